"""Activations on CUDA, softmax among them: memory, time, and halves (SoftMax.cu and Activation.cpp in
aten/src/ATen/native/cuda). Most take no more than their results, and have no row."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from virtual_gpus import figures
from virtual_gpus.clock.cost import READS_AND_WRITES, moves
from virtual_gpus.dispatch.operators import OpCall, Row
from virtual_gpus.dispatch.recipes import channels_first, channels_first_copy
from virtual_gpus.patches.table import Patch
from virtual_gpus.placement.storages import StorageAllocation, gpu_of, nbytes, put

_FITTED = figures.beside(__file__)
# Else autograd takes it apart for meta tensors, and for no others. A product has its form. `torch.library` refuses it.
_library = torch._C._dispatch_library("IMPL", "aten", "Meta")
_library.impl("mish_backward", "Meta", torch.mul)


def softmax_backward(call: OpCall) -> torch.Tensor:
    """A product of gradient and output and packed copies of both (`softmax_backward_cuda_out`)."""
    gradient, output = call["grad_output"], call["output"]
    is_packed = 0 in gradient.stride() or gradient.is_contiguous()
    product = nbytes(output)
    return call.run(product, 0 if is_packed else product, channels_first_copy(output))


def of_halves(func: torch._ops.OpOverload, tensor: torch.Tensor, *others: Any, **out: torch.Tensor) -> torch.Tensor:
    """A softmax that takes halves to floats, or its gradient, from floats to halves. The CPU's kernels refuse both."""
    if others[-1] is True:  # `half_to_float`
        return func._op(tensor.float(), *others[:-1], False)
    narrows = others[-1] is torch.float16 and tensor.dtype is torch.float32  # `input_dtype`
    return func._op(tensor, *others[:-1], tensor.dtype).half() if narrows else func._op(tensor, *others, **out)


def log_sigmoid(call: OpCall) -> tuple[torch.Tensor, torch.Tensor]:
    """The CPU keeps exp(-|x|) for backward; CUDA computes it anew and keeps an empty buffer."""
    result, buffer = call.compute()
    put(buffer, StorageAllocation(call.gpu, 0))
    return call.place(result), buffer


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
_softmax = partial(Row, cpu_kernel=partial(partial, of_halves))
OPERATORS = {
    **dict.fromkeys(("_softmax", "_log_softmax"), _softmax(_FORWARD, channels_first("self"), refuses_more=True)),
    "_softmax_backward_data": _softmax(_BACKWARD, softmax_backward),
    "_log_softmax_backward_data": _softmax(_BACKWARD, channels_first("grad_output", "output")),
    "log_sigmoid_forward": Row(READS_AND_WRITES, log_sigmoid),
}


def patches() -> list[Patch]:
    owners = (torch, torch.Tensor, torch.special)  # torch.nn.functional calls the tensor's
    return [(owner, name, one_kernel(owner, name)) for owner in owners for name in ("softmax", "log_softmax")]
