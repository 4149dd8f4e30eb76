"""Pictures of memory and loss: readings in, matplotlib axes out.

Made for a notebook (about 700 pixels wide) and for every eye: colours that colour-blind readers tell apart,
a hatch beside every colour, numbers with units on the bars. `describe` puts a picture into words; print it
beside the picture.

Usage:  memory_bars(readings)                            one GPU per row: peaks allocated and reserved
        compare_bars({"one": readings, "two": others})   several situations, GPU by GPU
        loss_curves({"train": losses})                   one line per history
"""

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from textwrap import fill

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from helpers.bars import Bar, draw_bars, finish
from helpers.readings import GiB, Readings, format_bytes

WIDTH = 7.0  # inches; at matplotlib's 100 dots per inch 700 pixels, the width of a notebook's output
# Okabe and Ito's palette, in the order that also differs most in lightness.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#F0E442")
HATCHES = ("", "////", "....", "xxxx", "\\\\\\\\", "----", "++++")
LINES = ("-", "--", "-.", ":")
MARKERS = "osD^vPX"


def memory_bars(
    readings: Readings, ax: Axes | None = None, labels: Sequence[str] | None = None, title: str | None = None
) -> Axes:
    """Per GPU its capacity (outline), the peak that PyTorch allocated (dark) and the peak reserved (hatched).

    `labels` replace "GPU 0", "GPU 1", .... Where all peaks are small the axis ends before the capacity and
    says so. Returns the axes. Raises ValueError for no readings, or for other than one label per GPU.
    """
    labels = _labels(readings, labels)
    bars = []
    for row, reading in enumerate(readings):
        for shift, what, style in ((-0.2, "peak_allocated", _style(0)), (0.2, "peak_reserved", _style(5, 1))):
            value, name = getattr(reading, what), _word(what) if row == 0 else None
            bars.append(Bar(row + shift, 0.36, value, reading.capacity, format_bytes(value), style, name))
    ax = _rows(ax, labels, height=0.62)
    outlines = [(row, 0.9, reading.capacity) for row, reading in enumerate(readings)]
    draw_bars(ax, bars, outlines, title)
    return ax


def compare_bars(
    situations: Mapping[str, Readings],
    ax: Axes | None = None,
    reference: Mapping[str, Sequence[float | None]] | None = None,
    field: str = "peak_allocated",
    title: str | None = None,
    reference_name: str = "article",
) -> Axes:
    """Several situations side by side, GPU by GPU, one bar each for `field` of their readings.

    `reference` holds somebody else's figures, in bytes per GPU (None where unknown), under the name of their
    situation; they appear as diamonds, called `reference_name`. Situations may have different numbers of
    GPUs. Returns the axes. Raises ValueError for no readings, or a reference that fits no situation.
    """
    reference = _checked(situations, reference or {})
    longest = max(situations.values(), key=len)
    bars = []
    for place, (name, readings) in enumerate(situations.items()):
        shape = (0.8 * (place + 0.5) / len(situations) - 0.4, 0.7 / len(situations), _style(place, place))
        values = [getattr(reading, field) for reading in readings]
        bars += _situation(name, readings, values, reference.get(name, ()), reference_name, *shape)
    ax = _rows(ax, [f"GPU {reading.index}" for reading in longest], height=0.1 + 0.26 * len(situations))
    draw_bars(ax, bars, [(bar.y, bar.height * 1.1, bar.capacity) for bar in bars], title, reference_name)
    ax.set_xlabel(f"{_word(field)}, {ax.get_xlabel()}")
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
    for place, (name, history) in enumerate(histories.items()):
        style = {"color": COLOURS[place % 7], "ls": LINES[place % 4], "marker": MARKERS[place % 7]}
        steps = range(1, len(history) + 1)
        ax.plot(steps, [float(v) for v in history], label=fill(name, 40), markevery=_every(history), **style)
    ax.set(xlabel=xlabel, ylabel="loss")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.grid(color="0.9")
    finish(ax, title)
    return ax


