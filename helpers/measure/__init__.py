"""What GPUs hold and do: readings of memory, the monitor, timelines, out-of-memory reports."""

from helpers.measure.memory import (
    GiB,
    MiB,
    Reading,
    Readings,
    format_bytes,
    largest_batch,
    measure_memory,
    peak_memory,
    read_memory,
    reset_peaks,
)
from helpers.measure.monitor import MemoryMonitor
from helpers.measure.oom import (
    explain_memory,
    explain_oom,
    find_batch_size,
    find_leaks,
    forget_error,
    remember_places,
    write_viewer,
)
from helpers.measure.timeline import describe_time_use, describe_timeline, record_timeline

__all__ = [
    "GiB",
    "MemoryMonitor",
    "MiB",
    "Reading",
    "Readings",
    "describe_time_use",
    "describe_timeline",
    "explain_memory",
    "explain_oom",
    "find_batch_size",
    "find_leaks",
    "forget_error",
    "format_bytes",
    "largest_batch",
    "measure_memory",
    "peak_memory",
    "read_memory",
    "record_timeline",
    "remember_places",
    "reset_peaks",
    "write_viewer",
]
