"""Draws what a `MemoryMonitor` recorded: allocated memory over a run, a panel per GPU, and says the same in words."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from textwrap import fill

import matplotlib.pyplot as plt
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator, StrMethodFormatter

from helpers.measure import GiB, format_bytes, unit_of
from helpers.measure.monitor.run import Run, Span
from helpers.show.plots import COLOURS, HATCHES, WIDTH
from helpers.show.plots.alt_text import set_alt_text

MOST_POINTS = 4_000  # more than the picture has pixels
MOST_PHASES = 60  # in more, neither their colours nor the curve's ups and downs can be told apart
STRETCHES = 320  # of a long run at most: two pixels each
BAND = "from lowest to highest of each step; phases are left out"
PER_CHARACTER = 0.0115  # of the width of the axes, at the size of a phase's name
# A colour and a hatch each, light enough for a dark line on top; other names take what is left, in order.
PHASES = {"forward": ("#56B4E9", ""), "backward": ("#E69F00", "////"), "step": ("#009E73", "....")}
SPARE = [colour for colour in COLOURS if colour not in {colour for colour, _ in PHASES.values()}]
PEAK = {"marker": "D", "color": "#D55E00", "mec": "white", "ms": 7, "ls": "none"}
CROSS = {"marker": "x", "color": "black", "ms": 11, "mew": 2.5, "ls": "none"}


def plot_memory(monitor, title: str | None = None, x: str = "event", around: int | None = None) -> Figure:
    """Allocated memory of every recorded GPU, phases shaded and named, the peak marked with what held it,
    a cross where memory ran out. Of a long run, with many phases, a band from the lowest to the highest is drawn.

    x: "event" (each allocation and each free is one: the same on every run) or "ms" (from the first event on, by
    PyTorch's clock: how long it took). around: draw so many events before and after each GPU's own peak; None: all.
    Returns the figure. Raises ValueError for another x and for `around` below 1, and the monitor's errors.
    """
    if x not in ("event", "ms"):
        raise ValueError(f"x={x!r}: give 'event' or 'ms'.")
    if around is not None and around < 1:
        raise ValueError(f"around={around}: give the number of events before and after the peak, 1 or more.")
    whole = [monitor.run(gpu) for gpu in monitor.indices]
    runs = whole if around is None else [_near_the_peak(run, around) for run in whole]
    styles = _styles(runs)
    title = fill(title or "", 66)
    handles = _handles(runs, styles)
    columns, few = _columns(handles), len(runs) <= 4
    height = 0.95 + (1.75 if few else 1.5) * len(runs) + 0.2 * (-(-len(handles) // columns) + title.count("\n"))
    figure, rows = plt.subplots(len(runs), figsize=(WIDTH, height), squeeze=False, sharey=True, layout="constrained")
    top = max(max(run.timeline.allocated) for run in runs)
    unit, name = unit_of(top)
    for run, full, ax in zip(runs, whole, rows[:, 0], strict=True):
        _draw(ax, run, unit, x, styles)
        text = _headline(full, monitor.watched).replace(f" {name}", f"\u00a0{name}")  # number and unit stay together
        ax.set_title(fill(text, 92), loc="left", fontsize=9)
    # Above the peak there is room for its figure, and above that for the phases' names.
    rows[0, 0].set_ylim(0, (1.42 if few else 1.6) * top / unit or 1)
    rows[-1, 0].set_xlabel("event (an allocation or a free)" if x == "event" else "time in ms")
    figure.supylabel(f"allocated memory in {name}", fontsize=10)
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, frameon=False, fontsize=9)
    if title:
        figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    set_alt_text(figure, "\n".join(filter(None, (title, describe_memory(monitor)))))
    plt.close(figure)  # a cell that ends with it shows it once, and figures do not pile up
    return figure


def describe_memory(monitor) -> str:
    """The picture in words: per GPU the peak, when it was, and what held it. Errors: `MemoryMonitor.run`."""
    lines = []
    for gpu in monitor.indices:
        lines += [_headline(monitor.run(gpu), monitor.watched) + ".", monitor.note(gpu)]
    return "\n".join(line for line in lines if line)


def _headline(run: Run, watched: bool) -> str:
    peak = run.peak()
    where = f" in {peak.phase}" if peak.phase else ""
    said = f"GPU {run.gpu}: peak {format_bytes(peak.bytes)}{where} (event {peak.event:,} of {run.timeline.last:,})"
    said += f": {_held(run)}" if watched and peak.bytes else ""
    return said + (f"; out of memory after event {run.timeline.ooms[0]:,}" if run.timeline.ooms else "")


def _held(run: Run) -> str:
    """ "activations 512 MiB, parameters 46.8 MiB", the largest first; what is there at all."""
    unit = "GiB" if run.peak().bytes >= 2 * GiB else "MiB"
    held = sorted(run.at_peak().items(), key=lambda item: -item[1])
    return ", ".join(f"{kind} {format_bytes(size, unit)}" for kind, size in held if size)


def _near_the_peak(run: Run, around: int) -> Run:
    """The run from `around` events before its peak to as many after it."""
    line = run.timeline
    peak = run.peak().event - line.lost
    start, end = max(0, peak - around), peak + around + 1
    ooms = [event for event in line.ooms if start <= event - line.lost < end]
    part = replace(line, allocated=line.allocated[start:end], ms=line.ms[start:end], ooms=ooms, lost=line.lost + start)
    return replace(run, timeline=part)


def _styles(runs: Sequence[Run]) -> dict[str, tuple[str, str]]:
    names = dict.fromkeys(span.phase for run in runs if not _is_long(run) for span in _phases(run))
    others = [name for name in names if name not in PHASES]
    spare = {name: (SPARE[i % len(SPARE)], HATCHES[(3 + i) % 7]) for i, name in enumerate(others)}
    return {name: PHASES.get(name) or spare[name] for name in names}


def _draw(ax: Axes, run: Run, unit: int, x: str, styles: dict) -> None:
    line, peak = run.timeline, run.peak()
    places = range(line.lost, line.last + 1) if x == "event" else line.ms
    end = max(places[-1], 1e-3 if x == "ms" else 1)
    if _is_long(run):
        _band(ax, run, places, unit)
    else:
        for span in _phases(run):
            edges = [places[event - line.lost] for event in (span.start, span.end)]
            _shade(ax, span.phase, edges, end - places[0], styles)
        kept = _thinned(line.allocated)
        ax.plot([places[i] for i in kept], [line.allocated[i] / unit for i in kept], color="black", lw=1.1,
                drawstyle="steps-post")  # fmt: skip
    for event in line.ooms:
        ax.plot(places[max(0, event - line.lost)], line.after(event) / unit, **CROSS, zorder=7, clip_on=False)
    _mark_peak(ax, places[peak.event - line.lost], peak.bytes / unit, places[0], end, format_bytes(peak.bytes))
    ax.set_xlim(places[0], end)
    if x == "event":
        ax.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
    if end >= 1000:
        ax.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(axis="y", color="0.9")
    ax.set_axisbelow(True)


def _phases(run: Run) -> list[Span]:
    """The phases, as far as the curve has them."""
    first, last = run.timeline.lost, run.timeline.last
    spans = [Span(max(first, span.start), min(span.end, last), span.phase) for span in run.spans()]
    return [span for span in spans if span.phase and span.start < span.end]


def _is_long(run: Run) -> bool:
    return len(_phases(run)) > MOST_PHASES


def _shade(ax: Axes, name: str, edges: Sequence[float], width: float, styles: dict) -> None:
    """A phase, with its name where that has room; the legend names them all."""
    colour, hatch = styles[name]
    ax.axvspan(*edges, **_tint(colour, hatch))
    if edges[1] - edges[0] > width * PER_CHARACTER * (len(name) + 1):
        ax.text(sum(edges) / 2, 0.985, name, transform=ax.get_xaxis_transform(), ha="center", va="top", fontsize=8,
                color="0.25", bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5, "alpha": 0.6})  # fmt: skip


def _band(ax: Axes, run: Run, places: Sequence[float], unit: int) -> None:
    """From the lowest to the highest of each step: a curve of thousands of ups and downs would be one black spot."""
    values, starts = run.timeline.allocated, _starts(run)
    pieces = [values[start:end] for start, end in pairwise([*starts, len(values)])]
    low, high = ([pick(piece) / unit for piece in pieces] for pick in (min, max))
    where = [*(places[start] for start in starts), places[-1]]
    ax.fill_between(where, [*low, low[-1]], [*high, high[-1]], step="post", color="#56B4E9", alpha=0.45, linewidth=0)
    for edge in (low, high):
        ax.plot(where, [*edge, edge[-1]], color="black", lw=0.9, drawstyle="steps-post")


def _starts(run: Run) -> list[int]:
    """Where steps begin, at most `STRETCHES` of them: at the phase that comes most often, or at all if none does."""
    phases = _phases(run)
    name, times = Counter(span.phase for span in phases).most_common(1)[0]
    found = [span.start for span in phases if span.phase == name or times <= MOST_PHASES // 6]
    return sorted({0, *(max(0, start - run.timeline.lost) for start in found[:: -(-len(found) // STRETCHES)])})


def _mark_peak(ax: Axes, where: float, height: float, start: float, end: float, text: str) -> None:
    """The peak and its figure: above it, where the curve never is."""
    ax.plot(where, height, **PEAK, zorder=5, clip_on=False)
    share = (where - start) / (end - start)
    side, shift = ("left", 4 if share < 0.02 else -4) if share < 0.5 else ("right", 4 if share < 0.98 else -4)
    ax.annotate(text, (where, height), (shift, 5), textcoords="offset points", fontsize=9, zorder=6, ha=side,
                va="bottom", annotation_clip=False)  # fmt: skip


def _thinned(values: Sequence[int]) -> list[int]:
    """Which points to draw: all, or of every stretch its lowest and its highest, so that no peak is lost."""
    count = len(values)
    if count <= MOST_POINTS:
        return list(range(count))
    width, kept = -(-2 * count // MOST_POINTS), {0, count - 1}
    for start in range(0, count, width):
        stretch = range(start, min(start + width, count))
        kept |= {min(stretch, key=values.__getitem__), max(stretch, key=values.__getitem__)}
    return sorted(kept)


def _columns(handles: Sequence[Artist]) -> int:
    """How many entries of the legend fit next to each other."""
    longest = max(len(handle.get_label()) for handle in handles)
    return max(1, min(5, len(handles), 92 // (longest + 9)))


def _short(name: str) -> str:
    return name if len(name) <= 40 else f"{name[:24]}…{name[-15:]}"


def _tint(colour: str, hatch: str) -> dict:
    """A light colour with a hatch of the same: a dark line on top is read well."""
    return {"facecolor": to_rgba(colour, 0.25), "edgecolor": to_rgba(colour, 0.4), "hatch": hatch, "linewidth": 0}


def _handles(runs: Sequence[Run], styles: dict) -> list[Artist]:
    """The legend's: phases, the band of a long run, peak and cross."""
    found: list[Artist] = [Patch(**_tint(*look), label=_short(name)) for name, look in styles.items()]
    if any(map(_is_long, runs)):
        found.append(Patch(facecolor="#56B4E9", alpha=0.45, edgecolor="black", label=BAND))
    found.append(Line2D([], [], **PEAK, label="peak"))
    if any(run.timeline.ooms for run in runs):
        found.append(Line2D([], [], **CROSS, label="out of memory"))
    return found
