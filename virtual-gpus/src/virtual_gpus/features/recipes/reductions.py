"""Reductions over many elements: partial results in GPU memory, see `memory_model.reduction_scratch`."""

from __future__ import annotations

import torch

from virtual_gpus.dispatch.op_call import OpCall
from virtual_gpus.memory_model import reduction_scratch
from virtual_gpus.threads import below


def take_buffers(call: OpCall, tensor: torch.Tensor, dims, partial_bytes: int) -> None:
    """Take and give back what reducing `tensor` on the call's GPU needs, after the result was placed."""
    partial, semaphores = reduction_scratch(
        tensor.shape, call.gpu.spec, dims, strides=tensor.stride(), partial_bytes=partial_bytes
    )
    if partial:
        with call.scratch(partial, semaphores):
            pass


def _partial_bytes(call: OpCall, tensor: torch.Tensor) -> int:
    """Sums are kept in float for half types, in the widest integer type for integers."""
    dtype = call["dtype"] if "dtype" in call.op.names else None
    dtype = dtype or tensor.dtype
    if dtype.is_floating_point:
        return 8 if dtype == torch.float64 else 4
    return 2 * (8 if dtype == torch.complex128 else 4) if dtype.is_complex else 8


def reduction(call: OpCall):
    """`sum`, `mean` and their like: one number per partial result."""
    tensor = call.args[0]
    result = call.run()
    take_buffers(call, tensor, _dims(call), _partial_bytes(call, tensor))
    return result


def with_index(call: OpCall):
    """`argmax`, `max(dim)`, ...: a partial result is a number and its index, 16 bytes."""
    tensor = call.args[0]
    result = call.run()
    take_buffers(call, tensor, _dims(call), 16)
    return result


def _dims(call: OpCall):
    if "dim" not in call.op.names:
        return None
    dim = call["dim"]
    return (dim,) if isinstance(dim, int) else dim


def histc(call: OpCall):
    """Of integers as well, for which only CUDA has a kernel (aten/src/ATen/native/cuda/SummaryOps.cu)."""
    x = call["self"]
    if x.is_floating_point():
        return call.run()
    with below():
        return call.place(torch.histc(x.double(), call["bins"], call["min"], call["max"]).to(x.dtype))


RECIPES = {
    "histc": histc,
    **dict.fromkeys(("sum", "mean", "nansum", "prod", "amax", "amin", "linalg_vector_norm", "norm"), reduction),
    **dict.fromkeys(("argmax", "argmin", "var", "std", "var_mean", "std_mean"), with_index),
}
