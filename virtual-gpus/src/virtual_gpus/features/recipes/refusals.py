"""What CUDA refuses before it runs an operator, in its words.

Among it are the operators that CUDA refuses, or warns of, under `torch.use_deterministic_algorithms(True)`, except
losses (`losses`). Source: the calls of `alertNotDeterministic` in PyTorch's aten/src/ATen/native/cuda, as they are in
the CUDA libraries of 2.11 to 2.15. What the CPU's kernel refuses itself, such as max_unpool2d, is not repeated here.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch._prims_common import alert_not_deterministic

from virtual_gpus.dispatch.op_call import OpCall

_WITH_CUDA = """avg_pool3d_backward adaptive_max_pool2d_backward fractional_max_pool2d_backward
fractional_max_pool3d_backward grid_sampler_2d_backward grid_sampler_3d_backward max_pool3d_with_indices_backward
replication_pad1d_backward replication_pad2d_backward replication_pad3d_backward"""
_WITH_OUT_CUDA = """reflection_pad1d_backward reflection_pad3d_backward upsample_linear1d_backward
upsample_bilinear2d_backward upsample_bicubic2d_backward upsample_trilinear3d_backward
_upsample_bilinear2d_aa_backward _upsample_bicubic2d_aa_backward"""
# Base name of the operator -> the name in CUDA's message.
_ALERTS = {name: f"{name}_cuda" for name in _WITH_CUDA.split()}
_ALERTS |= {name: f"{name.removeprefix('_')}_out_cuda" for name in _WITH_OUT_CUDA.split()}
_ALERTS |= {
    "_adaptive_avg_pool2d_backward": "adaptive_avg_pool2d_backward_cuda",
    "_adaptive_avg_pool3d_backward": "adaptive_avg_pool3d_backward_cuda",
    "_embedding_bag_backward": "embedding_bag_backward_cuda_max",
    "_embedding_bag_dense_backward": "embedding_bag_backward_cuda_max",
    "bincount": "_bincount_cuda",
    "histc": "_histc_cuda with floating point input",
    "index_reduce": "index_reduce_cuda",
    "index_reduce_": "index_reduce_cuda",
    "median": "median CUDA with indices output",
    "nanmedian": "median CUDA with indices output",
    "put": "put_",
    "put_": "put_",
    "scatter": "scatter_reduce_cuda_kernel",
    "scatter_": "scatter_reduce_cuda_kernel",
    "scatter_reduce": "scatter_reduce_cuda_prod_",
    "scatter_reduce_": "scatter_reduce_cuda_prod_",
}

_MAX = 2  # as C++ counts EmbeddingBag's modes


def _multiplies(call: OpCall) -> bool:
    """`scatter(..., src, reduce="multiply")`: sums are deterministic, and so is a number in the place of src."""
    return call.func._schema.overload_name == "reduce" and call["reduce"] == "multiply"


def _without_cudnn(call: OpCall) -> bool:
    """cuDNN's kernel is deterministic (cond_cudnn_grid_sampler in aten/src/ATen/native/GridSamplerUtils.h)."""
    x = call["input"]
    mode_fits = call["interpolation_mode"] == 0 and call["padding_mode"] == 0 and call["align_corners"]
    input_fits = x.dtype in (torch.float64, torch.float32, torch.float16) and x.shape[1] <= 1024
    return not (mode_fits and input_fits and torch._C._get_cudnn_enabled())


# Those that CUDA refuses in some calls only. `put_`: the CPU's kernel refuses the other calls itself.
_ONLY_IF: dict[str, Callable[[OpCall], bool]] = {
    "bincount": lambda call: call["weights"] is not None,
    "grid_sampler_2d_backward": _without_cudnn,
    "histc": lambda call: call["self"].is_floating_point(),
}
_ONLY_IF |= dict.fromkeys(("_embedding_bag_backward", "_embedding_bag_dense_backward"), lambda c: c["mode"] == _MAX)
_ONLY_IF |= dict.fromkeys(("median", "nanmedian"), lambda call: len(call.func._schema.returns) == 2)  # with indices
_ONLY_IF |= dict.fromkeys(("put", "put_"), lambda call: call["accumulate"])
_ONLY_IF |= dict.fromkeys(("scatter", "scatter_"), _multiplies)
_ONLY_IF |= dict.fromkeys(("scatter_reduce", "scatter_reduce_"), lambda call: call["reduce"] == "prod")


def alert(call: OpCall) -> None:
    """Raise RuntimeError or warn, as the setting says, if CUDA has no deterministic algorithm for this call."""
    only_if = _ONLY_IF.get(call.op.base)
    if torch.are_deterministic_algorithms_enabled() and (only_if is None or only_if(call)):
        alert_not_deterministic(_ALERTS[call.op.base])


CHECKS = dict.fromkeys(_ALERTS, alert)
