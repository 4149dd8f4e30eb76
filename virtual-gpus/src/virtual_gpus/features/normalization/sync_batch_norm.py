"""The operators of `torch.nn.SyncBatchNorm`, which PyTorch has for CUDA only. The layer itself is Python
(torch/nn/modules/_functions.py): each rank takes the statistics of its own samples, the ranks exchange them, and each
normalizes with those of all. Here the operators are computed with the CPU's, in float32 or wider, as on CUDA
(aten/src/ATen/native/cuda/Normalization.cu). `mean` and `invstd` (1 / standard deviation) have one entry per channel,
the second dimension of the input. The partial sums of CUDA's kernels are not counted."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn.modules._functions import SyncBatchNorm

from virtual_gpus.clock.cost import COPIES, READS_AND_WRITES
from virtual_gpus.dispatch.half_precision import wide
from virtual_gpus.dispatch.operators import OpCall, Row
from virtual_gpus.dispatch.valueless import assuming
from virtual_gpus.patches.table import Patch
from virtual_gpus.threads import below


def _others(tensor: torch.Tensor) -> list[int]:
    return [d for d in range(tensor.dim()) if d != 1]


def _per_channel(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """(C) -> (1, C, 1, ...), to be combined with the input."""
    return values.view(1, -1, *[1] * (like.dim() - 2))


def _placed(function: Callable[[OpCall], Any], call: OpCall) -> Any:
    """What `function` computes, below the accounting, on the GPU. Results of `out=` are copied into its tensors."""
    with below():
        made = function(call)
        results = made if isinstance(made, tuple) else (made,)
        pairs = zip(call.op.outputs, results, strict=False)
        placed = tuple(call.kwargs[name].resize_(result.shape).copy_(result) for name, result in pairs) or results
        return call.place(placed if len(placed) > 1 else placed[0])


def stats(call: OpCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and invstd of this rank's samples."""
    variance, mean = torch.var_mean(wide(call["input"]), _others(call["input"]), correction=0)
    return mean, torch.rsqrt(variance + call["eps"])


def gather_stats(call: OpCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and invstd of all ranks' samples from theirs, (ranks, C) each; the running ones move towards them."""
    means, counts = wide(call["mean"]), wide(call["counts"]).view(-1, 1)
    mean = (counts * means).sum(0) / counts.sum()
    squares = counts * (wide(call["invstd"]) ** -2 - call["eps"] + (means - mean) ** 2)
    variance = squares.sum(0) / counts.sum()
    unbiased = variance * counts.sum() / (counts.sum() - 1)
    for running, current in ((call["running_mean"], mean), (call["running_var"], unbiased)):
        if running is not None:
            running.lerp_(current.to(running.dtype), call["momentum"])
    return mean, torch.rsqrt(variance + call["eps"])


def normalize(call: OpCall) -> torch.Tensor:
    """(input - mean) * invstd * weight + bias, in the type of the input."""
    x = call["input"]
    scale, shift = call["invstd"], -call["mean"] * call["invstd"]
    if call["weight"] is not None:
        scale, shift = scale * call["weight"], shift * call["weight"]
    if call["bias"] is not None:
        shift = shift + call["bias"]
    return torch.addcmul(_per_channel(shift, x), wide(x), _per_channel(scale, x)).to(x.dtype)


def backward_reduce(call: OpCall) -> tuple[torch.Tensor, ...]:
    """This rank's sums: of the gradient, of the gradient times (input - mean); gradients of weight and bias."""
    x = call["input"]
    gradient = wide(call["grad_out"])
    sum_dy = gradient.sum(_others(x))
    sum_dy_xmu = (gradient * (wide(x) - _per_channel(call["mean"], x))).sum(_others(x))
    of_weight = (sum_dy_xmu * call["invstd"]).to((x if call["weight"] is None else call["weight"]).dtype)
    return sum_dy, sum_dy_xmu, of_weight, sum_dy.to(of_weight.dtype, copy=True)


def backward_elemt(call: OpCall) -> torch.Tensor:
    """The gradient of the input from the sums of all ranks; `count`: each rank's samples."""
    x = call["input"]
    gradient, total = wide(call["grad_out"]), call["count"].sum()
    scale = call["invstd"] if call["weight"] is None else call["invstd"] * call["weight"]
    of_mean = _per_channel(call["sum_dy"] / total, x)
    of_variance = _per_channel(call["sum_dy_xmu"] / total * call["invstd"] ** 2, x)
    centred = wide(x) - _per_channel(call["mean"], x)
    return ((gradient - of_mean - centred * of_variance) * _per_channel(scale, x)).to(x.dtype)


OPERATORS = {
    "batch_norm_stats": Row(READS_AND_WRITES, partial(_placed, stats)),
    "batch_norm_gather_stats_with_counts": Row(READS_AND_WRITES, partial(_placed, gather_stats)),
    "batch_norm_elemt": Row(COPIES._replace(is_fusible=False), partial(_placed, normalize)),
    "batch_norm_backward_reduce": Row(READS_AND_WRITES, partial(_placed, backward_reduce)),
    "batch_norm_backward_elemt": Row(READS_AND_WRITES, partial(_placed, backward_elemt)),
}


def patches() -> list[Patch]:
    """The layer chooses the ranks that have samples by a mask. Without values, all of them have."""
    return [(SyncBatchNorm, "forward", staticmethod(assuming(True)(SyncBatchNorm.forward)))]
