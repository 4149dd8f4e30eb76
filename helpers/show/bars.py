"""The memory of each GPU as three bars, one inside the other, with the figures on the right, and as text.

    memory_bars(readings);                          one situation; without the semicolon, a notebook shows it twice
    memory_bars({"one": readings, "two": others})   several, below each other
    describe_memory(readings)                       the same as text, for readers who cannot see the picture

The widest bar is what the driver counts (GPUtil's `memoryUsed`): the memory of all programs, and CUDA's context. Inside
it is the most that PyTorch has reserved (`torch.cuda.max_memory_reserved`), and inside that the most that tensors have
taken (`torch.cuda.max_memory_allocated`). The frame is the GPU's capacity. The driver's figure is that of now, and the
other two are peaks: after the cache was emptied, a peak can exceed it.
"""

from collections.abc import Mapping, Sequence
from html import escape
from textwrap import fill
from typing import NamedTuple

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from helpers.measure.readings import NO_READINGS, Reading, Readings
from helpers.show.style import FRAME, MEMORY, MEMORY_CSS, OVER, WIDTH, open_frame, set_alt_text
from helpers.sizes import MiB, format_bytes, unit_of


class _Bar(NamedTuple):
    kind: str
    label: str
    peak: str  # the field of a reading
    now: str
    height: float  # as a share of the row


_ZOOM_BELOW = 1 / 8  # of the capacity: if all GPUs hold less, the axis ends before it
# From the outside in.
_BARS = (
    _Bar("driver", "driver (GPUtil)", "driver_used", "driver_used", 0.78),
    _Bar("reserved", "peak reserved", "peak_reserved", "reserved", 0.52),
    _Bar("allocated", "peak allocated", "peak_allocated", "allocated", 0.26),
)


def memory_bars(
    readings: Readings | Mapping[str, Readings], title: str | None = None, figure: Figure | None = None
) -> Figure:
    """Draw for each GPU its peaks of allocated and reserved memory, and what the driver counts now.

    readings: of one situation, or of several by name, which are drawn below each other, on the same scale. If all
    figures are small, the axis ends before the capacity, and its label says so. What exceeds the capacity has its own
    colour. figure: an empty figure to draw in, such as `empty_figure`. Returns the figure. Raises ValueError if there
    are no readings, and TypeError for anything else.
    """
    situations = _by_name(readings)
    if not situations or not all(situations.values()):
        raise ValueError("There are no readings to draw. Pass the result of read_memory().")
    counts = [len(situation) for situation in situations.values()]
    if figure is None:
        figure = plt.figure(figsize=(WIDTH, _height(sum(counts)) + 0.3 * len(counts) - 0.3), layout="constrained")
    gpus = [reading for situation in situations.values() for reading in situation]
    top = max(getattr(reading, bar.peak) or 0 for reading in gpus for bar in _BARS)
    capacity = max(reading.capacity for reading in gpus)
    zoomed = 0 < top < _ZOOM_BELOW * capacity
    length = top if zoomed else max(top, capacity)
    unit, unit_name = unit_of(length)
    axes = figure.subplots(len(counts), sharex=True, squeeze=False, height_ratios=counts)[:, 0]
    for ax, (name, situation) in zip(axes, situations.items(), strict=True):
        _draw(ax, situation, unit)
        ax.set_title(fill(str(name), 80), loc="left", fontsize=10)
    axes[-1].set_xlim(0, 1.03 * length / unit)
    axes[-1].set_xlabel(f"memory in {unit_name}" + (" (the axis ends before the capacity)" if zoomed else ""))
    shown = [bar for bar in _BARS if any(getattr(reading, bar.peak) is not None for reading in gpus)]
    keys = [Patch(**MEMORY[bar.kind], label=bar.label) for bar in shown] + [Patch(**FRAME, label="capacity")]
    if any(max(reading.peak_reserved, reading.peak_allocated) > reading.capacity for reading in gpus):
        keys.append(Patch(**OVER, label="over the capacity"))
    figure.legend(handles=keys, loc="outside upper left", ncols=len(keys), frameon=False, fontsize=9, alignment="left",
                  title=fill(title or "", 66), title_fontsize=11, columnspacing=1.2, handlelength=1.6)  # fmt: skip
    set_alt_text(figure, title, describe_memory(readings))
    return figure


