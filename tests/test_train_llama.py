"""train_llama.py: the same losses on any number of processes and after a restart; its snapshots, export and errors."""

import ast
import json
import os
import re
import runpy
import shutil
import subprocess
import sys

import pytest
import torch
from torch.nn.functional import cross_entropy

from helpers.data import DATA
from tests.programs import SCRIPTS, free_port, torchrun

PROGRAM = SCRIPTS / "train_llama.py"
VIRTUAL = ("-m", "virtual_gpus", "--gpus")
STEPS, STOP = 12, 7  # 5 steps are an epoch of the short text


@pytest.fixture(scope="module")
def options(tmp_path_factory):
    """A text of 93 sequences, five batches. The losses are printed in every step, in float32."""
    text = tmp_path_factory.mktemp("text") / "text.txt"
    text.write_bytes((DATA / "pride_and_prejudice.txt").read_bytes()[:12_000])
    return ["--data", text, "--float32", "--log-every", 1, "--steps", STEPS]


@pytest.fixture
def alone(options, monkeypatch, capsys):
    """Run the program as the only process of a job, in this process; what it prints of each step."""
    place = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "MASTER_ADDR": "127.0.0.1"}
    for name, value in place.items():
        monkeypatch.setenv(name, str(value))

    def run(*arguments):
        capsys.readouterr()
        monkeypatch.setenv("MASTER_PORT", str(free_port()))
        monkeypatch.setattr(sys, "argv", ["train_llama.py", *map(str, [*options, "--workers", 0, *arguments])])
        try:
            runpy.run_path(str(PROGRAM), run_name="__main__")
        finally:
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()
        return steps(capsys.readouterr().out)

    return run


def steps(printed):
    """Of each step its number, loss, norm and learning rate; the speed differs from run to run."""
    return re.findall(r"^step (\d+) \| loss ([\d.]+) \| norm ([\d.]+) \| lr (\S+) \| [\d,]+ tokens/s", printed, re.M)


def test_losses_do_not_depend_on_the_processes_and_not_on_a_restart(alone, options, tmp_path):
    """One process on the CPU; two on GPUs up to the middle of the second epoch; four, in groups of two, from there."""
    expected = alone("--micro-batch", 4)
    assert [int(line[0]) for line in expected] == list(range(1, STEPS + 1))
    assert float(expected[-1][1]) < 0.8 * float(expected[0][1])

    options = [PROGRAM, *options, "--snapshots", tmp_path / "run"]
    first = ["--max-steps", STOP, "--save-every", 2, "--micro-batch", 2, "--export", tmp_path / "model.pt"]
    with torchrun("--standalone", "--nproc-per-node", 2, *VIRTUAL, 2, *options, *first, log=tmp_path / "log") as job:
        output = job.wait()
    assert steps(output) == expected[:STOP], output
    assert "peak 0.0" in output
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["step_00000006", "step_00000007"]

    second = ["--tensor-parallel", 2, "--recompute", "--workers", 0]
    forked = [sys.executable, "-m", "tests.forked_ranks", 4, free_port(), *options, *second]
    to = {"cwd": SCRIPTS.parents[1], "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "timeout": 300}
    output = subprocess.run(list(map(str, forked)), text=True, **to).stdout
    assert steps(output) == expected[STOP:], output
    assert "suboptimal" not in output
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["step_00000007", "step_00000012"]

    assert f"{loss_of_export(tmp_path / 'model.pt', STOP):.4f}" == expected[STOP][1]


def loss_of_export(file, step, size="tiny", length=128):
    """The loss of the exported weights on the batch that comes after `step` steps, in one process."""
    program = runpy.run_path(str(PROGRAM))
    model = program["Llama"](**program["SIZES"][size])
    model.load_state_dict(torch.load(file, weights_only=True))
    text = torch.tensor(list((DATA / "pride_and_prejudice.txt").read_bytes()[:12_000])).unfold(0, length + 1, length)
    (batch,) = program["batches"](len(text), 16, [step], 0, 1)
    tokens = text[batch]
    with torch.no_grad():
        return cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).item()


