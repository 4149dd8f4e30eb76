"""Sliders for any training job: its memory on every GPU, measured by a run on virtual GPUs in shapes only.

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
    """A panel that runs `step` with what its controls say, and shows the peak of every GPU. End a cell with it.

    step: a function that builds a net and trains it, for two steps if the optimizer's state is to count. It runs in
    shapes only, so it must not look at values. options: for each of its arguments (low, high) or (low, high, step) for
    a slider, a list of choices, or a dict of choices by name. A control begins at the argument's default value.
    gpus, kind, memory: of the virtual GPUs that the job finds, as for `use_gpus`; those that are on stay as they are.

    A job that runs out of memory is run again with more, to show what it would need. Raises TypeError where `step` does
    not take the options, ValueError for a default that is none of the options and for GPUs that do not exist.
    """
    modelled_gpus(gpus, kind, memory)  # says what is wrong with its arguments
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
    readings = Readings(replace(reading, capacity=room) for reading in readings)
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
    """The peaks of each GPU, and the bytes that each has for PyTorch. Random numbers go on as if nothing had been."""
    with modelled_gpus(gpus, kind, memory), torch.random.fork_rng(devices=[]):
        room, _ = torch.cuda.mem_get_info(0)  # the capacity without CUDA's context
        return peak_memory(job, catch=True), room


def _where(error: Exception, file: str) -> str:
    """The error in a line, and the job's line from which it came."""
    lines = str(error).strip().splitlines() or [""]
    said = lines[-1] if lines[0].startswith("Caught ") else lines[0]  # DataParallel puts a whole traceback into it
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    line = f" in line {frames[-1].lineno}, {frames[-1].line}" if frames else ""
    return f"{type(error).__name__}{line}: {said}"
