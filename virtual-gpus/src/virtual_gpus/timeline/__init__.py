"""Timelines: what the modelled host and GPUs did during a block of code.

For other recorders and pictures, which may hold measured times. Those that record are in the package itself.
"""

from virtual_gpus.clock.clock import Span
from virtual_gpus.timeline.animate import Animation, Recording, animate, gpus_of
from virtual_gpus.timeline.animate import describe as describe_timeline
from virtual_gpus.timeline.peak import KINDS as MEMORY_KINDS
from virtual_gpus.timeline.peak import PeakLog, kind_of, owned
from virtual_gpus.timeline.record import Timeline, name_work
from virtual_gpus.timeline.spans import COLOURS, busy_seconds, merged, seconds_covered

__all__ = ["COLOURS", "MEMORY_KINDS", "Animation", "PeakLog", "Recording", "Span", "Timeline", "animate",
           "busy_seconds", "describe_timeline", "gpus_of", "kind_of", "merged", "name_work", "owned",
           "seconds_covered"]  # fmt: skip
