"""MemoryMonitor: its curve is the allocator's to the byte, its kinds add up, and it leaves nothing behind."""

import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.optimizer import _global_optimizer_pre_hooks
from torch.utils.checkpoint import checkpoint
from virtual_gpus import virtual_gpus

from helpers.measure import MemoryMonitor, MiB
from helpers.measure import monitor as monitor_module

pytestmark = pytest.mark.usefixtures("workspaces_given_back")


def net(width: int = 512) -> nn.Module:
    return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))


def train(model, optimizer, batch: int = 64, steps: int = 2, width: int = 512) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        outputs = model(torch.randn(batch, width).to("cuda:0"))
        F.cross_entropy(outputs, torch.zeros(batch, dtype=torch.long).to("cuda:0")).backward()
        del outputs
        optimizer.step()


def recorded(gpus: int = 1, batch: int = 8, steps: int = 2) -> MemoryMonitor:
    model = net().to("cuda:0")
    parallel = nn.DataParallel(model, list(range(gpus))) if gpus > 1 else model
    optimizer = torch.optim.Adam(model.parameters())
    for gpu in range(gpus):
        torch.cuda.reset_peak_memory_stats(gpu)
    with MemoryMonitor() as monitor:
        train(parallel, optimizer, batch, steps)
    return monitor


