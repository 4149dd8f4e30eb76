"""Operators whose CUDA kernels want packed inputs: others are copied first, and the copy lives as long as the kernel.

The CPU's kernels copy as well, but not always the same inputs, and on no GPU. Most often it is a gradient that was
expanded from one number, as after `loss.sum()`. Sources: the `contiguous` and `expect_contiguous` calls of
aten/src/ATen/native/cuda (SoftMax.cu, layer_norm_kernel.cu, group_norm_kernel.cu, DilatedMaxPool2d.cu, ...) and of
aten/src/ATen/native/cudnn/BatchNorm.cpp.
"""

from __future__ import annotations

from functools import partial

import torch

from virtual_gpus.clock.cost import FITTED, OperatorClass
from virtual_gpus.clock.work import Cost, Operation
from virtual_gpus.dispatch.op_call import OpCall
from virtual_gpus.placement.storages import CHANNELS_LAST, nbytes

# Operator -> inputs that must be packed with the channels first, in the order of their copies.
_CHANNELS_FIRST = {
    "_softmax": ("self",),
    "_log_softmax": ("self",),
    "_softmax_backward_data": ("grad_output", "output"),
    "_log_softmax_backward_data": ("grad_output", "output"),
}
# Operator -> inputs that must be packed in either order of channels.
_PACKED = {
    "embedding": ("indices",),
    "max_pool2d_with_indices": ("self",),
    "max_pool2d_with_indices_backward": ("grad_output", "self"),
    "max_pool3d_with_indices": ("self",),
    "max_pool3d_with_indices_backward": ("grad_output", "self"),
    "avg_pool2d": ("self",),
    "avg_pool2d_backward": ("self", "grad_output"),
    "avg_pool3d": ("self",),
    "avg_pool3d_backward": ("self", "grad_output"),
    "_adaptive_avg_pool2d_backward": ("grad_output",),
    "_adaptive_avg_pool3d_backward": ("grad_output",),
    "adaptive_max_pool2d_backward": ("grad_output",),
    "reflection_pad2d_backward": ("grad_output",),
    "replication_pad2d_backward": ("grad_output",),
    "upsample_nearest1d_backward": ("grad_output",),
    "upsample_nearest2d": ("self",),
    "upsample_nearest2d_backward": ("grad_output",),
    "upsample_nearest3d_backward": ("grad_output",),
    "upsample_bilinear2d_backward": ("grad_output",),
    "upsample_trilinear3d_backward": ("grad_output",),
    "upsample_bicubic2d_backward": ("grad_output",),
}


def packed_copy(tensor: torch.Tensor | None) -> int:
    """Bytes of the packed copy that CUDA makes of `tensor`; 0 if it is packed, in either order of channels."""
    if tensor is None or tensor.is_contiguous():
        return 0
    last = CHANNELS_LAST.get(tensor.dim())
    return 0 if last is not None and tensor.is_contiguous(memory_format=last) else nbytes(tensor)


def channels_first_copy(tensor: torch.Tensor) -> int:
    """The same for kernels that do not know channels last, such as that of a cross entropy over images."""
    return 0 if tensor.is_contiguous() else nbytes(tensor)


def packed_copies(call: OpCall, names: tuple[str, ...], copy_of=packed_copy) -> list[int]:
    """Bytes of the copy of each named input that is not packed."""
    return [size for name in names if (size := copy_of(call[name]))]


def run_packed(call: OpCall, names: tuple[str, ...], copy_of=packed_copy) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Run a kernel that has its results first, then copies of the named inputs."""
    sizes = packed_copies(call, names, copy_of)
    result = call.run()
    with call.scratch(*sizes):
        return result


RECIPES = {
    **{op: partial(run_packed, names=inputs) for op, inputs in _PACKED.items()},
    **{op: partial(run_packed, names=inputs, copy_of=channels_first_copy) for op, inputs in _CHANNELS_FIRST.items()},
}


def _pool_backward(operation: Operation) -> Cost:
    fitted = FITTED["pool_backward"]
    share = fitted["share_channels_last" if operation.inputs[1].channels_last else "share"]
    return Cost(fitted["floor"] * operation.kernel + operation.reading(operation.nbytes, share), 1)


COSTS = {"max_pool2d_with_indices_backward": OperatorClass(_pool_backward, depends_on_strides=True)}
