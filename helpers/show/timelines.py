"""Draws timelines below each other, with one row per GPU and the same time axis."""

from bisect import bisect_left
from collections.abc import Mapping

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from helpers.engine import KIND_COLOURS, Recording, Span, describe_timeline, gpus_of, merged, seconds_covered
from helpers.measure.timeline import named_timelines
from helpers.show.style import WIDTH, bar_style, open_frame, set_alt_text

# By kind of work, with the colours of `animate`.
_HATCHES = {"forward": 0, "backward": 1, "step": 2, "copy": 3, "collective": 5}
_LOOKS = {kind: bar_style(0, hatch) | {"facecolor": KIND_COLOURS[kind]} for kind, hatch in _HATCHES.items()}
# The strip of the copies is too narrow for a hatch. An edge makes copies visible that are shorter than a pixel.
_LOOKS["copy"] |= {"hatch": "", "edgecolor": _LOOKS["copy"]["facecolor"], "linewidth": 1.2}
_GAP = 0.002  # of the width; kernels with a smaller gap between them are drawn as one bar


def timeline_bars(timelines: Mapping[str, Recording] | Recording) -> Figure:
    """Draw each timeline in its own axes, with its key as the title. Returns the figure.

    Kernels that are too close to be told apart are one bar. Its height is the share of the time in which they run.
    Copies are in a narrow strip below the row of their GPU. Raises ValueError if there are no timelines, if one has no
    work, or if some are modelled and others measured, and TypeError for anything else.
    """
    timelines, modelled_or_measured = named_timelines(timelines)
    work = {name: [span for span in each.spans if span.gpu is not None] for name, each in timelines.items()}
    for name, spans in work.items():
        if not spans:
            raise ValueError(f"The timeline {name!r} has no work of a GPU to draw. Record a block that does some.")
    rows = [len(gpus_of(spans)) for spans in work.values()]
    size = WIDTH, 0.75 + sum(0.3 + 0.36 * count for count in rows)
    figure, axes = plt.subplots(
        len(rows), figsize=size, height_ratios=rows, sharex=True, squeeze=False, layout="constrained"
    )
    longest = max(timeline.seconds for timeline in timelines.values())
    descriptions = []
    for ax, (name, timeline) in zip(axes[:, 0], timelines.items(), strict=True):
        _draw_rows(ax, work[name], _GAP * longest)
        ax.set_title(name, loc="left", fontsize=10)
        descriptions.append(f"{name}: {describe_timeline(timeline)}" if name else describe_timeline(timeline))
    axes[-1, 0].set(xlabel=f"{modelled_or_measured} time in ms", xlim=(0, 1e3 * longest))
    kinds = {span.kind for spans in work.values() for span in spans}
    used = [kind for kind in _LOOKS if kind in kinds]
    handles = [Patch(label=kind, **_LOOKS[kind]) for kind in used]
    figure.legend(handles=handles, loc="outside upper right", ncols=len(used), frameon=False, fontsize=9)
    set_alt_text(figure, *descriptions)
    return figure


def _draw_rows(ax: Axes, work: list[Span], gap: float) -> None:
    gpus = gpus_of(work)
    for row, gpu in enumerate(gpus):
        for kind in sorted(_LOOKS, key=lambda kind: kind != "collective"):  # which is behind simultaneous kernels
            spans = sorted((s.start, s.end) for s in work if (s.gpu, s.kind) == (gpu, kind))
            bars = [_bar(row, kind, piece, spans) for piece in merged(spans, gap)]
            ax.add_collection(PolyCollection(bars, **_LOOKS[kind]))
    ax.set_yticks(range(len(gpus)), [f"cuda:{gpu}" for gpu in gpus])
    ax.set_ylim(len(gpus) - 0.5, -0.5)
    open_frame(ax)


def _bar(
    row: int, kind: str, piece: tuple[float, float], spans: list[tuple[float, float]]
) -> list[tuple[float, float]]:
    """Return the corners of a bar, in ms and rows."""
    start, end = piece
    low, high = (row + 0.44, row + 0.34) if kind == "copy" else (row + 0.32, row - 0.4)
    if kind != "copy" and end > start:
        inside = spans[bisect_left(spans, (start, 0.0)) : bisect_left(spans, (end, 0.0))]
        high = low + seconds_covered(inside) / (end - start) * (high - low)
    return [(1e3 * start, low), (1e3 * start, high), (1e3 * end, high), (1e3 * end, low)]
