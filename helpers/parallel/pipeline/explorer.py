"""The pipeline's panel: sliders of stages and micro-batches, the schedule that comes of them, its bubble.

    from helpers.parallel.pipeline import explore_pipeline
    explore_pipeline(stages=4, micro_batches=8)

Nothing is run and no GPU is needed: the times are those of `simulate`, with stages of equal length, a backward pass
twice as long as the forward pass, and copies that take no time.
"""

from __future__ import annotations

import ipywidgets

from helpers.parallel.pipeline.explorer_picture import Plan, png
from helpers.show.widgets.panel import Panel, choice, slider

SLIDERS = {  # name -> label, smallest, largest, step
    "stages": ("stages", 1, 8, 1),
    "micro_batches": ("micro-batches", 1, 32, 1),
    "extra": ("extra per task, %", 0.0, 10.0, 0.5),
}


class PipelineExplorer(Panel):
    """The panel. `controls`: name -> widget, as `explore_pipeline` takes them; `words`: what the picture shows."""

    _picture_widget = ipywidgets.Image

    def __init__(self, plan: Plan):
        sliders = {name: slider(label, getattr(plan, name), *ends) for name, (label, *ends) in SLIDERS.items()}
        super().__init__(sliders | {"schedule": choice("schedule", Plan.SCHEDULES, plan.schedule)})

    @property
    def plan(self) -> Plan:
        """What the controls say."""
        return Plan(**self.chosen)

    def _look(self, **chosen) -> tuple[str, bytes]:
        return self.plan.words(), png(self.plan)


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


__all__ = ["SLIDERS", "PipelineExplorer", "explore_pipeline"]
