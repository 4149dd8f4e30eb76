"""PyTorch's tensors that hold others: DTensor, and those that wait for a collective when they are first used.

Functions that run in the place of PyTorch's own are given them as they are, since they compute below the dispatch mode.
"""

from typing import Any

import torch

from virtual_gpus.placement.storages import is_wrapper


def is_dtensor(value: Any) -> bool:
    """True for a DTensor; asks without importing what makes them."""
    return is_wrapper(type(value)) and hasattr(value, "to_local")


def arrived(tensor: Any) -> Any:
    """`tensor`, or the tensor in one that waits when it is first used, which is now. Such a wrapper has `wait`."""
    if not is_wrapper(type(tensor)) or not hasattr(tensor, "wait"):
        return tensor
    return _Arrived.apply(tensor) if tensor.requires_grad and torch.is_grad_enabled() else tensor.wait()


class _Arrived(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Any) -> torch.Tensor:
        return tensor.wait().detach()  # not the tensor inside itself, which has no graph

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient
