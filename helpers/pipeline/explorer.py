"""The pipeline's panel: sliders of stages and micro-batches, the schedule that comes of them, its bubble.

    from helpers.pipeline import explore_pipeline
    explore_pipeline(stages=4, micro_batches=8)

Nothing is run and no GPU is needed: the times are those of `simulate`, with stages of equal length, a backward pass
twice as long as the forward pass, and copies that take no time. A reader without a kernel sees a still picture and the
words. Nothing here prints: a slider's events come in a thread of the kernel whose output would go nowhere.
"""

from __future__ import annotations

import threading
from base64 import b64encode
from html import escape

import ipywidgets

from helpers.pipeline.explorer_picture import Plan, png

SLIDERS = {  # name -> label, smallest, largest, step
    "stages": ("stages", 1, 8, 1),
    "micro_batches": ("micro-batches", 1, 32, 1),
    "extra": ("extra per task, %", 0.0, 10.0, 0.5),
}


class PipelineExplorer:
    """The panel. `controls`: name -> widget, as `explore_pipeline` takes them; `words`: what the picture shows."""

    def __init__(self, plan: Plan):
        self._lock = threading.Lock()
        self.controls = {name: _slider(name, getattr(plan, name)) for name in SLIDERS}
        self.controls["schedule"] = ipywidgets.Dropdown(
            options=list(Plan.SCHEDULES), value=plan.schedule, description="schedule", **_style()
        )
        self._picture, self._said = ipywidgets.Image(format="png"), ipywidgets.HTML()
        grid = ipywidgets.Layout(grid_template_columns="repeat(2, 340px)", grid_gap="0 10px")
        controls = ipywidgets.GridBox(list(self.controls.values()), layout=grid)
        self._panel = ipywidgets.VBox([controls, self._picture, self._said])
        self._update()
        for control in self.controls.values():
            control.observe(self._update, names="value")

    @property
    def plan(self) -> Plan:
        """What the controls say."""
        return Plan(**{name: control.value for name, control in self.controls.items()})

    def _update(self, change=None) -> None:
        with self._lock:  # events may come in several threads; the last one to come here reads what all have set
            plan = self.plan
            self.words, self._picture.value = plan.words(), png(plan)
            lines = "<br>".join(escape(line) for line in self.words.splitlines())
            self._said.value = f'<div style="line-height: 1.4; max-width: 700px">{lines}</div>'

    def __repr__(self) -> str:
        return self.words

    def _repr_mimebundle_(self, include=None, exclude=None) -> dict:
        """For a notebook: the panel, and for readers without a kernel a still picture and the words."""
        bundle = dict(self._panel._repr_mimebundle_() or {})
        still = {"text/plain": self.words, "image/png": b64encode(self._picture.value).decode()}
        return bundle | still


def explore_pipeline(
    stages: int = 4, micro_batches: int = 8, schedule: str = "GPipe", extra: float = 1.0
) -> PipelineExplorer:
    """Sliders for a pipeline; end a cell with it.

    schedule  "GPipe" or "1F1B"
    extra     what each task costs beside its arithmetic (launching kernels, copies, small matrices that do not fill a
              GPU), in percent of a stage's forward pass of the whole batch. With 0, more micro-batches always help.

    A value beyond a slider's end moves the end. Raises ValueError for what is no pipeline.
    """
    return PipelineExplorer(Plan(stages, micro_batches, schedule, extra))


def _slider(name: str, value: float):
    label, low, high, step = SLIDERS[name]
    kind = ipywidgets.IntSlider if isinstance(step, int) else ipywidgets.FloatSlider
    return kind(value, min=low, max=max(high, value), step=step, description=label, **_style())


def _style() -> dict:
    return {"style": {"description_width": "125px"}, "layout": ipywidgets.Layout(width="340px")}


__all__ = ["SLIDERS", "PipelineExplorer", "explore_pipeline"]
