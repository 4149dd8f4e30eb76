"""What the course's panels share: a grid of controls, and a picture and words that follow them.

    class Squares(Panel):
        def __init__(self, side):
            super().__init__({"side": slider("side, px", side, 1, 100)})

        def _look(self, side):
            scene = Scene(120, 120)
            scene.box(10, 10, side, side, Look("#0072B2"))
            return f"{side * side} pixels", scene

A reader without a kernel sees a still picture and the words. Nothing here prints: a control's events come in a thread
of the kernel whose output would go nowhere.
"""

from __future__ import annotations

import re
import threading
from abc import ABC, abstractmethod
from base64 import b64encode
from collections.abc import Mapping, Sequence
from html import escape

import ipywidgets

from helpers.show.widgets.scene import Scene


class Panel(ABC):
    """The base of a panel: say in `_look` what the controls mean. End a cell with it.

    controls  name -> widget, an argument of `_look` each; two in a row
    words     what is shown, as a text
    """

    _picture_widget = ipywidgets.HTML  # ipywidgets.Image for a panel that draws PNGs
    _words_first = False

    def __init__(self, controls: Mapping[str, ipywidgets.ValueWidget]):
        self.controls, self._lock = dict(controls), threading.Lock()
        self._picture, self._said = self._picture_widget(), ipywidgets.HTML()
        self._nothing = self._picture.value
        grid = ipywidgets.Layout(grid_template_columns="repeat(auto-fill, 340px)", grid_gap="0 10px")
        below = [self._said, self._picture] if self._words_first else [self._picture, self._said]
        self._panel = ipywidgets.VBox([ipywidgets.GridBox(list(self.controls.values()), layout=grid), *below])
        self._update()
        for control in self.controls.values():
            control.observe(self._update, names="value")

    @property
    def chosen(self) -> dict:
        """What the controls say, by name."""
        return {name: control.value for name, control in self.controls.items()}

    @abstractmethod
    def _look(self, **chosen) -> tuple[str, Scene | bytes]:
        """Words and picture (a scene, or a PNG file). A ValueError, with what to do, where there is nothing to show."""

    def _update(self, change=None) -> None:
        with self._lock:  # events may come in several threads; the last one to come here reads what all have set
            try:
                self.words, self._shown = self._look(**self.chosen)
            except ValueError as error:
                self.words, self._shown = f"Not possible: {error}", None
            self._picture.value = self._nothing if self._shown is None else _moving(self._shown)
            lines = "<br>".join(_together(escape(line)) for line in self.words.splitlines())
            self._said.value = f'<div style="line-height: 1.4; max-width: 700px">{lines}</div>'

    def __repr__(self) -> str:
        return self.words

    def _repr_mimebundle_(self, include=None, exclude=None) -> tuple[dict, dict]:
        """For a notebook: the panel, and for readers without a kernel a still picture and the words.

        The words are the picture's alternative text as well, in the metadata (see `helpers.show.plots.alt_text`).
        """
        bundle = dict(self._panel._repr_mimebundle_() or {})
        bundle["text/plain"] = self.words
        if self._shown is None:
            return bundle, {}
        bundle["image/png"] = b64encode(_still(self._shown)).decode()
        return bundle, {"image/png": {"alt": self.words}}


def slider(label: str, value: float, low: float, high: float, step: float = 1) -> ipywidgets.ValueWidget:
    """A slider from `low` to `high`, of whole numbers if `step` is one. A value beyond an end moves the end."""
    whole = isinstance(step, int)
    if whole and (value - low) % step:
        step = 1  # else the slider would move the value to its nearest step
    kind = ipywidgets.IntSlider if whole else ipywidgets.FloatSlider
    return kind(value, min=min(low, value), max=max(high, value), step=step, description=label, **_style())


def choice(label: str, options: Sequence, value) -> ipywidgets.ValueWidget:
    """One of `options`: a list to choose from, or for numbers a slider that stops at each. ValueError for another."""
    options = list(options)
    if value not in options:
        raise ValueError(f"{label}={value!r}: choose one of {', '.join(map(str, options))}")
    kind = ipywidgets.SelectionSlider if isinstance(value, int) else ipywidgets.Dropdown
    return kind(options=options, value=value, description=label, **_style())


def _together(text: str) -> str:
    """A number and its unit do not part at the end of a line."""
    return re.sub(r"(?<=\d) (?=(?:[KMG]iB|ms|%)(?!\w))", "\u00a0", text)


def _moving(picture: Scene | bytes) -> str | bytes:
    return picture.svg() if isinstance(picture, Scene) else picture


def _still(picture: Scene | bytes) -> bytes:
    return picture.png() if isinstance(picture, Scene) else picture


def _style() -> dict:
    return {"style": {"description_width": "125px"}, "layout": ipywidgets.Layout(width="340px")}


__all__ = ["Panel", "choice", "slider"]
