"""scaled_dot_product_attention of DTensors: each rank attends with its own samples and heads.

DTensor's strategies for the fused kernels (torch/distributed/tensor/_ops/_matrix_ops.py) shard the samples or the
heads, and replicate everything else. The kernel that runs on a rank's part is CUDA's choice for that part.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch


def is_dtensor(value: Any) -> bool:
    """True for a DTensor; asks without importing what makes them."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def in_a_ring() -> bool:
    """True within PyTorch's context parallelism, which makes DTensor call a fused kernel for one block of keys after
    the other (torch/distributed/tensor/experimental/_context_parallel).
    """
    handlers = sys.modules["torch.distributed.tensor"].DTensor._op_dispatcher._custom_op_handlers
    return torch.ops.aten._scaled_dot_product_flash_attention.default in handlers


def on_each_rank(attention: Callable, query, key, value, mask, *args, **kwargs):
    """`attention` of DTensors, a DTensor. Raises RuntimeError where DTensors and plain tensors are mixed."""
    inputs = [part for part in (query, key, value, mask) if part is not None]
    mesh = next(part for part in inputs if is_dtensor(part)).device_mesh
    if not all(map(is_dtensor, inputs)):
        raise RuntimeError(
            "scaled_dot_product_attention: got mixed torch.Tensor and DTensor, need to convert all torch.Tensor to "
            "DTensor before calling distributed operators!"
        )
    kept = _placements(query)
    if not all(_fits(query, other, mesh, kept) for other in (key, value)):
        kept = [sys.modules["torch.distributed.tensor"].Replicate() for _ in kept]
    local = [_local(part, mesh, kept) for part in (query, key, value)]
    if mask is not None:
        mask = _local(mask, mesh, _placements_of_mask(mask, query, kept))
    made = attention(*local, mask, *args, **kwargs)
    shape = torch.Size((*query.shape[:-1], value.shape[-1]))
    strides = torch.empty(shape, device="meta").stride() if _is_uneven(query, mesh, kept) else None
    sizes = {} if strides is None else {"shape": shape, "stride": strides}
    return type(query).from_local(made, mesh, kept, run_check=False, **sizes)


def _placements(query) -> list[Any]:
    """Shards of samples and heads stay; all else is gathered."""
    module = sys.modules["torch.distributed.tensor"]
    inner = query.dim() - 2
    keeps = [type(placement) is module.Shard and placement.dim % query.dim() < inner for placement in query.placements]
    return [p if keep else module.Replicate() for p, keep in zip(query.placements, keeps, strict=True)]


def _fits(query, other, mesh, placements: Sequence[Any]) -> bool:
    """True if `other` can be sharded as the query. Heads that groups share must fill the ranks evenly."""
    for placement, ranks in zip(placements, mesh.shape, strict=True):
        if placement.is_shard() and query.shape[placement.dim] != other.shape[placement.dim]:
            if query.shape[placement.dim] % ranks or other.shape[placement.dim] % ranks:
                return False
    return True


def _placements_of_mask(mask, query, placements: Sequence[Any]) -> list[Any]:
    """A mask that has a row for each sample or head is sharded with them; one that serves all is replicated."""
    module = sys.modules["torch.distributed.tensor"]
    missing, found = query.dim() - mask.dim(), []
    for placement in placements:
        dim = placement.dim - missing if placement.is_shard() else -1
        has_rows = dim >= 0 and mask.shape[dim] == query.shape[placement.dim]
        found.append(module.Shard(dim) if has_rows else module.Replicate())
    return found


def _local(part, mesh, placements: Sequence[Any]):
    """This rank's part. Its gradient is sharded likewise: a rank with a part of a replica sees all of it."""
    return part.redistribute(mesh, placements).to_local(grad_placements=placements)


def _is_uneven(query, mesh, placements: Sequence[Any]) -> bool:
    shards = zip(placements, mesh.shape, strict=True)
    return any(p.is_shard() and query.shape[p.dim] % size for p, size in shards)
