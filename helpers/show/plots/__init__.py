"""Pictures of memory and loss: readings in, matplotlib axes out.

Made for a notebook (about 700 pixels wide) and for every eye: colours that colour-blind readers tell apart,
a hatch beside every colour, numbers with units on the bars. `describe` puts a picture into words; print it
beside the picture. The same words are its alternative text (`helpers.show.plots.alt_text`).

Usage:  memory_bars(readings)                            one GPU per row: peaks allocated and reserved
        memory_bars(readings, capacity="12 GiB")         ... and what would not fit on a smaller card
        memory_bars(peak_memory(step, catch=True))       ... and what was asked for when memory ran out
        compare_bars({"one": readings, "two": others})   several situations, GPU by GPU
        loss_curves({"train": losses})                   one line per history
        pieces_picture(states)                           pieces that travel between ranks, one grid per step
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from textwrap import fill

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from helpers.measure import GiB, Readings, format_bytes
from helpers.measure.readings import with_capacity
from helpers.show.plots.alt_text import set_alt_text
from helpers.show.plots.bars import Bar, draw_bars, finish
from helpers.show.plots.lanes import held, lane
from helpers.show.plots.palette import COLOURS, HATCHES, style, styles
from helpers.show.plots.pieces import pieces_picture
from helpers.show.plots.words import check_field, describe, word

__all__ = ["COLOURS", "HATCHES", "WIDTH", "compare_bars", "describe", "loss_curves", "memory_bars", "pieces_picture"]

WIDTH = 7.0  # inches; at matplotlib's 100 dots per inch 700 pixels, the width of a notebook's output
LINES = ("-", "--", "-.", ":")
MARKERS = "osD^vPX"


def memory_bars(
    readings: Readings,
    ax: Axes | None = None,
    labels: Sequence[str] | None = None,
    title: str | None = None,
    capacity: int | str | None = None,
) -> Axes:
    """Per GPU its capacity (outline), the peak that PyTorch allocated (dark) and the peak reserved (hatched).

    A peak that is larger than the capacity reaches out of the outline, in a colour of its own; `capacity` ("12 GiB",
    or bytes) shows the readings on cards of that size. The row of a GPU that ran out of memory shows that moment
    instead of the peaks, with what was asked for.

    `labels` replace "GPU 0", "GPU 1", .... Where all peaks are small the axis ends before the capacity and
    says so. Returns the axes. Raises ValueError for no readings, for other than one label per GPU, and for a
    `capacity` with readings of a run that ran out of memory.
    """
    readings = with_capacity(readings, capacity)
    labels = _labels(readings, labels)
    bars = []
    for row, reading in enumerate(readings):
        look = {"y": row - 0.2, "height": 0.36, "style": style(0), "name": "peak allocated"}
        bars += [held(reading, "allocated", **look)] if reading.refused else lane(reading, "peak_allocated", **look)
        look = {"y": row + 0.2, "height": 0.36, "style": style(5, 1), "name": "peak reserved"}
        bars += lane(reading, "peak_reserved", **look)
    ax = _rows(ax, labels, height=0.62)
    outlines = [(row, 0.9, reading.capacity) for row, reading in enumerate(readings)]
    draw_bars(ax, bars, outlines, title)
    set_alt_text(ax, _alternative(title, describe(readings)))
    return ax


def compare_bars(
    situations: Mapping[str, Readings],
    ax: Axes | None = None,
    reference: Mapping[str, Sequence[float | None]] | None = None,
    field: str = "peak_allocated",
    title: str | None = None,
    reference_name: str = "article",
    capacity: int | str | None = None,
) -> Axes:
    """Several situations side by side, GPU by GPU, one bar each for `field` of their readings.

    `field`: "peak_allocated", "peak_reserved", "allocated", "reserved" or "driver_used". `reference` holds somebody
    else's figures, in bytes per GPU (None where unknown), under the name of their situation; they appear as diamonds,
    called `reference_name`. Situations may have different numbers of GPUs. `capacity`, and what does not fit: as in
    `memory_bars`. Returns the axes. Raises ValueError for no readings, a reference that fits no situation, a field
    that is unknown, and as `memory_bars` does for `capacity`.
    """
    reference = _checked(situations, reference or {}, field)
    situations = {name: with_capacity(readings, capacity) for name, readings in situations.items()}
    longest = max(situations.values(), key=len)
    everything = [reading for readings in situations.values() for reading in readings]
    over = any(reading.refused or getattr(reading, field) > reading.edge(field) for reading in everything)
    bars, outlines, height = [], [], 0.7 / len(situations)
    looks = styles(len(situations), with_alarm=over)
    for place, (name, readings) in enumerate(situations.items()):
        shift = 0.8 * (place + 0.5) / len(situations) - 0.4
        look = {"height": height, "style": looks[place], "name": fill(name, 40)}
        bars += _situation(readings, field, reference.get(name, ()), reference_name, shift, look)
        outlines += [(row + shift, height * 1.1, reading.edge(field)) for row, reading in enumerate(readings)]
    ax = _rows(ax, [f"GPU {reading.index}" for reading in longest], height=0.1 + 0.26 * len(situations))
    draw_bars(ax, bars, outlines, title, reference_name)
    ax.set_xlabel(f"{word(field)}, {ax.get_xlabel()}")
    set_alt_text(ax, _alternative(title, describe(situations, field)))
    return ax


def loss_curves(
    histories: Mapping[str, Sequence[float]],
    ax: Axes | None = None,
    xlabel: str = "epoch",
    title: str | None = None,
) -> Axes:
    """One line per history, its values at 1, 2, 3, .... Returns the axes. Raises ValueError for no values."""
    if not histories or not all(len(history) for history in histories.values()):
        raise ValueError("Give at least one history with at least one value, for example {'train': [2.3, 1.9]}.")
    if ax is None:
        _, ax = plt.subplots(figsize=(WIDTH, 3.2), layout="constrained")
    floats = {name: [float(value) for value in history] for name, history in histories.items()}
    for place, (name, history) in enumerate(floats.items()):
        style = {"color": COLOURS[place % 7], "ls": LINES[place % 4], "marker": MARKERS[place % 7]}
        steps = range(1, len(history) + 1)
        ax.plot(steps, history, label=fill(name, 40), markevery=_every(history), **style)
    ax.set(xlabel=xlabel, ylabel="loss")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.grid(color="0.9")
    finish(ax, title)
    said = (f"{name}: loss {history[0]:.2g} first, {history[-1]:.2g} last" for name, history in floats.items())
    set_alt_text(ax, _alternative(title, f"{'; '.join(said)} ({xlabel} 1 to {max(map(len, floats.values()))})."))
    return ax


def _labels(readings: Readings, labels: Sequence[str] | None) -> list[str]:
    if not len(readings):
        raise ValueError("There are no readings to draw: give what read_memory() or peak_memory(step) returned.")
    labels = [f"GPU {reading.index}" for reading in readings] if labels is None else list(labels)
    if len(labels) != len(readings):
        raise ValueError(f"{len(labels)} labels for {len(readings)} GPUs: give one label per GPU.")
    return [
        f"{fill(label, 18)}\nof {format_bytes(reading.capacity)}" + ("\nas memory ran out" if reading.refused else "")
        for label, reading in zip(labels, readings, strict=True)
    ]


def _checked(situations: Mapping[str, Readings], reference: Mapping, field: str) -> dict:
    if not situations or not all(len(readings) for readings in situations.values()):
        raise ValueError("Give at least one situation, each with readings: {'DataParallel': peak_memory(step)}.")
    for readings in situations.values():
        check_field(readings, field)
    unknown = [name for name in reference if name not in situations]
    if unknown:
        raise ValueError(f"The reference names {unknown}, the situations are {list(situations)}.")
    for name, figures in reference.items():
        if len(figures) > len(situations[name]):
            raise ValueError(f"{name!r} has {len(situations[name])} GPU(s), its reference {len(figures)} figures.")
    return dict(reference)


def _situation(readings, field, told, told_name, shift, look) -> list[Bar]:
    """The bars of one situation, one lane per GPU, `shift` rows below the GPU's middle; `told`: reference."""
    bars = []
    for row, (reading, figure) in enumerate(zip_longest(readings, told)):
        *before, last = lane(reading, field, y=row + shift, **look)
        if figure is not None:  # as it was told: digits that nobody gave would be invented
            last = replace(last, marker=figure, text=f"{last.text} ({told_name}: {figure / GiB:.3g} GiB)")
        bars += [*before, last]
    return bars


def _rows(ax: Axes | None, labels: list[str], height: float) -> Axes:
    """Axes with one row per label, the first on top; new ones are `height` inches per row."""
    if ax is None:
        lines = max(label.count("\n") + 1 for label in labels)
        height = max(height, 0.165 * lines + 0.08)
        _, ax = plt.subplots(figsize=(WIDTH, 1.2 + height * len(labels)), layout="constrained")
    ax.set_yticks(range(len(labels)), labels, fontsize=9)
    ax.tick_params(axis="y", length=0)
    ax.set_ylim(len(labels) - 0.5, -0.5)
    return ax


def _alternative(title: str | None, words: str) -> str:
    return f"{title}\n{words}" if title else words


def _every(history: Sequence[float]) -> int:
    """Markers on at most about twenty points, so that a long history stays a line."""
    return max(1, len(history) // 20)
