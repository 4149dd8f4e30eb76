"""Devices as arguments: `1` means `cuda:1`, and `net.to(x)` the GPU of `x`.

A CPU build (laptops, macOS) refuses `torch.device(1)` and `net.to(1)` in C++, or takes them for its own accelerator.
"""

from collections.abc import Callable
from typing import Any

import torch

from virtual_gpus.patches.table import Patch

_raw_device = torch.device
raw_parse_to: Callable[..., tuple[Any, ...]] = torch._C._nn._parse_to


def numbers_mean_cuda() -> bool:
    """True if this build of PyTorch reads a plain number as a CUDA device by itself."""
    accelerator = torch._C._accelerator_getAccelerator()
    return accelerator is not None and accelerator.type == "cuda"


def named(device: Any) -> Any:
    """A device number as a device; anything else as it is."""
    return _raw_device("cuda", device) if isinstance(device, int) and not isinstance(device, bool) else device


class _AnyDevice(type):
    """isinstance(d, torch.device) stays true for the devices that C++ makes."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _raw_device)

    def __call__(cls, *args: Any, **kwargs: Any) -> torch.device:
        return _raw_device(*(map(named, args) if len(args) == 1 else args), **kwargs)


class device(metaclass=_AnyDevice):
    """torch.device, for which a plain number is a GPU."""


def _parse_to(*args: Any, tensor: torch.Tensor | None = None, **kwargs: Any) -> tuple[Any, ...]:
    """The arguments of Module.to."""
    other = args[0] if args and tensor is None else tensor
    if isinstance(other, torch.Tensor):  # C++ would read its device
        args = (other.device, other.dtype, *args[tensor is None :])
    args = (*map(named, args[:1]), *args[1:])
    if "device" in kwargs:
        kwargs["device"] = named(kwargs["device"])
    return raw_parse_to(*args, **kwargs)


def patches() -> list[Patch]:
    rows: list[Patch] = [(torch._C._nn, "_parse_to", _parse_to)]
    return rows if numbers_mean_cuda() else [*rows, (torch, "device", device)]
