"""Kinds of GPUs in figures, for what is reckoned instead of run: data sheets, and PyTorch's allocator as a model.

    data_sheet("TITAN Xp").memory                       # bytes
    block = CachingAllocator(capacity, context).malloc(nbytes)       # or OutOfMemory

Nothing is switched on here, and whatever GPUs are on stay as they are. The figures are those of virtual GPUs, so that
what is reckoned is what they count: beside `helpers.devices` the only lesson-facing module that knows of
`helpers.virtual`.
"""

from __future__ import annotations

from helpers.virtual.allocator import CachingAllocator, OutOfMemory
from helpers.virtual.specs import GPUSpec, spec


def data_sheet(kind: str) -> GPUSpec:
    """What is known of a kind of GPU (K80, TITAN Xp, V100, T4, A100, H100, H200). Raises ValueError for another one."""
    return spec(kind)


__all__ = ["CachingAllocator", "OutOfMemory", "data_sheet"]
