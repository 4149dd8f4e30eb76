"""Horizontal memory bars with a number at the end of each: no text is cut off, none lies on another.

The text of a bar stands to the right of it and of its marker, and the axis is made long enough
for the longest, measured on the drawn figure. A text that fits between a bar and its marker stands there, so that the
axis need not reach far beyond the capacity. What is over a bar's edge is drawn apart, beyond a line across its box.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from textwrap import fill

from matplotlib.axes import Axes
from matplotlib.container import BarContainer

from helpers.measure import unit_of
from helpers.show.plots.palette import OVER

MARKER = {"marker": "D", "color": "black", "mec": "white", "ms": 7, "ls": "none"}
FRAME = {"marker": "s", "mfc": "white", "mec": "0.55", "ms": 9, "ls": "none"}
EDGE = {"color": "black", "linewidth": 2.5, "solid_capstyle": "butt"}


@dataclass(frozen=True)
class Bar:
    """One bar from `start` to `value`; sizes in bytes, `y` and `height` in rows, `name` for the legend.

    A bar with a `start` continues another in the same place, which then has no text. `limit`: the edge of this bar
    where it is not the capacity.
    """

    y: float
    height: float
    value: float
    capacity: float
    text: str = ""
    style: dict = field(default_factory=dict)
    name: str | None = None
    marker: float | None = None
    start: float = 0
    limit: float | None = None

    @property
    def end(self) -> float:
        """Where the text may begin, in bytes."""
        return max(self.value, self.marker or 0)

    @property
    def edge(self) -> float:
        """What it must not be longer than."""
        return self.capacity if self.limit is None else self.limit


def draw_bars(
    ax: Axes,
    bars: Sequence[Bar],
    outlines: Sequence[tuple[float, float, float]],
    title: str | None = None,
    marker_name: str = "",
) -> None:
    """Draw `bars` on `ax` with texts, x axis, legend and title, and an empty box per (y, height, capacity).

    Where every bar is shorter than an eighth of the capacity the axis ends after the longest and says so.
    """
    top, capacity = max(bar.end for bar in bars), max(bar.capacity for bar in bars)
    zoomed = 0 < top < capacity / 8
    length = top if zoomed else max(top, capacity)
    unit, name = unit_of(length)
    for y, height, full in outlines:
        ax.barh(y, full / unit, height, facecolor="white", edgecolor="0.55", linewidth=1, zorder=1)
    _draw(ax, bars, unit)
    _draw_edges(ax, bars, outlines, unit)
    ax.set_xlim(0, 1.03 * length / unit)
    ax.set_xlabel(f"memory in {name}" + (" (the axis ends before the capacity)" if zoomed else ""))
    ax.grid(axis="x", color="0.9")
    ax.set_axisbelow(True)
    if any(bar.marker is not None for bar in bars):
        ax.plot([], [], **MARKER, label=marker_name)
    finish(ax, title)
    _place_texts(ax, [bar for bar in bars if bar.text], unit)


def finish(ax: Axes, title: str | None) -> None:
    """Legend above the axes, in as many columns as its width allows, and the title above the legend."""
    ax.spines[["top", "right"]].set_visible(False)
    if ax.get_legend_handles_labels()[1]:
        pad = _legend(ax) * 72 / ax.figure.dpi + 4
    else:
        pad = 6
    if title:
        ax.set_title(fill(title, 66), loc="left", fontsize=11, pad=pad)


def _draw(ax: Axes, bars: Sequence[Bar], unit: int) -> None:
    """The bars, what is over the edge, and the markers; the legend names each once, in this order."""
    named = set()
    for bar in sorted(bars, key=lambda bar: bar.start > 0):
        _draw_part(ax, bar, bar.start, min(bar.value, bar.edge), unit, bar.style, bar.name, named)
    for bar in bars:
        if bar.value > bar.edge:
            _draw_part(ax, bar, bar.edge, bar.value, unit, OVER, "over the edge", named)
        if bar.marker is not None:
            ax.plot(bar.marker / unit, bar.y, **MARKER, zorder=4)


def _draw_part(ax: Axes, bar: Bar, start: float, end: float, unit: int, style: dict, name, named: set) -> None:
    label = None if name in named else name
    ax.barh(bar.y, (end - start) / unit, bar.height, left=start / unit, label=label, zorder=2, **style)
    named.add(name)


def _draw_edges(ax: Axes, bars: Sequence[Bar], outlines: Sequence[tuple[float, float, float]], unit: int) -> None:
    """A line across each box out of which a bar reaches; the legend says what the boxes and the lines are."""
    edges = {
        (bar.edge / unit, y - height / 2, y + height / 2): "capacity" if bar.limit is None else "limit"
        for bar in bars
        for y, height, _ in outlines
        if bar.value > bar.edge and abs(bar.y - y) < height / 2
    }
    for x, low, high in edges:
        ax.plot([x, x], [low, high], **EDGE, zorder=2.5)
    for name in dict.fromkeys(edges.values()):
        ax.plot([], [], marker="|", ls="none", ms=11, mew=2.5, color="black", label=name)
    if "capacity" not in edges.values():
        ax.plot([], [], **FRAME, label="capacity")


def _legend(ax: Axes) -> float:
    """Put the legend above the axes, markers last; its height in pixels."""
    entries = list(zip(*ax.get_legend_handles_labels(), strict=True))
    entries.sort(key=lambda entry: not isinstance(entry[0], BarContainer))
    handles, labels = zip(*entries, strict=True)
    place = {"loc": "lower left", "bbox_to_anchor": (0, 1), "borderaxespad": 0.2}
    for columns in range(len(labels), 0, -1):
        legend = ax.legend(handles, labels, ncols=columns, frameon=False, fontsize=9, **place)
        legend.set_in_layout(False)  # a legend that is too wide must not squeeze the axes it is measured against
        ax.figure.draw_without_rendering()
        box = legend.get_window_extent()
        if box.width <= ax.get_window_extent().width:
            break
    legend.set_in_layout(True)
    return box.height


def _place_texts(ax: Axes, bars: Sequence[Bar], unit: int) -> None:
    """Write each text right of its bar, or of the box's edge where it would lie on it; lengthen the axis."""
    white = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}
    texts = [
        ax.annotate(
            bar.text, (bar.end / unit, bar.y), (9 if bar.marker else 5, 0), textcoords="offset points",
            va="center", fontsize=9, bbox=white, zorder=3, annotation_clip=False,
            in_layout=False,  # else the layout would shrink the axes for texts that still stick out
        )
        for bar in bars
    ]  # fmt: skip
    ax.figure.draw_without_rendering()
    room = ax.get_window_extent().width
    margins = [(text.xyann[0] + 5) * ax.figure.dpi / 72 for text in texts]  # before and after each text
    shares = [(text.get_window_extent().width + each) / room for text, each in zip(texts, margins, strict=True)]
    for _ in range(2):  # a longer axis makes the texts reach further in its units: once more with the new length
        limit = ax.get_xlim()[1]
        for bar, text, share in zip(bars, texts, shares, strict=True):
            text.xy = (_start(bar, share * limit * unit) / unit, bar.y)
        ends = [text.xy[0] / max(1 - share, 0.2) for text, share in zip(texts, shares, strict=True)]
        ax.set_xlim(0, max(limit, *ends))


def _start(bar: Bar, length: float) -> float:
    """Where a text of `length` bytes begins: after the bar, after its marker, or after the box's edge."""
    if bar.marker is not None and bar.value + length <= bar.marker <= bar.edge:
        return bar.value
    return bar.edge if bar.end < bar.edge <= bar.end + length else bar.end
