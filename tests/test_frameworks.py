"""Lesson 10's programs print what one_gpu.py prints, on two virtual GPUs; its benchmark and what it says of DeepSpeed.

What needs the group `frameworks` is skipped where its packages are missing, and runs at the end of .ci/run.
"""

import importlib.util
import runpy
import sys

import numpy as np
import pytest
import run_all
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from virtual_gpus import virtual_gpus

from helpers.parallel import launch
from tests.programs import SCRIPTS, Program, torchrun, write_images
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


@needs_frameworks
def test_lightning_prints_what_one_gpu_prints_and_continues(options, expected, tmp_path):
    program = [sys.executable, *VIRTUAL, SCRIPTS / "lightning_ddp.py", "--devices", "2", "--workers", "0"]
    program += ["--checkpoint", tmp_path / "run"]
    with Program([*program, *options, "--max-steps", 2], tmp_path / "log") as started:
        assert "epoch 0" in started.wait()
    assert not (tmp_path / "run").exists()  # it saves complete epochs only
    with Program([*program, *options, "--epochs", 1], tmp_path / "log") as started:
        assert close(lines(started.wait()), expected[:1])
    with Program([*program, *options], tmp_path / "log") as started:
        assert close(lines(started.wait()), expected[1:])
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["last.ckpt"]


@needs_frameworks
def test_accelerate_prints_what_one_gpu_prints_and_continues(options, expected, tmp_path):
    program = [*VIRTUAL, SCRIPTS / "accelerate_ddp.py", "--workers", "0", "--checkpoint", tmp_path / "last.pt"]
    launcher = ["--standalone", "--nproc-per-node", "2"]
    with torchrun(*launcher, *program, *options, "--epochs", 1, log=tmp_path / "log") as started:
        assert close(lines(started.wait()), expected[:1])
    with torchrun(*launcher, *program, *options, log=tmp_path / "log") as started:
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


def deepspeed_and_ddp(rank, stage, clipping):
    """The losses of four steps with DeepSpeed and with plain DDP, whose first gradient is longer than 1."""
    import deepspeed

    def build():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
        return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    model, optimizer = build()
    config = {
        "train_micro_batch_size_per_gpu": 16,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": clipping,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    plain, optimizer = build()
    ddp_model = DistributedDataParallel(plain.cuda())
    images = 4 * torch.randn(4, 16, 64, generator=torch.Generator().manual_seed(rank)).cuda()
    labels = (images.mean(-1) * 2 + 5).long().clamp(0, 9)
    losses = []
    for x, y in zip(images, labels, strict=True):
        loss = cross_entropy(engine(x), y)
        engine.backward(loss)
        engine.step()
        optimizer.zero_grad()
        expected = cross_entropy(ddp_model(x), y)
        expected.backward()
        norm = nn.utils.clip_grad_norm_(plain.parameters(), clipping or float("inf"))
        optimizer.step()
        losses.append((loss.item(), expected.item(), norm.item()))
    return losses


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed, from 0.19 on")
@pytest.mark.parametrize(("stage", "clipping"), [(0, 0.0), (1, 0.0), (2, 1.0), (3, 0.0)])
def test_deepspeed_computes_what_ddp_computes(stage, clipping):
    with virtual_gpus(2, memory="16 GiB"):
        for losses in launch(deepspeed_and_ddp, stage, clipping, ranks=2, show=False, timeout=300):
            found, expected, norms = torch.tensor(losses).T
            assert norms[0] > 1
            torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


@needs_frameworks
def test_the_benchmark_has_a_row_for_each_loop():
    from docs.tools import frameworks

    found = list(frameworks.rows(frameworks.Nothing, "cpu", rounds=1, steps=2))
    assert [row.split(" | ")[2] for row in found] == ["plain", "lightning", "accelerate", "transformers"]
