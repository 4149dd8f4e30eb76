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


def recorded(gpus: int = 1, batch: int = 64, steps: int = 2) -> MemoryMonitor:
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


@pytest.mark.parametrize("shapes_only", [False, True])
@pytest.mark.parametrize("gpus", [1, 3])
def test_the_peak_is_the_allocators_to_the_byte_and_gradients_and_state_are_counted_when_they_are_there(
    gpus, shapes_only
):
    with virtual_gpus(gpus, shapes_only=shapes_only):
        first, monitor = recorded(gpus, batch=8, steps=1).at_peak(), recorded(gpus, batch=8)
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
        model = net().to("cuda:0")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(ZeroDivisionError), MemoryMonitor() as monitor:
            train(model, optimizer)
            assert torch._C._cuda_isHistoryEnabled()
            raise ZeroDivisionError
        assert max(monitor.allocated[0]) > 0 and not torch._C._cuda_isHistoryEnabled()
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


def test_expandable_segments_that_were_there_before_are_split_wherever_it_may_be(monkeypatch):
    """A large segment that is not expandable hands out a block whole where less than 1 MiB would be left of it."""
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    with virtual_gpus(1, shapes_only=True):
        torch.empty(20 * MiB, dtype=torch.uint8, device="cuda")
        with MemoryMonitor() as monitor:
            kept = torch.empty(20 * MiB - 4096, dtype=torch.uint8, device="cuda")
        assert max(monitor.allocated[0]) == torch.cuda.memory_allocated() == kept.nbytes


# ---- random programs ------------------------------------------------------------------------------------------------


class Saved(nn.Sequential):
    """Recomputed in the backward pass."""

    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


class Program:
    """What a notebook may do in a monitor's block, in an order that `seed` picks."""

    def __init__(self, seed: int, gpus: int):
        self.numbers, self.gpus = random.Random(seed), gpus
        self.jobs, self.kept = [], []
        self.begin()
        steps = [self.train] * 3 + [self.begin, self.forget, self.forward, self.evaluate, self.take, self.give]
        steps += [self.run_out, self.accumulate, self.in_a_thread, torch.cuda.empty_cache]
        for step in self.numbers.choices(steps, k=self.numbers.randint(4, 14)):
            self.model, self.optimizer, self.width = self.numbers.choice(self.jobs)
            step()

    def chance(self, probability: float) -> bool:
        return self.numbers.random() < probability

    def begin(self) -> None:
        """A model and an optimizer, made in the run."""
        width = self.numbers.choice([64, 128, 300, 512])
        block = Saved if self.chance(0.4) else nn.Sequential
        block = block(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width))
        net = nn.Sequential(nn.Linear(width, width), nn.ReLU(), block, nn.BatchNorm1d(width)).to("cuda:0")
        kind = self.numbers.choice([torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
        optimizer = kind(net.parameters(), lr=0.1)
        model = nn.DataParallel(net, list(range(self.gpus))) if self.gpus > 1 and self.chance(0.5) else net
        self.jobs.append((model, optimizer, width))

    def forget(self) -> None:
        self.jobs = self.jobs[-1:]

    def batch(self) -> torch.Tensor:
        return torch.randn(self.numbers.choice([8, 9, 64, 1000]), self.width, device="cuda:0")

    def train(self) -> None:
        self.optimizer.zero_grad(set_to_none=self.chance(0.6))
        self.model(self.batch()).square().mean().backward()
        self.optimizer.step()

    def forward(self) -> None:
        self.kept.append(self.model(self.batch()))

    def evaluate(self) -> None:
        with torch.no_grad():
            self.model(self.batch())

    def accumulate(self) -> None:
        for _ in range(2):
            self.model(self.batch()).sum().backward()

    def take(self) -> None:
        device = f"cuda:{self.numbers.randrange(self.gpus)}"
        self.kept.append(torch.empty(self.numbers.randint(1, 9 * MiB), dtype=torch.uint8, device=device))

    def give(self) -> None:
        self.kept = self.kept[1:]

    def run_out(self) -> None:
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(2**40, dtype=torch.uint8, device="cuda:0")

    def in_a_thread(self) -> None:
        with ThreadPoolExecutor() as pool:
            pool.submit(self.accumulate).result()


@pytest.mark.parametrize("options", ["", "expandable_segments:True"])
@pytest.mark.parametrize("seed", range(6))
def test_the_peak_of_any_program_is_the_allocators_and_its_kinds_add_up(seed, options, monkeypatch):
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", options)
    numbers = random.Random(f"before {seed}")
    gpus = numbers.choice([1, 1, 2, 3])
    with virtual_gpus(gpus, shapes_only=True, memory="8 GiB"):
        held = [torch.empty(numbers.randint(1, 5 * MiB), dtype=torch.uint8, device="cuda") for _ in range(4)]
        del held[1::2]  # leaves holes
        with MemoryMonitor() as monitor:
            for gpu in range(gpus):
                torch.cuda.reset_peak_memory_stats(gpu)
            program = Program(seed, gpus)
        assert held and program.jobs
        for gpu in range(gpus):
            found = monitor.at_peak(gpu)
            assert sum(found.values()) == max(monitor.allocated[gpu]) == torch.cuda.max_memory_allocated(gpu)
            assert monitor.allocated[gpu][-1] == torch.cuda.memory_allocated(gpu)
