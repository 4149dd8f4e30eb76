"""The common style of pictures: width, colours with hatches, frames, and text alternatives."""

from typing import Any, Literal, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

WIDTH = 7.0  # inches; 700 pixels at matplotlib's 100 dots per inch, which is the width of a notebook's output
# Okabe and Ito's palette, which colour-blind readers can tell apart, ordered for large differences in lightness.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#F0E442")
HATCHES = ("", "////", "....", "xxxx", "\\\\\\\\", "----", "++++")
_ALARM = 4  # colour and hatch of memory that does not fit


def bar_style(colour: int, hatch: int = 0) -> dict[str, Any]:
    """Return the arguments of `Axes.barh` and of patches for a colour and a hatch, given by their numbers."""
    return {"facecolor": COLOURS[colour], "hatch": HATCHES[hatch], "edgecolor": "white", "linewidth": 0}


OVER = bar_style(_ALARM, _ALARM)
FRAME: dict[str, Any] = {"facecolor": "white", "edgecolor": "0.4", "linewidth": 1}  # the capacity of a GPU
# The memory of a GPU, each figure inside the one before: lighter outside, darker inside, and two of three have a hatch.
# For matplotlib, and as backgrounds in HTML, where a fine pattern would flicker while the bars move.
MEMORY: dict[str, dict[str, Any]] = {
    "driver": {"facecolor": "0.87", "hatch": "....", "edgecolor": "0.6", "linewidth": 1},
    "reserved": bar_style(5, 1),
    "allocated": bar_style(0),
}
MEMORY_CSS = {
    "driver": "#dedede",
    "reserved": f"repeating-linear-gradient(135deg, {COLOURS[5]} 0 4px, white 4px 6px)",
    "allocated": COLOURS[0],
}


def open_frame(ax: Axes, grid: Literal["x", "y", "both"] | None = None) -> None:
    """Remove the upper and the right line of the frame. grid: draw the lines of this axis, behind everything."""
    ax.spines[["top", "right"]].set_visible(False)
    if grid:
        ax.grid(axis=grid, color="0.9")
        ax.set_axisbelow(True)


def set_alt_text(figure: Figure, *words: str | None) -> None:
    """Set a figure's text alternative, which is its title, if it has one, and a description.

    A notebook stores the text in the metadata `alt` of the output. JupyterLab 4 does not use it, so the lessons print
    the description, too.
    """
    vars(figure)["_repr_mimebundle_"] = _AltText("\n".join(filter(None, words)))


class _AltText(NamedTuple):
    """What IPython asks a figure for: no data, and metadata, which it adds to the picture that it makes itself."""

    text: str

    def __call__(self, include: object = None, exclude: object = None) -> tuple[dict[str, Any], dict[str, Any]]:
        return {}, {"image/png": {"alt": self.text}}
