"""Losses whose memory differs on CUDA, or with shapes only (aten/src/ATen/native/Loss.cpp, Activation.cpp).

`mse_loss` and `smooth_l1_loss` reduce into the storage that was made for the loss of every element: the scalar keeps
all of it alive. Their meta kernels make a small one, so with shapes only the size must be put right.
"""

from __future__ import annotations

import torch

from virtual_gpus.dispatch.op_call import OpCall
from virtual_gpus.features.contiguous import NO_REDUCTION
from virtual_gpus.features.recipes.reductions import take_buffers
from virtual_gpus.placement.storages import StorageAllocation, nbytes, put


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
}
