"""Draws the allocated memory of a run that a `MemoryMonitor` recorded as a curve."""

from collections.abc import Sequence
from textwrap import fill

import matplotlib.pyplot as plt
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator, StrMethodFormatter

from helpers.measure import GiB, MemoryMonitor, format_bytes, unit_of
from helpers.measure.monitor import Run, Span
from helpers.show.style import WIDTH, legend_below, open_frame, set_alt_text

MOST_PHASES = 60  # with more phases, the colours cannot be told apart
# A colour and a hatch for each phase, light enough for a dark line on top.
PHASES = {"forward": ("#56B4E9", ""), "backward": ("#E69F00", "////"), "step": ("#009E73", "....")}
PEAK = {"marker": "D", "color": "#D55E00", "mec": "white", "ms": 7, "ls": "none"}
CROSS = {"marker": "x", "color": "black", "ms": 11, "mew": 2.5, "ls": "none"}


def plot_memory(monitor: MemoryMonitor, title: str | None = None, around: int | None = None) -> Figure:
    """Draw the allocated memory of every recorded GPU by event. Each allocation and each free is an event.

    Phases are shaded, unless there are more than `MOST_PHASES`. The peak is marked, and the text above it says what
    filled it. A cross marks where memory ran out. around: draw only this number of events before and after each GPU's
    peak. Returns the figure. Raises ValueError for `around` below 1, and what `MemoryMonitor.run` raises.
    """
    if around is not None and around < 1:
        raise ValueError(f"around={around}, but the number of events before and after the peak must be 1 or more.")
    runs = [monitor.run(gpu) for gpu in monitor.indices]
    shown = [_events(run, around) for run in runs]
    phases = [_phases(run, events) for run, events in zip(runs, shown, strict=True)]
    named = {span.phase for spans in phases for span in spans}
    handles: list[Artist] = [Patch(**_tint(*look), label=name) for name, look in PHASES.items() if name in named]
    handles.append(Line2D([], [], **PEAK, label="peak"))
    if any(run.ooms for run in runs):
        handles.append(Line2D([], [], **CROSS, label="out of memory"))

    title = fill(title or "", 66)
    size = WIDTH, 1.15 + 1.75 * len(runs) + 0.2 * title.count("\n")
    figure, rows = plt.subplots(len(runs), figsize=size, squeeze=False, sharey=True, layout="constrained")
    top = max(run.peak().bytes for run in runs)
    unit, unit_name = unit_of(top)
    for run, events, spans, ax in zip(runs, shown, phases, rows[:, 0], strict=True):
        for span in spans:
            ax.axvspan(span.start, span.end, **_tint(*PHASES[span.phase]))
        _draw_curve(ax, run, events, unit)
        text = _headline(run, monitor.watched).replace(f" {unit_name}", f"\u00a0{unit_name}")  # a no-break space
        ax.set_title(fill(text, 92), loc="left", fontsize=9)
    rows[0, 0].set_ylim(0, 1.1 * top / unit or 1)
    rows[-1, 0].set_xlabel("event (an allocation or a free)")
    figure.supylabel(f"allocated memory in {unit_name}", fontsize=10)
    legend_below(figure, handles)
    if title:
        figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    set_alt_text(figure, title, describe_memory(monitor))
    plt.close(figure)  # so a cell shows the figure only once, and figures do not accumulate
    return figure


def describe_memory(monitor: MemoryMonitor) -> str:
    """Describe each GPU's peak, when it occurred, and what filled it. Raises what `MemoryMonitor.run` raises."""
    return "\n".join(_headline(monitor.run(gpu), monitor.watched) + "." for gpu in monitor.indices)


def _headline(run: Run, watched: Sequence) -> str:
    peak = run.peak()
    where = f" in {peak.phase}" if peak.phase else ""
    said = f"GPU {run.gpu}: peak {format_bytes(peak.bytes)}{where} (event {peak.event:,} of {run.last:,})"
    if watched and peak.bytes:
        unit = "GiB" if peak.bytes >= 2 * GiB else "MiB"
        held = sorted(run.at_peak().items(), key=lambda item: -item[1])
        said += ": " + ", ".join(f"{kind} {format_bytes(size, unit)}" for kind, size in held if size)
    if run.off:
        said += f"; the curve ends {format_bytes(run.off)} off what the allocator counts"
    return said + (f"; out of memory after event {run.ooms[0]:,}" if run.ooms else "")


def _events(run: Run, around: int | None) -> range:
    """Return the events to draw: all, or `around` events before and after the peak."""
    if around is None:
        return range(run.last + 1)
    peak = run.peak().event
    return range(max(0, peak - around), min(run.last, peak + around) + 1)


def _phases(run: Run, events: range) -> list[Span]:
    """Return the phases within the drawn events, or none if there are too many."""
    spans = [Span(max(events[0], span.start), min(span.end, events[-1]), span.phase) for span in run.spans()]
    spans = [span for span in spans if span.phase and span.start < span.end]
    return spans if len(spans) <= MOST_PHASES else []


def _tint(colour: str, hatch: str) -> dict:
    """Return the style for a light colour with a hatch, on which a dark line is easy to see."""
    return {"facecolor": to_rgba(colour, 0.25), "edgecolor": to_rgba(colour, 0.4), "hatch": hatch, "linewidth": 0}


def _draw_curve(ax: Axes, run: Run, events: range, unit: int) -> None:
    """Draw the curve, its peak, and the events at which memory ran out."""
    peak = run.peak()
    ax.plot(events, [run.allocated[event] / unit for event in events], color="black", lw=1.1, drawstyle="steps-post")
    for event in run.ooms:
        if event in events:
            ax.plot(event, run.allocated[event] / unit, **CROSS, zorder=7, clip_on=False)
    ax.plot(peak.event, peak.bytes / unit, **PEAK, zorder=5, clip_on=False)
    ax.set_xlim(events[0], max(events[-1], 1))
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
    ax.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    open_frame(ax, grid="y")
