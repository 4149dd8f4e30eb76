"""A panel for a notebook: controls, and a picture and words that follow them.

    def look(side):                      # what to show, as words and a figure
        return f"{side * side} pixels", draw_square(side)

    Panel(look, {"side": control("side, px", (1, 100), 20)})

Readers without a kernel see the picture and the words of the first position.
"""

import struct
from base64 import b64encode
from collections.abc import Callable, Mapping
from html import escape
from inspect import Parameter
from io import BytesIO

import ipywidgets
from matplotlib.figure import Figure

_SIGN = "<b>computing …</b>"


class Panel:
    """`look(**chosen)` gives words and a figure for what the `controls` say. End a cell with the panel.

    slow: `look` takes seconds. A sign says so meanwhile, and a slider is followed only when it is let go.

    Each answer is computed once. An error of `look` is shown as words. While a cell runs the panel waits, as everything
    that a kernel does.

    controls  name -> widget, an argument of `look` each
    words     what is shown, as a text
    """

    def __init__(self, look: Callable[..., tuple[str, Figure]], controls: Mapping, slow: bool = False):
        self.controls, self.words = dict(controls), ""
        self._look, self._slow = look, slow
        self._answers: dict[str, tuple[str, bytes]] = {}
        self._png = b""
        self._sign, self._picture, self._said = ipywidgets.HTML(), ipywidgets.HTML(), ipywidgets.HTML()
        grid = ipywidgets.Layout(grid_template_columns="repeat(auto-fill, 340px)", grid_gap="0 10px")
        top = ipywidgets.GridBox(list(self.controls.values()), layout=grid)
        self._panel = ipywidgets.VBox([top, *([self._sign] if slow else []), self._picture, self._said])
        self._follow()
        for widget in self.controls.values():
            if slow and hasattr(widget, "continuous_update"):
                widget.continuous_update = False
            widget.observe(self._follow, names="value")

    @property
    def chosen(self) -> dict:
        """What the controls say, by name."""
        return {name: widget.value for name, widget in self.controls.items()}

    def at(self, **values) -> str:
        """The words for `values` in place of what the controls say; the panel stays as it is."""
        return self._answer(self.chosen | values)[0]

    def _follow(self, change=None) -> None:
        """Show what the controls say."""
        self._sign.value = _SIGN
        self.words, picture = self._answer(self.chosen)
        self._png = picture or self._png
        # Where there is no picture the last one keeps its place, so that the page below does not move.
        self._picture.layout.visibility = "visible" if picture else "hidden"
        self._picture.value = image(self._png, self.words) if self._png else ""
        lines = "<br>".join(map(escape, self.words.splitlines()))
        room = "8.4em" if self._slow else "4.2em"  # for six lines, or three
        self._said.value = f'<div style="line-height: 1.4; max-width: 700px; min-height: {room}">{lines}</div>'
        self._sign.value = "&nbsp;"

    def _answer(self, chosen: dict) -> tuple[str, bytes]:
        """Words and picture for `chosen`; no picture where that is an error."""
        key = repr(chosen)
        if key not in self._answers:
            try:
                words, figure = self._look(**chosen)
                self._answers[key] = words, png(figure)
            except Exception as error:
                self._answers[key] = f"Not possible: {error}", b""
        return self._answers[key]

    def __repr__(self) -> str:
        return self.words

    def _repr_mimebundle_(self, include=None, exclude=None) -> tuple[dict, dict]:
        """For a notebook: the panel, and for readers without a kernel a still picture and the words."""
        bundle = dict(self._panel._repr_mimebundle_() or {}) | {"text/plain": self.words}
        picture = self._answer(self.chosen)[1]
        if not picture:
            return bundle, {}
        return bundle | {"image/png": b64encode(picture).decode()}, {"image/png": {"alt": self.words}}


def control(label: str, options, value=Parameter.empty) -> ipywidgets.ValueWidget:
    """A slider for (low, high) or (low, high, step), a menu for a list; it begins at `value`.

    `options`: as for ipywidgets.interact. Raises ValueError for a value that is none of them.
    """
    widget = ipywidgets.interactive.widget_from_abbrev(options, value)
    if widget is None or (value is not Parameter.empty and widget.value != value):
        raise ValueError(f"{label}={value!r} is none of the options {options}.")
    widget.description = label
    widget.style.description_width, widget.layout.width = "125px", "340px"
    return widget


def png(figure: Figure) -> bytes:
    """The figure as a PNG file: the same bytes each time."""
    file = BytesIO()
    figure.savefig(file, format="png", dpi=100, metadata={"Software": None})
    return file.getvalue()


def size_of(picture: bytes) -> dict:
    """Width and height of a PNG file in pixels, as its header says."""
    return dict(zip(("width", "height"), struct.unpack(">II", picture[16:24]), strict=True))


def image(picture: bytes, words: str) -> str:
    """A PNG file as an HTML element that has its size from the start, with `words` as its alternative text."""
    data, size = b64encode(picture).decode(), "width: {width}px; height: {height}px".format(**size_of(picture))
    style = f"display: block; {size}; max-width: none"  # a block: inline, a line of text would leave room below it
    return f'<img src="data:image/png;base64,{data}" alt="{escape(words)}" style="{style}">'
