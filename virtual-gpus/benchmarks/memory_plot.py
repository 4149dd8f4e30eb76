"""The picture of `python -m benchmarks.memory --plot`: peaks as predicted against peaks as measured."""

from __future__ import annotations

import math

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator
from virtual_gpus.gpus import format_bytes

from benchmarks.memory_tables import peak
from benchmarks.reference.compare import GOAL

MIB = 1 << 20
WIDTH = 7.0  # inches
BLUE, ORANGE = "#0072B2", "#D55E00"  # of Okabe and Ito's palette, which colour-blind readers tell apart
BAND = GOAL["peak_allocated"].largest


def predicted_against_measured(real: dict, virtual: dict, tracker: dict, meta: dict) -> Figure:
    """One mark per case and tool: across what the real GPU measured, up what was predicted, both on log scales.

    real, virtual: case -> figures as in steps.json; tracker: case -> bytes, may be empty. Returns the figure.
    """
    figure = Figure(figsize=(WIDTH, 6.2), layout="constrained")
    axes = figure.add_subplot()
    measured = {name: peak(case) for name, case in real.items()}
    series = [("virtual GPU", {name: peak(case) for name, case in virtual.items()}, BLUE, "o", BLUE)]
    if tracker:
        series.append(("PyTorch's MemTracker", tracker, ORANGE, "^", "none"))
    every = [value for group in (measured, *(points for _, points, *_ in series)) for value in group.values()]
    low, high = min(every) / 1.2, max(every) * 1.2
    lowest = {name: min(points[name] for _, points, *_ in series if name in points) for name in measured}
    _names(axes, measured, lowest, low, high)
    for label, points, colour, marker, face in series:
        across = [measured[name] for name in points]
        axes.plot(across, list(points.values()), marker, color=colour, label=label, markersize=7, markerfacecolor=face)
    _identity(axes, low, high)
    _finish(axes, low, high, meta)
    return figure


def _identity(axes: Axes, low: float, high: float) -> None:
    """The line on which a prediction is right, and the goal around it."""
    ends, below, above = [low, high], [low * (1 - BAND), high * (1 - BAND)], [low * (1 + BAND), high * (1 + BAND)]
    axes.plot(ends, ends, color="0.3", linewidth=0.8, label="as measured", zorder=1)
    axes.fill_between(ends, below, above, color="0.8", label=f"within {100 * BAND:.0f} %", zorder=0)


def _names(axes: Axes, measured: dict, lowest: dict, low: float, high: float) -> None:
    """The cases' names stand along the bottom, a line up from each to its marks."""
    names = sorted(measured, key=measured.get)
    bottom = _bottom(low, high)
    for name, place in zip(names, _apart([math.log(measured[name]) for name in names], low, high), strict=True):
        axes.annotate(name, (measured[name], lowest[name]), (math.exp(place), bottom * 1.02), rotation=90, ha="center",
                      va="bottom", fontsize=8, color="0.25", zorder=2,
                      arrowprops={"arrowstyle": "-", "color": "0.7", "linewidth": 0.6, "shrinkB": 5})  # fmt: skip


def _bottom(low: float, high: float) -> float:
    """Where the vertical axis begins: under the marks, with room for the names."""
    return low / (high / low) ** 0.42


def _apart(places: list[float], low: float, high: float, least: float = 0.034) -> list[float]:
    """The same places, moved until neighbours are `least` of the axis apart: to both sides of where they crowd."""
    gap, moved = least * math.log(high / low), list(places)
    for _ in range(200):
        for i in range(1, len(moved)):
            overlap = gap - (moved[i] - moved[i - 1])
            if overlap > 0:
                moved[i - 1], moved[i] = moved[i - 1] - overlap / 2, moved[i] + overlap / 2
    return moved


def _finish(axes: Axes, low: float, high: float, meta: dict) -> None:
    axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(_bottom(low, high), high))
    powers = range(math.ceil(math.log2(_bottom(low, high))), math.floor(math.log2(high)) + 1)
    for axis, start in ((axes.xaxis, low), (axes.yaxis, _bottom(low, high))):
        ticks = [2.0**power for power in powers if 2.0**power >= start]
        axis.set_ticks(ticks)
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(FuncFormatter(lambda value, _: format_bytes(round(value))))
    axes.grid(color="0.92")
    axes.set_axisbelow(True)
    axes.set_xlabel(f"measured: {meta['gpu']}, torch {meta['torch'].split('+')[0]}")
    axes.set_ylabel("predicted")
    axes.set_title("Peak memory of training steps: predicted against measured", fontsize=11)
    axes.legend(loc="upper left", frameon=False)
