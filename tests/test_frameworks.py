"""Lesson 10's programs print what one_gpu.py prints. Most tests need the group `frameworks`, at the end of .ci/run."""

import importlib.util
import runpy
import sys

import numpy as np
import pytest
import run_all
import torch
from virtual_gpus import virtual_gpus

from tests.programs import SCRIPTS, Program, in_ranks, torchrun, write_images
from tests.test_programs_to_take_home import close, execute, lines

# 6 steps per epoch. The test images can be shared evenly by two processes: Lightning would repeat one of 17.
TRAIN, TEST, BATCH, EPOCHS = 50, 16, 8, 2
LESSON = run_all.FOLDER / "10_frameworks.ipynb"
VIRTUAL = ("-m", "virtual_gpus", "--gpus", "2")

needs_frameworks = pytest.mark.skipif(bool(run_all.missing(LESSON)), reason=run_all.missing(LESSON))


@pytest.fixture(scope="module")
def options(tmp_path_factory):
    """The arguments of every program: few images, and no processes that load them."""
    data = write_images(tmp_path_factory.mktemp("data"), TRAIN, TEST)
    return ["--data", data, "--batch-size", BATCH, "--epochs", EPOCHS]


@pytest.fixture(scope="module")
def expected(options):
    """What one_gpu.py prints."""
    return execute("one_gpu", *options, "--workers", 0)


def in_two_ranks(folder, program, *arguments):
    """What a program prints on two virtual GPUs in processes forked from this one, which has imported what it needs."""
    import accelerate  # noqa: F401
    import lightning  # noqa: F401

    with virtual_gpus(2):
        return "".join(in_ranks(2, folder, SCRIPTS / program, "--workers", 0, *arguments))


@needs_frameworks
def test_lightning_prints_what_one_gpu_prints_and_continues(options, expected, tmp_path):
    """The last time as a learner starts it, as in the test below."""
    options = ["--devices", 2, "--checkpoint", tmp_path / "run", *options]
    assert "epoch 0" in in_two_ranks(tmp_path, "lightning_ddp.py", *options, "--max-steps", 2)
    assert not (tmp_path / "run").exists()  # it saves complete epochs only
    assert close(lines(in_two_ranks(tmp_path, "lightning_ddp.py", *options, "--epochs", 1)), expected[:1])
    program = [sys.executable, *VIRTUAL, SCRIPTS / "lightning_ddp.py", "--workers", "0", *options]
    with Program(program, tmp_path / "log") as started:
        assert close(lines(started.wait()), expected[1:])
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["last.ckpt"]


@needs_frameworks
def test_accelerate_prints_what_one_gpu_prints_and_continues(options, expected, tmp_path):
    options = ["--checkpoint", tmp_path / "last.pt", *options]
    assert close(lines(in_two_ranks(tmp_path, "accelerate_ddp.py", *options, "--epochs", 1)), expected[:1])
    program = ["--standalone", "--nproc-per-node", "2", *VIRTUAL, SCRIPTS / "accelerate_ddp.py", "--workers", "0"]
    with torchrun(*program, *options, log=tmp_path / "log") as started:
        assert close(lines(started.wait()), expected[1:])


@pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="needs `uv run --group tensorflow`")
def test_tensorflow_computes_the_same_from_the_same_start(options, expected, tmp_path):
    model = runpy.run_path(str(SCRIPTS / "one_gpu.py"))["Net"]
    torch.manual_seed(0)
    weights = {name: weight.numpy() for name, weight in model().state_dict().items()}
    generators = [torch.Generator().manual_seed(epoch) for epoch in range(EPOCHS)]
    orders = np.stack([torch.randperm(TRAIN, generator=generator).numpy() for generator in generators])
    np.savez(tmp_path / "start.npz", orders=orders, **weights)
    program = [sys.executable, SCRIPTS / "mirrored_strategy.py", "--devices", "2", *options]
    with Program([*program, "--start", tmp_path / "start.npz"], tmp_path / "log") as started:
        assert close(lines(started.wait()), expected)
