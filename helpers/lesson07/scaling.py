"""Scaling: a step of DDP on any number of GPUs, and Amdahl's law.

    recorded = rank_step(net, train_step, "cuda:0")      # one rank, alone in its process group
    recorded.on(64, Cluster("A100", 8))                  # seconds of the step on 64 GPUs, modelled
    amdahl({1: 0.32, 2: 0.17, 4: 0.09})                  # the share that does not get faster

64 ranks would be 64 processes, so one rank's step is recorded: when each bucket of gradients is ready, how large it is,
and when each kernel starts. The all-reduces are then laid on a line of their own. Each starts when its bucket is ready
and the one before is done, and takes as long as a ring of n GPUs. A kernel that needs its result starts after it, and
no earlier than with one rank, because the host goes on meanwhile. All ranks count as equally fast, and the broadcast of
buffers (of BatchNorm) takes no longer than with one rank. Against 2 and 4 ranks in processes of their own this is
within 0.2 % (tests/test_scaling.py). Both use the same clock, so this checks the arithmetic and not the clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from helpers.gpus import GPUSpec, Rates, all_reduce_seconds, copy_seconds, data_sheet, rates
from helpers.measure.timeline import record_timeline, seconds_covered

# ---- machines --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cluster:
    """Machines with `per_machine` GPUs of a `kind`. links: within a machine, None for the kind's own ("PCIe 3", ...,
    "NVLink pairs", "NVSwitch"). network: between machines; adapters: how many of them a machine has, which an
    all-reduce uses together. No GPU is needed. Raises ValueError for unknown names."""

    kind: str
    per_machine: int = 4
    links: str | None = None
    network: str = "Ethernet 100"
    adapters: int = 1

    def __post_init__(self):
        self.all_reduce_seconds(1, self.per_machine)

    @property
    def gpu(self) -> GPUSpec:
        """The data sheet of its GPUs."""
        return data_sheet(self.kind)

    @property
    def room(self) -> int:
        """Bytes that PyTorch can have on a GPU: its memory without CUDA's context."""
        return self.gpu.memory - self.gpu.context

    @property
    def rates(self) -> Rates:
        """Operations and bytes per second that a GPU reaches, modelled."""
        return rates(self.kind)

    def all_reduce_seconds(self, nbytes: float, gpus: int) -> float:
        """Modelled seconds of an all-reduce on `gpus` GPUs, one machine filled after the other.

        Raises ValueError for a number of GPUs that leaves a machine partly empty.
        """
        return all_reduce_seconds(nbytes, gpus, **vars(self))

    def copy_seconds(self, nbytes: float, gpus: int) -> float:
        """Modelled seconds of a copy between neighbours among `gpus` GPUs, over the slowest link between them and one
        adapter."""
        return copy_seconds(nbytes, gpus, self.kind, self.per_machine, self.links, self.network)


# ---- one rank's step, and what many take -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Bucket:
    """Gradients that are sent together: `ready` in seconds since the step began, `nbytes`, and how many `tensors`."""

    ready: float
    nbytes: int
    tensors: int