def test_a_killed_run_leaves_complete_snapshots_only(alone, monkeypatch, tmp_path):
    folder = ["--snapshots", tmp_path]
    expected = alone("--steps", 4)
    replace = os.replace

    def killed(old, new):
        if str(new).endswith("step_00000004"):
            raise KeyboardInterrupt
        replace(old, new)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, "replace", killed)
        alone("--steps", 4, "--save-every", 2, *folder)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000002", "temporary"]
    assert alone("--steps", 4, *folder) == expected[2:]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000002", "step_00000004"]
    assert json.loads((tmp_path / "step_00000004" / "job.json").read_text())["step"] == 4

    with pytest.raises(SystemExit, match=r"was saved by a run with .*'sequence': 128.* This run has .*'sequence': 64"):
        alone("--steps", 4, "--sequence", 64, *folder)

    (file,) = (tmp_path / "step_00000004").glob("*.distcp")
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    assert alone("--steps", 4, "--max-steps", 1, *folder) == expected[2:3]  # from the snapshot before
    shutil.rmtree(tmp_path / "step_00000003")
    with pytest.raises(SystemExit, match=r"No snapshot in .* can be read. To begin anew, name another folder"):
        alone("--steps", 4, *folder)


def test_a_run_that_diverges_keeps_its_snapshots(alone, tmp_path):
    with pytest.raises(SystemExit, match="In step 2, the norm of the gradients is nan. No snapshot is saved"):
        alone("--learning-rate", "nan", "--save-every", 1, "--snapshots", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000001"]


def test_tokens_of_another_type(alone, options, tmp_path):
    tokens, expected = torch.tensor(list(options[1].read_bytes())), alone("--steps", 2)
    for name in ("uint16", "int32"):
        tokens.to(getattr(torch, name)).numpy().tofile(tmp_path / name)
        assert alone("--steps", 2, "--data", tmp_path / name, "--token-type", name) == expected


def test_bfloat16_is_close(alone, options):
    expected = alone("--steps", 3)
    options.remove("--float32")
    found = alone("--steps", 3)
    options.append("--float32")
    assert found != expected
    for one, other in zip(found, expected, strict=True):
        assert float(one[1]) == pytest.approx(float(other[1]), rel=2e-3)


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--micro-batch", 3], r"--batch-size must be a multiple of 3: 1 groups x 3"),
        (["--tensor-parallel", 2], r"--tensor-parallel must divide the 1 processes"),
        (["--data", "/nowhere.txt"], r"/nowhere.txt is not a file with enough text for one batch"),
        (["--batch-size", 512], "is not a file with enough text"),
        (["--batch-size", -16], "--batch-size is -16. It must be at least 1"),
        (["--log-every", 0], "--log-every is 0. It must be at least 1"),
        (["--micro-batch", 0], "--micro-batch is 0. It must be at least 1"),
        (["--export", "/nowhere/llama.pt"], "--export /nowhere/llama.pt: name a file in a folder that exists"),
    ],
)
def test_errors(alone, arguments, words):
    with pytest.raises(SystemExit, match=words):
        alone(*arguments)


def test_without_torchrun_it_says_what_is_needed(alone, monkeypatch):
    monkeypatch.delenv("RANK")
    with pytest.raises(SystemExit, match="Start this program with torchrun: torchrun --standalone"):
        alone()


def test_it_is_short_and_imports_only_pytorch():
    text = PROGRAM.read_text(encoding="utf-8")
    assert len(text.splitlines()) < 300
    nodes = list(ast.walk(ast.parse(text)))
    modules = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    modules += [node.module for node in nodes if isinstance(node, ast.ImportFrom)]
    assert {module.split(".")[0] for module in modules} <= {"torch", *sys.stdlib_module_names}


def test_the_sizes_are_those_of_llama():
    program = runpy.run_path(str(PROGRAM))
    with torch.device("meta"):
        counts = {
            size: sum(p.numel() for p in program["Llama"](**shape).parameters())
            for size, shape in program["SIZES"].items()
        }
    assert counts["8b"] == 8_030_261_248
    assert counts["1b"] == 1_235_814_400 + 128_256 * 2048  # the output layer has weights of its own
