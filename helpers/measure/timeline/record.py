"""Recording: modelled by virtual GPUs, measured by torch.profiler on real ones."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from helpers.gpus import modelled_timeline
from helpers.measure.intervals import seconds_covered
from helpers.measure.timeline.trace import BLOCK, Work, work_of

__all__ = ["Timeline", "describe_timeline", "format_time", "record_timeline"]


class Timeline:
    """What was recorded: filled when the block ends. Can be pickled, so a rank can return it."""

    def __init__(self):
        self.seconds = 0.0
        self.work: list[Work] = []
        self.modelled = True

    def busy_seconds(self, gpu: int) -> float:
        """Seconds in which a GPU ran kernels, collectives' among them, copies not; two at once count once."""
        return seconds_covered((w.start, w.end) for w in self.work if w.gpu == gpu and w.kind != "copy")

    def utilisation(self, gpu: int) -> float:
        """The share of the block's time in which a GPU ran kernels, 0 to 1."""
        return self.busy_seconds(gpu) / self.seconds if self.seconds else 0.0

    @property
    def gpus(self) -> list[int]:
        """Those that did something, in order."""
        return sorted({w.gpu for w in self.work})


@contextmanager
def record_timeline() -> Iterator[Timeline]:
    """Record what the GPUs do in the block; they are idle when it begins and when it ends.

    Raises RuntimeError where there is no GPU.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("there is no GPU whose work could be recorded: call use_gpus(...) first")
    found, clock = Timeline(), modelled_timeline()
    if clock is None:
        yield from _measured(found)
        return
    with clock:
        yield found
    found.seconds = clock.seconds
    found.work = [Work(s.gpu, s.start, s.end, s.kind, s.name) for s in clock.spans if s.gpu is not None]


def _measured(found: Timeline) -> Iterator[Timeline]:
    """By torch.profiler."""
    from torch.profiler import ProfilerActivity, profile, record_function

    found.modelled = False
    _wait_for_all()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        with record_function(BLOCK):
            yield found
            _wait_for_all()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    found.seconds, found.work = work_of(events)


def _wait_for_all() -> None:
    for index in range(torch.cuda.device_count()):
        torch.cuda.synchronize(index)


def describe_timeline(timeline: Timeline) -> str:
    """The timeline in a line: its length, modelled or measured, and how busy each GPU is."""
    how = "modelled" if timeline.modelled else "measured"
    busy = ", ".join(f"cuda:{gpu} {100 * timeline.utilisation(gpu):.0f} %" for gpu in timeline.gpus)
    return f"{how} {format_time(timeline.seconds)} | busy: {busy}"


def format_time(seconds: float) -> str:
    """ "12.3 ms", "1,234 ms": three digits or more."""
    ms = 1e3 * seconds
    return f"{ms:,.0f} ms" if ms >= 100 else f"{ms:.3g} ms"
