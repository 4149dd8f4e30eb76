"""Draws memory as horizontal bars, with one row per GPU and a number at the end of each bar.

    memory_bars(readings)                            peaks of allocated and reserved memory
    compare_bars({"one": readings, "two": others})   several situations, GPU by GPU

The frame behind a bar is the GPU's capacity. Memory that does not fit extends beyond it, with its own colour and hatch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from textwrap import fill

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from helpers.measure import Reading, Readings, format_bytes, unit_of
from helpers.show.style import ASKED, OVER, TAKEN, WIDTH, legend_below, open_frame, series_style, set_alt_text
from helpers.show.words import check_field, describe, word


def memory_bars(readings: Readings, title: str | None = None, figure: Figure | None = None) -> Axes:
    """Draw for each GPU the peaks of allocated and of reserved memory, and the GPU's capacity.

    For a GPU that ran out of memory, the row shows that moment and the request that failed. If all peaks are small, the
    axis ends before the capacity, and its label says so. `figure`: an empty figure to draw in, such as `empty_figure`.
    Returns the axes. Raises ValueError if there are no readings.
    """
    if not readings:
        raise ValueError("There are no readings to draw. Pass the result of read_memory() or peak_memory(step).")
    series = {"peak allocated": (readings, "peak_allocated"), "peak reserved": (readings, "peak_reserved")}
    labels = [f"GPU {reading.index}\nof {format_bytes(reading.capacity)}" for reading in readings]
    ax = _draw(series, labels, title, figure)
    set_alt_text(ax.figure, title, describe(readings))
    return ax


def compare_bars(situations: Mapping[str, Readings], field: str = "peak_allocated", title: str | None = None) -> Axes:
    """Draw several situations side by side, with one bar for each GPU and situation.

    `field`: "peak_allocated", "peak_reserved", "allocated", "reserved" or "driver_used". Situations may have different
    numbers of GPUs. Memory that does not fit is drawn as in `memory_bars`. Returns the axes. Raises ValueError for
    missing readings or an unknown field.
    """
    if not situations or not all(situations.values()):
        raise ValueError("Pass at least one situation, each with readings: {'DataParallel': peak_memory(step)}.")
    for readings in situations.values():
        check_field(readings, field)
    labels = [f"GPU {reading.index}" for reading in max(situations.values(), key=len)]
    series = {name: (readings, field) for name, readings in situations.items()}
    ax = _draw(series, labels, title)
    ax.set_xlabel(f"{word(field)}, {ax.get_xlabel()}")
    set_alt_text(ax.figure, title, describe(situations, field))
    return ax


def empty_figure(gpus: int) -> Figure:
    """Return a figure for `memory_bars` of this number of GPUs. It does not use pyplot, so threads can draw in it."""
    return Figure(figsize=(WIDTH, 1.2 + 0.62 * gpus), layout="constrained")


@dataclass
class _Bar:
    """One bar, with sizes in bytes. `parts`: (name, end, style); each part begins at the end of the one before."""

    y: float
    edge: int
    parts: list[tuple[str, float, dict]]
    text: str

    @property
    def end(self) -> float:
        return self.parts[-1][1]


def _bar(reading: Reading, field: str, y: float, name: str, style: dict) -> _Bar:
    edge, refused = reading.edge(field), reading.refused
    if refused is None:
        value = getattr(reading, field)
        if value <= edge:
            return _Bar(y, edge, [(name, value, style)], format_bytes(value))
        parts = [(name, edge, style), ("over the capacity", value, OVER)]
        return _Bar(y, edge, parts, f"{format_bytes(value)}: {format_bytes(value - edge)} over")
    on_gpu = reading.capacity - refused.free
    value = {"allocated": refused.allocated, "reserved": refused.reserved}.get(field.removeprefix("peak_"), on_gpu)
    taken = max(value, refused.reserved if refused.limited else on_gpu)
    parts = [(name, value, style)]
    if taken > value:  # used by PyTorch's cache, CUDA's context, or other programs
        parts.append(("taken otherwise", taken, TAKEN))
    parts.append(("asked for when memory ran out", taken + refused.requested, ASKED))
    over = f": {format_bytes(refused.over)} over" if refused.over else " refused"
    return _Bar(y, edge, parts, f"{format_bytes(value)} + {format_bytes(refused.requested)}{over}")


def _draw(
    series: Mapping[str, tuple[Readings, str]], labels: Sequence[str], title: str | None, figure: Figure | None = None
) -> Axes:
    """Draw a bar for each series (readings, field) and each GPU. `labels` are the names of the rows."""
    size = WIDTH, 1.2 + (0.1 + 0.26 * len(series)) * len(labels)
    ax = (figure or plt.figure(figsize=size, layout="constrained")).subplots()
    bars = []
    for place, (name, (readings, field)) in enumerate(series.items()):
        shift = 0.8 * (place + 0.5) / len(series) - 0.4
        for row, reading in enumerate(readings):
            bars.append(_bar(reading, field, row + shift, fill(name, 40), series_style(place)))
    top, capacity = max(bar.end for bar in bars), max(bar.edge for bar in bars)
    zoomed = 0 < top < capacity / 8
    length = top if zoomed else max(top, capacity)
    unit, unit_name = unit_of(length)
    keys = _draw_bars(ax, bars, 0.7 / len(series), unit)
    ax.set_xlabel(f"memory in {unit_name}" + (" (the axis ends before the capacity)" if zoomed else ""))
    ax.set_yticks(range(len(labels)), labels, fontsize=9)
    ax.tick_params(axis="y", length=0)
    ax.set(xlim=(0, 1.03 * length / unit), ylim=(len(labels) - 0.5, -0.5))
    open_frame(ax, grid="x")
    ax.set_title(fill(title or "", 66), loc="left", fontsize=11)
    legend_below(ax.figure, keys)
    _write_figures(ax, bars, unit)
    return ax


def _draw_bars(ax: Axes, bars: Sequence[_Bar], height: float, unit: int) -> list:
    """Draw the bars and return the legend's keys."""
    keys: dict[str, Patch] = {}
    for bar in bars:
        ax.barh(bar.y, bar.edge / unit, 1.1 * height, facecolor="white", edgecolor="0.55", zorder=1)
        start = 0.0
        for name, end, style in bar.parts:
            ax.barh(bar.y, (end - start) / unit, height, left=start / unit, zorder=2, **style)
            keys.setdefault(name, Patch(label=name, **style))
            start = end
        if start > bar.edge:
            ax.vlines(bar.edge / unit, bar.y - 0.55 * height, bar.y + 0.55 * height, "black", lw=2.5, zorder=2.5)
    return [*keys.values(), Patch(facecolor="white", edgecolor="0.55", label="capacity")]


def _write_figures(ax: Axes, bars: Sequence[_Bar], unit: int) -> None:
    """Write each bar's text to the right of it, or of its frame if they would overlap. Lengthen the axis to fit."""
    box = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}
    # The layout ignores the texts. Otherwise it would shrink the axes for texts that are still too long.
    look = {"textcoords": "offset points", "va": "center", "fontsize": 9, "bbox": box, "zorder": 3, "in_layout": False}
    texts = [ax.annotate(bar.text, (0, bar.y), (5, 0), **look) for bar in bars]
    ax.figure.draw_without_rendering()
    width = ax.get_window_extent().width
    shares = [(text.get_window_extent().width + 0.2 * ax.figure.dpi) / width for text in texts]
    for _ in range(2):  # twice, because on a longer axis the texts cover more of its units
        limit = ax.get_xlim()[1]
        for bar, text, share in zip(bars, texts, shares, strict=True):
            on_the_edge = bar.end < bar.edge <= bar.end + share * limit * unit
            text.xy = (bar.edge if on_the_edge else bar.end) / unit, bar.y
        ends = [text.xy[0] / max(1 - share, 0.2) for text, share in zip(texts, shares, strict=True)]
        ax.set_xlim(0, max(limit, *ends))
