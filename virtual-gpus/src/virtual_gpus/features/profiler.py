"""torch.profiler on virtual GPUs: the CPU's times are real, those of the GPUs come from the modelled clock.

C++ would ask the driver for an event at every operator. So the profiler records the CPU alone, and the rows of the GPUs
are added where PyTorch's Python code reads the results (torch/autograd/profiler.py).
"""

from __future__ import annotations

import torch
from torch.autograd import ProfilerActivity, ProfilerState, profiler, profiler_util

from virtual_gpus.machine import active
from virtual_gpus.timeline.profile import DeviceRecord

_METHODS = ("_prepare_trace", "_start_trace", "__exit__", "_parse_kineto_results", "export_chrome_trace")
_raw = {name: getattr(profiler.profile, name) for name in _METHODS}
_raw_supported = torch.autograd._supported_activities
_raw_table = profiler_util.EventList.table
_FALLBACK = ProfilerState.KINETO_GPU_FALLBACK


def _supported_activities() -> set[ProfilerActivity]:
    """The CPU's, and CUDA."""
    return _raw_supported() | {ProfilerActivity.CUDA}


def _prepare_trace(self) -> None:
    """Let C++ record the CPU alone."""
    if self.use_device == "cuda":
        self.profiler_kind = ProfilerState.KINETO if self.profiler_kind == _FALLBACK else self.profiler_kind
        self.kineto_activities = {ProfilerActivity.CPU}
    _raw["_prepare_trace"](self)


def _start_trace(self) -> None:
    """Listen to the clock from here on."""
    _raw["_start_trace"](self)
    self._devices = None
    if self.use_device == "cuda":
        self._devices = DeviceRecord(active())


def __exit__(self, *error):
    """Wait for the GPUs, then stop listening."""
    result = _raw["__exit__"](self, *error)
    record = getattr(self, "_devices", None)
    if record is not None:
        record.stop()
    return result


def _parse_kineto_results(self, result, *args, **kwargs):
    """The profiler's events, and those of the GPUs."""
    events = _raw["_parse_kineto_results"](self, result, *args, **kwargs)
    record = getattr(self, "_devices", None)
    return events if record is None else record.merge(events, result.trace_start_ns(), self.use_cpu)


def export_chrome_trace(self, path, *args, **kwargs):
    """PyTorch's file, with a process for each GPU."""
    result = _raw["export_chrome_trace"](self, path, *args, **kwargs)
    record = getattr(self, "_devices", None)
    if record is not None:
        record.add_to_chrome_trace(path)
    return result


def table(self, *args, **kwargs) -> str:
    """PyTorch's table, which says at its end that the GPUs' times are modelled."""
    return _raw_table(self, *args, **kwargs).replace("Self CUDA time total:", "Self CUDA time total (modelled):")


class _Ranges:
    """NVTX without a profiler: `torch.cuda.nvtx` marks nothing. Every function of it answers 0."""

    def __getattr__(self, name: str):
        return lambda *args: 0


def patches():
    """See `features`."""
    methods = (_prepare_trace, _start_trace, __exit__, _parse_kineto_results, export_chrome_trace)
    rows = [(profiler.profile, method.__name__, method) for method in methods]
    rows += [(owner, "_supported_activities", _supported_activities) for owner in (profiler, torch.autograd)]
    return rows + [(profiler_util.EventList, "table", table), (torch.cuda.nvtx, "_nvtx", _Ranges())]
