"""What this computer's CPU has no fast kernels for in half precision, or none at all: computed in float32.

Only numbers are concerned. A GPU adds up half precision in float32 too, so memory and time are as without this.
"""

import functools
from collections.abc import Callable
from operator import methodcaller
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

HALVES = (torch.float16, torch.bfloat16)
_REFUSED = ("not implemented for 'Half'", "not implemented for 'BFloat16'")


@functools.cache
def slow_types() -> tuple[torch.dtype, ...]:
    """The types of half precision for which oneDNN has no kernels on this CPU. PyTorch's own are 10 to 70 times slower.

    Measured with products of 1,024 x 1,024 on a CPU with AVX2 alone.
    """
    mkldnn = torch.ops.mkldnn
    has = {torch.bfloat16: mkldnn._is_mkldnn_bf16_supported(), torch.float16: mkldnn._is_mkldnn_fp16_supported()}
    return tuple(dtype for dtype, supported in has.items() if not supported)


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """Half types in float32, in which CUDA adds up; other tensors as they are."""
    return tensor.float() if tensor.dtype in HALVES else tensor


def wide_if_slow(tensor: Any) -> Any:
    """A tensor or None, in float32 where this CPU has no fast kernels: results are rounded once, as a GPU's are."""
    return tensor.float() if tensor is not None and tensor.dtype in slow_types() else tensor


def widened(func: torch._ops.OpOverload, rounded: int | None = None) -> Callable[..., Any] | None:
    """What computes in float32 where half precision is slow. None for other CPUs, and for `out=`. rounded: so many of
    the results are rounded; the others are in float32 on any CPU. None: all."""
    if not slow_types() or func._schema.overload_name:
        return None

    def run(*args: Any, **options: Any) -> Any:
        dtype = args[0].dtype
        if dtype not in slow_types() or args[0].is_meta or any(arg.dtype is not dtype for arg in args[1:2]):  # refused
            return func._op(*args, **options)
        return _in_float32(func, rounded, args, options)

    return run


def widened_if_refused(func: torch._ops.OpOverload) -> Callable[..., Any] | None:
    """What computes in float32 what the CPU's kernel refuses in half precision. None for `out=`."""

    def run(*args: Any, **options: Any) -> Any:
        try:
            return func._op(*args, **options)
        except RuntimeError as error:  # before anything is written
            if not str(error).endswith(_REFUSED):
                raise
        return _in_float32(func, None, args, options)

    return None if func._schema.overload_name else run


def _in_float32(func: torch._ops.OpOverload, rounded: int | None, args: Any, options: Any) -> Any:
    """Compute in float32 and round once, as a GPU does, whose sums of half precision are in float32."""
    dtype, given = args[0].dtype, {**dict(zip([a.name for a in func._schema.arguments], args, strict=False)), **options}
    wider = {n: a.float() if isinstance(a, torch.Tensor) and a.dtype is dtype else a for n, a in given.items()}
    result = func._op(**wider)
    for argument in func._schema.arguments:
        if argument.is_write:
            given[argument.name].copy_(wider[argument.name])
    if func._schema.arguments[0].is_write:
        return args[0]
    if rounded is not None:
        return *(part.to(dtype) for part in result[:rounded]), *result[rounded:]
    return tree_map_only(torch.Tensor, methodcaller("to", dtype), result)


def of_halves(func: torch._ops.OpOverload) -> Callable[..., torch.Tensor]:
    """Softmax's floats of halves, and gradients of halves from those of floats, which the CPU's kernels refuse."""

    def run(tensor: torch.Tensor, *others: Any, **out: torch.Tensor) -> torch.Tensor:
        if others[-1] is True:  # `half_to_float`
            return func._op(tensor.float(), *others[:-1], False)
        narrows = others[-1] is torch.float16 and tensor.dtype is torch.float32  # `input_dtype`
        return func._op(tensor, *others[:-1], tensor.dtype).half() if narrows else func._op(tensor, *others, **out)

    return run
