"""The panel of lesson 05: sliders for a pipeline, which is simulated, without a GPU."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from helpers.parallel import Slot, bubble, gpipe, most_kept, one_f_one_b, simulate
from helpers.show import Panel, control
from helpers.show.style import COLOURS, WIDTH

_SCHEDULES = {"GPipe": gpipe, "1F1B": one_f_one_b}
_MOST_MICRO_BATCHES = 48  # that are tried for the shortest step


def explore_pipeline(stages: int = 4, micro_batches: int = 8, schedule: str = "GPipe", extra: float = 1.0) -> Panel:
    """Return a panel with sliders for a pipeline, for the end of a cell. It simulates the pipeline and needs no GPU.

    schedule: "GPipe" or "1F1B". extra: the overhead of each task (kernel launches, copies, small matrices that do not
    fill a GPU), in percent of a stage's forward pass of the whole batch. With 0 and several stages, more micro-batches
    always help.

    All stages take equally long, and a backward pass takes twice as long as a forward pass. Times are in units of one
    stage's forward pass of the whole batch, so one GPU needs 3 * stages for a step. Raises ValueError for values
    outside the ranges of the sliders.
    """
    controls = {
        "stages": control("stages", (1, 8), stages),
        "micro_batches": control("micro-batches", (1, 32), micro_batches),
        "extra": control("extra per task, %", (0.0, 10.0, 0.5), extra),
        "schedule": control("schedule", list(_SCHEDULES), schedule),
    }
    return Panel(_look, controls)


def _look(stages: int, micro_batches: int, extra: float, schedule: str) -> tuple[str, Figure]:
    orders = _SCHEDULES[schedule](stages, micro_batches)
    slots = simulate(orders, *_task_times(micro_batches, extra))
    figure = Figure(figsize=(WIDTH, 0.9 + 0.28 * stages), layout="constrained")
    ax = figure.subplots()
    _draw_schedule(ax, slots)
    ax.set_title(f"{schedule}: forward blue, backward orange", loc="left", fontsize=10)
    idle = f"{100 * bubble(stages, micro_batches):.1f} % of the step, {stages - 1}/{micro_batches + stages - 1}"
    kept = most_kept(orders[0])
    lines = [
        f"{schedule}, {stages} stages, {micro_batches} micro-batches: each GPU is idle for {idle}.",
        f"Stage 0 keeps the activations of at most {kept} of {micro_batches} micro-batches, "
        f"{100 * kept / micro_batches:.0f} % of the batch.",
        _describe_time(stages, max(slot.end for slot in slots), extra),
    ]
    return "\n".join(lines), figure


def _describe_time(stages: int, step: float, extra: float) -> str:
    """Compare the time of a step with that of one GPU, and with the shortest, which is the same for both schedules."""
    one_gpu = 3 * stages
    tried = range(1, _MOST_MICRO_BATCHES + 1)
    times = {count: (count + stages - 1) * sum(_task_times(count, extra)) / one_gpu for count in tried}
    best = min(times, key=times.__getitem__)
    return (
        f"A step takes {step / one_gpu:.2f} of one GPU's time ({stages} GPUs at best 1/{stages} = {1 / stages:.2f}); "
        f"shortest with {best}{'' if best < _MOST_MICRO_BATCHES else ' or more'} micro-batches: {times[best]:.2f}."
    )


def _task_times(micro_batches: int, extra: float) -> tuple[float, float]:
    """Return the times of a forward and of a backward pass, in forward passes of the whole batch."""
    return 1 / micro_batches + extra / 100, 2 / micro_batches + extra / 100


def _draw_schedule(ax: Axes, slots: list[Slot]) -> None:
    """Draw one row per stage and one box per task, with the number of its micro-batch."""
    end, stages = max(slot.end for slot in slots), 1 + max(slot.stage for slot in slots)
    for stage, (kind, number), start, stop in slots:
        forward = kind == "F"
        ax.barh(stage, stop - start, 0.8, start, color=COLOURS[0 if forward else 1], edgecolor="white", linewidth=0.8)
        if (stop - start) / end > 0.012 * len(str(number)) + 0.004:  # there is room for it
            middle, colour = (start + stop) / 2, "white" if forward else "black"
            ax.text(middle, stage, str(number), ha="center", va="center", fontsize=7, color=colour)
    ax.set(xlim=(0, end), ylim=(stages - 0.5, -0.5), xticks=[])
    ax.set_yticks(range(stages), [f"stage {stage}" for stage in range(stages)], fontsize=8)
    ax.spines[:].set_visible(False)
    ax.set_facecolor("#f2f2f2")
