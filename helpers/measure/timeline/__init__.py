"""Who works when: the work of every GPU during a block of code, modelled or measured.

    with record_timeline() as timeline:
        step()
    timeline.seconds, timeline.utilisation(0)
    print(describe_timeline(timeline))
    print(describe_time_use(timeline))             # a line per GPU: computing, or waiting, and for what
    timeline_bars({"two GPUs": timeline})          # of helpers.show: a row per GPU, forward, backward, step, copies

Virtual GPUs have a modelled clock (`virtual_gpus`); on real ones torch.profiler measures, which slows the program
itself down. `timeline.modelled` says which of the two it was, and so do picture and words.

    record   `record_timeline`
    trace    the profiler's events, read
    use      `time_use`: what a GPU waits for
"""

from helpers.measure.timeline.record import Timeline, describe_timeline, format_time, record_timeline
from helpers.measure.timeline.trace import KINDS, Work
from helpers.measure.timeline.use import TimeUse, describe_time_use, time_use

__all__ = [
    "KINDS",
    "TimeUse",
    "Timeline",
    "Work",
    "describe_time_use",
    "describe_timeline",
    "format_time",
    "record_timeline",
    "time_use",
]
