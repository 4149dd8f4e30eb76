"""The picture of `python -m benchmarks.published --plot`: modelled against published speeds, one dot a row."""

from __future__ import annotations

from typing import TYPE_CHECKING

from matplotlib.figure import Figure

if TYPE_CHECKING:
    from benchmarks.published import Compared

# Colours of Okabe and Ito's palette, and a shape for each, for those who do not see the colours.
_STYLES = (("#0072B2", "o"), ("#D55E00", "s"), ("#009E73", "^"), ("#CC79A7", "D"), ("#E69F00", "v"), ("#56B4E9", "P"))


def drawn(compared: list[Compared]) -> Figure:
    """Two panels, of the rows to fit to and of those held apart. Hollow: fused or compiled runs."""
    figure = Figure(figsize=(9.6, 5.2), layout="constrained")
    styles = dict(zip(sorted({each.row["kind"] for each in compared}), _STYLES, strict=False))
    for axes, half in zip(figure.subplots(1, 2, sharex=True, sharey=True), ("fit", "held"), strict=True):
        points = [(*_point(each), each) for each in compared if each.half == half]
        everything = [value for each in compared for value in _point(each)]
        low, high = min(everything) / 1.6, max(everything) * 1.6
        axes.fill_between([low, high], [0.8 * low, 0.8 * high], [1.2 * low, 1.2 * high], color="0.87", label="±20 %")
        axes.plot([low, high], [low, high], color="0.3", linewidth=0.8)
        for kind, (color, marker) in styles.items():
            for eager in (True, False):
                own = [point for point in points if point[2].row["kind"] == kind]
                chosen = [point for point in own if (point[2].row["how"] == "eager") == eager]
                xs, ys = [point[0] for point in chosen], [point[1] for point in chosen]
                filled, label = (color, kind) if eager else ("none", None)
                axes.plot(xs, ys, marker, color=color, markersize=5.5, markerfacecolor=filled, label=label)
        axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high), aspect="equal")
        title = "rows to fit to" if half == "fit" else "rows held apart"
        axes.set(title=f"{title}: {len(points)}", xlabel="published speed, in the units of the table")
        axes.grid(color="0.93", linewidth=0.6)
        axes.set_axisbelow(True)
        if half == "fit":
            axes.set_ylabel("modelled speed")
    axes.legend(frameon=False, loc="lower right", fontsize=8)
    return figure


def _point(each: Compared) -> tuple[float, float]:
    """Published and modelled speed, also where the figure is a time."""
    if each.row["unit"] == "s":
        return 1 / each.row["measured"], 1 / each.modelled
    return each.row["measured"], each.modelled
