"""Measures GPUs: memory readings, reports about running out of memory, and timelines."""

from helpers.engine import describe_timeline, record_training
from helpers.measure.memory import fits, largest_batch, measure_memory, read_memory
from helpers.measure.oom import Advice, Block, Explanation, explain_oom
from helpers.measure.readings import Reading, Readings
from helpers.measure.refusal import Refusal
from helpers.measure.timeline import Timeline, describe_time_use, record_timeline
from helpers.sizes import GiB, MiB, format_bytes

__all__ = ["Advice", "Block", "Explanation", "GiB", "MiB", "Reading", "Readings", "Refusal", "Timeline",
           "describe_time_use", "describe_timeline", "explain_oom", "fits", "format_bytes", "largest_batch",
           "measure_memory", "read_memory", "record_timeline", "record_training"]  # fmt: skip
