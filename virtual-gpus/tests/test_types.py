"""Types by a type checker: complete in the whole package, and of use to a program that is checked itself."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from virtual_gpus.settings import INSTALLED
from virtual_gpus.versions import NEWEST

SOURCE = Path(__file__).resolve().parents[1] / "src"
PUBLIC = ["__init__.py", "__main__.py", "switch.py", "settings.py", "gpus.py", "memory_model.py", "timeline",
          "testing"]  # fmt: skip

RIGHT = """\
import torch
from virtual_gpus import active_machine, record_timeline, virtual_gpus
from virtual_gpus.memory_model import round_size
from virtual_gpus.testing import RankError, run_ranks

@virtual_gpus(2, memory="1 GiB")
def on_two(count: int) -> torch.Tensor:
    return torch.ones(count, device="cuda:1")

def rank_plus(rank: int, number: float) -> float:
    return rank + number

with virtual_gpus(4, kind="A100", shapes_only=True) as gpus:
    first: torch.device = gpus[0]
    with record_timeline() as timeline:
        result: torch.Tensor = on_two(3)
    seconds: float = timeline.seconds + timeline.busy_seconds(0)
machine = active_machine()
bytes_taken: int = round_size(1000)
try:
    sums: list[float] = run_ranks(rank_plus, ranks=2, args=(0.5,), timeout=None)
except RankError as error:
    text: str = str(error)
"""
WRONG = ["on_two('three')", "virtual_gpus('four')", "virtual_gpus(2, shapes_only=3)", "virtual_gpus(2, colour='red')",
         "round_size('1 KiB') + 1", "timeline.seconds.upper()", "gpus.count_all()", "run_ranks(rank_plus, ranks='two')",
         "sums[0].upper()"]  # fmt: skip


def check(*paths, preset="default", ignored=()):
    """What pyrefly says of files, a line each. ignored: kinds of errors."""
    pyrefly = shutil.which("pyrefly", path=str(Path(sys.executable).parent)) or shutil.which("pyrefly")
    if pyrefly is None:
        pytest.skip("pyrefly is not installed")
    command = [pyrefly, "check", "--preset", preset, "--python-interpreter-path", sys.executable]
    command += ["--search-path", SOURCE, "--output-format", "min-text", *paths]
    command += [part for kind in ignored for part in ("--ignore", kind)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert "error" in done.stderr + done.stdout, done.stderr  # its last line counts them
    return [line for line in done.stdout.splitlines() if line.lstrip().startswith("ERROR")]


def files_of(names):
    """The Python files of modules and folders of the package."""
    found = [file for name in names for file in sorted((SOURCE / "virtual_gpus" / name).rglob("*.py"))]
    return found + [SOURCE / "virtual_gpus" / name for name in names if name.endswith(".py")]


def test_public_modules_are_typed_throughout():
    files = files_of(PUBLIC)
    assert len(files) > 8
    assert check(*files, SOURCE / "pytest_virtual_gpus.py", preset="strict") == []


@pytest.mark.skipif(INSTALLED != NEWEST, reason="older versions of PyTorch have other types in their stubs")
def test_inner_modules_are_typed_throughout():
    # `typing.override` is of Python 3.12, and autograd functions override `forward(*args)` with arguments of their own.
    files = sorted({*(SOURCE / "virtual_gpus").rglob("*.py")} - {*files_of(PUBLIC)})
    assert len(files) > 100
    assert check(*files, preset="strict", ignored=("missing-override-decorator", "bad-override")) == []


def test_a_program_that_uses_them_is_checked(tmp_path):
    (tmp_path / "program.py").write_text(RIGHT + "\n".join(WRONG) + "\n")
    first = len(RIGHT.splitlines()) + 1
    told = {int(re.search(r"program\.py:(\d+):", line)[1]) for line in check(tmp_path / "program.py")}
    assert told == set(range(first, first + len(WRONG)))
