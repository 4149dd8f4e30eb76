"""Pooling, padding, interpolation and sampling of images on CUDA: memory, time and what is refused. Source:
aten/src/ATen/native/cuda, DilatedMaxPool2d.cu and its like."""

from functools import partial

import torch

from virtual_gpus import figures
from virtual_gpus.clock.cost import READS_AND_WRITES, OperatorClass, moves
from virtual_gpus.clock.work import Cost, Operation
from virtual_gpus.dispatch.operators import OpCall, Row
from virtual_gpus.dispatch.recipes import channels_first_copy, not_deterministic, packed, packed_copies
from virtual_gpus.placement.storages import StorageAllocation, nbytes, put

_FITTED = figures.beside(__file__)


def _max_pool_backward_cost(operation: Operation) -> Cost:
    fitted = _FITTED["max_pool_backward"]
    share = fitted["share_channels_last" if operation.inputs[1].channels_last else "share"]
    return Cost(fitted["floor"] * operation.kernel + operation.reading(operation.nbytes, share), 1)


def roll(call: OpCall) -> torch.Tensor:
    """Of a packed copy, and along one dimension after the other, each with a result (cuda/TensorTransformations.cu)."""
    further = [nbytes(call["self"])] * (len(call["dims"]) - 1)
    with call.scratch(*further):
        return call.run(*(() if further else packed_copies(call, ("self",), channels_first_copy)))


def _roll_cost(operation: Operation) -> Cost:
    kernels = max(1, len(operation.arguments["dims"]))
    return Cost(kernels * (operation.kernel + operation.reading(operation.nbytes)), kernels)


def _without_cudnn(call: OpCall) -> bool:
    """cuDNN's kernel is deterministic (cond_cudnn_grid_sampler in aten/src/ATen/native/GridSamplerUtils.h)."""
    x = call["input"]
    mode_fits = call["interpolation_mode"] == 0 and call["padding_mode"] == 0 and call["align_corners"]
    input_fits = x.dtype in (torch.float64, torch.float32, torch.float16) and x.shape[1] <= 1024
    return not (mode_fits and input_fits and torch._C._get_cudnn_enabled())


def _gradients(names: str, *inputs: str, refused: str = "") -> dict[str, Row]:
    """Rows of backward passes. inputs: those that are packed. refused: how the name of a kernel ends that
    `torch.use_deterministic_algorithms` refuses, if it does."""
    recipe = packed(*inputs) if inputs else None
    checks = {op: not_deterministic(f"{op.strip('_')}_backward_{refused}") if refused else None for op in names.split()}
    return {f"{op}_backward": Row(READS_AND_WRITES, recipe, check) for op, check in checks.items()}


def unfolded(call: OpCall) -> torch.Tensor:
    """The result has the size of the input first, and keeps this block if it is large enough (Im2Col.cu, Col2Im.cu)."""
    copies = packed_copies(call, ("self",), channels_first_copy)
    if call.op.outputs:
        return call.run(*copies)
    result, first = call.compute(), nbytes(call["self"])
    keeps = nbytes(result) <= first
    if keeps:
        put(result, StorageAllocation(call.gpu, first))
    with call.scratch(*[first] * (not keeps), *copies):
        return call.place(result)


_MAX_POOL_BACKWARD = OperatorClass(_max_pool_backward_cost, depends_on_strides=True)
_GRID_SAMPLER = not_deterministic("grid_sampler_2d_backward_cuda", _without_cudnn)
_ROLLS = OperatorClass(_roll_cost, arguments=("dims",))
_packed = partial(packed, copy_of=channels_first_copy)
_CHANNELS_FIRST = """reflection_pad1d reflection_pad2d reflection_pad3d upsample_nearest1d upsample_nearest3d
    _upsample_nearest_exact1d _upsample_nearest_exact3d adaptive_max_pool2d adaptive_max_pool3d
    _adaptive_avg_pool3d"""
OPERATORS = {
    "max_pool2d_with_indices": Row(moves(**_FITTED["max_pool"]), packed("self")),
    "max_pool2d_with_indices_backward": Row(_MAX_POOL_BACKWARD, packed("grad_output", "self")),
    **dict.fromkeys(("max_pool3d_with_indices", "avg_pool2d", "avg_pool3d", "upsample_nearest2d",
                     "_upsample_nearest_exact2d", "_adaptive_avg_pool2d"), Row(READS_AND_WRITES, packed("self"))),
    **dict.fromkeys(_CHANNELS_FIRST.split(), Row(READS_AND_WRITES, _packed("self"))),
    **dict.fromkeys(("max_unpool2d", "max_unpool3d"), Row(READS_AND_WRITES, _packed("self", "indices"))),
    "roll": Row(_ROLLS, roll),
    **_gradients("max_pool3d_with_indices", "grad_output", "self", refused="cuda"),
    **_gradients("avg_pool2d", "self", "grad_output"),
    **_gradients("avg_pool3d", "self", "grad_output", refused="cuda"),
    **_gradients("reflection_pad2d upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d "
                 "_upsample_nearest_exact2d _upsample_nearest_exact3d", "grad_output"),
    **_gradients("replication_pad2d _adaptive_avg_pool2d _adaptive_avg_pool3d adaptive_max_pool2d", "grad_output",
                 refused="cuda"),
    **_gradients("replication_pad1d replication_pad3d grid_sampler_3d fractional_max_pool2d fractional_max_pool3d",
                 refused="cuda"),
    **_gradients("upsample_bilinear2d upsample_bicubic2d upsample_trilinear3d", "grad_output", refused="out_cuda"),
    **_gradients("reflection_pad1d reflection_pad3d upsample_linear1d _upsample_bilinear2d_aa _upsample_bicubic2d_aa",
                 refused="out_cuda"),
    **dict.fromkeys(("im2col", "col2im"), Row(READS_AND_WRITES, unfolded)),
    "grid_sampler_2d_backward": Row(READS_AND_WRITES, check=_GRID_SAMPLER),
}  # fmt: skip
