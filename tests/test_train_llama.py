"""train_llama.py: the same losses on any number of processes and after a restart; its snapshots, export and errors."""

import json
import re
import runpy
import shutil

import pytest
import torch
from torch.nn.functional import cross_entropy
from virtual_gpus import virtual_gpus

from helpers.data import DATA
from tests.programs import SCRIPTS, in_ranks, killed_before_it_names, printed, set_rank

PROGRAM = SCRIPTS / "train_llama.py"
STEPS, STOP = 6, 4  # 3 steps are an epoch of the short text


@pytest.fixture(scope="module")
def options(tmp_path_factory):
    """A text of 54 sequences, three batches. The losses are printed in every step, in float32."""
    text = tmp_path_factory.mktemp("text") / "text.txt"
    text.write_bytes((DATA / "pride_and_prejudice.txt").read_bytes()[:7_000])
    return ["--data", text, "--float32", "--log-every", 1, "--steps", STEPS]


@pytest.fixture
def alone(options, monkeypatch):
    """Run the program as the only process of a job, in this process; what it prints of each step."""

    def run(*arguments):
        set_rank(monkeypatch)
        try:
            return steps(printed("train_llama", *options, "--workers", 0, *arguments))
        finally:
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()

    return run


def steps(printed):
    """Of each step its number, loss, norm and learning rate; the speed differs from run to run."""
    return re.findall(r"^step (\d+) \| loss ([\d.]+) \| norm ([\d.]+) \| lr (\S+) \| [\d,]+ tokens/s", printed, re.M)


def close(printed, expected):
    """Whether what `steps` gives is equal, except for the last digit of a loss and of a norm."""
    found, wanted = (torch.tensor([[*map(float, line)] for line in lines]) for lines in (printed, expected))
    return found.shape == wanted.shape and bool(((found - wanted).abs() <= torch.tensor([0, 1.1e-4, 1.1e-3, 0])).all())


def test_losses_do_not_depend_on_the_processes_and_not_on_a_restart(options, tmp_path):
    """One process on the CPU; two on GPUs up to the middle of the second epoch; four, in groups of two, from there."""
    expected = steps(*in_ranks(1, tmp_path, PROGRAM, *options, "--micro-batch", 4, "--workers", 0))
    assert [int(line[0]) for line in expected] == list(range(1, STEPS + 1))
    assert float(expected[-1][1]) < float(expected[0][1])

    folder, export = tmp_path / "run", tmp_path / "model.pt"
    job = [PROGRAM, *options, "--snapshots", folder]
    first = ["--max-steps", STOP, "--save-every", 2, "--micro-batch", 2, "--export", export]
    with virtual_gpus(2):
        output, _ = in_ranks(2, tmp_path, *job, *first)
    assert close(steps(output), expected[:STOP]) and "peak 0.0" in output, output
    assert sorted(path.name for path in folder.iterdir()) == ["step_00000002", "step_00000004"]
    output, *_ = in_ranks(4, tmp_path, *job, "--tensor-parallel", 2, "--recompute", "--workers", 0)
    assert close(steps(output), expected[STOP:]) and "suboptimal" not in output, output
    assert sorted(path.name for path in folder.iterdir()) == ["step_00000004", "step_00000006"]

    # The loss of the exported weights, in one process, on the batch that comes after them.
    program = runpy.run_path(str(PROGRAM))
    model = program["Llama"](**program["SIZES"]["tiny"])
    model.load_state_dict(torch.load(export, weights_only=True))
    text = torch.tensor(list(options[1].read_bytes())).unfold(0, 129, 128)
    mapped = program["Text"](options[1], torch.uint8, options[1].stat().st_size, 128)
    assert len(mapped) == len(text) and all(torch.equal(mapped[row].long(), text[row]) for row in range(len(text)))
    # Such a tensor cannot be sent to the workers, which Python 3.14 does not fork.
    assert not any(isinstance(value, torch.Tensor) for value in vars(mapped).values())
    (batch,) = program["batches"](len(text), 16, [STOP], 0, 1)
    loss = cross_entropy(model(text[batch][:, :-1]).flatten(0, 1), text[batch][:, 1:].flatten())
    assert loss.item() == pytest.approx(float(expected[STOP][1]), abs=1.1e-4)


def test_a_killed_run_leaves_complete_snapshots_only(alone, tmp_path):
    folder = ["--snapshots", tmp_path]
    expected = alone("--steps", 2)
    with killed_before_it_names("step_00000002"):
        alone("--steps", 2, "--save-every", 1, *folder)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000001", "temporary"]
    assert alone("--steps", 2, *folder) == expected[1:]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000001", "step_00000002"]
    assert json.loads((tmp_path / "step_00000002" / "job.json").read_text())["step"] == 2

    with pytest.raises(SystemExit, match=r"was saved by a run with .*'sequence': 128.* This run has .*'sequence': 64"):
        alone("--steps", 2, "--sequence", 64, *folder)

    second, first = ([*(tmp_path / f"step_0000000{step}").glob("*.distcp")][0] for step in (2, 1))
    second.write_bytes(second.read_bytes()[: second.stat().st_size // 2])
    assert alone("--steps", 2, *folder) == expected[1:]  # from the snapshot before
    shutil.rmtree(tmp_path / "step_00000002")
    first.write_bytes(first.read_bytes()[: first.stat().st_size // 2])
    with pytest.raises(SystemExit, match=r"No snapshot in .* can be read. To begin anew, name another folder"):
        alone("--steps", 2, *folder)


def test_a_run_that_diverges_keeps_its_snapshots(alone, tmp_path):
    with pytest.raises(SystemExit, match="In step 2, the norm of the gradients is nan. No snapshot is saved"):
        alone("--learning-rate", "nan", "--save-every", 1, "--snapshots", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000001"]


def test_tokens_of_another_type_and_bfloat16(alone, options, tmp_path):
    expected = alone("--steps", 2)
    torch.tensor(list(options[1].read_bytes())).to(torch.uint16).numpy().tofile(tmp_path / "tokens")
    assert alone("--steps", 2, "--data", tmp_path / "tokens", "--token-type", "uint16") == expected
    options.remove("--float32")
    found = alone("--steps", 2)
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
        (["--batch-size", 55], "is not a file with enough text"),
        (["--log-every", 0], "--log-every is 0. It must be at least 1"),
        (["--export", "/nowhere/llama.pt"], "--export /nowhere/llama.pt: name a file in a folder that exists"),
    ],
)
def test_errors(alone, arguments, words):
    with pytest.raises(SystemExit, match=words):
        alone(*arguments)


def test_it_must_be_started_with_torchrun(options):
    with pytest.raises(SystemExit, match="Start this program with torchrun: torchrun --standalone"):
        printed("train_llama", *options)


def test_the_sizes_are_those_of_llama():
    program = runpy.run_path(str(PROGRAM))
    with torch.device("meta"):
        models = {size: program["Llama"](**shape) for size, shape in program["SIZES"].items()}
    counts = {size: sum(parameter.numel() for parameter in model.parameters()) for size, model in models.items()}
    assert counts["8b"] == 8_030_261_248
    assert counts["1b"] == 1_235_814_400 + 128_256 * 2048  # the output layer has weights of its own
