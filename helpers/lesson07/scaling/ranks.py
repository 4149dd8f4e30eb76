"""A step of DDP on any number of GPUs, from one rank's step. Part of `helpers.lesson07.scaling`, which says how."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from helpers.lesson07.scaling.clusters import Cluster
from helpers.measure.timeline import record_timeline, seconds_covered


@dataclass(frozen=True)
class Bucket:
    """Gradients that are sent together: `ready` in seconds since the step began, `nbytes`, and how many `tensors`."""

    ready: float
    nbytes: int
    tensors: int


@dataclass(frozen=True)
class RankStep:
    """A DDP step of one rank on its own: `seconds`, bytes allocated at `rest` before it and at its `peak`, its
    `buckets`, and (start, end) of its GPU's `kernels`, all-reduces not among them: with one rank they take no time."""

    seconds: float
    rest: int
    peak: int
    buckets: tuple[Bucket, ...]
    kernels: tuple[tuple[float, float], ...] = field(repr=False)

    @property
    def after(self) -> tuple[tuple[float, float], ...]:
        """The kernels that need the reduced gradients: those that came once the last bucket was ready."""
        return tuple(each for each in self.kernels if each[0] >= self.buckets[-1].ready)

    def on(self, ranks: int, cluster: Cluster) -> float:
        """Modelled seconds of the step on `ranks` GPUs."""
        return self._laid_out(ranks, cluster)[0]

    def utilisation_on(self, ranks: int, cluster: Cluster) -> float:
        """Share of the step in which each GPU is busy, all-reduces included: nvidia-smi counts NCCL's kernels too."""
        seconds, spans = self._laid_out(ranks, cluster)
        return seconds_covered(spans) / seconds

    def _laid_out(self, ranks: int, cluster: Cluster) -> tuple[float, list[tuple[float, float]]]:
        """Seconds of the step, and (start, end) of everything on the GPU.

        A kernel starts when it has been issued, the one before it is done and its gradients are reduced. The host
        issues as early as ever, since it does not wait for an all-reduce: so no kernel starts earlier than with one
        rank, and gaps take up a delay.
        """
        after, end, sent = self.after, 0.0, []
        spans, needs = list(self.kernels[: len(self.kernels) - len(after)]), []
        for bucket in self.buckets:
            start = max(end, bucket.ready)
            end = start + cluster.all_reduce_seconds(bucket.nbytes, ranks)
            sent.append((start, end))
            needs += [end] * bucket.tensors  # DDP copies its tensors back, a kernel each, bucket by bucket
        needs += [end] * len(after)  # the optimizer needs them all
        free = 0.0
        for (start, ended), reduced in zip(after, needs, strict=False):
            start, free = max(start, free, reduced), max(start, free, reduced) + ended - start
            spans.append((start, free))
        end = max(end, free)
        return max(self.seconds, end), spans + sent


def rank_step(net: nn.Module, train_step: Callable[[nn.Module], Callable[[], object]], gpu) -> RankStep:
    """Record a step of DDP with one rank. train_step(ddp) gives the function that runs a step of the wrapped net.

    Three steps are run, since DDP orders its buckets after the first. RuntimeError where a process group is open, and
    where times are not modelled.
    """
    gpu, sizes = torch.device(gpu), _Sizes()
    with one_rank():
        step = train_step(DistributedDataParallel(net, device_ids=[gpu]))
        step()
        with sizes, _arrivals(net) as arrived:
            step()
        net.zero_grad()
        rest = torch.cuda.memory_allocated(gpu)
        torch.cuda.reset_peak_memory_stats(gpu)
        with record_timeline() as timeline:
            step()
    if not timeline.modelled:
        raise RuntimeError("one rank tells what many take by modelled times only: real ranks can be timed themselves")
    sent = [span.start for span in timeline.work if span.kind == "collective" and span.name == "all_reduce"]
    kernels = tuple((span.start, span.end) for span in timeline.work if span.kind not in ("collective", "copy"))
    tensors = _tensors(sizes.found, arrived)
    buckets = tuple(Bucket(*each) for each in zip(sent, sizes.found, tensors, strict=True))
    return RankStep(timeline.seconds, rest, torch.cuda.max_memory_allocated(gpu), buckets, tuple(sorted(kernels)))


class _Sizes(TorchDispatchMode):
    """Notes the bytes of each all-reduce. (A communication hook could, but DDP copies gradients otherwise with one.)"""

    def __init__(self):
        super().__init__()
        self.found: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.c10d.allreduce_.default:
            self.found.append(sum(tensor.nbytes for tensor in args[0]))
        return func(*args, **(kwargs or {}))


@contextmanager
def _arrivals(net: nn.Module):
    """A list of the bytes of each gradient, in the order in which they come: DDP fills its buckets so."""
    arrived: list[int] = []
    handles = [
        parameter.register_post_accumulate_grad_hook(lambda each: arrived.append(each.nbytes))
        for parameter in net.parameters()
        if parameter.requires_grad
    ]
    try:
        yield arrived
    finally:
        for handle in handles:
            handle.remove()


def _tensors(sizes: list[int], arrived: list[int]) -> list[int]:
    """How many gradients each bucket of `sizes` bytes holds."""
    found, gradients = [], iter(arrived)
    for size in sizes:
        count = 0
        while size > 0:
            size, count = size - next(gradients), count + 1
        found.append(count)
    return found


@contextmanager
def one_rank():
    """A process group of this process only, for the block. RuntimeError where one is open already."""
    if dist.is_initialized():
        raise RuntimeError("a process group is open here: call torch.distributed.destroy_process_group() first")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