def describe(readings: Readings | Mapping[str, Readings], field: str = "peak_allocated") -> str:
    """A picture in words: per situation the fullest GPU, the others, and how far they are apart."""
    if isinstance(readings, Mapping):
        return "\n".join(f"{name}: {describe(each, field)}" for name, each in readings.items())
    if not readings:
        return "No readings yet."
    values = [getattr(reading, field) for reading in readings]
    full = values.index(max(values))
    of = f"{format_bytes(values[full])} ({_word(field)}) of {format_bytes(readings[full].capacity)}"
    others = values[:full] + values[full + 1 :]
    if not others:
        return f"GPU {readings[full].index} holds {of}."
    low, high = format_bytes(min(others)), format_bytes(max(others))
    if low == high == format_bytes(values[full]):
        return f"All {len(values)} GPUs hold {of} each."
    span = low if low == high else f"{low} to {high}"
    times = f", {values[full] / min(others):.1f} times the emptiest" if min(others) else ""
    rest = "the other GPU holds" if len(others) == 1 else f"the other {len(others)} GPUs hold"
    return f"GPU {readings[full].index} holds {of}{times}; {rest} {span}{'' if len(others) == 1 else ' each'}."


def _labels(readings: Readings, labels: Sequence[str] | None) -> list[str]:
    if not len(readings):
        raise ValueError("There are no readings to draw: give what read_memory() or peak_memory(step) returned.")
    labels = [f"GPU {reading.index}" for reading in readings] if labels is None else list(labels)
    if len(labels) != len(readings):
        raise ValueError(f"{len(labels)} labels for {len(readings)} GPUs: give one label per GPU.")
    return [
        f"{fill(label, 18)}\nof {format_bytes(reading.capacity)}"
        for label, reading in zip(labels, readings, strict=True)
    ]


def _checked(situations: Mapping[str, Readings], reference: Mapping) -> dict:
    if not situations or not all(len(readings) for readings in situations.values()):
        raise ValueError("Give at least one situation, each with readings: {'DataParallel': peak_memory(step)}.")
    unknown = [name for name in reference if name not in situations]
    if unknown:
        raise ValueError(f"The reference names {unknown}, the situations are {list(situations)}.")
    for name, figures in reference.items():
        if len(figures) > len(situations[name]):
            raise ValueError(f"{name!r} has {len(situations[name])} GPU(s), its reference {len(figures)} figures.")
    return dict(reference)


def _situation(name, readings, values, told, told_name, shift, height, style) -> list[Bar]:
    """The bars of one situation, one per GPU, `shift` rows below the GPU's middle; `told`: reference."""
    bars = []
    for row, (reading, value, figure) in enumerate(zip_longest(readings, values, told)):
        text = format_bytes(value)
        if figure is not None:  # as it was told: digits that nobody gave would be invented
            text += f" ({told_name}: {figure / GiB:.3g} GiB)"
        legend = fill(name, 40) if row == 0 else None
        bars.append(Bar(row + shift, height, value, reading.capacity, text, style, legend, figure))
    return bars


def _rows(ax: Axes | None, labels: list[str], height: float) -> Axes:
    """Axes with one row per label, the first on top; new ones are `height` inches per row."""
    if ax is None:
        _, ax = plt.subplots(figsize=(WIDTH, 1.2 + height * len(labels)), layout="constrained")
    ax.set_yticks(range(len(labels)), labels, fontsize=9)
    ax.tick_params(axis="y", length=0)
    ax.set_ylim(len(labels) - 0.5, -0.5)
    return ax


def _style(colour: int, hatch: int = 0) -> dict:
    return {"color": COLOURS[colour % 7], "hatch": HATCHES[hatch % 7], "edgecolor": "white", "linewidth": 0}


def _word(field: str) -> str:
    return field.replace("_", " ")


def _every(history: Sequence[float]) -> int:
    """Markers on at most about twenty points, so that a long history stays a line."""
    return max(1, len(history) // 20)
