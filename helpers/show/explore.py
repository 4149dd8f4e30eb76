"""Panels with sliders: for any training job, which is run on virtual GPUs, and for a pipeline, which is simulated.

    def job(batch=64, width=1024):
        net = nn.DataParallel(nn.Linear(width, width).to("cuda:0"))
        net(torch.empty(batch, width, device="cuda:0")).sum().backward()

    explore(job, batch=(8, 512, 8), width=[256, 1024, 4096], count=4, memory="1 GiB")
    explore_pipeline(stages=4, micro_batches=8, schedule="1F1B")

A panel is the last expression of a cell.
"""

import inspect
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from helpers.gpus import modelled_gpus
from helpers.measure import Readings, format_bytes, measure_memory
from helpers.parallel.pipeline import Slot, bubble, gpipe, most_kept, one_f_one_b, simulate
from helpers.show.bars import describe_memory, empty_figure, memory_bars
from helpers.show.panel import Panel, control
from helpers.show.style import COLOURS, WIDTH

_PLENTY = "1000000 GiB"
_SCHEDULES = {"GPipe": gpipe, "1F1B": one_f_one_b}
_MOST_MICRO_BATCHES = 48  # that are tried for the shortest step

# ---- any training job ------------------------------------------------------------------------------------------------


def explore(
    step: Callable[..., object],
    *,
    count: int = 1,
    kind: str = "H200",
    memory: int | str | None = None,
    **options: Sequence[Any] | Mapping[str, Any],
) -> Panel:
    """Return a panel that runs `step` with the values of its controls, and shows the peak memory of every GPU.

    step: a function that builds and trains a model, for two steps if the optimizer's state should count. It runs in
    shapes only, so it must not read values. options: for each argument of `step`, (low, high) or (low, high, step) for
    a slider, a list of choices, or a dict of choices by name. A control starts at the argument's default value.
    count, kind, memory: the virtual GPUs of the job, as for `use_gpus`, and not arguments of `step`. Active GPUs do not
    change.

    If the job runs out of memory, it runs again with more memory to show how much it needs. Raises TypeError if `step`
    does not accept the options, and ValueError for a default outside the options or for GPUs that do not exist.
    """
    modelled_gpus(count, kind, memory)  # checks its arguments
    parameters = inspect.signature(step).parameters
    inspect.signature(step).bind(**options)
    code = getattr(inspect.unwrap(getattr(step, "func", step)), "__code__", None)  # of a functools.partial, too
    file = code.co_filename if code else ""
    controls = {}
    for name, choices in options.items():
        begin = parameters[name].default if name in parameters else inspect.Parameter.empty
        if isinstance(choices, Mapping):
            begin = next((label for label, value in choices.items() if value is begin or value == begin), begin)
            choices = list(choices)
        controls[name] = control(name, choices, begin)

    def look(**chosen: Any) -> tuple[str, Figure]:
        values: dict[str, Any] = {}
        words: list[str] = []
        for name, value in chosen.items():
            values[name] = options[name][value] if isinstance(options[name], Mapping) else value
            words.append(f"{name} {value:,}" if isinstance(value, int | float) else f"{name} {value}")
        try:
            return _run_and_look(lambda: step(**values), ", ".join(words), count, kind, memory)
        except Exception as error:
            if type(error) is NameError:  # of a cell that has not run; the panel says so
                raise
            raise RuntimeError(_describe_error(error, file)) from error

    return Panel(look, controls, slow=True)


def _run_and_look(
    job: Callable[[], object], name: str, count: int, kind: str, memory: int | str | None
) -> tuple[str, Figure]:
    readings, room = _run(job, count, kind, memory)
    refusal = next((reading.refused for reading in readings if reading.refused), None)
    if refusal:
        readings, _ = _run(job, count, kind, _PLENTY)
    on = f"{count} x {readings[0].name}"
    readings = Readings(replace(reading, capacity=room, driver_used=None) for reading in readings)  # PyTorch's alone
    lines = [f"{name}; {on}, {format_bytes(room)} each for PyTorch."]
    if refusal:
        lines += [f"Out of memory: {refusal}.", f"With more memory: {describe_memory(readings)}"]
        if max(reading.peak_allocated for reading in readings) <= room:
            lines[-1] += " Enough would be free, but in pieces that are too small (fragmentation)."
    else:
        lines.append(f"The job runs: {describe_memory(readings)}")
    figure = empty_figure(count)
    memory_bars(readings, f"{on}: {'out of memory' if refusal else 'the job runs'}", figure)
    return "\n".join(lines), figure