def rounded(tensors) -> int:
    return sum(-(-tensor.nbytes // 512) * 512 for tensor in tensors)


PARAMETERS = rounded(net().parameters())


@pytest.mark.parametrize("gpus", [1, 3])
def test_gradients_and_state_are_counted_when_they_are_there(gpus):
    with virtual_gpus(gpus):
        first, monitor = recorded(gpus, steps=1).at_peak(), recorded(gpus)
        for gpu in range(gpus):
            most = max(monitor.allocated[gpu])
            assert most == sum(monitor.at_peak(gpu).values()) == torch.cuda.max_memory_allocated(gpu)
            # The copies of DataParallel are parameters, too.
            assert monitor.at_peak(gpu)["parameters"] == pytest.approx(PARAMETERS, rel=0.2)
            assert ("optimizer state" in monitor.at_peak(gpu)) == (gpu == 0)
        assert str(monitor).startswith("GPU 0 peaked at ") and str(monitor).count("\n") == gpus - 1
    held = monitor.at_peak()
    assert "optimizer state" not in first and held["optimizer state"] == pytest.approx(2 * PARAMETERS, rel=0.2)
    if gpus == 1:  # the peak is in the backward pass
        assert 0 < held["gradients"] <= 1.2 * PARAMETERS


@pytest.mark.parametrize("save", [False, True])
def test_a_large_batch_is_held_by_activations_also_those_that_a_checkpoint_computes_again(save):
    with virtual_gpus(1, shapes_only=True):
        model, inputs = net().to("cuda"), torch.ones(50_000, 512, device="cuda")
        with MemoryMonitor() as monitor:
            outputs = checkpoint(model, inputs, use_reentrant=False) if save else model(inputs)
            F.cross_entropy(outputs, torch.zeros(50_000, dtype=torch.long, device="cuda")).backward()
        held = monitor.at_peak()
    assert held["parameters"] == pytest.approx(PARAMETERS, rel=0.2) and held["other"] >= inputs.nbytes
    assert 3 <= held["activations"] / inputs.nbytes < 5


def test_gradients_that_zero_grad_let_go_are_not_counted():
    """In the forward pass, the blocks of the last step's gradients hold activations."""
    with virtual_gpus(1, shapes_only=True):
        model = net().to("cuda")
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        with MemoryMonitor() as monitor:
            train(model, sgd, batch=8, steps=2)
            sgd.zero_grad()
            outputs = model(torch.empty(50_000, 512, device="cuda"))
        assert "gradients" not in monitor.at_peak() and outputs.is_cuda


def test_nothing_is_left_behind():
    with virtual_gpus(1):
        with pytest.raises(ZeroDivisionError), MemoryMonitor() as monitor:
            kept = torch.ones(7, device="cuda")
            assert torch._C._cuda_isHistoryEnabled()
            raise ZeroDivisionError
        assert max(monitor.allocated[0]) == 512 > kept.nbytes and not torch._C._cuda_isHistoryEnabled()
        assert not _global_optimizer_pre_hooks


def test_who_was_recording_goes_on():
    with virtual_gpus(1):
        torch.cuda.memory._record_memory_history("all", context="all", stacks="python", max_entries=1000)
        first = torch.ones(7, device="cuda")
        with MemoryMonitor() as monitor:
            second = torch.ones(1000, device="cuda")
        third = torch.ones(7, device="cuda")
        trace = torch.cuda.memory._snapshot()["device_traces"][0]
        torch.cuda.memory._record_memory_history(None)
        made = [entry for entry in trace if entry["action"] == "alloc"]
        assert len(made) == 3 and all(entry["frames"] for entry in made) and len(monitor.allocated[0]) == 2
        assert all(tensor is not None for tensor in (first, second, third))


def test_errors_say_what_to_do(monkeypatch):
    with pytest.raises(RuntimeError, match="Call use_gpus first"), MemoryMonitor():
        pass
    with virtual_gpus(1):
        with pytest.raises(ValueError, match="no cuda:3"), MemoryMonitor(gpus=3):
            pass
        monkeypatch.setattr(monitor_module, "MOST_EVENTS", 20)
        with pytest.raises(RuntimeError, match="does not contain the whole run"):
            recorded()


# ---- random programs ------------------------------------------------------------------------------------------------


def bytes_of(size: int, gpu: int = 0) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, device=f"cuda:{gpu}")


class Saved(nn.Sequential):
    """Recomputed in the backward pass."""

    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


class Program:
    """What a notebook may do in a monitor's block, in an order that `seed` picks."""

    def __init__(self, seed: int, gpus: int):
        self.numbers, self.gpus, self.kept = random.Random(seed), gpus, []
        self.begin()
        steps = [self.train, self.train, self.begin, self.forward, self.take, self.give, self.run_out, self.in_a_thread]
        for step in self.numbers.choices([*steps, torch.cuda.empty_cache], k=self.numbers.randint(6, 14)):
            step()

    def begin(self) -> None:
        """A model and an optimizer, made in the run."""
        self.width = self.numbers.choice([64, 128, 300, 512])
        block = self.numbers.choice([Saved, nn.Sequential])
        block = block(nn.Linear(self.width, 2 * self.width), nn.ReLU(), nn.Linear(2 * self.width, self.width))
        net = nn.Sequential(nn.Linear(self.width, self.width), block, nn.BatchNorm1d(self.width)).to("cuda:0")
        self.optimizer = self.numbers.choice([torch.optim.SGD, torch.optim.Adam])(net.parameters(), lr=0.1)
        self.model = self.numbers.choice([net, nn.DataParallel(net, list(range(self.gpus)))])

    def forward(self) -> None:
        batch = self.numbers.choice([8, 9, 64, 1000])
        self.kept.append(self.model(torch.randn(batch, self.width, device="cuda:0")))

    def train(self) -> None:
        self.optimizer.zero_grad(set_to_none=self.numbers.random() < 0.6)
        self.forward()
        self.kept.pop().square().mean().backward()
        self.optimizer.step()

    def in_a_thread(self) -> None:
        with ThreadPoolExecutor() as pool:
            pool.submit(self.train).result()

    def take(self) -> None:
        self.kept.append(bytes_of(self.numbers.randint(1, 9 * MiB), self.numbers.randrange(self.gpus)))

    def give(self) -> None:
        self.kept = self.kept[1:]

    def run_out(self) -> None:
        with pytest.raises(torch.OutOfMemoryError):
            bytes_of(2**40)


@pytest.mark.parametrize("options", ["", "expandable_segments:True"])
@pytest.mark.parametrize("seed", range(4))
def test_the_peak_of_any_program_is_the_allocators_and_its_kinds_add_up(seed, options, monkeypatch):
    """Beside blocks that were there before: of the last one, a segment has less than 1 MiB that was free."""
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", options)
    numbers, gpus = random.Random(f"before {seed}"), (1, 2, 1, 3)[seed]
    with virtual_gpus(gpus, shapes_only=True, memory="8 GiB"):
        held = [bytes_of(numbers.randint(1, 5 * MiB)) for _ in range(4)] + [bytes_of(20 * MiB)]
        del held[1::2], held[-1]  # leaves holes
        with MemoryMonitor() as monitor:
            held.append(bytes_of(20 * MiB - 4096))
            for gpu in range(gpus):
                torch.cuda.reset_peak_memory_stats(gpu)
            program = Program(seed, gpus)
        assert held and program.model
        for gpu in range(gpus):
            found = monitor.at_peak(gpu)
            assert sum(found.values()) == max(monitor.allocated[gpu]) == torch.cuda.max_memory_allocated(gpu)
            assert monitor.allocated[gpu][-1] == torch.cuda.memory_allocated(gpu)
