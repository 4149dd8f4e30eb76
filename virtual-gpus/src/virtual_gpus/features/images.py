"""Pooling, padding, interpolation and sampling of images on CUDA: memory, time and what is refused. Source:
aten/src/ATen/native/cuda, DilatedMaxPool2d.cu and its like."""

import torch

from virtual_gpus import figures
from virtual_gpus.clock.cost import READS_AND_WRITES, OperatorClass
from virtual_gpus.clock.work import Cost, Operation
from virtual_gpus.dispatch.operators import OpCall, Row
from virtual_gpus.dispatch.recipes import channels_first_copy, not_deterministic, packed
from virtual_gpus.placement.storages import StorageAllocation, nbytes, put

_FITTED = figures.beside(__file__)


def _max_pool_backward_cost(operation: Operation) -> Cost:
    fitted = _FITTED["max_pool_backward"]
    share = fitted["share_channels_last" if operation.inputs[1].channels_last else "share"]
    return Cost(fitted["floor"] * operation.kernel + operation.reading(operation.nbytes, share), 1)


def roll(call: OpCall) -> torch.Tensor:
    """Along several dimensions CUDA rolls one after the other, each with a result (cuda/TensorTransformations.cu)."""
    further = [nbytes(call["self"])] * (len(call["dims"]) - 1)
    return call.run_with(*further) if further else call.run(channels_first_copy(call["self"]))


def _roll_cost(operation: Operation) -> Cost:
    kernels = max(1, len(operation.arguments["dims"]))
    return Cost(kernels * (operation.kernel + operation.reading(operation.nbytes)), kernels)


def _without_cudnn(call: OpCall) -> bool:
    """cuDNN's kernel is deterministic (cond_cudnn_grid_sampler in aten/src/ATen/native/GridSamplerUtils.h)."""
    x = call["input"]
    mode_fits = call["interpolation_mode"] == 0 and call["padding_mode"] == 0 and call["align_corners"]
    input_fits = x.dtype in (torch.float64, torch.float32, torch.float16) and x.shape[1] <= 1024
    return not (mode_fits and input_fits and torch._C._get_cudnn_enabled())


def unfolded(call: OpCall) -> torch.Tensor:
    """CUDA first makes the result as large as the input. It keeps that block if it fits (Im2Col.cu, Col2Im.cu)."""
    copy, size = channels_first_copy(call["self"]), nbytes(call["self"])
    if call.op.outputs:
        return call.run(copy)
    result = call.compute()
    fits = nbytes(result) <= size
    if fits:
        put(result, StorageAllocation(call.gpu, size))
    with call.scratch(0 if fits else size, copy):
        return call.place(result)


_MAX_POOL_BACKWARD = OperatorClass(_max_pool_backward_cost, depends_on_strides=True)
_GRID_SAMPLER = not_deterministic("grid_sampler_2d_backward_cuda", _without_cudnn)
OPERATORS = {
    "max_pool2d_with_indices_backward": Row(_MAX_POOL_BACKWARD, packed("grad_output", "self")),
    "roll": Row(OperatorClass(_roll_cost, arguments=("dims",)), roll),
    **dict.fromkeys(("im2col", "col2im"), Row(READS_AND_WRITES, unfolded)),
    "grid_sampler_2d_backward": Row(READS_AND_WRITES, check=_GRID_SAMPLER),
}
