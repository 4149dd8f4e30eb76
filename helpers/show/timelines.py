"""The picture of timelines: a row per GPU, one timeline below the other with the same scale of time."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping

import matplotlib.pyplot as plt
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from helpers.measure.timeline import KINDS, Timeline, describe_timeline, merged, seconds_covered
from helpers.show.plots.alt_text import set_alt_text
from helpers.show.plots.palette import styles

__all__ = ["timeline_bars"]

# "color" would colour the edges of a bar in `broken_barh`, too, and with them its hatch.
LOOKS = {kind: {"facecolor" if key == "color" else key: value for key, value in style.items()}
         for kind, style in zip(KINDS, styles(len(KINDS)), strict=True)}  # fmt: skip
# Copies lie in a strip too narrow for a hatch, and an edge lets one that is shorter than a pixel be seen.
LOOKS["copy"] |= {"hatch": "", "edgecolor": LOOKS["copy"]["facecolor"], "linewidth": 1.2}
_GAP = 0.002  # of the width: kernels nearer than that are drawn as one bar


def timeline_bars(timelines: Mapping[str, Timeline] | Timeline, width: float = 7.0) -> Figure:
    """Draw each timeline in axes of its own, named by its key. Returns the figure.

    Kernels too near to be told apart are one bar, as high as the share of its time in which they run. Copies lie in a
    narrow strip below their GPU's row. Raises ValueError for a timeline without work.
    """
    timelines = {"": timelines} if isinstance(timelines, Timeline) else dict(timelines)
    if not timelines or not all(timeline.work for timeline in timelines.values()):
        raise ValueError("there is nothing to draw: a timeline has no work of a GPU in it")
    heights = [len(timeline.gpus) for timeline in timelines.values()]
    figure, axes = plt.subplots(len(timelines), 1, sharex=True, squeeze=False, layout="constrained",
                                figsize=(width, 0.75 + sum(0.3 + 0.36 * rows for rows in heights)),
                                height_ratios=heights)  # fmt: skip
    longest = max(timeline.seconds for timeline in timelines.values())
    for ax, (name, timeline) in zip(axes[:, 0], timelines.items(), strict=True):
        _rows(ax, timeline, longest)
        ax.set_title(name, loc="left", fontsize=10)
    how = "modelled" if next(iter(timelines.values())).modelled else "measured"
    axes[-1, 0].set(xlabel=f"{how} time in ms", xlim=(0, 1e3 * longest))
    used = [kind for kind in KINDS if any(w.kind == kind for t in timelines.values() for w in t.work)]
    handles = [Patch(label=kind, **LOOKS[kind]) for kind in used]
    figure.legend(handles=handles, loc="outside upper right", ncols=len(used), frameon=False, fontsize=9)
    set_alt_text(axes[0, 0], words(timelines))
    return figure


def words(timelines: Mapping[str, Timeline]) -> str:
    """What the picture shows, a line per timeline."""
    return "\n".join(f"{name}: {describe_timeline(each)}" if name else describe_timeline(each)
                     for name, each in timelines.items())  # fmt: skip


def _rows(ax, timeline: Timeline, longest: float) -> None:
    for row, gpu in enumerate(timeline.gpus):
        for kind in ("collective", *KINDS[:-1]):  # behind the kernels that run meanwhile
            spans = sorted((w.start, w.end) for w in timeline.work if (w.gpu, w.kind) == (gpu, kind))
            bars = [_bar(row, kind, piece, spans) for piece in merged(spans, _GAP * longest)]
            ax.add_collection(PolyCollection(bars, **LOOKS[kind]))
    ax.set_yticks(range(len(timeline.gpus)), [f"cuda:{gpu}" for gpu in timeline.gpus])
    ax.set_ylim(len(timeline.gpus) - 0.5, -0.5)
    ax.spines[["top", "right"]].set_visible(False)


def _bar(row: int, kind: str, piece: tuple[float, float], spans: list[tuple[float, float]]) -> list:
    """Corners of a piece, in ms and rows."""
    start, end = piece
    low, high = (row + 0.44, row + 0.34) if kind == "copy" else (row + 0.32, row - 0.4)
    if kind != "copy" and end > start:
        inside = spans[bisect_left(spans, (start, 0.0)) : bisect_left(spans, (end, 0.0))]
        share = seconds_covered(inside) / (end - start)
        high = low + share * (high - low)
    return [(1e3 * start, low), (1e3 * start, high), (1e3 * end, high), (1e3 * end, low)]
