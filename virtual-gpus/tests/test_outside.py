"""The programs from elsewhere: their table is well-formed, the page shows it, and with -m outside they run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.outside import operator_table, table
from benchmarks.outside.programs import SOURCES
from benchmarks.outside.runner import WITNESS, hold

NAMES = [program.name for program in table.PROGRAMS]


def test_every_program_has_a_source_and_a_run_on_virtual_gpus():
    assert len(set(NAMES)) == len(NAMES)
    for program in table.PROGRAMS:
        assert program.source in SOURCES and program.on.gpus > 0 and program.on.gpus >= program.on.ranks
        assert program.beside != program.on and not program.on.edits


def test_the_page_was_made_from_the_stored_results():
    assert table.PAGE.read_text() == table.page(), "Run python -m benchmarks.outside to write docs/programs.md anew."


def test_the_witness_lets_a_gpu_draw_what_the_cpu_would(tmp_path):
    draws = "print(torch.nn.Dropout()(torch.ones(99, device=sys.argv[1])).tolist(), torch.rand(9))"
    (tmp_path / "program.py").write_text(f"import sys, torch\n{draws}\n")
    environment = os.environ | {"PYTHONPATH": str(WITNESS), "OUTSIDE_DRAWS": "1", "OUTSIDE_LOSSES": ""}
    command = [sys.executable, "-m", "virtual_gpus", "--gpus", "1", tmp_path / "program.py"]
    on_the_cpu, on_a_gpu = (subprocess.check_output([*command, name], env=environment) for name in ("cpu", "cuda"))
    assert on_the_cpu == on_a_gpu


@pytest.mark.outside  # 20 minutes
def test_pytorch_s_tests_of_torch_distributed_pass_as_before():
    pytest.importorskip("expecttest")
    command = [sys.executable, "-m", "benchmarks.outside.distributed_tests", "--check"]
    subprocess.run(command, check=True, cwd=table.PAGE.parents[1])


@pytest.mark.outside
@pytest.mark.parametrize("part", range(operator_table.PARTS))
def test_operators_are_as_on_the_cpu(part):
    pytest.importorskip("expecttest", reason="op_db imports it")
    assert operator_table.differences(part) == {}


@pytest.mark.outside
@pytest.mark.parametrize("program", table.PROGRAMS, ids=NAMES)
def test_the_program_runs_with_the_losses_beside_it(program, tmp_path):
    folder = Path(os.environ.get("OUTSIDE_FROM", "")) / SOURCES[program.source].folder
    if "OUTSIDE_FROM" not in os.environ or not folder.is_dir():
        pytest.skip("OUTSIDE_FROM names no folder with this program; python -m benchmarks.outside --had lists them.")
    result = hold(program, folder, tmp_path)
    assert table.good(program, result.row()), result.row()
