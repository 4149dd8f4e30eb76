"""What the package's pages show: code runs as printed, and bugs fail as docs/bugs.md says and run once mended."""

import re
import runpy
from pathlib import Path

import pytest
import torch
from virtual_gpus.dispatch.operators import OpCall

bugs = pytest.importorskip("bugs")  # which run ranks
ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "a_small_virtual_gpu.md").read_text(encoding="utf-8")
CODE = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def test_the_example_trains_counts_and_refuses(capsys):
    """And has sixty lines, as the page promises."""
    before, names = (torch.Tensor.device, torch.Tensor.to, torch.cuda._lazy_init), {}
    for code in CODE[:2]:
        exec(code, names)
    shape, refused = capsys.readouterr().out.splitlines()
    assert shape.startswith("torch.Size([500, 1000]) [4") and "found GPUs {" in refused
    assert (torch.Tensor.device, torch.Tensor.to, torch.cuda._lazy_init) == before
    assert 55 <= len([line for line in CODE[0].splitlines() if line.strip()]) <= 65


def test_what_the_page_for_contributors_says_of_a_call_exists():
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    assert {name for name in re.findall(r"`(?:with )?call\.(\w+)", text) if not hasattr(OpCall, name)} == set()


def test_a_new_feature_runs_and_its_test_fails_until_it_is_filled(tmp_path, capsys):
    (tmp_path / "tests" / "features").mkdir(parents=True)
    make = runpy.run_path(str(ROOT / "docs" / "new_feature.py"))["main"]
    for operator, words in {"mm": "has a row", "kron": "made of other", "add.Tensor": "no operator"}.items():
        with pytest.raises(SystemExit):
            make(["airy", "Airy functions", operator], tmp_path)
        assert words in capsys.readouterr().err
    make(["airy", "Airy functions", "special_airy_ai"], tmp_path)
    module, test = (runpy.run_path(str(next(tmp_path.rglob(name)))) for name in ("airy.py", "test_airy.py"))
    assert module["OPERATORS"]["special_airy_ai"].recipe is module["special_airy_ai"]
    with pytest.raises(AssertionError):
        test["test_peak_of_special_airy_ai"]()


@pytest.mark.parametrize("program", bugs.programs(), ids=lambda program: program.__name__)
def test_a_public_bug_is_found_and_its_mend_passes(program):
    with pytest.raises(Exception, match=".") as raised:
        bugs.run(program, "before")
    assert program.ERROR in f"{raised.typename}: {raised.value}"
    bugs.run(program, "after")
