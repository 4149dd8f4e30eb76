"""Whatever happens inside: afterwards the books are right, training goes on, and nothing is kept alive."""

import gc
import os
import traceback
from functools import partial
from pathlib import Path

import pytest
import snapshots
import torch
from interrupts import interrupted_at_call
from torch import nn
from virtual_gpus import active_machine, virtual_gpus
from virtual_gpus.dispatch import timing
from virtual_gpus.dispatch.operators import OpCall

pytestmark = pytest.mark.usefixtures("workspaces_given_back")

MIB = 1 << 20
STATM = Path("/proc/self/statm")


@pytest.fixture(autouse=True)
def as_before():
    yield
    assert torch.utils._python_dispatch._len_torch_dispatch_stack() == 0
    assert not snapshots.this_thread.in_kernel and torch.is_grad_enabled()


def allocated(count=2):
    """Bytes per GPU, after what only waits for the garbage collector has gone."""
    gc.collect()
    return [torch.cuda.memory_allocated(i) for i in range(count)]


class Training:
    """A small net under DataParallel on two GPUs, with Adam."""

    def __init__(self):
        net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 2))
        self.net = nn.DataParallel(net.to("cuda:0"))
        self.optimizer = torch.optim.Adam(self.net.parameters())

    def step(self, batch=None):
        self.optimizer.zero_grad()
        batch = torch.rand(4, 8).to("cuda:0") if batch is None else batch
        self.net(batch).square().mean().backward()
        self.optimizer.step()