def _by_name(readings: Readings | Mapping[str, Readings]) -> Mapping[str, Readings]:
    """Return situations by name. The name of the only one is empty. Raises TypeError for anything else."""
    situations = readings if isinstance(readings, Mapping) else {"": readings}
    for situation in situations.values():
        if not isinstance(situation, Sequence) or not all(isinstance(reading, Reading) for reading in situation):
            kind = type(situation).__name__
            raise TypeError(f"Pass what read_memory or measure_memory gives, or several by name, not a {kind}.")
    return situations


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
        for bar in _BARS:
            size = getattr(reading, bar.peak)
            if size is None:
                continue
            figures.append(f"{format_bytes(size)} {bar.kind}")
            ax.barh(row, size / unit, bar.height, zorder=2, **MEMORY[bar.kind])
            if bar.kind != "driver" and size > reading.capacity:
                over = (size - reading.capacity) / unit
                ax.barh(row, over, bar.height, left=reading.capacity / unit, zorder=2, **OVER)
        place = ax.get_yaxis_transform()
        ax.text(1.01, row, "\n".join(figures), transform=place, va="center", fontsize=9, linespacing=1.1)
    labels = [f"GPU {reading.index}\nof {format_bytes(reading.capacity)}" for reading in readings]
    ax.set_yticks(range(len(labels)), labels, fontsize=9)
    ax.tick_params(axis="y", length=0)
    ax.set_ylim(len(labels) - 0.5, -0.5)
    open_frame(ax, grid="x")


# ---- the same bars now, as HTML --------------------------------------------------------------------------------------


def bars_now(readings: Readings, heading: str) -> str:
    """Return HTML with the figures of this moment and their bars. Matplotlib would need a fifth of a second.

    The height is that of `empty_figure`. The frame is as long as the capacity, or as a power of two if all GPUs hold
    little, so that the scale rarely changes while memory grows.
    """
    capacity = max(reading.capacity for reading in readings)
    most = max(max(reading.driver_used or 0, reading.peak_reserved) for reading in readings)
    length = capacity if most >= _ZOOM_BELOW * capacity else max(1 << (most - 1).bit_length(), MiB)
    return (
        f'<div role="img" aria-label="{"; ".join(map(_html_now, readings))}" style="width: {100 * WIDTH:.0f}px; '
        f'height: {100 * _height(len(readings)):.0f}px; line-height: 20px; font-size: 13px; overflow: hidden">'
        f"<b>{escape(heading[:96])}</b><br>light: driver (GPUtil), striped: reserved, dark: allocated; "
        f"frame: {format_bytes(length)}{''.join(_row_now(reading, length) for reading in readings)}</div>"
    )


def _html_now(reading: Reading) -> str:
    peak = format_bytes(reading.peak_allocated)
    driver = "" if reading.driver_used is None else f", driver {format_bytes(reading.driver_used)}"
    return escape(
        f"GPU {reading.index}: {format_bytes(reading.allocated)} allocated, peak {peak}, "
        f"{format_bytes(reading.reserved)} reserved{driver}, of {format_bytes(reading.capacity)}"
    )


def _row_now(reading: Reading, length: int) -> str:
    bars = ""
    for bar in _BARS:
        width, margin = min(1, (getattr(reading, bar.now) or 0) / length), (1 - bar.height) / 2
        place = f"left: 0; top: {margin:.0%}; bottom: {margin:.0%}; width: {width:.2%}"
        bars += f'<div style="position: absolute; {place}; background: {MEMORY_CSS[bar.kind]}"></div>'
    frame = "position: relative; height: 26px; border: 1px solid #666; box-sizing: border-box"
    return f'<div style="padding-top: 14px">{_html_now(reading)}</div><div style="{frame}">{bars}</div>'


# ---- the text --------------------------------------------------------------------------------------------------------


def describe_memory(readings: Readings | Mapping[str, Readings]) -> str:
    """Describe each GPU's peaks of allocated and reserved memory and what the driver counts, equal GPUs in one line.

    readings: of one situation, or of several by name. A GPU that ran out of memory has the request that failed. Raises
    TypeError for anything else.
    """
    situations = _by_name(readings)
    if isinstance(readings, Mapping):
        texts = {name: describe_memory(situation) for name, situation in situations.items()}
        return "\n".join(f"{name}: {line}" for name, text in texts.items() for line in text.splitlines()) or NO_READINGS
    gpus: dict[str, list[str]] = {}  # by what is said of them
    for reading in readings:
        gpus.setdefault(_figures(reading), []).append(str(reading.index))
    return "\n".join(f"{_gpus(indices)} {figures}." for figures, indices in gpus.items()) or NO_READINGS


def _figures(reading: Reading) -> str:
    if reading.refused:
        return reading.refused.described()
    capacity = format_bytes(reading.capacity)
    peaks = f"{format_bytes(reading.peak_allocated)} allocated and {format_bytes(reading.peak_reserved)} reserved"
    if reading.peak_allocated > reading.capacity:
        return f"would need {peaks}, {format_bytes(reading.peak_allocated - reading.capacity)} more than its {capacity}"
    if reading.driver_used is None:
        return f"peaked at {peaks} of {capacity}"
    return f"peaked at {peaks}; the driver counts {format_bytes(reading.driver_used)} of {capacity}"


def _gpus(indices: list[str]) -> str:
    return f"GPU {indices[0]}" if len(indices) == 1 else f"GPUs {', '.join(indices[:-1])} and {indices[-1]} each"
