"""Products and convolutions that this computer's CPU has no fast kernels for, or none: computed in another type.

Only their numbers are concerned. A GPU adds up half precision in float32 too, so memory and time are as without this.
"""

import functools
from collections.abc import Callable
from operator import methodcaller
from typing import Any

import torch
from torch.utils._pytree import tree_map_only


@functools.cache
def slow_types() -> tuple[torch.dtype, ...]:
    """The types of half precision for which oneDNN has no kernels on this CPU. PyTorch's own are 10 to 70 times slower.

    Measured with products of 1,024 x 1,024 on a CPU with AVX2 alone.
    """
    mkldnn = torch.ops.mkldnn
    has = {torch.bfloat16: mkldnn._is_mkldnn_bf16_supported(), torch.float16: mkldnn._is_mkldnn_fp16_supported()}
    return tuple(dtype for dtype, supported in has.items() if not supported)


def widened(func: torch._ops.OpOverload, rounded: int | None = None) -> Callable[..., Any] | None:
    """What computes in float32 where half precision is slow. None for other CPUs, and for `out=`. rounded: so many of
    the results are rounded; the others are in float32 on any CPU. None: all."""
    instead = functools.partial(_widened, func._op, rounded)
    return instead if slow_types() and not func._schema.overload_name else None


def _wide(argument: Any, dtype: torch.dtype) -> Any:
    return argument.float() if isinstance(argument, torch.Tensor) and argument.dtype is dtype else argument


def _widened(kernel: Callable[..., Any], rounded: int | None, *args: Any, **options: Any) -> Any:
    """Compute in float32 and round once, as a GPU does, whose sums of half precision are in float32."""
    dtype = args[0].dtype
    if dtype not in slow_types() or args[0].is_meta or any(arg.dtype is not dtype for arg in args[1:2]):  # refused
        return kernel(*args, **options)
    result = kernel(*(_wide(arg, dtype) for arg in args), **{name: _wide(arg, dtype) for name, arg in options.items()})
    if rounded is not None:
        return *(part.to(dtype) for part in result[:rounded]), *result[rounded:]
    return tree_map_only(torch.Tensor, methodcaller("to", dtype), result)
