"""`shapes_only`: operators whose results are known without asking PyTorch, since asking takes longest for them.

A rule gives what PyTorch's meta kernel gives in the plain case, float32 and packed, and None in every other.
"""

from __future__ import annotations

import torch

_META = torch.device("meta")


def _batch_norm(input, weight, bias, running_mean, running_var, training, momentum, eps):
    """Like the input; mean and 1 / deviation of each channel."""
    if not _is_plain(input, weight, bias, running_mean, running_var) or not (training or running_mean is not None):
        return None
    channels = input.shape[1]
    return _packed(input.shape), _packed((channels,)), _packed((channels,))


def _batch_norm_backward(
    grad_out, input, weight, running_mean, running_var, save_mean, save_invstd, train, eps, output_mask
):
    """Gradients of input, weight and bias; those of the last two as they are asked for."""
    mean, deviation = (save_mean, save_invstd) if train else (running_mean, running_var)
    if mean is None or deviation is None or grad_out.shape != input.shape or not _is_packed(grad_out):
        return None
    if not _is_plain(input, weight, running_mean, running_var, save_mean, save_invstd):
        return None
    return _packed(input.shape), *(_packed((input.shape[1],)) if wanted else None for wanted in output_mask[1:])


def _is_plain(input, *per_channel) -> bool:
    if input.dim() < 2 or not _is_packed(input) or not 0 < input.shape[1] < input.numel():
        return False
    return all([each is None or (each.shape == input.shape[1:2] and _is_packed(each)) for each in per_channel])


def _is_packed(tensor) -> bool:
    """Its numbers lie as those of a new tensor; a contiguous one may have other strides where it has one row."""
    return tensor.dtype is torch.float32 and tensor.stride() == _packed(tensor.shape).stride()


def _packed(shape) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.float32, device=_META)


RULES = {
    torch.ops.aten.native_batch_norm.default: _batch_norm,
    torch.ops.aten.native_batch_norm_backward.default: _batch_norm_backward,
}
