"""`python -m virtual_gpus plan`: the verdict, its reason and the exit code."""

import json
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from forks import command, run
from virtual_gpus import plan
from virtual_gpus.__main__ import main
from virtual_gpus.errors import NeedsValues
from virtual_gpus.timeline.training import TrainingReport

PROGRAM = """\
import sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("nccl")
torch.cuda.set_device(0)
layer = DDP(torch.nn.Linear(1024, 1024 * int(sys.argv[1]), device="cuda"))
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
for _ in range(int(sys.argv[2])):
    optimizer.zero_grad()
    layer(torch.ones(8, 1024, device="cuda")).sum().backward()
    optimizer.step()
torch.save(layer.state_dict(), "saved.pt")
int(layer.module.weight.argmax())
"""
GIB = 2**30
ROOT = Path(__file__).resolve().parents[1]
RECIPE, ACCURACY = str(ROOT / "recipes" / "train.py"), (ROOT / "docs" / "accuracy.md").read_text(encoding="utf-8")
LARGEST = (37, 1, 512, 12), (1, 1, 512, 2), (0, 1, 512, 1), (512, 1, 512, 10), (37, 30, 37, 2), (0, 3, 9, 1)
SEARCHES = [*LARGEST, *(("GPUs", *case) for case in ((64, 8, 512, 4), (8, 8, 8, 1), (0, 8, 60, 3)))]


def report(peak, step=0.1):
    return TrainingReport("A100", 40 * GIB, 0, 8, 7, peak * GIB, peak * GIB, {}, {}, step)


def raised(error):
    try:
        raise error
    except type(error):
        return error


OOM = torch.OutOfMemoryError(
    "CUDA out of memory. Tried to allocate 4.00 GiB. GPU 3 has a total capacity of 40.00 GiB of which 3.08 GiB is free."
)
CASES = [
    (report(30), None, None, plan.FITS, 10, "FITS: the peak is 30 GiB of 40 GiB, 10 GiB are left."),
    (report(30), None, 36 * GIB, plan.FITS, 6, "of 36 GiB, 6 GiB are left"),
    (report(30), None, 80 * GIB, plan.FITS, 10, "of 40 GiB, 10 GiB are left"),  # no GPU has more than it has
    (report(30), None, 20 * GIB, plan.DOES_NOT_FIT, -10, "DOES NOT FIT: the peak is 30 GiB of 20 GiB, 10 GiB too much"),
    (report(37, None), OOM, None, plan.DOES_NOT_FIT, 0, "GPU 3 has 3.08 GiB free and was asked for 4.00 GiB, at test_"),
    (report(30, None), None, None, plan.INCOMPLETE, 10, "INCOMPLETE: fewer than two optimizer steps"),
    (report(30, None), NeedsValues("x"), None, plan.INCOMPLETE, 10, "looked at numbers, at test_plan.py:"),
    (report(30), NeedsValues("x"), None, plan.FITS, 10, "After its steps, it looked at numbers, at test_plan.py:"),
    (report(30), ValueError("x"), None, plan.ERROR, 10, "ERROR: the program ended with ValueError, at test_plan.py:"),
    (report(30), SystemExit(5), None, plan.ERROR, 10, "the program ended with exit code 5"),
    (report(30), KeyboardInterrupt(), 20 * GIB, plan.DOES_NOT_FIT, -10, "10 GiB too much"),
]


@pytest.mark.parametrize(("found", "error", "limit", "code", "margin", "words"), CASES)
def test_a_verdict(found, error, limit, code, margin, words):
    verdict = plan.judge(found, error and raised(error), limit)
    assert (verdict.exit_code, verdict.margin) == (code, margin * GIB) and words in str(verdict), verdict


@pytest.mark.parametrize(
    ("program", "options", "ranks", "code", "said"),
    [
        (["train.py", "64", "2"], ["--gpus", "8", "--of", "16"], 16, plan.FITS, "FITS: the peak is 8"),
        (["train.py", "4096", "2"], ["--memory", "20GiB"], 1, plan.DOES_NOT_FIT, "DOES NOT FIT: GPU 0 has "),
        ([RECIPE, "--words=64", "--layers=4"], ["--gpus", "4"], 4, plan.FITS, "FITS: the peak is "),
    ],
)
def test_a_program_gets_its_verdict_last(program, options, ranks, code, said, tmp_path):
    (tmp_path / "train.py").write_text(PROGRAM)
    done = command(["plan", *options, "--json", "plan.json", *program], tmp_path)
    assert done.returncode == code and done.stdout.splitlines()[-1].startswith(said), done.stdout + done.stderr
    written = json.loads((tmp_path / "plan.json").read_text())
    assert written["exit_code"] == code and said.startswith(written["verdict"])
    assert written["report"]["world_size"] == ranks
    assert ("layers.*.feed_forward.*" in written["report"]["by_module"]) == (program[0] == RECIPE)
    assert (plan.KNOWN_ERROR in done.stdout) == (code == plan.FITS)
    assert "held apart | median 7 %" in ACCURACY and "of 36" in ACCURACY  # as in KNOWN_ERROR


@pytest.mark.parametrize("case", SEARCHES)
def test_a_search_finds_the_largest_number_or_the_fewest_gpus(case, monkeypatch, capsys, tmp_path):
    *gpus, best, low, high, tries = case
    which = "smallest" if gpus else "largest"
    tried = []

    def attempt(arguments, options, number):
        tried.append(number)
        code = plan.FITS if (0 < best <= number if gpus else number <= best) else plan.DOES_NOT_FIT
        return {"exit_code": code, "verdict": str(code), "why": "as told"}

    monkeypatch.setattr(plan, "_try", attempt)
    with pytest.raises(SystemExit) as left:
        plan.search([], Namespace(search=(low, high), seeks_gpus=gpus, json=tmp_path / "found.json"))
    last = capsys.readouterr().out.splitlines()[-1]
    assert left.value.code == (plan.FITS if best else plan.DOES_NOT_FIT)
    assert last.startswith(f"FITS: {best} is the {which}" if best else "DOES NOT FIT: even ")
    assert len(tried) == len(set(tried)) <= tries and all(low <= number <= high for number in tried)
    assert json.loads((tmp_path / "found.json").read_text())[which] == (best or None)


def test_a_search_runs_the_program(tmp_path, capsys, monkeypatch):
    (tmp_path / "train.py").write_text(PROGRAM)
    monkeypatch.setattr(plan.subprocess, "run", run)
    for arguments, code in ((["{}", "1"], plan.INCOMPLETE), (["8"], plan.USAGE)):
        with pytest.raises(SystemExit, match=str(code)):
            main(["plan", "--search=64:99", "--json", "found.json", str(tmp_path / "train.py"), *arguments])
    said = capsys.readouterr()
    assert "64: INCOMPLETE: the program looked at" in said.out and "--search needs {}" in said.err
