"""Random programs of views, writes in place, streams, threads, copies and gradients: on virtual GPUs as on the CPU. A
program is a seed. All its choices follow from that and from sizes, so it runs alike on two GPUs and on the CPU. Each
step may fail, and then fails on both. In the end values, strides, errors and the sharing of memory are equal, every
tensor is on its GPU, and each GPU holds the blocks of the living storages and nothing else."""

import gc
import random
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import torch
from virtual_gpus import virtual_gpus

pytestmark = pytest.mark.usefixtures("workspaces_given_back")


class Program:
    """A pool of tensors, each with the number of its GPU, and the steps that change it."""

    def __init__(self, seed: int, devices):
        self.choose, self.devices = random.Random(seed), devices
        self.values = torch.Generator().manual_seed(seed)
        self.pool: list[tuple[torch.Tensor, int]] = []
        self.errors: list[tuple[int, str]] = []
        self.streams = [torch.cuda.Stream(device) for device in devices if device.type == "cuda"]
        for _ in range(3):
            self.make()

    def run(self, steps: int) -> None:
        names = ["make", "view", "write", "write", "compute", "compute", "copy", "copy", "drop", "learn", "resize"]
        for number in range(steps):
            step = getattr(self, self.choose.choice(names))
            on_stream, in_thread = self.choose.random() < 0.2, self.choose.random() < 0.1
            gpu = self.choose.randrange(2)

            def do(step=step, number=number, gpu=gpu, on_stream=on_stream):
                try:
                    with torch.cuda.stream(self.streams[gpu]) if on_stream and self.streams else nullcontext():
                        step()
                except (RuntimeError, IndexError, ValueError) as error:
                    self.errors.append((number, type(error).__name__))

            if in_thread:
                with ThreadPoolExecutor(1) as pool:
                    pool.submit(do).result()
            else:
                do()

    def pick(self) -> tuple[torch.Tensor, int]:
        return self.choose.choice(self.pool)

    def pick_two(self) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Two tensors on one GPU: the second one is copied there if need be."""
        (first, gpu), (second, other) = self.pick(), self.pick()
        return first, second if gpu == other else self.sent(second, gpu), gpu

    def sent(self, x: torch.Tensor, gpu: int) -> torch.Tensor:
        """A copy: on the CPU as well, where `to` would give the tensor itself."""
        return x.to(self.devices[gpu], copy=True, non_blocking=self.choose.random() < 0.5)

    def keep(self, tensor: torch.Tensor, gpu: int) -> None:
        self.pool.append((tensor.detach() if tensor.dim() else tensor.detach().reshape(1), gpu))
        if len(self.pool) > 12:
            del self.pool[self.choose.randrange(len(self.pool))]

    def make(self) -> None:
        gpu, shape = self.choose.randrange(2), [self.choose.randrange(1, 5) for _ in range(self.choose.randrange(1, 4))]
        made = torch.randint(-4, 5, shape, generator=self.values).to(self.choose.choice([torch.float32, torch.float64]))
        self.keep(self.sent(made, gpu), gpu)

    def view(self) -> None:
        x, gpu = self.pick()
        dim, size = self.choose.randrange(x.dim()), x.shape[0]
        views = (
            lambda: x.transpose(0, dim),
            lambda: x[self.choose.randrange(size) :],
            lambda: x[:: self.choose.randrange(1, 3)],
            lambda: x.unsqueeze(dim).expand(*x.shape[:dim], 2, *x.shape[dim:]),
            lambda: x.view(-1),
            lambda: x.as_strided((2,), (1,)),
            lambda: x.unfold(0, 2, 1),
            lambda: x.chunk(2, dim)[-1],
        )
        self.keep(self.choose.choice(views)(), gpu)

    def write(self) -> None:
        x, y, _ = self.pick_two()
        writes = (
            lambda: x.add_(y),
            lambda: x.mul_(2).clamp_(-64, 64),
            lambda: x.copy_(y),
            lambda: x.masked_fill_(x > 2, -1),
            lambda: x.__setitem__(0, 3),
            lambda: x.__setitem__(x < 0, 1),
            lambda: x.index_add_(0, torch.tensor([0], device=x.device), x[:1]),
            lambda: torch.add(x, y, out=x),
            lambda: x.view(-1).cumsum_(0).clamp_(-64, 64),
            lambda: torch._foreach_add_([x, y], 1),
            lambda: x.transpose_(0, -1),
        )
        self.choose.choice(writes)()

    def compute(self) -> None:
        x, y, gpu = self.pick_two()
        results = (
            lambda: x + y,
            lambda: (x @ y).clamp(-64, 64),
            lambda: x.sum(0, keepdim=True).clamp(-64, 64),
            lambda: torch.cat([x, x]),
            lambda: x.clone(memory_format=torch.contiguous_format),
            lambda: x[torch.tensor([0, 0], device=x.device)],
            lambda: x.new([1, 2]),
            lambda: x.double(),
        )
        self.keep(self.choose.choice(results)(), gpu)

    def copy(self) -> None:
        (x, _), (y, _), gpu = self.pick(), self.pick(), self.choose.randrange(2)
        self.keep(self.sent(x, gpu), gpu)
        x.copy_(y, non_blocking=self.choose.random() < 0.5)

    def drop(self) -> None:
        if len(self.pool) > 2:
            del self.pool[self.choose.randrange(len(self.pool))]

    def learn(self) -> None:
        x, y, gpu = self.pick_two()
        leaf = x.clone().requires_grad_()
        other = (leaf * y).to(self.devices[1 - gpu])
        (other.square().sum() + leaf.sum().to(other.device)).backward()
        self.keep(leaf.grad.clamp(-64, 64), gpu)

    def resize(self) -> None:
        x, _ = self.pick()
        elements = x.untyped_storage().nbytes() // x.itemsize - x.storage_offset()
        x.resize_(self.choose.choice([1, 2, 4, 8, 300]))  # the last needs more than one block of 512 bytes
        x[elements:].zero_()  # what is new has no value yet

    def result(self) -> list:
        storages = [x.untyped_storage()._cdata for x, _ in self.pool]
        shared = [storages.index(storage) for storage in storages]
        return [(x.cpu().tolist(), x.dtype, x.stride(), gpu) for x, gpu in self.pool] + [shared, self.errors]

    def expected_bytes(self, gpu: int) -> int:
        """Blocks of the living storages: multiples of 512 bytes."""
        living = {x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x, where in self.pool if where == gpu}
        return sum(-(-size // 512) * 512 for size in living.values())


LONG = [pytest.param(range(n, n + 100), 120, marks=pytest.mark.outside) for n in range(1000, 2000, 100)]


@pytest.mark.parametrize(("seeds", "steps"), [(range(30), 40), *LONG])
def test_programs(seeds, steps):
    cpu = torch.device("cpu")
    with virtual_gpus(2) as gpus:
        for seed in seeds:
            plain, program = Program(seed, [cpu, cpu]), Program(seed, gpus)
            plain.run(steps)
            program.run(steps)
            assert program.result() == plain.result(), f"seed {seed}"
            assert all(x.device == gpus[gpu] for x, gpu in program.pool), f"seed {seed}"
            for gpu in range(2):
                if torch.cuda.memory_allocated(gpu) != program.expected_bytes(gpu):
                    gc.collect()  # errors that were caught hold frames
                assert torch.cuda.memory_allocated(gpu) == program.expected_bytes(gpu), f"seed {seed}"
