"""torch.accelerator: the device-agnostic names. They ask C++, which knows no virtual GPU; torch.cuda answers."""

from collections.abc import Callable
from types import ModuleType

import torch
from torch.types import Device

from virtual_gpus.features.cuda import devices as cuda
from virtual_gpus.features.cuda import memory_figures
from virtual_gpus.machine import get_machine
from virtual_gpus.patches.table import Patch, around, in_package


def current_accelerator(check_available: bool = False) -> torch.device | None:
    """The kind of accelerator: cuda."""
    return torch.device("cuda") if get_machine().gpus or not check_available else None


def memory_stats(device_index: Device = None, /) -> dict[str, int]:
    """See torch.cuda.memory_stats, which is PyTorch's own function and so cannot stand for another one."""
    return torch.cuda.memory_stats(device_index)


def _get_accelerator(check: bool | None = None) -> torch.device:
    """What C++ answers: the accelerator of this build, or of this machine with `check`; cpu where there is none."""
    return torch.device("cuda" if get_machine().gpus or not check else "cpu")


def get_device_module(function: Callable[..., ModuleType], device: torch.device | str | None = None) -> ModuleType:
    """torch.cuda, unless another device is named."""
    return torch.cuda if device is None else function(device)


def patches() -> list[Patch]:
    rows = in_package("torch.accelerator", current_accelerator, memory_stats, cuda.synchronize,
                      memory_figures.empty_cache, memory_figures.reset_peak_memory_stats,
                      memory_figures.reset_accumulated_memory_stats,
                      current_device_index=cuda.current_device, current_device_idx=cuda.current_device,
                      set_device_index=cuda.set_device, set_device_idx=cuda.set_device,
                      get_memory_info=memory_figures.mem_get_info,
                      empty_host_cache=lambda: None)  # pinned memory is not kept  # fmt: skip
    rows.append((torch, "get_device_module", around(torch.get_device_module, get_device_module)))
    return [*rows, (torch._C, "_get_accelerator", _get_accelerator)]
