"""Computes the time of a DDP step on any number of GPUs, and fits Amdahl's law.

    recorded = rank_step(net, train_step, "cuda:0")      # one rank, alone in its process group
    recorded.on(64, Cluster("A100", 8))                  # seconds of the step on 64 GPUs, modelled
    amdahl({1: 0.32, 2: 0.17, 4: 0.09})                  # the share that does not get faster

64 ranks would be 64 processes. Therefore one rank's step is recorded: when each bucket of gradients is ready, how large
it is, and when each kernel starts. The times of the all-reduces are then computed. Each starts when its bucket is ready
and the previous one is done, and takes the time of a ring of n GPUs. A kernel that needs the result starts after it,
but no earlier than with one rank. All ranks are assumed to be equally fast, and broadcasting buffers (of BatchNorm) to
take no longer than with one rank. The result is within 0.2 % of runs with 2 and 4 processes (tests/test_scaling.py).
Both use the same modelled clock, so this checks the arithmetic, but not the clock.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from helpers.gpus import GPUSpec, Rates, all_reduce_seconds, copy_seconds, data_sheet, rates, seconds_covered
from helpers.measure.timeline import record_timeline

# ---- machines --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cluster:
    """Machines with `per_machine` GPUs of a `kind`. links: the links within a machine ("PCIe 3", ..., "NVLink pairs",
    "NVSwitch"), or None for the kind's default. network: the network between machines. adapters: the number of network
    adapters of a machine, which an all-reduce uses together. No GPU is needed. Raises ValueError for unknown names."""

    kind: str
    per_machine: int = 4
    links: str | None = None
    network: str = "Ethernet 100"
    adapters: int = 1

    def __post_init__(self):
        self.all_reduce_seconds(1, self.per_machine)

    @property
    def gpu(self) -> GPUSpec:
        """The data sheet of the GPUs."""
        return data_sheet(self.kind)

    @property
    def room(self) -> int:
        """Bytes that PyTorch can use on a GPU, which is its memory without CUDA's context."""
        return self.gpu.memory - self.gpu.context

    @property
    def rates(self) -> Rates:
        """Operations and bytes per second that a GPU reaches, modelled."""
        return rates(self.kind)

    def all_reduce_seconds(self, nbytes: float, gpus: int) -> float:
        """Return the modelled seconds of an all-reduce of `nbytes` bytes. The GPUs fill one machine after another.

        Raises ValueError for a number of GPUs that leaves a machine partly unused.
        """
        return all_reduce_seconds(nbytes, gpus, **vars(self))

    def copy_seconds(self, nbytes: float, gpus: int) -> float:
        """Return the modelled seconds of a copy of `nbytes` bytes between neighbours among `gpus` GPUs, over the
        slowest link between them and one adapter."""
        return copy_seconds(nbytes, gpus, self.kind, self.per_machine, self.links, self.network)


# ---- one rank's step, and the time of many ranks ---------------------------------------------------------------------


@dataclass(frozen=True)
class Bucket:
    """Gradients that are sent together. They are `ready` in seconds since the step began. `tensors` is their number."""

    ready: float
    nbytes: int
    tensors: int


@dataclass(frozen=True)
class RankStep:
    """A DDP step of one rank on its own: its `seconds`, the bytes allocated before it (`rest`) and at its `peak`, its
    `buckets`, and (start, end) of its `kernels` without the all-reduces, which take no time with one rank."""

    seconds: float
    rest: int
    peak: int
    buckets: tuple[Bucket, ...]
    kernels: tuple[tuple[float, float], ...] = field(repr=False)

    @property
    def after(self) -> tuple[tuple[float, float], ...]:
        """The kernels that need the reduced gradients, which are those that start after the last bucket is ready."""
        return tuple(kernel for kernel in self.kernels if kernel[0] >= self.buckets[-1].ready)

    def on(self, ranks: int, cluster: Cluster) -> float:
        """Return the modelled seconds of the step on `ranks` GPUs."""
        return self._on(ranks, cluster)[0]

    def utilisation_on(self, ranks: int, cluster: Cluster) -> float:
        """Return the share of the step (0 to 1) in which each GPU is busy. All-reduces count, as in nvidia-smi."""
        seconds, spans = self._on(ranks, cluster)
        return seconds_covered(spans) / seconds

    def _on(self, ranks: int, cluster: Cluster) -> tuple[float, list[tuple[float, float]]]:
        """Return the seconds of the step, and (start, end) of everything that runs on the GPU."""
        after, end, reduced = self.after, 0.0, []
        spans = list(self.kernels[: len(self.kernels) - len(after)])
        for bucket in self.buckets:
            start = max(end, bucket.ready)
            end = start + cluster.all_reduce_seconds(bucket.nbytes, ranks)
            spans.append((start, end))
            reduced += [end] * bucket.tensors  # DDP copies the tensors back, with one kernel for each
        reduced += [end] * (len(after) - len(reduced))  # the optimizer needs all of them
        free = 0.0
        for (start, stop), needed in zip(after, reduced, strict=False):
            begin = max(start, free, needed)
            free = begin + stop - start
            spans.append((begin, free))
        return max(self.seconds, end, free), spans


