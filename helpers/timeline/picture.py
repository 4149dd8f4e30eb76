"""The picture of timelines: a row per GPU, one timeline below the other with the same scale of time."""

from __future__ import annotations

from collections.abc import Mapping

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from helpers.intervals import merged
from helpers.plots.alt_text import set_alt_text
from helpers.plots.palette import styles
from helpers.timeline.record import Timeline, describe_timeline
from helpers.timeline.trace import KINDS

__all__ = ["timeline_bars"]

# "color" would colour the edges of a bar in `broken_barh`, too, and with them its hatch.
LOOKS = {kind: {"facecolor" if key == "color" else key: value for key, value in style.items()}
         for kind, style in zip(KINDS, styles(len(KINDS)), strict=True)}  # fmt: skip
# Copies lie in a strip too narrow for a hatch, and an edge lets one that is shorter than a pixel be seen.
LOOKS["copy"] |= {"hatch": "", "edgecolor": LOOKS["copy"]["facecolor"], "linewidth": 1.2}
_GAP = 0.002  # of the width: kernels nearer than that are drawn as one bar


def timeline_bars(timelines: Mapping[str, Timeline] | Timeline, width: float = 7.0) -> Figure:
    """Draw each timeline in axes of its own, named by its key. Returns the figure.

    Copies lie in a narrow strip below their GPU's row. Raises ValueError for a timeline without work.
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
        for kind in KINDS:
            low, high = (row + 0.34, 0.1) if kind == "copy" else (row - 0.4, 0.72)
            pieces = merged([(w.start, w.end) for w in timeline.work if (w.gpu, w.kind) == (gpu, kind)], _GAP * longest)
            ax.broken_barh([(1e3 * a, 1e3 * (b - a)) for a, b in pieces], (low, high), **LOOKS[kind])
    ax.set_yticks(range(len(timeline.gpus)), [f"cuda:{gpu}" for gpu in timeline.gpus])
    ax.set_ylim(len(timeline.gpus) - 0.5, -0.5)
    ax.spines[["top", "right"]].set_visible(False)