@dataclass(frozen=True)
class RankStep:
    """A DDP step of one rank on its own: `seconds`, bytes allocated at `rest` before it and at its `peak`, its
    `buckets`, and (start, end) of its GPU's `kernels` without the all-reduces, which take no time with one rank."""

    seconds: float
    rest: int
    peak: int
    buckets: tuple[Bucket, ...]
    kernels: tuple[tuple[float, float], ...] = field(repr=False)

    @property
    def after(self) -> tuple[tuple[float, float], ...]:
        """The kernels that need the reduced gradients: those that came once the last bucket was ready."""
        return tuple(kernel for kernel in self.kernels if kernel[0] >= self.buckets[-1].ready)

    def on(self, ranks: int, cluster: Cluster) -> float:
        """Modelled seconds of the step on `ranks` GPUs."""
        return self._on(ranks, cluster)[0]

    def utilisation_on(self, ranks: int, cluster: Cluster) -> float:
        """Share of the step in which each GPU is busy. All-reduces count: nvidia-smi counts NCCL's kernels too."""
        seconds, spans = self._on(ranks, cluster)
        return seconds_covered(spans) / seconds

    def _on(self, ranks: int, cluster: Cluster) -> tuple[float, list[tuple[float, float]]]:
        """Seconds of the step, and (start, end) of everything that runs on the GPU."""
        after, end, reduced = self.after, 0.0, []
        spans = list(self.kernels[: len(self.kernels) - len(after)])
        for bucket in self.buckets:
            start = max(end, bucket.ready)
            end = start + cluster.all_reduce_seconds(bucket.nbytes, ranks)
            spans.append((start, end))
            reduced += [end] * bucket.tensors  # DDP copies its tensors back, a kernel each, bucket by bucket
        reduced += [end] * (len(after) - len(reduced))  # the optimizer needs all of them
        free = 0.0
        for (start, stop), needed in zip(after, reduced, strict=False):
            begin = max(start, free, needed)
            free = begin + stop - start
            spans.append((begin, free))
        return max(self.seconds, end, free), spans


def rank_step(net: nn.Module, train_step: Callable[[nn.Module], Callable[[], object]], gpu) -> RankStep:
    """Record a step of DDP with one rank. train_step(ddp) returns the function that runs a step of the wrapped net.

    Three steps are run, because DDP orders its buckets after the first. Raises RuntimeError where times are not
    modelled.
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
        raise RuntimeError("One rank stands for many by modelled times only. Time real ranks themselves.")
    starts = [span.start for span in timeline.work if span.kind == "collective" and span.name == "all_reduce"]
    kernels = sorted((span.start, span.end) for span in timeline.work if span.kind not in ("collective", "copy"))
    buckets = tuple(Bucket(start, *bucket) for start, bucket in zip(starts, sent.found, strict=True))
    return RankStep(timeline.seconds, rest, torch.cuda.max_memory_allocated(gpu), buckets, tuple(kernels))


class _AllReduces(TorchDispatchMode):
    """Notes of each all-reduce its bytes, and how many gradients have come since the one before: DDP sends a bucket
    with its last gradient. (A communication hook would see buckets too, but makes DDP copy gradients differently.)"""

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
    """A process group of this process only, for the block. Raises ValueError (PyTorch's) where one is open already."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


# ---- laws, of {GPUs: seconds of a step} ------------------------------------------------------------------------------


def efficiency(seconds: Mapping[int, float], weak: bool = False) -> dict[int, float]:
    """Speed-up divided by the number of GPUs, 1 for the fewest. weak: the work grew with the GPUs, so the ideal is the
    same time; otherwise the work is the same."""
    fewest = min(seconds)
    return {gpus: seconds[fewest] / each * (1 if weak else fewest / gpus) for gpus, each in sorted(seconds.items())}


def amdahl_seconds(one: float, serial: float, gpus: int) -> float:
    """Amdahl's law: the time on `gpus` GPUs if a share `serial` (0 to 1) of one GPU's time does not get shorter."""
    return one * (serial + (1 - serial) / gpus)


def amdahl(seconds: Mapping[int, float]) -> float:
    """The serial share, 0 to 1, for which Amdahl's law fits best: least squares of relative errors, T(1) kept.

    Raises ValueError without the time of one GPU, or with nothing else.
    """
    if 1 not in seconds or len(seconds) < 2:
        raise ValueError("Amdahl's law needs the time on one GPU and on at least one other number of GPUs.")
    gpus = np.array(list(seconds))
    relative = np.array(list(seconds.values())) / seconds[1]
    parallel = (1 - 1 / gpus) / relative  # T(n) / T(1) = s + (1 - s) / n, so T(n) / T(1) - 1 / n = s (1 - 1 / n)
    return float(np.clip(parallel @ (1 - 1 / gpus / relative) / (parallel @ parallel), 0, 1))
