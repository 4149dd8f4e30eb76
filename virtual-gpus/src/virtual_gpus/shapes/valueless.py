"""`shapes_only`: tensors on virtual GPUs are meta tensors, with sizes and no values.

A floating-point value read from such a tensor is nan, which says "not known" and keeps a training loop going. A whole
number or a truth value has no such word, so reading one raises.
"""

from __future__ import annotations

import torch

from virtual_gpus import errors
from virtual_gpus.operators import Operator
from virtual_gpus.placement.storages import home_of


def prepare(op: Operator, args, kwargs, mixed: bool):
    """Turn CPU tensors that may meet a GPU's (indices, sources of a copy) into meta tensors; keep 0-dim ones."""
    if not mixed:
        return args, kwargs
    if op.base == "copy_" and home_of(args[0]) is None:
        return args, kwargs
    return tuple(_as_shape(a) for a in args), {k: _as_shape(v) for k, v in kwargs.items()}


def _as_shape(value):
    if isinstance(value, torch.Tensor):
        return value.to("meta") if value.device.type == "cpu" and value.dim() and home_of(value) is None else value
    if isinstance(value, (list, tuple)) and any(isinstance(v, torch.Tensor) for v in value):
        return type(value)(_as_shape(v) for v in value)
    return value


def size_is_known(op: Operator, args) -> bool:
    """True for indexing by whole numbers: its size is the index's. A mask's depends on its values."""
    masks = (torch.bool, torch.uint8)
    return op.is_index and not any(i is not None and i.dtype in masks for i in args[1])


def value(op: Operator, args):
    """The answer to `.item()` and its like: nan for a float, an error for everything else."""
    if op.base == "_local_scalar_dense" and _has_nan(args[0]):
        return float("nan")
    raise errors.needs_values(op.base if op.base != "_local_scalar_dense" else "item()")


def to_host(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """`.cpu()` of a tensor without values: a CPU tensor of nan, or an error for whole numbers."""
    _refuse_whole_numbers(tensor)
    return torch.full(tensor.shape, float("nan"), dtype=dtype or tensor.dtype, device="cpu")


def copy_to_host(target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """`cpu_tensor.copy_(gpu_tensor)` without values."""
    _refuse_whole_numbers(source)
    return target.fill_(float("nan"))


def collective(func, args):
    """What a collective on tensors without values returns: no numbers are sent, and it is done at once.

    The ranks still tell each other the time (`collectives`), so they wait for each other.

    Sizes that differ between the ranks, an error or a hang with numbers, are not noticed.
    """
    from torch._C._distributed_c10d import _create_work_from_future  # not in builds without distributed

    future = torch.futures.Future()
    future.set_result(list(args[0]) if isinstance(args[0], (list, tuple)) else [args[0]])
    work, results = _create_work_from_future(future).boxed(), len(func._schema.returns)
    return (None, work, (args[0], work))[results]  # two results: the tensors that were written, and the work


def _refuse_whole_numbers(tensor: torch.Tensor) -> None:
    if not _has_nan(tensor):
        raise errors.needs_values("copying a tensor of whole numbers to the CPU")


def _has_nan(tensor: torch.Tensor) -> bool:
    """True for the dtypes that have a word for "not known"."""
    return tensor.is_floating_point() or tensor.is_complex()
