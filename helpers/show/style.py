"""What all pictures share: their width, colours with hatches, legends, and a text alternative."""

from collections.abc import Sequence

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure

WIDTH = 7.0  # inches; at matplotlib's 100 dots per inch 700 pixels, the width of a notebook's output
# Okabe and Ito's palette, which colour-blind readers tell apart, in the order that also differs most in lightness.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#F0E442")
HATCHES = ("", "////", "....", "xxxx", "\\\\\\\\", "----", "++++")
_ALARM = 4  # the colour and the hatch of what does not fit; no series has either
_SERIES = [number for number in range(len(COLOURS)) if number != _ALARM]


def bar_style(colour: int, hatch: int = 0) -> dict:
    """Arguments of `Axes.barh` and of patches for the colour and the hatch of these numbers."""
    return {"facecolor": COLOURS[colour], "hatch": HATCHES[hatch], "edgecolor": "white", "linewidth": 0}


def series_style(place: int) -> dict:
    """The style of the series in this place: the first six differ in colour and in hatch, 36 in one of the two."""
    times, rest = divmod(place, len(_SERIES))
    return bar_style(_SERIES[rest], _SERIES[(rest + times) % len(_SERIES)])


OVER = bar_style(_ALARM, _ALARM)
ASKED = OVER | {"facecolor": "white", "edgecolor": COLOURS[_ALARM], "linewidth": 1}
TAKEN = {"facecolor": "0.75", "hatch": "||||", "edgecolor": "white", "linewidth": 0}


def legend_below(figure: Figure, handles: Sequence[Artist]) -> None:
    """A legend under everything else, with as many entries next to each other as fit."""
    longest = max(len(line) for handle in handles for line in handle.get_label().splitlines())
    columns = max(1, min(5, len(handles), 92 // (longest + 9)))
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, frameon=False, fontsize=9)


def open_frame(ax: Axes, grid: str) -> None:
    """Leave out the frame's upper and right line, and draw a grid behind everything, along "x", "y" or "both"."""
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(axis=grid, color="0.9")
    ax.set_axisbelow(True)


def set_alt_text(figure: Figure, *words: str | None) -> None:
    """Give a figure a text alternative: its title, if it has one, and what it shows.

    A notebook stores it beside the picture, as the output's metadata `alt`. JupyterLab 4 does not show that, so
    lessons print the words too.
    """
    said = "\n".join(filter(None, words))
    figure._repr_mimebundle_ = lambda include=None, exclude=None: ({}, {"image/png": {"alt": said}})


def alt_text(part: Artist) -> str:
    """The text alternative of a figure, or of the one that `part` is in."""
    return part.get_figure(root=True)._repr_mimebundle_()[1]["image/png"]["alt"]
