"""torch.profiler on virtual GPUs: the CPU's times are real, those of the GPUs come from the modelled clock.

C++ would ask the driver for an event at every operator. So the profiler records the CPU alone, and the rows of the GPUs
are added where PyTorch's Python code reads the results (torch/autograd/profiler.py).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.autograd import ProfilerActivity, ProfilerState, profiler, profiler_util

from virtual_gpus.features.profiler.device_record import DeviceRecord
from virtual_gpus.machine import active
from virtual_gpus.patches.table import Patch, around

_FALLBACK = ProfilerState.KINETO_GPU_FALLBACK


def _supported_activities(function: Callable) -> set[ProfilerActivity]:
    """The CPU's, and CUDA."""
    return function() | {ProfilerActivity.CUDA}


def _prepare_trace(function: Callable, self) -> None:
    """Let C++ record the CPU alone."""
    if self.use_device == "cuda":
        self.profiler_kind = ProfilerState.KINETO if self.profiler_kind == _FALLBACK else self.profiler_kind
        self.kineto_activities = {ProfilerActivity.CPU}
    function(self)


def _start_trace(function: Callable, self) -> None:
    """Listen to the clock from here on."""
    function(self)
    self._devices = DeviceRecord(active()) if self.use_device == "cuda" else None


def __exit__(function: Callable, self, *error: object):
    """Wait for the GPUs, then stop listening."""
    result = function(self, *error)
    record = getattr(self, "_devices", None)
    if record is not None:
        record.stop()
    return result


def _parse_kineto_results(function: Callable, self, result, *args, **kwargs):
    """The profiler's events, and those of the GPUs."""
    events = function(self, result, *args, **kwargs)
    record = getattr(self, "_devices", None)
    return events if record is None else record.merge(events, result.trace_start_ns(), self.use_cpu)


def export_chrome_trace(function: Callable, self, path: str, *args, **kwargs):
    """PyTorch's file, with a process for each GPU."""
    result = function(self, path, *args, **kwargs)
    record = getattr(self, "_devices", None)
    if record is not None:
        record.add_to_chrome_trace(path)
    return result


def table(function: Callable, self, *args, **kwargs) -> str:
    """PyTorch's table, which says at its end that the GPUs' times are modelled."""
    return function(self, *args, **kwargs).replace("Self CUDA time total:", "Self CUDA time total (modelled):")


class _Ranges:
    """NVTX without a profiler: `torch.cuda.nvtx` marks nothing. Every function of it answers 0."""

    def __getattr__(self, name: str):
        return lambda *args: 0


def patches() -> list[Patch]:
    methods = (_prepare_trace, _start_trace, __exit__, _parse_kineto_results, export_chrome_trace)
    replaced = [(profiler.profile, method) for method in methods] + [(profiler_util.EventList, table)]
    replaced += [(owner, _supported_activities) for owner in (profiler, torch.autograd)]
    rows = [(owner, new.__name__, around(getattr(owner, new.__name__), new)) for owner, new in replaced]
    return [*rows, (torch.cuda.nvtx, "_nvtx", _Ranges())]
