"""Draws the memory of each GPU as three bars, one inside the other, with the figures on the right.

    memory_bars(readings)                            one situation
    compare_bars({"one": readings, "two": others})   several, below each other

The widest bar is what the driver counts (GPUtil's `memoryUsed`): the memory of all programs, and CUDA's context. Inside
it is the most that PyTorch has reserved (`torch.cuda.max_memory_reserved`), and inside that the most that tensors have
taken (`torch.cuda.max_memory_allocated`). The frame is the GPU's capacity. The driver's figure is that of now, and the
other two are peaks: after the cache was emptied, a peak can exceed it.
"""

from collections.abc import Mapping
from textwrap import fill

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from helpers.measure import Readings, format_bytes, unit_of
from helpers.show.style import FRAME, MEMORY, OVER, WIDTH, open_frame, set_alt_text
from helpers.show.words import describe

_FIELDS = {"driver": "driver_used", "reserved": "peak_reserved", "allocated": "peak_allocated"}  # from the outside in
_NAMES = {"driver": "driver (GPUtil)", "reserved": "peak reserved", "allocated": "peak allocated"}


def memory_bars(readings: Readings, title: str | None = None, figure: Figure | None = None) -> Figure:
    """Draw for each GPU its peaks of allocated and reserved memory, and what the driver counts now.

    If all figures are small, the axis ends before the capacity, and its label says so. What exceeds the capacity has
    its own colour. `figure`: an empty figure to draw in, such as `empty_figure`. Returns the figure. Raises ValueError
    if there are no readings.
    """
    return compare_bars({"": readings}, title, figure)


def compare_bars(situations: Mapping[str, Readings], title: str | None = None, figure: Figure | None = None) -> Figure:
    """Draw several situations below each other, on the same scale. Otherwise like `memory_bars`."""
    if not situations or not all(situations.values()):
        raise ValueError("There are no readings to draw. Pass the result of read_memory() or peak_memory(step).")
    counts = [len(readings) for readings in situations.values()]
    if figure is None:
        figure = plt.figure(figsize=(WIDTH, _height(sum(counts)) + 0.3 * len(counts) - 0.3), layout="constrained")
    found = [reading for readings in situations.values() for reading in readings]
    top = max(getattr(reading, field) or 0 for reading in found for field in _FIELDS.values())
    capacity = max(reading.capacity for reading in found)
    zoomed = 0 < top < capacity / 8
    length = top if zoomed else max(top, capacity)
    unit, unit_name = unit_of(length)
    axes = figure.subplots(len(counts), sharex=True, squeeze=False, height_ratios=counts)[:, 0]
    for ax, (name, readings) in zip(axes, situations.items(), strict=True):
        _draw(ax, readings, unit)
        ax.set_title(fill(name, 80), loc="left", fontsize=10)
    axes[-1].set_xlim(0, 1.03 * length / unit)
    axes[-1].set_xlabel(f"memory in {unit_name}" + (" (the axis ends before the capacity)" if zoomed else ""))
    shown = [kind for kind, field in _FIELDS.items() if any(getattr(reading, field) is not None for reading in found)]
    keys = [Patch(**MEMORY[kind], label=_NAMES[kind]) for kind in shown] + [Patch(**FRAME, label="capacity")]
    if any(max(reading.peak_reserved, reading.peak_allocated) > reading.capacity for reading in found):
        keys.append(Patch(**OVER, label="over the capacity"))
    figure.legend(handles=keys, loc="outside upper left", ncols=len(keys), frameon=False, fontsize=9, alignment="left",
                  title=fill(title or "", 66), title_fontsize=11, columnspacing=1.2, handlelength=1.6)  # fmt: skip
    alone = len(situations) == 1
    set_alt_text(figure, title, describe(next(iter(situations.values())) if alone else situations))
    return figure


def empty_figure(gpus: int) -> Figure:
    """Return a figure for `memory_bars` of this number of GPUs. It does not use pyplot, so threads can draw in it."""
    return Figure(figsize=(WIDTH, _height(gpus)), layout="constrained")


def _height(gpus: int) -> float:
    return 1.2 + 0.62 * gpus


def _draw(ax: Axes, readings: Readings, unit: int) -> None:
    """Draw one row for each GPU, with its figures to the right of the axes."""
    for row, reading in enumerate(readings):
        ax.barh(row, reading.capacity / unit, 0.86, zorder=1, **FRAME)
        figures = []
        for (kind, field), height in zip(_FIELDS.items(), (0.78, 0.52, 0.26), strict=True):
            size = getattr(reading, field)
            if size is None:
                continue
            figures.append(f"{format_bytes(size)} {kind}")
            ax.barh(row, size / unit, height, zorder=2, **MEMORY[kind])
            if kind != "driver" and size > reading.capacity:
                over = (size - reading.capacity) / unit
                ax.barh(row, over, height, left=reading.capacity / unit, zorder=2, **OVER)
        place = ax.get_yaxis_transform()
        ax.text(1.01, row, "\n".join(figures), transform=place, va="center", fontsize=9, linespacing=1.1)
    labels = [f"GPU {reading.index}\nof {format_bytes(reading.capacity)}" for reading in readings]
    ax.set_yticks(range(len(labels)), labels, fontsize=9)
    ax.tick_params(axis="y", length=0)
    ax.set_ylim(len(labels) - 0.5, -0.5)
    open_frame(ax, grid="x")
