"""Padding, interpolation and sampling of images on CUDA: memory, and what is refused."""

from __future__ import annotations

import torch

from virtual_gpus.dispatch.op_call import OpCall
from virtual_gpus.features.recipes.packed_inputs import packed
from virtual_gpus.features.recipes.refusals import not_deterministic


def _without_cudnn(call: OpCall) -> bool:
    """cuDNN's kernel is deterministic (cond_cudnn_grid_sampler in aten/src/ATen/native/GridSamplerUtils.h)."""
    x = call["input"]
    mode_fits = call["interpolation_mode"] == 0 and call["padding_mode"] == 0 and call["align_corners"]
    input_fits = x.dtype in (torch.float64, torch.float32, torch.float16) and x.shape[1] <= 1024
    return not (mode_fits and input_fits and torch._C._get_cudnn_enabled())


_PACKED = """reflection_pad2d replication_pad2d upsample_nearest1d upsample_nearest2d upsample_nearest3d
upsample_bilinear2d upsample_trilinear3d upsample_bicubic2d"""
RECIPES = {f"{op}_backward": packed("grad_output") for op in _PACKED.split()} | {"upsample_nearest2d": packed("self")}
_REFUSED = "replication_pad1d replication_pad2d replication_pad3d grid_sampler_3d"
_REFUSED_OUT = """reflection_pad1d reflection_pad3d upsample_linear1d upsample_bilinear2d upsample_bicubic2d
upsample_trilinear3d _upsample_bilinear2d_aa _upsample_bicubic2d_aa"""
CHECKS = {
    **{f"{op}_backward": not_deterministic(f"{op}_backward_cuda") for op in _REFUSED.split()},
    **{f"{op}_backward": not_deterministic(f"{op.strip('_')}_backward_out_cuda") for op in _REFUSED_OUT.split()},
    "grid_sampler_2d_backward": not_deterministic("grid_sampler_2d_backward_cuda", _without_cudnn),
}
