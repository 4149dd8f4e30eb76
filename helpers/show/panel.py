"""A panel for a notebook, with controls, and a picture and a text that depend on them.

    def look(side):                      # returns a text and a figure
        return f"{side * side} pixels", draw_square(side)

    Panel(look, {"side": control("side, px", (1, 100), 20)})

Readers without a kernel see the picture and the text for the initial values.
"""

import struct
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from html import escape
from inspect import Parameter
from io import BytesIO
from typing import Any

import ipywidgets
import matplotlib.pyplot as plt
from matplotlib.figure import Figure

_BUSY = "<b>computing …</b>"


class Panel:
    """Shows the text and the figure that `look(**chosen)` returns. Make the panel the last expression of a cell.

    controls: by name of each argument of `look`, its widget. slow: set this if `look` takes seconds. The panel then
    says that it computes, and waits until a slider is released. words: the text that is shown.

    Each result is computed once. An error of `look` is shown as text. While a cell runs, the panel waits, because the
    kernel does one thing at a time.
    """

    def __init__(
        self,
        look: Callable[..., tuple[str, Figure]],
        controls: Mapping[str, ipywidgets.ValueWidget],
        slow: bool = False,
    ):
        self.controls, self.words = dict(controls), ""
        self._look, self._slow = look, slow
        self._answers: dict[str, tuple[str, bytes]] = {}
        self._png = b""
        self._state, self._picture, self._text = ipywidgets.HTML(), ipywidgets.HTML(), ipywidgets.HTML()
        grid = ipywidgets.Layout(grid_template_columns="repeat(auto-fit, minmax(400px, 1fr))", grid_gap="0 10px")
        top = ipywidgets.GridBox(list(self.controls.values()), layout=grid)
        self._panel = ipywidgets.VBox([top, *([self._state] if slow else []), self._picture, self._text])
        self._update()
        for widget in self.controls.values():
            if slow and widget.has_trait("continuous_update"):
                widget.set_trait("continuous_update", False)
            widget.observe(self._update, names="value")

    @property
    def chosen(self) -> dict[str, Any]:
        """The values of the controls, by name."""
        return {name: widget.value for name, widget in self.controls.items()}

    def at(self, /, **values: Any) -> str:
        """Return the text for `values`, and for the controls' values otherwise. The panel itself does not change.

        Raises TypeError for a name that is no control's.
        """
        if unknown := values.keys() - self.controls.keys():
            raise TypeError(f"There is no control {', '.join(sorted(unknown))}. There are {', '.join(self.controls)}.")
        return self._answer(self.chosen | values)[0]

    def _update(self, change: object = None) -> None:
        """Show the result for the values of the controls."""
        self._state.value = _BUSY
        if self._png and repr(self.chosen) not in self._answers:
            self._picture.value = image(self._png, self.words, faded=True)  # the figures of other values
        self.words, picture = self._answer(self.chosen)
        self._png = picture or self._png
        # Without a picture, the hidden last one keeps its space, so that the page below does not move.
        self._picture.layout.visibility = "visible" if picture else "hidden"
        self._picture.value = image(self._png, self.words) if self._png else ""
        lines = "<br>".join(map(escape, self.words.splitlines()))
        room = "8.4em" if self._slow else "4.2em"  # for six lines, or three
        self._text.value = f'<div style="line-height: 1.4; max-width: 980px; min-height: {room}">{lines}</div>'
        self._state.value = "&nbsp;"

    def _answer(self, chosen: dict[str, Any]) -> tuple[str, bytes]:
        """Return text and picture for `chosen`. After an error, the picture is empty."""
        key = repr(chosen)
        if key not in self._answers:
            before = plt.get_fignums()
            try:
                words, figure = self._look(**chosen)
                self._answers[key] = words, png(figure, dpi=140)
            except Exception as error:
                if misses_a_cell(error):  # not kept, because that cell may run later
                    return f"Not possible: {error}. If a cell above defines it, run that cell, and then this one.", b""
                self._answers[key] = f"Not possible: {error}", b""
            finally:
                for number in set(plt.get_fignums()) - set(before):  # or pyplot would show them below the panel
                    plt.close(number)
        return self._answers[key]

    def __repr__(self) -> str:
        return self.words

    def _repr_mimebundle_(
        self, include: object = None, exclude: object = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the panel for a notebook, and a static picture and the text for readers without a kernel."""
        bundle = {"text/plain": self.words} | view(self._panel)
        picture = self._answer(self.chosen)[1]
        if not picture:
            return bundle, {}
        return bundle | {"image/png": b64encode(picture).decode()}, {"image/png": {"alt": self.words}}


def misses_a_cell(error: Exception) -> bool:
    """Return True if `error` is about a global name that no cell has set yet, and not about a local one."""
    return type(error) is NameError


def control(label: str, options: Sequence[Any], value: object = Parameter.empty) -> ipywidgets.ValueWidget:
    """Return a slider for (low, high), (low, high, step) or a list of numbers, and a menu for another list. It starts
    at `value`.

    Raises ValueError for other options, and for a value that the slider or menu cannot take.
    """
    widget = None
    if isinstance(options, tuple):
        with suppress(ValueError):  # low > high
            widget = ipywidgets.interactive.widget_from_abbrev(options, value)
    elif isinstance(options, Sequence) and options and not isinstance(options, str):
        numbers = {type(option) for option in options} <= {int, float}
        kind = ipywidgets.SelectionSlider if numbers else ipywidgets.Dropdown
        labelled = [(str(option), option) for option in options]  # without labels, half of a pair would be the label
        widget = kind(options=labelled, value=value if value in options else options[0])
    if widget is None:
        raise ValueError(f"The options of {label} must be (low, high), (low, high, step) or a list, not {options!r}.")
    if value is not Parameter.empty and widget.value != value:
        raise ValueError(f"{label}={value!r} is none of the options {options}.")
    widget.description = label
    widget.style.description_width, widget.layout.width = "125px", "auto"
    return widget


def view(widget: ipywidgets.Widget) -> dict[str, dict[str, Any]]:
    """Return what shows a widget in a notebook, with ipywidgets 8 and with Colab's ipywidgets 7."""
    return {"application/vnd.jupyter.widget-view+json": widget.get_view_spec()}


def png(figure: Figure, dpi: int = 100) -> bytes:
    """Return the figure as a PNG file. Equal figures give equal bytes."""
    file = BytesIO()
    figure.savefig(file, format="png", dpi=dpi, metadata={"Software": None})
    return file.getvalue()


def size_of(picture: bytes) -> dict[str, int]:
    """Return the width and the height of a PNG file in pixels, from its header."""
    return dict(zip(("width", "height"), struct.unpack(">II", picture[16:24]), strict=True))


def image(picture: bytes, words: str, faded: bool = False) -> str:
    """Return a PNG file as an HTML element with a fixed size and `words` as its alternative text."""
    data, size = b64encode(picture).decode(), "width: {width}px; aspect-ratio: {width} / {height}"
    style = "display: block; max-width: 100%; " + size.format(**size_of(picture))  # inline, there would be a gap below
    if faded:
        style += "; opacity: 0.3"
    return f'<img src="data:image/png;base64,{data}" alt="{escape(words)}" style="{style}">'
