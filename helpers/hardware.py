"""Kinds of GPUs in figures, for what is reckoned instead of run: data sheets, and PyTorch's allocator as a model.

    data_sheet("TITAN Xp").memory                       # bytes
    all_reduce_seconds(nbytes, 64, "A100", per_machine=8, network="Ethernet 25")
    block = CachingAllocator(capacity, context).malloc(nbytes)       # or OutOfMemory

Nothing is switched on here, and whatever GPUs are on stay as they are. The figures are those of virtual GPUs, so that
what is reckoned is what they count: beside `helpers.devices` the only lesson-facing module that knows of
`helpers.virtual`.
"""

from __future__ import annotations

from helpers.virtual.allocator import CachingAllocator, OutOfMemory
from helpers.virtual.links import NETWORKS, arrange
from helpers.virtual.specs import GPUSpec, kinds, spec
from helpers.virtual.traffic import ring_seconds

GPU_KINDS = tuple(kinds())


def data_sheet(kind: str) -> GPUSpec:
    """What is known of a kind of GPU (K80, TITAN Xp, V100, T4, A100, H100, H200). Raises ValueError for another one."""
    return spec(kind)


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
    "OutOfMemory",
    "all_reduce_seconds",
    "data_sheet",
]
