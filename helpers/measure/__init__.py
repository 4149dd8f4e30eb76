"""Measures GPUs: memory readings, reports about running out of memory, and timelines."""

from helpers.gpus import describe_timeline
from helpers.measure.memory import fits, largest_batch, measure_memory, read_memory, reset_peaks
from helpers.measure.oom import explain_oom
from helpers.measure.readings import GiB, MiB, Reading, Readings, Refusal, format_bytes, unit_of
from helpers.measure.timeline import describe_time_use, record_timeline
