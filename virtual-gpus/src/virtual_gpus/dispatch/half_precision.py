"""Operators are computed in float32 if this computer's CPU has no fast kernel for half precision, or none at all.

This changes only the numbers of a result. A GPU also adds up half precision in float32, and memory and time are as
without this module.
"""

import functools
from collections.abc import Callable, Collection
from operator import methodcaller
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

HALVES = (torch.float16, torch.bfloat16)
_REFUSED = ("not implemented for 'Half'", "not implemented for 'BFloat16'")


@functools.cache
def slow_types() -> tuple[torch.dtype, ...]:
    """The types of half precision for which oneDNN has no kernels on this CPU.

    PyTorch's own kernels are 10 to 70 times slower. This was measured with products of 1,024 x 1,024 on a CPU that has
    AVX2, but not AVX-512.
    """
    mkldnn = torch.ops.mkldnn
    has = {torch.bfloat16: mkldnn._is_mkldnn_bf16_supported(), torch.float16: mkldnn._is_mkldnn_fp16_supported()}
    return tuple(dtype for dtype, supported in has.items() if not supported)


def wide(value: Any, types: Collection[torch.dtype] = HALVES) -> Any:
    """A tensor of one of these types in float32, in which CUDA adds up. Anything else is returned as it is."""
    return value.float() if isinstance(value, torch.Tensor) and value.dtype in types else value


def widened(func: torch._ops.OpOverload, rounded: int | None = None) -> Callable[..., Any] | None:
    """A function that computes `func` in float32 if the CPU is slow in half precision, and rounds the results once.

    None if no type is slow on this CPU, and for `out=`. rounded: the number of results that are rounded, if there are
    others, which are in float32 on any CPU. Tensors of two types are left to the CPU's kernel, which refuses them.
    """
    slow = slow_types()

    def run(*args: Any, **options: Any) -> Any:
        first, second = args[:2]
        if first.dtype not in slow or first.dtype is not second.dtype or first.is_meta:
            return func._op(*args, **options)
        return _in_float32(func, rounded, args, options)

    return None if func._schema.overload_name or not slow else run


def widened_if_refused(func: torch._ops.OpOverload) -> Callable[..., Any] | None:
    """The same if the CPU's kernel refuses half precision. None for `out=`."""

    def run(*args: Any, **options: Any) -> Any:
        try:
            return func._op(*args, **options)
        except RuntimeError as error:  # before anything is written
            if not str(error).endswith(_REFUSED):
                raise
        return _in_float32(func, None, args, options)

    return None if func._schema.overload_name else run


def _in_float32(func: torch._ops.OpOverload, rounded: int | None, args: Any, options: Any) -> Any:
    """Compute `func` in float32. Round the results, and what it writes to, as a GPU does."""
    arguments, dtype = func._schema.arguments, args[0].dtype
    given = dict(zip([argument.name for argument in arguments], args, strict=False)) | options
    wider = {name: wide(value, (dtype,)) for name, value in given.items()}
    result = func._op(**wider)
    for argument in arguments:
        if argument.is_write:
            given[argument.name].copy_(wider[argument.name])
    if arguments[0].is_write:
        return args[0]
    if isinstance(result, torch.Tensor):
        return result.to(dtype)
    if rounded is not None:
        return *(part.to(dtype) for part in result[:rounded]), *result[rounded:]
    return tree_map_only(torch.Tensor, methodcaller("to", dtype), result)
