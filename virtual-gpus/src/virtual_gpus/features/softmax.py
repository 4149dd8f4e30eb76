"""Softmax on CUDA: memory, time, and halves (aten/src/ATen/native/cuda/SoftMax.cu)."""

from collections.abc import Callable
from typing import Any

import torch

from virtual_gpus import figures
from virtual_gpus.clock.cost import moves
from virtual_gpus.dispatch.half_precision import softmax_of_halves
from virtual_gpus.dispatch.operators import OpCall, Row
from virtual_gpus.dispatch.recipes import channels_first, channels_first_copy
from virtual_gpus.patches.table import Patch
from virtual_gpus.placement.storages import gpu_of, nbytes

_FITTED = figures.beside(__file__)


def softmax_backward(call: OpCall) -> torch.Tensor:
    """A product of gradient and output and packed copies of both (`softmax_backward_cuda_out`)."""
    gradient, output = call["grad_output"], call["output"]
    is_packed = 0 in gradient.stride() or gradient.is_contiguous()
    product = nbytes(output)
    return call.run(product, 0 if is_packed else product, channels_first_copy(output))


def one_kernel(owner: Any, name: str) -> Callable[..., torch.Tensor]:
    """`softmax` or `log_softmax` of `owner`: CUDA takes halves to floats without a copy (SoftMax.cpp)."""
    raw, fused = getattr(owner, name), getattr(torch, f"_{name}")

    def answer(*args: Any, **named: Any) -> torch.Tensor:
        if args and len(args) + len(named) == 3:  # `dim` and `dtype` are given
            dim, dtype = named.get("dim", *args[1:2]), named.get("dtype", *args[2:3])
            if dim is not None and dtype is torch.float32 and args[0].dtype is torch.float16 and gpu_of(args[0]):
                return fused(args[0], dim, True)
        return raw(*args, **named)

    return answer


_FORWARD, _BACKWARD = moves(**_FITTED["softmax"]), moves(**_FITTED["softmax_backward"])
OPERATORS = {
    **dict.fromkeys(("_softmax", "_log_softmax"), Row(_FORWARD, channels_first("self"), cpu_kernel=softmax_of_halves)),
    "_softmax_backward_data": Row(_BACKWARD, softmax_backward, cpu_kernel=softmax_of_halves),
    "_log_softmax_backward_data": Row(_BACKWARD, channels_first("grad_output", "output"), cpu_kernel=softmax_of_halves),
}
_PAIRS = [(owner, name) for owner in (torch, torch.Tensor, torch.special) for name in ("softmax", "log_softmax")]
_PATCHES: list[Patch] = [(*pair, one_kernel(*pair)) for pair in _PAIRS]


def patches() -> list[Patch]:
    """See `features`. torch.nn.functional calls the tensor's."""
    return _PATCHES
