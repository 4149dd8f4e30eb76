"""The programs from elsewhere: their table is well-formed, the page shows it, and with -m outside they run."""

import math
import os
from pathlib import Path

import pytest
from benchmarks.outside import table
from benchmarks.outside.programs import SOURCES, Run
from benchmarks.outside.runner import command, distance, hold

NAMES = [program.name for program in table.PROGRAMS]


def test_every_program_has_a_source_and_a_run_on_virtual_gpus():
    assert len(set(NAMES)) == len(NAMES)
    for program in table.PROGRAMS:
        assert program.source in SOURCES and program.on.gpus > 0 and program.on.gpus >= program.on.ranks
        assert program.beside != program.on and not program.on.edits


def test_the_page_was_made_from_the_stored_results():
    assert table.PAGE.read_text() == table.page(), "Run python -m benchmarks.outside to write docs/programs.md anew."


def test_losses_are_compared_step_by_step():
    assert distance([[1.0, 2.0]], [[1.0, 2.0]]) == 0
    assert distance([[1.0, 2.0]], [[1.0, 2.5]]) == 0.2
    assert distance([[1.0, 1.0], [3.0, 2.0]], [[2.0, 1.5]]) == 0  # two ranks beside one: the mean
    assert distance([[3.0], [1.0]], [[1.0], [3.0]]) == 0  # the same processes in another order
    assert distance([[1.0]], [[1.0, 2.0]]) == math.inf and distance([[math.nan]], [[1.0]]) == math.inf
    assert distance([], []) is None


def test_commands_are_those_that_people_write():
    assert command(Run("train.py --epochs 1"))[1:] == ["train.py", "--epochs", "1"]
    assert command(Run("train.py", gpus=4))[1:] == ["-m", "virtual_gpus", "--gpus", "4", "train.py"]
    assert command(Run("-m package", gpus=2, ranks=2))[-5:] == ["virtual_gpus", "--gpus", "2", "-m", "package"]
    assert command(Run("-m package", ranks=2))[-2:] == ["-m", "package"]


@pytest.mark.outside
@pytest.mark.parametrize("program", table.PROGRAMS, ids=NAMES)
def test_the_program_runs_with_the_losses_beside_it(program, tmp_path):
    folder = Path(os.environ.get("OUTSIDE_FROM", "")) / SOURCES[program.source].folder
    if "OUTSIDE_FROM" not in os.environ or not folder.is_dir():
        pytest.skip("OUTSIDE_FROM names no folder with this program; python -m benchmarks.outside --had lists them.")
    result = hold(program, folder, tmp_path)
    assert table.good(program, result.row()), result.row()