def rank_step(net: nn.Module, train_step: Callable[[nn.Module], Callable[[], object]], gpu) -> RankStep:
    """Record a step of DDP with one rank. train_step(ddp) returns the function that runs a step of the wrapped model.

    Three steps run, because DDP orders its buckets after the first. Raises RuntimeError if times are not modelled.
    """
    gpu, sent = torch.device(gpu), _AllReduces()
    with one_rank():
        step = train_step(DistributedDataParallel(net, device_ids=[gpu]))
        step()
        hooks = [each.register_post_accumulate_grad_hook(sent.count) for each in net.parameters() if each.requires_grad]
        with sent:
            step()
        for hook in hooks:
            hook.remove()
        net.zero_grad()
        rest = torch.cuda.memory_allocated(gpu)
        torch.cuda.reset_peak_memory_stats(gpu)
        with record_timeline() as timeline:
            step()
    if not timeline.modelled:
        raise RuntimeError("One rank can stand for many only with modelled times. On real GPUs, time all ranks.")
    starts = [span.start for span in timeline.work if span.kind == "collective" and span.name == "all_reduce"]
    kernels = sorted((span.start, span.end) for span in timeline.work if span.kind not in ("collective", "copy"))
    buckets = tuple(Bucket(start, *bucket) for start, bucket in zip(starts, sent.found, strict=True))
    return RankStep(timeline.seconds, rest, torch.cuda.max_memory_allocated(gpu), buckets, tuple(kernels))


class _AllReduces(TorchDispatchMode):
    """Records for each all-reduce its bytes and the number of gradients since the previous one. DDP sends a bucket
    after its last gradient. A communication hook would see buckets, but with it DDP copies gradients differently."""

    def __init__(self):
        super().__init__()
        self.found: list[tuple[int, int]] = []
        self._gradients = 0

    def count(self, parameter: nn.Parameter) -> None:
        self._gradients += 1

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.c10d.allreduce_.default:
            self.found.append((sum(tensor.nbytes for tensor in args[0]), self._gradients))
            self._gradients = 0
        return func(*args, **(kwargs or {}))


@contextmanager
def one_rank() -> Iterator[None]:
    """Open a process group of only this process for the block. PyTorch raises ValueError if one is already open."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


# ---- efficiency and Amdahl's law, from {GPUs: seconds of a step} -----------------------------------------------------


def efficiency(seconds: Mapping[int, float], weak: bool = False) -> dict[int, float]:
    """Return the speed-up divided by the number of GPUs, which is 1 for the smallest number. weak: the work grows with
    the number of GPUs, so the ideal time is constant. Otherwise, the work is constant."""
    fewest = min(seconds)
    return {gpus: seconds[fewest] / each * (1 if weak else fewest / gpus) for gpus, each in sorted(seconds.items())}


def amdahl_seconds(one: float, serial: float, gpus: int) -> float:
    """Return the time on `gpus` GPUs by Amdahl's law, if the share `serial` (0 to 1) of the time `one` is constant."""
    return one * (serial + (1 - serial) / gpus)


def amdahl(seconds: Mapping[int, float]) -> float:
    """Return the serial share (0 to 1) for which Amdahl's law fits best, by least squares of relative errors.

    Raises ValueError if the time of one GPU or of any other number is missing.
    """
    if 1 not in seconds or len(seconds) < 2:
        raise ValueError("Amdahl's law needs the time on one GPU and on at least one other number of GPUs.")
    gpus = np.array(list(seconds))
    relative = np.array(list(seconds.values())) / seconds[1]
    parallel = (1 - 1 / gpus) / relative  # T(n) / T(1) = s + (1 - s) / n, so T(n) / T(1) - 1 / n = s (1 - 1 / n)
    return float(np.clip(parallel @ (1 - 1 / gpus / relative) / (parallel @ parallel), 0, 1))
