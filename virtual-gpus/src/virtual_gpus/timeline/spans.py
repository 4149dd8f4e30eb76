"""Spans of work: their kinds, their rows in a plot or a file, how much time they cover, and what collectives cost."""

from collections.abc import Iterable
from typing import NamedTuple

from virtual_gpus.clock.clock import HOST_LANE, Span

Row = tuple[int | None, int | str]  # GPU (None: the host), and its stream or engine
# By kind, in all pictures: of Okabe and Ito's colours, which colour-blind people can tell apart.
COLOURS = {"forward": "#0072B2", "backward": "#E69F00", "step": "#009E73", "copy": "#CC79A7", "collective": "#56B4E9",
           "wait": "#BBBBBB"}  # fmt: skip

ALL = "all"  # collectives
_ROUNDING = 1e-12  # seconds between an end and the next beginning that are the same moment


def busy_seconds(spans: Iterable[Span], gpu: int, copies: bool = False) -> float:
    """Seconds in which a GPU ran kernels, including those of collectives. Overlapping kernels count once.

    nvidia-smi counts in the same way. copies: also count copies, as a profiler does for all work on the GPU.
    """
    return seconds_covered((s.start, s.end) for s in spans if s.gpu == gpu and (copies or s.kind != "copy"))


def rows_of(spans: Iterable[Span]) -> list[Row]:
    """The (GPU, lane) pairs with work: first the host, then the streams, copies and collectives of each GPU."""
    rows = {(s.gpu, s.lane) for s in spans}
    return sorted(rows, key=lambda r: (-1 if r[0] is None else r[0], isinstance(r[1], str), str(r[1]).zfill(9)))


def lane_name(lane: int | str) -> str:
    """ "stream", "stream 3", or the name of an engine."""
    if isinstance(lane, str):  # collectives have a row for each kind and group
        return "waits" if lane == HOST_LANE else lane
    return f"stream {lane}" if lane else "stream"


def merged(intervals: Iterable[tuple[float, float]], gap: float = 0.0) -> list[tuple[float, float]]:
    """Merge (start, end) pairs that are at most `gap` seconds apart. Returns them in order."""
    union: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if union and start <= union[-1][1] + gap + _ROUNDING:
            union[-1] = union[-1][0], max(union[-1][1], end)
        else:
            union.append((start, end))
    return union


def seconds_covered(intervals: Iterable[tuple[float, float]]) -> float:
    """The seconds in at least one of the intervals. Overlaps count once."""
    return sum((end - start for start, end in merged(intervals)), 0.0)


class Communication(NamedTuple):
    """The collectives of one kind and group on one GPU.

    calls: how many there are. sent: the bytes that the busiest member of each sends or receives, added up.
    seconds: modelled time in which at least one of them runs. Real processes also wait in it for the last one.
    exposed: the part of `seconds` in which no kernel runs on the GPU, so that the step gets longer.
    """

    calls: int
    sent: float
    seconds: float
    exposed: float


def communication(spans: Iterable[Span], gpu: int) -> dict[str, Communication]:
    """The collectives of a GPU by the name of their row ("all-gather", "reduce-scatter, data"), and "all" of them.

    Messages count as collectives. Rows that overlap are exposed together: their `exposed` may exceed that of "all".
    """
    rows: dict[str, list[Span]] = {ALL: []}
    kernels: list[tuple[float, float]] = []
    for span in spans:
        if span.gpu != gpu:
            continue
        if span.kind == "collective":
            rows[ALL].append(span)
            rows.setdefault(str(span.lane), []).append(span)
        elif span.kind != "copy":
            kernels.append((span.start, span.end))
    computing = seconds_covered(kernels)
    figures = {}
    for name, row in rows.items():
        times = [(span.start, span.end) for span in row]
        exposed = max(0.0, seconds_covered(times + kernels) - computing)  # not below zero by rounding
        figures[name] = Communication(len(row), sum(span.sent for span in row), seconds_covered(times), exposed)
    return figures
