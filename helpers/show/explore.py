"""Sliders for any training job. The panel measures its memory on every GPU by a run on virtual GPUs in shapes only.

def job(batch=64, width=1024):
    net = nn.DataParallel(nn.Linear(width, width).to("cuda:0"))
    net(torch.empty(batch, width, device="cuda:0")).sum().backward()

explore(job, batch=(8, 512, 8), width=[256, 1024, 4096], gpus=4, memory="1 GiB")
"""

import inspect
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from matplotlib.figure import Figure

from helpers.gpus import modelled_gpus
from helpers.measure import Readings, format_bytes, peak_memory
from helpers.show.bars import empty_figure, memory_bars
from helpers.show.panel import Panel, control
from helpers.show.words import describe

_PLENTY = "1000000 GiB"


def explore(step: Callable, *, gpus: int = 1, kind: str = "H200", memory: int | str | None = None, **options) -> Panel:
    """Return a panel that runs `step` with the values of its controls, and shows the peak memory of every GPU.

    step: a function that builds and trains a model, for two steps if the optimizer's state should count. It runs in
    shapes only, so it must not read values. options: for each argument of `step`, (low, high) or (low, high, step) for
    a slider, a list of choices, or a dict of choices by name. A control starts at the argument's default value.
    gpus, kind, memory: the virtual GPUs of the job, as for `use_gpus`. Active GPUs do not change.

    If the job runs out of memory, it runs again with more memory to show how much it needs. Raises TypeError if `step`
    does not accept the options, and ValueError for a default outside the options or for GPUs that do not exist.
    """
    modelled_gpus(gpus, kind, memory)  # checks its arguments
    parameters = inspect.signature(step).parameters
    inspect.signature(step).bind(**options)
    controls = {}
    for name, each in options.items():
        begin = parameters[name].default if name in parameters else inspect.Parameter.empty
        if isinstance(each, Mapping):
            begin = next((label for label, value in each.items() if value is begin), begin)
        controls[name] = control(name, list(each) if isinstance(each, Mapping) else each, begin)

    def look(**chosen) -> tuple[str, Figure]:
        values, said = {}, []
        for name, value in chosen.items():
            values[name] = options[name][value] if isinstance(options[name], Mapping) else value
            said.append(f"{name} {value:,}" if isinstance(value, int | float) else f"{name} {value}")
        try:
            return _run_and_look(lambda: step(**values), ", ".join(said), gpus, kind, memory)
        except Exception as error:
            raise RuntimeError(_where(error, inspect.getfile(step))) from error

    return Panel(look, controls, slow=True)


def _run_and_look(job: Callable, name: str, gpus: int, kind: str, memory: int | str | None) -> tuple[str, Figure]:
    readings, room = _run(job, gpus, kind, memory)
    refusal = next((reading.refused for reading in readings if reading.refused), None)
    if refusal:
        readings, _ = _run(job, gpus, kind, _PLENTY)
    on = f"{gpus} x {readings[0].name}"
    readings = Readings(replace(reading, capacity=room, driver_used=None) for reading in readings)  # PyTorch's alone
    lines = [f"{name}; {on}, {format_bytes(room)} each for PyTorch."]
    if refusal:
        lines += [f"Out of memory: {refusal}.", f"With more memory: {describe(readings)}"]
        if max(reading.peak_allocated for reading in readings) <= room:
            lines[-1] += " Enough would be free, but in pieces that are too small (fragmentation)."
    else:
        lines.append(f"The job runs: {describe(readings)}")
    figure = empty_figure(gpus)
    memory_bars(readings, f"{on}: {'out of memory' if refusal else 'the job runs'}", figure)
    return "\n".join(lines), figure


def _run(job: Callable, gpus: int, kind: str, memory: int | str | None) -> tuple[Readings, int]:
    """Return the peaks of each GPU, and the bytes that each has for PyTorch. Random number generators do not change."""
    with modelled_gpus(gpus, kind, memory), torch.random.fork_rng(devices=[]):
        room, _ = torch.cuda.mem_get_info(0)  # the capacity without CUDA's context
        return peak_memory(job, catch=True), room


def _where(error: Exception, file: str) -> str:
    """Describe an error in one line, with the line of the job that caused it."""
    lines = str(error).strip().splitlines() or [""]
    said = lines[-1] if lines[0].startswith("Caught ") else lines[0]  # DataParallel includes a whole traceback
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    line = f" in line {frames[-1].lineno}, {frames[-1].line}" if frames else ""
    return f"{type(error).__name__}{line}: {said}"
