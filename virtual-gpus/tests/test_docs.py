"""What the package's pages show: code runs as printed, and bugs fail as docs/bugs.md says and run once mended."""

import re
from pathlib import Path

import bugs
import pytest
import torch

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


@pytest.mark.parametrize("program", bugs.programs(), ids=lambda program: program.__name__)
def test_a_public_bug_is_found_and_its_mend_passes(program):
    with pytest.raises(Exception, match=".") as raised:
        bugs.run(program, "before")
    assert program.ERROR in f"{raised.typename}: {raised.value}"
    bugs.run(program, "after")
