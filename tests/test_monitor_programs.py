"""MemoryMonitor against random programs: the peak is the allocator's to the byte, and its kinds add up to it."""

import random
import threading

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from virtual_gpus import virtual_gpus

from helpers.measure import MemoryMonitor, MiB

pytestmark = pytest.mark.usefixtures("workspaces_given_back")
OPTIMIZERS = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)


class Net(nn.Module):
    """Two blocks, one of them recomputed in the backward pass if `saves`."""

    def __init__(self, width: int, saves: bool):
        super().__init__()
        self.first, self.norm, self.saves = nn.Linear(width, width), nn.BatchNorm1d(width), saves
        self.block = nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width))

    def forward(self, x):
        x = self.first(x).relu()
        return self.norm(checkpoint(self.block, x, use_reentrant=False) if self.saves else self.block(x))


class Program:
    """What a notebook may do in a monitor's block, in an order that `seed` picks."""

    def __init__(self, seed: int, gpus: int):
        self.numbers, self.gpus = random.Random(seed), gpus
        self.jobs, self.kept = [], []
        self.begin()
        steps = [
            self.train,
            self.train,
            self.train,
            self.begin,
            self.forget,
            self.forward,
            self.evaluate,
            self.take,
            self.give,
            self.run_out,
            self.accumulate,
            self.in_a_thread,
            torch.cuda.empty_cache,
        ]
        for step in self.numbers.choices(steps, k=self.numbers.randint(4, 14)):
            self.model, self.optimizer, self.width = self.numbers.choice(self.jobs)
            step()

    def chance(self, probability: float) -> bool:
        return self.numbers.random() < probability

    def begin(self) -> None:
        """A model and an optimizer, made in the run."""
        width = self.numbers.choice([64, 128, 300, 512])
        net = Net(width, self.chance(0.4)).to("cuda:0")
        optimizer = self.numbers.choice(OPTIMIZERS)(net.parameters(), lr=0.1)
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
        thread = threading.Thread(target=self.accumulate)
        thread.start()
        thread.join()


def before(numbers: random.Random) -> list[torch.Tensor]:
    """What lies on the GPU when the run begins, with holes in it."""
    held = [torch.empty(numbers.randint(1, 5 * MiB), dtype=torch.uint8, device="cuda") for _ in range(4)]
    return held[::2]


@pytest.mark.parametrize("options", ["", "expandable_segments:True"])
@pytest.mark.parametrize("seed", range(8))
def test_the_peak_is_the_allocators_and_its_kinds_add_up(seed, options, monkeypatch):
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", options)
    numbers = random.Random(f"before {seed}")
    gpus = numbers.choice([1, 1, 2, 3])
    with virtual_gpus(gpus, shapes_only=True, memory="8 GiB"):
        held = before(numbers)
        with MemoryMonitor() as monitor:
            for gpu in range(gpus):
                torch.cuda.reset_peak_memory_stats(gpu)
            program = Program(seed, gpus)
        assert held and program.jobs
        for gpu in range(gpus):
            found = monitor.at_peak(gpu)
            assert sum(found.values()) == max(monitor.allocated[gpu]) == torch.cuda.max_memory_allocated(gpu)
            assert monitor.allocated[gpu][-1] == torch.cuda.memory_allocated(gpu)
