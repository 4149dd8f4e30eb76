"""Where the time of each GPU goes: computing, or waiting, and for what."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from helpers.measure.intervals import seconds_covered
from helpers.measure.timeline.record import Timeline

__all__ = ["TimeUse", "describe_time_use", "time_use"]


class TimeUse(NamedTuple):
    """Seconds of one GPU; the five add up to the timeline's `seconds`. Each moment counts at the first that holds.

    computing: it runs a kernel that is no collective's. collective: it is in a collective, and so sends or waits for
    another rank (nvidia-smi calls that busy). copying: a copy from or to it is on its way. others: another GPU of this
    timeline works; a GPU may need what that one computes, or the host may be late, busy with the other GPU. nothing: no
    GPU does anything, so the host has issued nothing that could begin.
    """

    computing: float
    collective: float
    copying: float
    others: float
    nothing: float

    @property
    def waiting(self) -> float:
        """Seconds in which the GPU does not compute."""
        return sum(self) - self.computing


def time_use(timeline: Timeline, gpu: int) -> TimeUse:
    """Where the time of a GPU (its index) went, in modelled or measured seconds, as the timeline's.

    A timeline knows the GPUs of its process: where each rank is a process, record one in each. Raises ValueError for a
    GPU that did nothing in it.
    """
    if gpu not in timeline.gpus:
        raise ValueError(f"GPU {gpu} did nothing in this timeline, whose GPUs are {timeline.gpus}")
    kinds = ([], [], [], [])  # computing, collective, copying, others
    for work in timeline.work:
        place = 3 if work.gpu != gpu else {"collective": 1, "copy": 2}.get(work.kind, 0)
        kinds[place].append((work.start, work.end))
    until = [seconds_covered(sum(kinds[:count], [])) for count in range(5)]
    parts = [after - before for before, after in zip(until, until[1:], strict=False)]
    return TimeUse(*parts, nothing=max(0.0, timeline.seconds - until[-1]))


def describe_time_use(timelines: Mapping[str, Timeline] | Timeline) -> str:
    """A table in ms, modelled or measured: a line for each GPU of each timeline, named by its key."""
    timelines = {"": timelines} if isinstance(timelines, Timeline) else dict(timelines)
    how = "modelled" if all(timeline.modelled for timeline in timelines.values()) else "measured"
    wide = max(len(f"{how} ms"), *(len(f"{name} cuda:{gpu}") for name, t in timelines.items() for gpu in t.gpus))
    lines = [f"{how + ' ms':{wide}} {'in all':>8}" + "".join(f"{name:>11}" for name in TimeUse._fields)]
    for name, timeline in timelines.items():
        for gpu in timeline.gpus:
            figures = "".join(f"{1e3 * seconds:11.1f}" for seconds in time_use(timeline, gpu))
            lines.append(f"{f'{name} cuda:{gpu}'.strip():{wide}} {1e3 * timeline.seconds:8.1f}{figures}")
    return "\n".join(lines)
