"""torch.accelerator: the device-agnostic names. They ask C++, which knows no virtual GPU; torch.cuda answers."""

from __future__ import annotations

import functools

import torch

from virtual_gpus.machine import active
from virtual_gpus.patches import cuda, memory, streams
from virtual_gpus.patches.table import in_package


def current_accelerator(check_available: bool = False) -> torch.device | None:
    """The kind of accelerator: cuda."""
    return torch.device("cuda") if active().gpus or not check_available else None


def current_device_index() -> int:
    """Index of this thread's current GPU."""
    return cuda.current_device()


def set_device_index(device, /) -> None:
    """Make a GPU this thread's current one."""
    cuda.set_device(device)


def current_stream(device=None, /) -> streams.Stream:
    """This thread's stream on a GPU."""
    return streams.current_stream(device)


def set_stream(stream) -> None:
    """Make `stream` this thread's stream on its GPU."""
    streams.set_stream(stream)


def synchronize(device=None, /) -> None:
    """Wait for a GPU."""
    cuda.synchronize(device)


class device_index:
    """`with torch.accelerator.device_index(1):`; None changes nothing."""

    def __init__(self, device: int | None, /):
        self.idx = device
        self.prev_idx = -1

    def __enter__(self) -> None:
        if self.idx is not None:
            self.prev_idx = cuda._exchange_device(self.idx)

    def __exit__(self, *error) -> None:
        if self.idx is not None:
            cuda._maybe_exchange_device(self.prev_idx)


def empty_cache() -> None:
    """See torch.cuda.empty_cache."""
    memory.empty_cache()


def empty_host_cache() -> None:
    """Pinned memory is not kept, so there is nothing to give back."""


def memory_stats(device_index=None, /):
    """See torch.cuda.memory_stats."""
    return torch.cuda.memory_stats(device_index)


def reset_peak_memory_stats(device_index=None, /) -> None:
    """See torch.cuda.reset_peak_memory_stats."""
    memory.reset_peak_memory_stats(device_index)


def reset_accumulated_memory_stats(device_index=None, /) -> None:
    """See torch.cuda.reset_accumulated_memory_stats."""
    memory.reset_accumulated_memory_stats(device_index)


def get_memory_info(device_index=None, /) -> tuple[int, int]:
    """See torch.cuda.mem_get_info."""
    return memory.mem_get_info(device_index)


def _get_accelerator(check=None) -> torch.device:
    """What C++ answers: the accelerator of this build, or of this machine with `check`; cpu where there is none."""
    return torch.device("cuda" if active().gpus or not check else "cpu")


_raw_get_device_module = torch.get_device_module


@functools.wraps(_raw_get_device_module)
def get_device_module(device=None):
    """torch.cuda, unless another device is named."""
    return torch.cuda if device is None else _raw_get_device_module(device)


def patches():
    """See `patches`."""
    found = in_package("torch.accelerator", current_accelerator, current_device_index, set_device_index, current_stream,
                      set_stream, synchronize, device_index, empty_cache, empty_host_cache, memory_stats,
                      reset_peak_memory_stats, reset_accumulated_memory_stats, get_memory_info)  # fmt: skip
    for alias, function in (("current_device_idx", current_device_index), ("set_device_idx", set_device_index)):
        if hasattr(torch.accelerator, alias):
            found.append((torch.accelerator, alias, function))
    return found + [(torch, "get_device_module", get_device_module), (torch._C, "_get_accelerator", _get_accelerator)]
