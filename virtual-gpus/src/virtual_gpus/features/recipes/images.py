"""Pooling, padding, interpolation and sampling of images on CUDA: memory, time and what is refused. Source:
aten/src/ATen/native/cuda, DilatedMaxPool2d.cu and its like."""

from __future__ import annotations

import torch

from virtual_gpus.clock.cost import READS_AND_WRITES, OperatorClass
from virtual_gpus.clock.work import Cost, Operation
from virtual_gpus.dispatch.operators import OpCall, Row
from virtual_gpus.features.recipes import FIGURES, moves, not_deterministic
from virtual_gpus.features.recipes.packed_inputs import packed


def _max_pool_backward_cost(operation: Operation) -> Cost:
    fitted = FIGURES["max_pool_backward"]
    share = fitted["share_channels_last" if operation.inputs[1].channels_last else "share"]
    return Cost(fitted["floor"] * operation.kernel + operation.reading(operation.nbytes, share), 1)


def _without_cudnn(call: OpCall) -> bool:
    """cuDNN's kernel is deterministic (cond_cudnn_grid_sampler in aten/src/ATen/native/GridSamplerUtils.h)."""
    x = call["input"]
    mode_fits = call["interpolation_mode"] == 0 and call["padding_mode"] == 0 and call["align_corners"]
    input_fits = x.dtype in (torch.float64, torch.float32, torch.float16) and x.shape[1] <= 1024
    return not (mode_fits and input_fits and torch._C._get_cudnn_enabled())


_BACKWARD = """reflection_pad2d replication_pad2d upsample_nearest1d upsample_nearest2d upsample_nearest3d
upsample_bilinear2d upsample_trilinear3d upsample_bicubic2d _adaptive_avg_pool2d _adaptive_avg_pool3d
adaptive_max_pool2d"""
_FORWARD = ("max_pool2d_with_indices", "max_pool3d_with_indices", "avg_pool2d", "avg_pool3d", "upsample_nearest2d")
_REFUSED = """replication_pad1d replication_pad2d replication_pad3d grid_sampler_3d avg_pool3d _adaptive_avg_pool2d
_adaptive_avg_pool3d adaptive_max_pool2d fractional_max_pool2d fractional_max_pool3d max_pool3d_with_indices"""
_REFUSED_OUT = """reflection_pad1d reflection_pad3d upsample_linear1d upsample_bilinear2d upsample_bicubic2d
upsample_trilinear3d _upsample_bilinear2d_aa _upsample_bicubic2d_aa"""
_PACKED = {
    **{f"{op}_backward": packed("grad_output") for op in _BACKWARD.split()},
    **dict.fromkeys(_FORWARD, packed("self")),
    **dict.fromkeys(("max_pool2d_with_indices_backward", "max_pool3d_with_indices_backward"),
                    packed("grad_output", "self")),
    **dict.fromkeys(("avg_pool2d_backward", "avg_pool3d_backward"), packed("self", "grad_output")),
}  # fmt: skip
_TIMES = {
    "max_pool2d_with_indices": moves("max_pool"),
    "max_pool2d_with_indices_backward": OperatorClass(_max_pool_backward_cost, depends_on_strides=True),
}
_CHECKS = {
    **{f"{op}_backward": not_deterministic(f"{op.strip('_')}_backward_cuda") for op in _REFUSED.split()},
    **{f"{op}_backward": not_deterministic(f"{op.strip('_')}_backward_out_cuda") for op in _REFUSED_OUT.split()},
    "grid_sampler_2d_backward": not_deterministic("grid_sampler_2d_backward_cuda", _without_cudnn),
}
OPERATORS = {
    op: Row(_TIMES.get(op, READS_AND_WRITES), _PACKED.get(op), _CHECKS.get(op)) for op in _PACKED | _TIMES | _CHECKS
}
