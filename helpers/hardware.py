"""Kinds of GPUs in figures, for what is reckoned instead of run: data sheets, and PyTorch's allocator as a model.

    data_sheet("TITAN Xp").memory                       # bytes
    all_reduce_seconds(nbytes, 64, "A100", per_machine=8, network="Ethernet 25")
    paces("A100").convolutions                          # operations per second that they reach, modelled
    block = CachingAllocator(capacity, context).malloc(nbytes)       # or OutOfMemory

Nothing is switched on here, and whatever GPUs are on stay as they are. The figures are those of virtual GPUs, so that
what is reckoned is what they count: beside `helpers.gpus` the only lesson-facing module that knows of
`virtual_gpus`.
"""

from __future__ import annotations

from typing import NamedTuple

from virtual_gpus.clock.calibration import HOST, pace
from virtual_gpus.clock.cost import CONVOLUTIONS_BACKWARD
from virtual_gpus.clock.cost_matmul import peak, tensor_cores
from virtual_gpus.clock.links import NETWORKS, REACHED, arrange
from virtual_gpus.clock.traffic import ring_seconds
from virtual_gpus.gpus import GPUSpec, kinds, spec
from virtual_gpus.memory.allocator import CachingAllocator, OutOfMemory

GPU_KINDS = tuple(kinds())


def data_sheet(kind: str) -> GPUSpec:
    """What is known of a kind of GPU (K80, TITAN Xp, V100, T4, A100, H100, H200). Raises ValueError for another one."""
    return spec(kind)


class Paces(NamedTuple):
    """What a kind of GPU reaches with float32 as PyTorch computes it by default, modelled: operations per second of
    large matrix `products` and of `convolutions` (both passes; on TF32's tensor cores where there are some), bytes per
    second of its `memory`, and the seconds of its shortest `kernel`."""

    products: float
    convolutions: float
    memory: float
    kernel: float


def paces(kind: str) -> Paces:
    """The clock's shares of a data sheet's peaks, as rates; `help("virtual_gpus.clock.calibration")` has
    their sources.

    Raises ValueError for a kind that is not known.
    """
    card = spec(kind)
    shares, cores = pace(card.kind), tensor_cores(card, "tf32")
    forward = peak(card, "tf32" if cores else "fp32") * (shares.tensor_conv if cores else shares.conv)
    both = 3 / (1 + 2 / CONVOLUTIONS_BACKWARD)  # two of three parts of the arithmetic are the backward pass's
    return Paces(peak(card, "fp32") * shares.simt, forward * both, card.bandwidth * shares.memory, shares.kernel)


# What a host pays for an operator of a training step, in seconds: to issue it, to keep autograd's graph, and for a view
# before and one after it.
OPERATOR_SECONDS = HOST.operator + HOST.training + 2 * HOST.view


def copy_seconds(
    nbytes: float, ranks: int, kind: str, per_machine: int, links: str | None = None, network: str = "Ethernet 100"
) -> float:
    """Modelled seconds of a copy between two neighbours of `ranks` GPUs, over the slowest link that there is.

    Arguments and errors: `all_reduce_seconds`. With one GPU nothing is copied: 0.
    """
    topology = arrange(spec(kind), ranks, links, -(-ranks // per_machine), network)
    between = [topology.between(rank, rank + 1) for rank in range(ranks - 1)]
    return max((link.latency + nbytes / (REACHED * link.bandwidth) for link in between), default=0.0)


def all_reduce_seconds(
    nbytes: int, ranks: int, kind: str, per_machine: int, links: str | None = None, network: str = "Ethernet 100"
) -> float:
    """Modelled seconds of an all-reduce of `nbytes` around a ring of `ranks` GPUs, one machine filled after the other.

    links: within a machine, None for the kind's own; network: between machines, one of `NETWORKS`. Raises ValueError
    for unknown names, and for ranks that leave a machine partly empty.
    """
    topology = arrange(spec(kind), ranks, links, -(-ranks // per_machine), network)
    ring = [topology.between(rank, (rank + 1) % ranks) for rank in range(ranks)] if ranks > 1 else []
    return ring_seconds(ring, ranks, "all_reduce", nbytes)


__all__ = [
    "CachingAllocator",
    "GPU_KINDS",
    "NETWORKS",
    "OPERATOR_SECONDS",
    "OutOfMemory",
    "Paces",
    "all_reduce_seconds",
    "copy_seconds",
    "data_sheet",
    "paces",
]
