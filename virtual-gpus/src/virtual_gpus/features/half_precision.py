"""Products and convolutions that this computer's CPU has no fast kernels for, or none: computed in another type.

Only their numbers are concerned. A GPU adds up half precision in float32 too, so memory and time are as without this.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
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


def convolution(func: torch._ops.OpOverload) -> Callable[..., Any] | None:
    """What computes in float32 where half precision is slow. None for other CPUs, and for `out=`."""
    slow = slow_types()
    return functools.partial(_widened, func._op, slow) if slow and not func._schema.overload_name else None


def product(func: torch._ops.OpOverload) -> Callable[..., Any] | None:
    """The same, and the overloads with a dtype for the result, which the CPU has no kernel for."""
    if func._schema.overload_name.startswith("dtype"):
        return functools.partial(_in_another_dtype, getattr(torch, func.overloadpacket.__name__))
    return convolution(func)


def _widened(kernel: Callable[..., Any], slow: tuple[torch.dtype, ...], *args: Any, **options: Any) -> Any:
    """Compute in float32 and round once, as a GPU does, whose sums of half precision are in float32."""
    dtype = args[0].dtype
    if dtype not in slow or args[0].is_meta:
        return kernel(*args, **options)
    wide = [a.float() if isinstance(a, torch.Tensor) and a.dtype is dtype else a for a in args]
    return tree_map_only(torch.Tensor, lambda result: result.to(dtype), kernel(*wide, **options))


def _in_another_dtype(product: Callable[..., torch.Tensor], *args: Any, **options: Any) -> torch.Tensor:
    """A product of matrices whose last argument is the dtype of the result, in which the GPU adds up."""
    *matrices, dtype = args
    return product(*(matrix.to(dtype) for matrix in matrices), **options)


CPU_KERNELS = {
    **dict.fromkeys(("mm", "bmm", "addmm", "baddbmm"), product),
    **dict.fromkeys(("convolution", "convolution_backward"), convolution),
}
