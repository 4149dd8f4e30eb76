"""Explains a GPU's memory, now or at the moment when it ran out."""

from collections.abc import Iterator
from contextlib import contextmanager
from textwrap import fill

import torch

from helpers.measure.memory import Refusal, format_bytes, measure_memory, read_memory
from helpers.measure.oom.advice import Advice, advise, enough
from helpers.measure.oom.live import live_blocks
from helpers.measure.oom.places import remembered
from helpers.measure.oom.report import Picture

MOST_ADVICE = 4
COLUMNS = 110  # of a notebook's output


class Explanation:
    """What `explain_oom` found. False, and `picture` None, where memory did not run out.

    picture  the fullest GPU when memory ran out, block by block (`helpers.measure.oom.report.Picture`)
    advice   [(bytes that come back, what to do)], the largest first
    """

    def __init__(self):
        self.picture: Picture | None = None
        self.advice: list[Advice] = []
        self._said = "The block has not ended yet."

    def __bool__(self) -> bool:
        return self.picture is not None

    def __str__(self) -> str:
        if self.picture is None:
            return self._said
        lines = [str(self.picture)]
        if self.advice:
            lines += ["", "what would have helped" if self.picture.refused else "what would give memory back"]
        for size, text in self.advice[:MOST_ADVICE]:
            verdict = enough(self.picture, size)
            told = f"{format_bytes(size):>9}  {text}" + (f" ({verdict})" if verdict else "")
            lines.append(fill(told, COLUMNS, initial_indent="  ", subsequent_indent=" " * 13))
        return "\n".join(lines)

    __repr__ = __str__

    def _fill(self, picture: Picture) -> None:
        self.picture, self.advice = picture, advise(picture)


def explain_memory(gpu=0) -> Explanation:
    """What is on one GPU now (a number, "cuda:1", a device), by kind, and the lines that made the largest tensors.

    Lines are known from `remember_places()` on. Raises what `read_memory` raises.
    """
    found = Explanation()
    found._fill(_picture(read_memory(gpu)[0], None))
    return found


@contextmanager
def explain_oom(gpus=None, catch: bool = True) -> Iterator[Explanation]:
    """Run the block; where it runs out of memory, say what was there, what was asked for, what would have helped.

    The explanation is filled when the block ends. `catch=True`: the program goes on after the block, and nothing that
    died with it is kept alive; `catch=False`: the error passes through, as any other error does. `gpus`: see
    `helpers.measure.memory.read_memory`.
    """
    found, pictures = Explanation(), {}
    try:
        with remembered(), measure_memory(gpus) as readings:
            try:
                yield found
            except torch.OutOfMemoryError:
                # Now, while the error still holds the frames and their variables: after this block they are gone.
                pictures = {each.index: _picture(each, None) for each in read_memory(gpus)}
                raise
    except torch.OutOfMemoryError as error:
        _finish(found, pictures, [each.refused for each in readings if each.refused])
        if not catch:
            raise
        error.__traceback__ = None  # as in `measure_memory`: or the frames, and their tensors, would wait for gc
    else:
        peaks = ", ".join(f"GPU {each.index} {format_bytes(each.peak_allocated)}" for each in readings)
        found._said = f"Memory did not run out. The most that was allocated: {peaks}."


def _finish(found: Explanation, pictures: dict[int, Picture], refusals: list[Refusal]) -> None:
    """The GPU that refused, or the fullest where PyTorch's error does not say which it was."""
    refused = refusals[0] if refusals else None
    if refused is not None and refused.gpu in pictures:
        found._fill(_with(pictures[refused.gpu], refused))
    elif pictures:
        found._fill(max(pictures.values(), key=lambda picture: picture.allocated))


def _with(picture: Picture, refused: Refusal) -> Picture:
    return Picture(picture.gpu, picture.capacity, picture.reserved, picture.outside, picture.blocks, refused)


def _picture(reading, refused: Refusal | None) -> Picture:
    free, total = torch.cuda.mem_get_info(reading.index)
    outside = max(0, total - free - reading.reserved)
    return Picture(reading.index, total, reading.reserved, outside, live_blocks(reading.index), refused)
