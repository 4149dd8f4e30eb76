"""What GPUs hold and do: readings of memory, the monitor, timelines, out-of-memory reports."""

import importlib

_HOMES = {
    "MemoryMonitor": "helpers.measure.monitor",
    "MiB": "helpers.measure.memory",
    "Readings": "helpers.measure.memory",
    "describe_cures": "helpers.measure.oom",
    "describe_segments": "helpers.measure.oom",
    "describe_time_use": "helpers.measure.timeline",
    "describe_timeline": "helpers.measure.timeline",
    "draw_cures": "helpers.measure.oom",
    "draw_segments": "helpers.measure.oom",
    "explain_oom": "helpers.measure.oom",
    "find_batch_size": "helpers.measure.oom",
    "find_leaks": "helpers.measure.oom",
    "forget_error": "helpers.measure.oom",
    "format_bytes": "helpers.measure.memory",
    "largest_batch": "helpers.measure.memory",
    "measure_memory": "helpers.measure.memory",
    "peak_memory": "helpers.measure.memory",
    "read_memory": "helpers.measure.memory",
    "record_timeline": "helpers.measure.timeline",
    "remember_places": "helpers.measure.oom",
    "reset_peaks": "helpers.measure.memory",
    "timeline_bars": "helpers.measure.timeline",
    "write_viewer": "helpers.measure.oom",
}
__all__ = list(_HOMES)


def __getattr__(name):
    """The names above, imported when they are first asked for."""
    if name not in _HOMES:
        raise AttributeError(name)
    return getattr(importlib.import_module(_HOMES[name]), name)
