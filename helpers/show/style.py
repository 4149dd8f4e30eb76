"""The common style of all pictures: width, colours with hatches, legends, and text alternatives."""

from collections.abc import Sequence

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure

WIDTH = 7.0  # inches; 700 pixels at matplotlib's 100 dots per inch, which is the width of a notebook's output
# Okabe and Ito's palette, which colour-blind readers can tell apart, ordered for large differences in lightness.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#F0E442")
HATCHES = ("", "////", "....", "xxxx", "\\\\\\\\", "----", "++++")
# What a GPU does, by the number of its colour and hatch. Collectives that add numbers differ from those that move them.
WORK = {"forward": 0, "compute": 0, "backward": 1, "step": 2, "copy": 3, "collective": 5, "reduce": 6}
_ALARM = 4  # colour and hatch of memory that does not fit; no series uses them
_SERIES = [number for number in range(len(COLOURS)) if number != _ALARM]


def bar_style(colour: int, hatch: int = 0) -> dict:
    """Return the arguments of `Axes.barh` and of patches for a colour and a hatch, given by their numbers."""
    return {"facecolor": COLOURS[colour], "hatch": HATCHES[hatch], "edgecolor": "white", "linewidth": 0}


def series_style(place: int) -> dict:
    """Return the style of series `place`. The first 6 differ in colour and hatch, the first 36 in one or both."""
    times, rest = divmod(place, len(_SERIES))
    return bar_style(_SERIES[rest], _SERIES[(rest + times) % len(_SERIES)])


OVER = bar_style(_ALARM, _ALARM)
FRAME = {"facecolor": "white", "edgecolor": "0.4", "linewidth": 1}  # the capacity of a GPU
# The memory of a GPU, each figure inside the one before: lighter outside, darker inside, and two of three have a hatch.
MEMORY = {
    "driver": {"facecolor": "0.87", "hatch": "....", "edgecolor": "0.6", "linewidth": 1},
    "reserved": bar_style(5, 1),
    "allocated": bar_style(0),
}


def legend_below(figure: Figure, handles: Sequence[Artist]) -> None:
    """Draw a legend at the bottom of the figure, with as many entries in a row as fit."""
    longest = max(len(line) for handle in handles for line in handle.get_label().splitlines())
    columns = max(1, min(5, len(handles), 92 // (longest + 9)))
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, frameon=False, fontsize=9)


def open_frame(ax: Axes, grid: str) -> None:
    """Remove the upper and the right line of the frame, and draw a grid behind everything: "x", "y" or "both"."""
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(axis=grid, color="0.9")
    ax.set_axisbelow(True)


def set_alt_text(figure: Figure, *words: str | None) -> None:
    """Set a figure's text alternative, which is its title, if it has one, and a description.

    A notebook stores the text in the metadata `alt` of the output. JupyterLab 4 does not use it, so the lessons print
    the description, too.
    """
    said = "\n".join(filter(None, words))
    figure._repr_mimebundle_ = lambda include=None, exclude=None: ({}, {"image/png": {"alt": said}})


# The style of the SVGs of `helpers.show.animate`: the hatches, and a style sheet with the colours of both themes.
_LINES = {1: "M0 6L6 0", 2: "M1 3h1.5M4 0h1.5", 3: "M0 6L6 0M0 0L6 6", 5: "M0 3H6", 6: "M0 3H6M3 0V6"}
SVG_PATTERNS = "".join(
    f'<pattern id="h{number}" width="6" height="6" patternUnits="userSpaceOnUse"><rect width="6" height="6" '
    f'fill="{COLOURS[number]}"/><path d="{lines}" stroke="#fff" stroke-opacity=".75"/></pattern>'
    for number, lines in _LINES.items()
)
SVG_STYLE = """
@property --t{syntax:"&lt;number&gt;";inherits:true;initial-value:0}
svg{--t:STILL;--paper:#fff;--ink:#1a1a1a;--dim:#666;--idle:#dcdcdc;--line:#e3e3e3;--card:#f4f4f4;--memory:#8f8f8f;
font:12px system-ui,sans-serif;fill:var(--ink)}
@media(prefers-color-scheme:dark){svg{--paper:#16181c;--ink:#eee;--dim:#aaa;--idle:#3a3d44;--line:#33363c;--card:#23262c;
--memory:#8a8f99}}
@media screen and (prefers-reduced-motion:no-preference){svg{animation:t 14s steps(260) infinite}}
@keyframes t{from{--t:0}93%,to{--t:1}}
.w{opacity:clamp(0,min((var(--t) - var(--a))*1e5 + 1,(var(--b) - var(--t))*1e5),1)}
.m{transform:translateY(calc(clamp(0,(var(--t) - var(--a))/(var(--b) - var(--a)),1)*var(--y)))}
.t{transform:translateX(calc(var(--t)*496px))}.v{fill:var(--paper);opacity:.72}
.b{font-weight:600}.s{font-size:13px}.d{fill:var(--dim);font-size:11px}.k{text-anchor:middle;font-size:11px}
.c{font-size:17px;font-weight:600;text-anchor:end;font-variant-numeric:tabular-nums}
.n{paint-order:stroke;stroke:#fff;stroke-width:3px;fill:#111}
"""
