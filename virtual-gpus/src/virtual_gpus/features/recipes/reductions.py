"""Reductions over many elements: partial results in GPU memory, see `memory_model.reduction_scratch`.

Among them losses whose memory differs on CUDA, or with shapes only (aten/src/ATen/native/Loss.cpp, Activation.cpp).
`mse_loss` and `smooth_l1_loss` reduce into the storage that was made for the loss of every element: the scalar keeps
all of it alive. Their meta kernels make a small one, so with shapes only the size must be put right.
"""

from __future__ import annotations

from math import prod

import torch

from virtual_gpus.clock.cost import FITTED, OperatorClass, bytes_of
from virtual_gpus.clock.work import Cost, Operation
from virtual_gpus.dispatch.op_call import OpCall
from virtual_gpus.features.recipes.packed_inputs import NO_REDUCTION
from virtual_gpus.memory_model import reduction_scratch
from virtual_gpus.placement.storages import StorageAllocation, nbytes, put
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


def reduction(call: OpCall, partial_bytes: int | None = None):
    """`sum`, `mean` and their like: one number per partial result, unless it is said how many bytes one has."""
    tensor, dim = call.args[0], call["dim"] if "dim" in call.op.names else None
    result = call.run()
    take_buffers(call, tensor, (dim,) if isinstance(dim, int) else dim, partial_bytes or _partial_bytes(call, tensor))
    return result


def with_index(call: OpCall):
    """`argmax`, `max(dim)`, ...: a partial result is a number and its index, 16 bytes."""
    return reduction(call, 16)


def histc(call: OpCall):
    """Of integers as well, for which only CUDA has a kernel (aten/src/ATen/native/cuda/SummaryOps.cu)."""
    x = call["self"]
    if x.is_floating_point():
        return call.run()
    with below():
        return call.place(torch.histc(x.double(), call["bins"], call["min"], call["max"]).to(x.dtype))


# ---- losses ------------------------------------------------------------------------------------------------------


def reduced_in_place(call: OpCall):
    """A loss per element, summed up into the same storage by way of a second one."""
    if call["reduction"] == NO_REDUCTION:
        return call.run()
    result = call.compute()
    shape, other = call["self"].shape, call["target"].shape
    if other != shape:
        shape = torch.broadcast_shapes(shape, other)  # its first call imports sympy, for half a second
    whole = torch.Size(shape).numel() * result.element_size()
    put(result, StorageAllocation(call.gpu, whole))
    with call.scratch(whole):
        take_buffers(call, torch.empty(shape, device="meta", dtype=result.dtype), None, 4)
    return result


def reduced(call: OpCall):
    """A loss per element, then its sum or mean in a storage of its own."""
    if call["reduction"] == NO_REDUCTION:
        return call.run()
    with call.scratch(nbytes(call["self"])):
        return call.run()


def log_sigmoid(call: OpCall):
    """The CPU keeps exp(-|x|) for backward; CUDA computes it anew and keeps an empty buffer."""
    result, kept = call.compute()
    call.place(result)
    put(kept, StorageAllocation(call.gpu, 0))
    return result, kept


def with_logits(call: OpCall):
    """binary_cross_entropy_with_logits: log-sigmoid, the loss per element and a scaled copy, then the reduction."""
    size = nbytes(call["self"])
    with call.scratch(size, size):
        result = call.run()
        if call["reduction"] != NO_REDUCTION:
            take_buffers(call, call["self"], None, 4)
    return result


RECIPES = {
    "mse_loss": reduced_in_place,
    "smooth_l1_loss": reduced_in_place,
    "huber_loss": reduced,
    "log_sigmoid_forward": log_sigmoid,
    "binary_cross_entropy_with_logits": with_logits,
    "histc": histc,
    **dict.fromkeys(("sum", "mean", "nansum", "prod", "amax", "amin", "linalg_vector_norm", "norm"), reduction),
    **dict.fromkeys(("argmax", "argmin", "var", "std", "var_mean", "std_mean"), with_index),
}
ON_THE_HOST = {"_ctc_loss": {"input_lengths", "target_lengths"}}


def _reduction_cost(work: Operation) -> Cost:
    """Few results of many numbers: threads leave partial sums, and the last block adds them up."""
    inputs, results = (sum(prod(p.shape) for p in parts) for parts in (work.inputs, work.outputs))
    fitted = FITTED["reduction"]
    far = inputs > fitted["numbers_per_result"] * max(1, results) and inputs > fitted["numbers"]
    floor = fitted["floor_of_many" if far else "floor"] * work.kernel
    return Cost(floor + work.reading(work.nbytes, fitted["share"]), 2 if far else 1)


def _nll_cost(work: Operation) -> Cost:
    """The loss of classes: one thread adds up many rows."""
    fitted, forward = FITTED["nll_loss"], work.name.endswith("forward")
    rows, per_row = work.inputs[not forward].shape[0], fitted["per_row" if forward else "per_row_backward"]
    written = 0 if forward else bytes_of(work.outputs)
    return Cost(work.kernel * (fitted["floor"] + per_row * rows) + work.reading(written), 1 if not written else 2)


_REDUCED = ("sum", "mean", "prod", "amax", "amin", "nansum", "linalg_vector_norm", "norm", "argmax", "argmin", "max",
            "min", "var", "std", "var_mean", "std_mean", "all", "any")  # fmt: skip
_NLL = (f"nll_loss{images}_{direction}" for images in ("", "2d") for direction in ("forward", "backward"))
COSTS = dict.fromkeys(_REDUCED, OperatorClass(_reduction_cost)) | dict.fromkeys(_NLL, OperatorClass(_nll_cost))