def test_ctrl_c_at_any_moment():
    with virtual_gpus(2):
        training = Training()
        training.step()
        training.step()
        torch.cuda.set_device(1)
        base, (_, total) = allocated(), interrupted_at_call(-1, training.step)
        assert total > 1000
        for n in range(1, total, total // 60):
            place, _ = interrupted_at_call(n, training.step)
            if not place:  # the clock's own calls vary a little from step to step
                assert n > 0.95 * total, n
                continue
            assert not snapshots.this_thread.in_kernel, place
            assert torch.utils._python_dispatch._len_torch_dispatch_stack() == 1, place
            assert torch.cuda.current_device() == 1 and torch.is_grad_enabled(), place
            training.step()
            assert allocated() == base, place
            clock = active_machine().clock
            assert clock.share == 1 and clock._threads is None, place


def test_ctrl_c_while_switching_on_and_off():
    with virtual_gpus(2):
        pass  # imports what the first switching on imports
    before = snapshots.picture()
    gpus = virtual_gpus(2)
    _, total = interrupted_at_call(-1, gpus.start)
    gpus.stop()
    assert total > 20
    for n in range(1, total, total // 8):
        gpus = virtual_gpus(2)
        interrupted_at_call(n, gpus.start)
        gpus.stop()
        assert snapshots.differences(before) == [], n


def test_what_cannot_fit_on_the_gpu_is_not_computed_first(monkeypatch):
    monkeypatch.setattr(OpCall, "compute", None)
    with virtual_gpus(1, memory="2 GiB"):
        for make in (partial(torch.eye, 40_000), partial(torch.arange, 0, 1e9), partial(torch.randperm, 1 << 30)):
            with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
                make(device="cuda")


def test_a_failed_backward_leaves_no_gradients_waiting():
    """The CPU's engine keeps what a failed pass had still to do; that of a real GPU does not."""

    def branch(gpu, mib):
        x = torch.ones(mib * MIB // 4, device=gpu, requires_grad=True)
        return ((x * x) * (x * x)).mean().to(0)

    with virtual_gpus(3, memory="96 MiB"):
        for _ in range(2):
            loss = sum([branch(0, 1), branch(1, 1), branch(2, 16)])
            with pytest.raises(torch.OutOfMemoryError, match="GPU 2"):
                loss.backward()
            del loss
            assert not snapshots.this_thread.in_kernel and allocated(3) == [0, 0, 0]
        with torch.inference_mode(), pytest.raises(RuntimeError, match="does not require grad"):
            torch.ones((), device=0).backward()
        branch(1, 1).backward()
        assert allocated(3) == [0, 0, 0]


def tensors_in_our_frames(trace):
    """Names of the tensors among the variables of the package's frames in a traceback."""
    frames = [frame for frame, _ in traceback.walk_tb(trace) if "virtual_gpus" in frame.f_code.co_filename]
    leaves = torch.utils._pytree.tree_leaves
    found = [(name, leaves(value)) for frame in frames for name, value in frame.f_locals.items()]
    return [name for name, parts in found if any(isinstance(part, torch.Tensor) for part in parts)]


FAILS = {
    "empty": lambda x: torch.empty(1 << 26, device="cuda"),
    "operator": lambda x: torch.cat([x] * 8),
    "copy": lambda x: torch.ones(1 << 24).to("cuda"),
    "module": lambda x: nn.BatchNorm1d(1 << 24).to("cuda"),
    "as_tensor": lambda x: torch.as_tensor(torch.ones(1 << 24), device="cuda"),
    "expanded": lambda x: torch.ones(1 << 13, device="cuda")[:, None] * torch.ones(1 << 13, device="cuda"),
    "scatter": lambda x: nn.parallel.scatter(torch.ones(1 << 25), [0, 1]),
    "clone of a storage": lambda x: [x.untyped_storage().clone() for _ in range(8)],
    "two GPUs": lambda x: x + torch.ones(3, device="cuda:1"),
    "numpy": lambda x: (x + 1).numpy(),
    "no such GPU": lambda x: (x + 1).to("cuda:9"),
}


@pytest.mark.parametrize("name", FAILS)
def test_an_error_keeps_nothing_alive(name):
    """JupyterLab keeps the last error with its traceback: it must not keep what a cell then deletes."""
    errors = {"two GPUs": RuntimeError, "numpy": TypeError, "no such GPU": torch.AcceleratorError}
    with virtual_gpus(2, memory="64 MiB"):
        x = torch.ones(4 * MIB, device="cuda")  # 16 MiB
        base = allocated()
        with pytest.raises(errors.get(name, torch.OutOfMemoryError)) as kept:
            FAILS[name](x)
        assert tensors_in_our_frames(kept.tb) == []
        del kept
        assert allocated() == base
        assert (x + 1).sum().item() == 8 * MIB


def counted():
    """What could grow, and what needs the garbage collector."""
    held = [(torch.cuda.memory_allocated(gpu), torch.cuda.memory_reserved(gpu)) for gpu in range(2)]
    gc.collect()
    machine = active_machine()
    return {
        "objects": len(gc.get_objects()),
        "tensors": sum(isinstance(found, torch.Tensor) for found in gc.get_objects()),
        "held": held,
        "segments": len(torch.cuda.memory_snapshot()),
        "known times": len(timing.launch_times),
        "collectives on their way": sum(len(gpu.late) for gpu in machine.slots),
        "streams": sum(len(track.streams) for track in machine.clock.tracks),
        "resident": int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if STATM.exists() else 0,
    }


@pytest.mark.parametrize("steps", [20, pytest.param(10_000, marks=pytest.mark.outside)])
def test_many_steps_take_no_more_than_a_few(steps):
    with virtual_gpus(2):
        training, side, event = Training(), torch.cuda.Stream(0), torch.cuda.Event()
        noted = []
        gc.disable()
        try:
            for step in range(steps):
                with torch.cuda.stream(side):
                    batch = torch.randn(32, 8, pin_memory=True).to("cuda:0", non_blocking=True)
                    event.record()
                event.wait()
                training.step(batch)
                if step in (steps // 5, steps - 1):
                    noted.append(counted())
        finally:
            gc.enable()
        early, late = noted
        # The last modelled second's busy times are kept, and up to 4096 changes of streams for backward passes to come.
        assert abs(late.pop("objects") - early.pop("objects")) < 4096 + 1000
        assert late.pop("resident") - early.pop("resident") < 8 << 20
        assert late == early and early["held"][0][0] > 0
        del training, batch
        gc.collect()
        torch.cuda.empty_cache()
        assert [torch.cuda.memory_reserved(gpu) for gpu in range(2)] == [0, 0]