def _run(job: Callable[[], object], count: int, kind: str, memory: int | str | None) -> tuple[Readings, int]:
    """Return the peaks of each GPU, and the bytes that each has for PyTorch. Random number generators do not change."""
    with modelled_gpus(count, kind, memory), torch.random.fork_rng(devices=[]):
        room, _ = torch.cuda.mem_get_info(0)  # the capacity without CUDA's context
        with measure_memory(catch=True) as readings:
            job()
        return readings, room


def _describe_error(error: Exception, file: str) -> str:
    """Describe an error in one line, with the line of the job that caused it."""
    lines = str(error).strip().splitlines() or [""]
    message = lines[-1] if lines[0].startswith("Caught ") else lines[0]  # DataParallel includes a whole traceback
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    line = f" in line {frames[-1].lineno}, {frames[-1].line}" if frames else ""
    return f"{type(error).__name__}{line}: {message}"


# ---- a pipeline ------------------------------------------------------------------------------------------------------


def explore_pipeline(stages: int = 4, micro_batches: int = 8, schedule: str = "GPipe", extra: float = 1.0) -> Panel:
    """Return a panel with sliders for a pipeline, for the end of a cell. It simulates the pipeline and needs no GPU.

    schedule: "GPipe" or "1F1B". extra: the overhead of each task (kernel launches, copies, small matrices that do not
    fill a GPU), in percent of a stage's forward pass of the whole batch. With 0 and several stages, more micro-batches
    always help.

    All stages take equally long, and a backward pass takes twice as long as a forward pass. Times are in units of one
    stage's forward pass of the whole batch, so one GPU needs 3 * stages for a step. Raises ValueError for values that
    the sliders do not have.
    """
    controls = {
        "stages": control("stages", (1, 8), stages),
        "micro_batches": control("micro-batches", (1, 32), micro_batches),
        "extra": control("extra per task, %", (0.0, 10.0, 0.5), extra),
        "schedule": control("schedule", list(_SCHEDULES), schedule),
    }
    return Panel(_look_at_pipeline, controls)


def _look_at_pipeline(stages: int, micro_batches: int, extra: float, schedule: str) -> tuple[str, Figure]:
    orders = _SCHEDULES[schedule](stages, micro_batches)
    slots = simulate(orders, *_task_times(micro_batches, extra))
    # The time of a step as a share of one GPU's, with 1, 2, ... micro-batches. It is the same for both schedules.
    times = [(m + stages - 1) * sum(_task_times(m, extra)) / (3 * stages) for m in range(1, _MOST_MICRO_BATCHES + 1)]
    best = min(range(_MOST_MICRO_BATCHES), key=times.__getitem__) + 1
    kept, now = most_kept(orders[0]), max(slot.end for slot in slots) / (3 * stages)
    words = (
        f"{schedule}, {stages} stages, {micro_batches} micro-batches: each GPU is idle for "
        f"{100 * bubble(stages, micro_batches):.1f} % of the step, {stages - 1}/{micro_batches + stages - 1}.\n"
        f"Stage 0 keeps the activations of at most {kept} of {micro_batches} micro-batches, "
        f"{100 * kept / micro_batches:.0f} % of the batch.\n"
        f"A step takes {now:.2f} of one GPU's time ({stages} GPUs at best 1/{stages} = {1 / stages:.2f}); shortest "
        f"with {best}{'' if best < _MOST_MICRO_BATCHES else ' or more'} micro-batches: {times[best - 1]:.2f}."
    )
    figure = Figure(figsize=(WIDTH, 0.9 + 0.28 * stages), layout="constrained")
    ax = figure.subplots()
    _draw_schedule(ax, slots)
    ax.set_title(f"{schedule}: forward blue, backward orange", loc="left", fontsize=10)
    return words, figure


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
