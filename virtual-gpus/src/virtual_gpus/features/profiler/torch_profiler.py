"""torch.profiler on virtual GPUs: the CPU's times are real, those of the GPUs come from the modelled clock.

C++ would ask the driver for an event at every operator. So the profiler records the CPU alone, and the rows of the GPUs
are added where PyTorch's Python code reads the results (torch/autograd/profiler.py).
"""

import weakref
from collections.abc import Callable
from typing import Any, Self

import torch
from torch.autograd import ProfilerActivity, ProfilerState, profiler
from torch.autograd.profiler import EventList, FunctionEvent, profile

from virtual_gpus.features.profiler.device_record import DeviceRecord
from virtual_gpus.machine import active
from virtual_gpus.patches.table import Patch, wrapped

_FALLBACK = ProfilerState.KINETO_GPU_FALLBACK
_records: weakref.WeakKeyDictionary[profile, DeviceRecord] = weakref.WeakKeyDictionary()
_Raw = Callable[..., Any]  # PyTorch's function


def _supported_activities(raw: _Raw) -> set[ProfilerActivity]:
    """The CPU's, and CUDA."""
    return raw() | {ProfilerActivity.CUDA}


def _prepare_trace(raw: _Raw, self: profile) -> None:
    """Let C++ record the CPU alone."""
    if self.use_device == "cuda":
        self.profiler_kind = ProfilerState.KINETO if self.profiler_kind == _FALLBACK else self.profiler_kind
        self.kineto_activities = {ProfilerActivity.CPU}
    raw(self)


def _start_trace(raw: _Raw, self: profile) -> None:
    """Listen to the clock from here on."""
    raw(self)
    if self.use_device == "cuda" and (machine := active()) is not None:
        _records[self] = DeviceRecord(machine)


def __exit__(raw: _Raw, self: profile, *error: object) -> bool | None:
    """Wait for the GPUs, then stop listening."""
    result = raw(self, *error)
    if self in _records:
        _records[self].stop()
    return result


def _parse_kineto_results(raw: _Raw, self: profile, result: Any, *args: Any, **kwargs: Any) -> list[FunctionEvent]:
    """The profiler's events, and those of the GPUs."""
    events = raw(self, result, *args, **kwargs)
    return _records[self].merge(events, result.trace_start_ns(), self.use_cpu) if self in _records else events


def export_chrome_trace(raw: _Raw, self: profile, path: str, *args: Any, **kwargs: Any) -> Any:
    """PyTorch's file, with a process for each GPU."""
    result = raw(self, path, *args, **kwargs)
    if self in _records:
        _records[self].add_to_chrome_trace(path)
    return result


def table(raw: _Raw, self: EventList, *args: Any, **kwargs: Any) -> str:
    """PyTorch's table, which says at its end that the GPUs' times are modelled."""
    return raw(self, *args, **kwargs).replace("Self CUDA time total:", "Self CUDA time total (modelled):")


class _Ranges:
    """NVTX without a profiler: `torch.cuda.nvtx` marks nothing. Every function of it answers 0."""

    def __getattr__(self, name: str) -> Self:
        return self

    def __call__(self, *args: object) -> int:
        return 0


def patches() -> list[Patch]:
    rows = wrapped(profile, _prepare_trace, _start_trace, __exit__, _parse_kineto_results, export_chrome_trace)
    rows += wrapped(EventList, table)
    rows += wrapped(profiler, _supported_activities) + wrapped(torch.autograd, _supported_activities)
    return [*rows, (torch.cuda.nvtx, "_nvtx", _Ranges())]
