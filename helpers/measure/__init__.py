"""Measures GPUs: memory readings, the memory monitor, timelines, and reports about running out of memory."""

from helpers.measure.batch_size import largest_batch
from helpers.measure.memory import measure_memory, peak_memory, read_memory, reset_peaks
from helpers.measure.monitor import MemoryMonitor
from helpers.measure.oom import explain_oom
from helpers.measure.readings import Reading, Readings
from helpers.measure.refusals import Refusal
from helpers.measure.sizes import GiB, MiB, format_bytes, unit_of
from helpers.measure.timeline import describe_time_use, describe_timeline, record_timeline
