"""Measured seconds of operators: they win over the formulas, and a program's operators can be written down."""

import json

import pytest
import torch
import torch.nn.functional as F
from benchmarks import clock
from forks import run
from measuring import recorded, table
from virtual_gpus import active_machine, measure, virtual_gpus
from virtual_gpus.__main__ import main

PROGRAM = """\
import torch, torch.nn.functional as F
net = torch.nn.Linear(64, 32).cuda()
optimizer = torch.optim.Adam(net.parameters(), foreach=True)
x = torch.zeros(16, 64, device="cuda")
(F.softmax(net(x), 0).sum() + torch.nn.LSTM(64, 8, 2, dropout=0.5).cuda()(x)[0].sum()).backward()
optimizer.step()
query = torch.zeros(1, 2, 128, 64, device="cuda", dtype=torch.float16, requires_grad=True)
F.scaled_dot_product_attention(query, query, query, is_causal=True).sum().backward()
"""


@pytest.fixture
def listed(tmp_path, monkeypatch, capsys):
    """A file that lists the operators of PROGRAM, by the command."""
    program, out = tmp_path / "train.py", tmp_path / "listed.json"
    program.write_text(PROGRAM)
    monkeypatch.setattr(measure.subprocess, "run", run)
    main(["measure", "--kind", "A100", "--out", str(out), str(program)])
    assert "operators without times" in capsys.readouterr().out or torch.cuda.is_available()
    return out


def times():
    """The modelled seconds of one softmax over each dimension of 32 x 32 numbers, and of a product."""
    x = torch.zeros(32, 32, device="cuda")
    spans = recorded(lambda: (F.softmax(x, 0), F.softmax(x, 1), x @ x)).spans
    return [span.end - span.start for span in spans if span.gpu == 0]


def written(path, rows, gpu="H200"):
    path.write_text(json.dumps({"gpu": gpu, "rows": rows}))


def test_a_row_wins_over_the_formula_for_its_arguments_alone(tmp_path):
    tensor = {"shape": [32, 32], "dtype": "float32", "strides": [32, 1]}
    row = {"operator": "aten._softmax.default", "arguments": [[tensor, 1, False], {}], "seconds": 0.25}
    with virtual_gpus(shapes_only=True):
        formulas = times()
    written(tmp_path / "softmax.json", [row, row | {"seconds": None}])
    written(tmp_path / "other.json", [row | {"seconds": 9}], gpu="A100")
    with virtual_gpus(shapes_only=True, measured=tmp_path):
        assert times() == [pytest.approx(formulas[0]), pytest.approx(0.25), pytest.approx(formulas[2])]
    with virtual_gpus(shapes_only=True):
        assert times() == formulas  # what was looked up with a table is forgotten
    expected = ({"_softmax": 0.25}, {"_softmax": pytest.approx(formulas[1])}, {"_softmax": 1})
    assert clock.kernels_of_file(tmp_path / "softmax.json") == expected


def test_a_programs_operators_are_listed_and_can_be_called(listed):
    rows = json.loads(listed.read_text())["rows"]
    operators = {row["operator"] for row in rows}
    assert {"aten.addmm.default", "aten._softmax.default", "aten.mm.default"} <= operators
    assert any(name.startswith("aten._foreach_") for name in operators)
    with virtual_gpus(shapes_only=True):
        measure.write_list(lambda: exec(PROGRAM, {}), active_machine(), listed)  # without the command
    rows = json.loads(listed.read_text())["rows"]
    assert sum(row["operator"].startswith(("_scaled", "_cudnn_rnn")) for row in rows) == 4  # both directions
    for row in rows:
        measure.prepared(row["operator"], row["arguments"], "cpu")()


@pytest.mark.parametrize(("content", "words"), table("wrong_settings")["measured"].items())
def test_bad_files_are_refused(tmp_path, content, words):
    file = tmp_path / "bad.json"
    if content != "absent":
        file.write_text(content)
    with pytest.raises(ValueError, match=words):
        virtual_gpus(measured=str(file))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="times operators on a real GPU, and this computer has none")
def test_the_operators_are_timed_on_a_real_gpu(listed):
    assert any(row["seconds"] for row in json.loads(listed.read_text())["rows"])
