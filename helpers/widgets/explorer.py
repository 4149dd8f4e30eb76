"""The memory explorer: sliders for a training of the article's BERT, and the memory of every GPU at once.

    from helpers.widgets import explore_memory
    explore_memory(gpus=4, batch=200, method="DataParallel", memory="12 GiB")

The figures come from the formula of `bert_memory`: nothing is run, no GPU is needed, and whatever GPUs are on
stay as they are. A slider's event changes the picture within some hundredths of a second. A reader without a kernel
sees a still picture and the words. Nothing here prints: events come in a thread of the kernel whose output would go
nowhere.
"""

from __future__ import annotations

import threading
from base64 import b64encode
from html import escape

import ipywidgets

from helpers.widgets.bert_fits import judge
from helpers.widgets.bert_memory import METHODS, OPTIMIZERS, Job, step_memory
from helpers.widgets.cards import card
from helpers.widgets.explorer_picture import draw
from helpers.widgets.scene import Scene

SLIDERS = {  # name -> label, smallest, largest, step
    "gpus": ("GPUs", 1, 8, 1),
    "batch": ("batch", 8, 512, 4),
    "length": ("tokens per sample", 32, 512, 1),
    "vocabulary": ("vocabulary", 2_000, 100_000, 1_000),
    "hidden": ("hidden size", 128, 1024, 64),
    "layers": ("layers", 1, 24, 1),
}


class MemoryExplorer:
    """The panel. `controls`: name -> widget, as the arguments of `explore_memory`; `words`: what the picture shows."""

    def __init__(self, job: Job):
        self._card, self._lock = job.card, threading.Lock()
        self.controls = {name: _slider(name, getattr(job, name)) for name in SLIDERS}
        self.controls |= {
            "optimizer": _choice("optimizer", OPTIMIZERS, job.optimizer),
            "method": _choice("method", METHODS, job.method),
        }
        self._picture, self._said = ipywidgets.HTML(), ipywidgets.HTML()
        grid = ipywidgets.Layout(grid_template_columns="repeat(2, 340px)", grid_gap="0 10px")
        self._panel = ipywidgets.VBox(
            [ipywidgets.GridBox(list(self.controls.values()), layout=grid), self._picture, self._said]
        )
        self._update()
        for control in self.controls.values():
            control.observe(self._update, names="value")

    @property
    def job(self) -> Job:
        """What the controls say. Raises ValueError where that cannot be trained."""
        return Job(card=self._card, **{name: control.value for name, control in self.controls.items()})

    def _update(self, change=None) -> None:
        with self._lock:  # events may come in several threads; the last one to come here reads what all have set
            try:
                self._show(_scene(self.job))
            except ValueError as error:
                self._show(None, f"Not possible: {error}")

    def _show(self, scene: Scene | None, said: str = "") -> None:
        self._scene, self.words = scene, scene.words if scene else said
        self._picture.value = scene.svg() if scene else ""
        lines = "<br>".join(escape(line) for line in self.words.splitlines())
        self._said.value = f'<div style="line-height: 1.4; max-width: 700px">{lines}</div>'

    def __repr__(self) -> str:
        return self.words

    def _repr_mimebundle_(self, include=None, exclude=None) -> dict:
        """For a notebook: the panel, and for readers without a kernel a still picture and the words."""
        bundle = dict(self._panel._repr_mimebundle_() or {})
        bundle["text/plain"] = self.words
        if self._scene is not None:
            bundle["image/png"] = b64encode(self._scene.png()).decode()
        return bundle


def explore_memory(
    gpus: int = 4,
    batch: int = 200,
    length: int = 163,
    vocabulary: int = 30_000,
    hidden: int = 256,
    layers: int = 8,
    optimizer: str = "Adam",
    method: str = "DataParallel",
    kind: str = "TITAN Xp",
    memory: int | str | None = None,
) -> MemoryExplorer:
    """Sliders for the article's BERT (8 heads, float32, dropout; attention scores stored); end a cell with it.

    batch      samples of all GPUs together; `length` tokens each
    optimizer  "SGD", "SGD with momentum", "Adam" or "AdamW"
    method     "one GPU", "DataParallel", "output_device=1" (DataParallel that gathers on GPU 1), "loss in forward" or
               "parallel loss"
    kind       of all GPUs, as for `use_gpus`; `memory`: of each, the kind's own if None ("12 GiB", or bytes)

    Shown is the peak that PyTorch allocates from the second step on, against what the card has without CUDA's context.
    A value beyond a slider's end moves the end. Raises ValueError for a job that cannot be trained, and says what to
    do; sliders that ask for such a job show the same sentence.
    """
    return MemoryExplorer(
        Job(gpus, batch, length, vocabulary, hidden, layers, optimizer, method, card=card(kind, memory))
    )


def _scene(job: Job) -> Scene:
    gpus = step_memory(job)
    return draw(job, gpus, judge(job, gpus))


def _slider(name: str, value: int) -> ipywidgets.IntSlider:
    label, low, high, step = SLIDERS[name]
    if (value - low) % step:
        step = 1  # else the slider would move the value to its nearest step
    return ipywidgets.IntSlider(value, min(low, value), max(high, value), step, description=label, **_style())


def _choice(name: str, options, value: str) -> ipywidgets.Dropdown:
    return ipywidgets.Dropdown(options=list(options), value=value, description=name, **_style())


def _style() -> dict:
    return {"style": {"description_width": "125px"}, "layout": ipywidgets.Layout(width="340px")}


__all__ = ["SLIDERS", "MemoryExplorer", "explore_memory"]
