"""Explains a GPU's memory, now or at the moment when it ran out, and frees what an error keeps."""

import gc
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from textwrap import fill
from types import TracebackType

import torch

from helpers.measure.memory import measure_memory, read_memory
from helpers.measure.oom.blocks import live_blocks, variables
from helpers.measure.oom.origins import origins_remembered
from helpers.measure.oom.report import Picture, advise, enough
from helpers.measure.readings import Reading
from helpers.measure.refusals import Refusal, read_refusal
from helpers.measure.sizes import format_bytes

_MOST_ADVICE = 4
_WIDTH = 110  # characters of a notebook's output


class Explanation:
    """What `explain_oom` found. False, and `picture` None, where memory did not run out.

    picture  the GPU that ran out of memory at that moment, block by block (`helpers.measure.oom.report.Picture`)
    advice   [(bytes that come back, what to do)], the largest first
    """

    def __init__(self, picture: Picture | None = None):
        self.picture = picture
        self.said = "The block has not ended yet."

    @property
    def advice(self) -> list[tuple[int, str]]:
        return advise(self.picture) if self.picture else []

    def __bool__(self) -> bool:
        return self.picture is not None

    def __repr__(self) -> str:
        if self.picture is None:
            return self.said
        lines = [str(self.picture)]
        if self.advice:
            lines += ["", "what would have helped" if self.picture.refused else "what would give memory back"]
        for size, text in self.advice[:_MOST_ADVICE]:
            verdict = enough(self.picture, size)
            told = f"{format_bytes(size):>9}  {text}" + (f" ({verdict})" if verdict else "")
            lines.append(fill(told, _WIDTH, initial_indent="  ", subsequent_indent=" " * 13))
        return "\n".join(lines)


def explain_memory(gpu=0) -> Explanation:
    """What is on one GPU now (a number, "cuda:1", a device), by kind, and the lines that made the largest tensors.

    Lines are known from `remember_origins()` on. Raises what `read_memory` raises.
    """
    return Explanation(_picture(read_memory(gpu)[0]))


@contextmanager
def explain_oom(gpus=None, catch: bool = True) -> Iterator[Explanation]:
    """Run the block; where it runs out of memory, say what was there, what was asked for, what would have helped.

    The explanation is filled when the block ends. `catch=True`: the program goes on after the block, and nothing that
    died with it is kept alive; `catch=False`: the error passes through, as any other error does. `gpus`: see
    `helpers.measure.read_memory`.
    """
    found = Explanation()
    with origins_remembered(), measure_memory(gpus, catch) as readings:
        try:
            yield found
        except torch.OutOfMemoryError as error:
            # Now, while the error still holds the frames and their variables: after this block they are gone.
            found.picture = _picture_of(read_refusal(error), read_memory(gpus))
            raise
    peaks = ", ".join(f"GPU {each.index} {format_bytes(each.peak_allocated)}" for each in readings)
    found.said = f"Memory did not run out. The most that was allocated: {peaks}."


def _picture_of(refused: Refusal | None, readings: list[Reading]) -> Picture:
    """Of the GPU that refused, or of the fullest where PyTorch's error does not say which it was."""
    for reading in readings:
        if refused and reading.index == refused.gpu:
            return _picture(reading, refused)
    return _picture(max(readings, key=lambda reading: reading.allocated))


def _picture(reading: Reading, refused: Refusal | None = None) -> Picture:
    free, total = torch.cuda.mem_get_info(reading.index)
    outside = max(0, total - free - reading.reserved)
    return Picture(reading.index, total, reading.reserved, outside, live_blocks(reading.index), refused)


def forget_error() -> int:
    """Free what the last error that ended a cell, or a line at a prompt, keeps. Returns the bytes that came back on
    all GPUs. Does nothing where there was none; an error that your own variable names stays.

    Python keeps the error (`sys.last_value`), the error its traceback, that the frames of all functions on the way,
    and the frames their variables: the tensors of a training step that ran out of memory. IPython keeps it a second
    time, and has looked at every frame to show it.
    """
    before = _allocated()
    ipython = sys.modules.get("IPython")
    shown = getattr(ipython and ipython.get_ipython(), "InteractiveTB", None)  # what shows IPython's errors
    for trace in (getattr(sys, "last_traceback", None), getattr(shown, "tb", None)):
        if isinstance(trace, TracebackType):
            for frame, _ in traceback.walk_tb(trace):
                variables(frame)  # empties the copy that Python up to 3.12 made when IPython looked
            traceback.clear_frames(trace)
    for name in ("last_exc", "last_value", "last_traceback", "last_type"):
        vars(sys).pop(name, None)
    if shown is not None:
        shown.tb = None
    gc.collect()  # older errors lie in reference cycles
    return before - _allocated()


def _allocated() -> int:
    return sum(torch.cuda.memory_allocated(gpu) for gpu in range(torch.cuda.device_count()))
