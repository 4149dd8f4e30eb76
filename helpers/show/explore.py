"""A panel with sliders for any training job, which is run on virtual GPUs.

    def job(batch=64, width=1024):
        net = nn.DataParallel(nn.Linear(width, width).to("cuda:0"))
        net(torch.empty(batch, width, device="cuda:0")).sum().backward()

    explore(job, batch=(8, 512, 8), width=[256, 1024, 4096], count=4, memory="1 GiB")

The panel is the last expression of a cell.
"""

import inspect
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from matplotlib.figure import Figure

from helpers.gpus import modelled_gpus
from helpers.measure.memory import measure_memory
from helpers.measure.readings import Readings
from helpers.show.bars import describe_memory, empty_figure, memory_bars
from helpers.show.panel import Panel, control, misses_a_cell
from helpers.sizes import format_bytes

_MEMORY_FOR_ANY_JOB = "1000000 GiB"


def explore(
    step: Callable[..., object],
    /,
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
    change. In several ranks at once, the jobs share their GPUs.

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
            words.append(f"{name} {value:,}" if type(value) in (int, float) else f"{name} {value}")
        try:
            return _run_and_draw(lambda: step(**values), ", ".join(words), count, kind, memory)
        except Exception as error:
            if misses_a_cell(error):  # the panel says so
                raise
            raise RuntimeError(_describe_error(error, file)) from error

    return Panel(look, controls, slow=True)


def _run_and_draw(
    job: Callable[[], object], name: str, count: int, kind: str, memory: int | str | None
) -> tuple[str, Figure]:
    readings, room, ran = _run(job, count, kind, memory)
    why = next((f"{reading.refused}." for reading in readings if reading.refused), readings.note)
    if not ran:
        readings, _, _ = _run(job, count, kind, _MEMORY_FOR_ANY_JOB)
    on = f"{count} x {readings[0].name}"
    readings = Readings(replace(reading, capacity=room, driver_used=None) for reading in readings)  # PyTorch's alone
    lines = [f"{name + '; ' if name else ''}{on}, {format_bytes(room)} each for PyTorch."]
    if not ran:
        lines += [f"Out of memory: {why}", f"With more memory: {describe_memory(readings)}"]
        if max(reading.peak_allocated for reading in readings) <= room:
            lines[-1] += " Enough would be free, but in pieces that are too small (fragmentation)."
    else:
        lines.append(f"The job runs: {describe_memory(readings)}")
    figure = empty_figure(count)
    memory_bars(readings, f"{on}: {'the job runs' if ran else 'out of memory'}", figure)
    return "\n".join(lines), figure


def _run(job: Callable[[], object], count: int, kind: str, memory: int | str | None) -> tuple[Readings, int, bool]:
    """Return the peaks of each GPU, the bytes that each has for PyTorch, and whether the job ended without running out
    of memory. Random number generators do not change."""
    with modelled_gpus(count, kind, memory), torch.random.fork_rng(devices=[]):
        room, _ = torch.cuda.mem_get_info(0)  # the capacity without CUDA's context
        ran = False
        with measure_memory(catch=True) as readings:
            job()
            ran = True
        return readings, room, ran


def _describe_error(error: Exception, file: str) -> str:
    """Describe an error in one line, with the line of the job that caused it."""
    lines = str(error).strip().splitlines() or [""]
    message = lines[-1] if lines[0].startswith("Caught ") else lines[0]  # DataParallel includes a whole traceback
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    line = f" in line {frames[-1].lineno}, {frames[-1].line}" if frames else ""
    return f"{type(error).__name__}{line}: {message}"
