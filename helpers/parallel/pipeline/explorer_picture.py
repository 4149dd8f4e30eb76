"""A plan of a pipeline: its times, its words, its picture (the schedule above, all numbers of micro-batches below)."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import ClassVar

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from helpers.parallel.pipeline.schedules import Slot, bubble, gpipe, idle_share, most_kept, one_f_one_b, simulate
from helpers.show.plots.palette import COLOURS

__all__ = ["Plan", "draw", "png", "schedule_bars"]

_MOST = 48  # micro-batches that the curve reaches to


@dataclass(frozen=True)
class Plan:
    """stages, micro_batches; schedule: a key of `SCHEDULES`; extra: percent of a stage's whole forward, per task.

    Times are in units of one stage's forward pass of the whole batch, so that one GPU needs 3 x stages for a step.
    Raises ValueError.
    """

    stages: int
    micro_batches: int
    schedule: str = "GPipe"
    extra: float = 0.0
    SCHEDULES: ClassVar = {"GPipe": gpipe, "1F1B": one_f_one_b}

    def __post_init__(self):
        bubble(self.stages, self.micro_batches)  # says what is wrong with the numbers
        if self.schedule not in self.SCHEDULES:
            raise ValueError(f"no schedule {self.schedule!r}: choose one of {', '.join(self.SCHEDULES)}")
        if not self.extra >= 0:
            raise ValueError(f"extra is a percentage of at least 0, not {self.extra!r}")

    def orders(self):
        """Each stage's tasks."""
        return self.SCHEDULES[self.schedule](self.stages, self.micro_batches)

    def slots(self) -> list[Slot]:
        """Each task in time."""
        return simulate(self.orders(), *self.task_times(self.micro_batches))

    def task_times(self, micro_batches: int) -> tuple[float, float]:
        """Of a forward and of a backward pass."""
        return tuple(passes / micro_batches + self.extra / 100 for passes in (1, 2))

    def times(self) -> list[float]:
        """A step's time as a share of one GPU's, with 1, 2, ... micro-batches (both schedules take as long)."""
        return [(m + self.stages - 1) * sum(self.task_times(m)) / (3 * self.stages) for m in range(1, _MOST + 1)]

    def words(self) -> str:
        """What the picture shows."""
        p, m, times = self.stages, self.micro_batches, self.times()
        kept = most_kept(self.orders()[0])
        best = min(range(_MOST), key=times.__getitem__) + 1
        now = max(slot.end for slot in self.slots()) / (3 * p)
        end = "" if best < _MOST else " or more"
        return "\n".join([
            f"{self.schedule}, {p} stages, {m} micro-batches: each GPU is idle for {100 * bubble(p, m):.1f} % "
            f"of the step, {p - 1}/{m + p - 1}.",
            f"Stage 0 keeps the activations of at most {kept} of {m} micro-batches, "
            f"{100 * kept / m:.0f} % of the batch.",
            f"A step takes {now:.2f} of one GPU's time ({p} GPUs at best 1/{p} = {1 / p:.2f}); "
            f"shortest with {best}{end} micro-batches: {times[best - 1]:.2f}.",
        ])  # fmt: skip


def png(plan: Plan) -> bytes:
    """The picture as a PNG, the same bytes each time."""
    file = io.BytesIO()
    draw(plan).savefig(file, format="png", dpi=100, metadata={"Software": None})
    return file.getvalue()


def draw(plan: Plan) -> Figure:
    """The schedule, and how long a step takes with any number of micro-batches."""
    figure = Figure(figsize=(7, 2.9 + 0.28 * plan.stages), layout="constrained")
    above, below = figure.subplots(2, 1, height_ratios=(0.9 + 0.28 * plan.stages, 2))
    schedule_bars(plan.slots(), above)
    idle = 100 * idle_share(plan.slots())
    title = f"{plan.schedule}, forward blue, backward orange: idle for {idle:.1f} % of the step"
    above.set_title(title, loc="left", fontsize=10)
    _curve(plan, below)
    return figure


def schedule_bars(slots: list[Slot], ax: Axes) -> Axes:
    """A row per stage, a box per task, numbered by its micro-batch: forward dark, backward light. Returns the axes."""
    end, stages = max(slot.end for slot in slots), 1 + max(slot.stage for slot in slots)
    for stage, (kind, number), start, stop in slots:
        colour = COLOURS[0] if kind == "F" else COLOURS[1]
        ax.barh(stage, stop - start, 0.8, start, color=colour, edgecolor="white", linewidth=0.8)
        if (stop - start) / end > 0.012 * len(str(number)) + 0.004:
            ax.text((start + stop) / 2, stage, number, ha="center", va="center", fontsize=7,
                    color="white" if kind == "F" else "black")  # fmt: skip
    ax.set(xlim=(0, end), ylim=(stages - 0.5, -0.5), xticks=[])
    ax.set_yticks(range(stages), [f"stage {stage}" for stage in range(stages)], fontsize=8)
    ax.spines[:].set_visible(False)
    ax.set_facecolor("#f2f2f2")
    return ax


def _curve(plan: Plan, ax: Axes) -> None:
    numbers = range(1, _MOST + 1)
    ax.plot(numbers, plan.times(), color=COLOURS[0], label="time of a step (one GPU: 1)")
    ax.plot(numbers, [bubble(plan.stages, m) for m in numbers], "--", color=COLOURS[4], label="idle share, the bubble")
    if plan.micro_batches <= _MOST:
        ax.plot(plan.micro_batches, plan.times()[plan.micro_batches - 1], "o", color=COLOURS[0])
        ax.plot(plan.micro_batches, bubble(plan.stages, plan.micro_batches), "o", color=COLOURS[4])
    ax.set(xlabel="micro-batches", ylim=(0, None), xlim=(0, _MOST + 1))
    ax.legend(frameon=False, fontsize=8)
    ax.grid(color="0.9")
