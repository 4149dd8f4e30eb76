"""Draw a timeline with one row per stream. Colours separate forward, backward, step, copies and collectives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from virtual_gpus.clock.clock import Span
from virtual_gpus.timeline.spans import COLOURS, KINDS, Row, lane_name, merged, rows_of

if TYPE_CHECKING:  # matplotlib is an extra
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

_HEIGHT = 0.8


def draw(spans: Sequence[Span], seconds: float, axes: Axes | None = None) -> Figure | SubFigure:
    """Draw into `axes` or into a new figure, and return the figure. seconds: the duration of the block."""
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        raise ImportError("Drawing a timeline needs matplotlib: pip install 'virtual-gpus[plot]'.") from None

    rows = rows_of(spans)
    if axes is None:
        _, axes = plt.subplots(figsize=(10, 0.8 + 0.4 * max(1, len(rows))), layout="constrained")
    used = [kind for kind in KINDS if any(s.kind == kind for s in spans)]
    labelled: set[str] = set()
    for place, row in enumerate(rows):
        for kind in used:
            pieces = merged([(s.start, s.end) for s in spans if (s.gpu, s.lane) == row and s.kind == kind])
            bars = [(1e3 * start, 1e3 * (end - start)) for start, end in pieces]
            label = kind if bars and kind not in labelled else None  # once, for the legend
            labelled.update([kind] if bars else [])
            axes.broken_barh(bars, (place - _HEIGHT / 2, _HEIGHT), color=COLOURS[kind], linewidth=0, label=label)
    axes.set_yticks(range(len(rows)), [_title(row) for row in rows])
    axes.invert_yaxis()
    axes.set_xlabel("modelled time in ms")
    axes.set_xlim(0, 1e3 * seconds or 1)
    if used:
        axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False)
    return axes.figure


def _title(row: Row) -> str:
    gpu, lane = row
    return f"host, {lane_name(lane)}" if gpu is None else f"cuda:{gpu}, {lane_name(lane)}"
