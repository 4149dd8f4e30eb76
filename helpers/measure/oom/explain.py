"""Explains a GPU's memory, now or when it ran out: its contents by kind and by line, and what would have helped."""

from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from textwrap import fill

import torch

from helpers.measure.memory import measure_memory, read_memory
from helpers.measure.oom.blocks import KINDS, Block, live_blocks, origins_remembered
from helpers.measure.readings import Reading
from helpers.measure.refusals import Refusal, read_refusal
from helpers.measure.sizes import MiB, format_bytes

_WIDTH = 110  # characters per line of a notebook's output
_MOST_GROUPS = 5
_LEAST = 0.02  # of the allocated memory; advice that saves less is left out
_ROUNDING = 0.01  # in the figures of PyTorch's error text


@dataclass(frozen=True)
class Group:
    """`count` blocks of the same kind, shape and origin, with a total of `size` bytes."""

    kind: str
    shape: tuple[int, ...] | None
    dtype: str
    origin: str
    count: int
    size: int

    def __str__(self) -> str:
        times = f"{self.count} x " if self.count > 1 else ""
        what = f"{self.shape} {self.dtype}, {self.kind}" if self.shape else "held by autograd or a library"
        return f"{format_bytes(self.size):>9}  {times}{what}: {self.origin}"


@dataclass
class Explanation:
    """The memory of GPU number `gpu` at one time, in bytes. It is false if memory did not run out in `explain_oom`.

    outside   memory in use outside PyTorch's allocator: the CUDA context, libraries, other programs
    refused   the request that failed, if memory ran out
    said      the text that is printed if there is nothing to explain

    The blocks are read shortly after the failure. The failed operation has freed its own blocks by then (`gone`).
    """

    gpu: int | None = None
    capacity: int = 0
    reserved: int = 0
    outside: int = 0
    blocks: list[Block] = field(default_factory=list)
    refused: Refusal | None = None
    said: str = "The block has not ended yet."

    def __bool__(self) -> bool:
        return self.gpu is not None

    @property
    def allocated(self) -> int:
        return sum(block.size for block in self.blocks)

    @property
    def gone(self) -> int:
        """Bytes that the failed operation held when memory ran out, or 0 if below the rounding of PyTorch's text."""
        gone = self.refused.allocated - self.allocated if self.refused else 0
        return gone if gone > _ROUNDING * self.allocated else 0

    @property
    def cached(self) -> int:
        """Bytes that PyTorch has reserved and no tensor uses. If memory ran out, this is the value at that time."""
        return max(0, self.reserved - self.allocated - self.gone)

    def by_kind(self) -> dict[str, int]:
        """Bytes per kind: the existing kinds of `KINDS`, then memory that is gone, cached, used by others, or free."""
        found = Counter()
        for block in self.blocks:
            found[block.kind] += block.size
        kinds = {kind: found[kind] for kind in KINDS if found[kind]}
        if self.gone:
            kinds["inside the failed operation"] = self.gone
        kinds |= {"cached by PyTorch": self.cached, "context and other programs": self.outside}
        return kinds | {"free": max(0, self.capacity - self.reserved - self.outside)}

    def groups(self) -> list[Group]:
        """The blocks, grouped by kind, shape and origin. The largest group comes first."""
        found = defaultdict(list)
        for block in self.blocks:
            found[block.kind, block.shape or None, block.dtype, block.origin].append(block.size)
        made = [Group(*key, len(sizes), sum(sizes)) for key, sizes in found.items()]
        return sorted(made, key=lambda group: (-group.size, group.origin))

    def advice(self) -> list[tuple[int, str]]:
        """(bytes saved, what to do) pairs, largest first. Advice that would save very little is left out."""
        graph, refused = self.by_kind().get("held by autograd", 0), self.refused
        half, whole, cached = format_bytes(graph // 2), format_bytes(graph), format_bytes(self.cached)
        found = [
            (graph, "For validation: torch.inference_mode(), which keeps nothing for backward."),
            (
                graph // 2,
                f"Halve the batch and accumulate the gradients of both halves: autograd holds about {half} less.",
            ),
            (
                graph // 2,
                "Put torch.utils.checkpoint around the model's blocks, or use autocast to bfloat16: "
                f"half of {whole} or more.",
            ),
        ]
        if refused and refused.requested > self.capacity - self.outside:
            text = "Nothing: this one request is larger than the whole GPU. Make that tensor smaller."
            found.append((refused.requested, text))
        if refused and self.cached + refused.room >= refused.requested:
            text = f"{cached} are cached, but in several gaps. One gap of that size would be enough. "
            found.append((self.cached, text + "Set expandable_segments:True, or create the large tensors first."))
        least = _LEAST * max(1, self.allocated)
        return sorted((each for each in found if each[0] > least), key=lambda each: -each[0])

    def __str__(self) -> str:
        if not self:
            return self.said
        lines = [f"{self.refused}." if self.refused else f"GPU {self.gpu}, {format_bytes(self.capacity)}"]
        lines += ["", "what is there"]
        lines += [f"  {kind:<30}{format_bytes(size):>10}" for kind, size in self.by_kind().items()]
        groups = self.groups()
        if groups:
            lines += ["", "the largest, and the line that made them"]
            lines += [f"  {group}" for group in groups[:_MOST_GROUPS]]
        rest = groups[_MOST_GROUPS:]
        if rest:
            lines.append(f"  {format_bytes(sum(g.size for g in rest)):>9}  in {sum(g.count for g in rest)} others")
        advice = self.advice()
        if advice:
            lines += ["", "what would have helped" if self.refused else "what would give memory back"]
        for size, text in advice:
            told = f"{format_bytes(size):>9}  {text}{self._enough(size)}"
            lines.append(fill(told, _WIDTH, initial_indent="  ", subsequent_indent=" " * 13))
        return "\n".join(lines)

    def _enough(self, size: int) -> str:
        """Say whether `size` more bytes would have been enough."""
        if self.refused is None:
            return ""
        lacking = self.refused.over
        return (
            " (enough)" if size >= lacking else f" (not enough: {format_bytes(max(lacking, MiB // 100))} are missing)"
        )

    def _look(self, reading: Reading, refused: Refusal | None) -> None:
        free, self.capacity = torch.cuda.mem_get_info(reading.index)
        self.gpu, self.reserved, self.refused = reading.index, reading.reserved, refused
        self.outside = max(0, self.capacity - free - reading.reserved)
        self.blocks = live_blocks(reading.index)


def explain_memory(gpu=0) -> Explanation:
    """Explain what one GPU (an index, "cuda:1", or a device) contains now, by kind and by line of code.

    Lines are known for tensors created after `remember_origins()`. Raises what `read_memory` raises.
    """
    found = Explanation()
    found._look(read_memory(gpu)[0], None)
    return found


@contextmanager
def explain_oom(gpus=None) -> Iterator[Explanation]:
    """Run the block. If it runs out of memory, explain what was in use, what was requested, what would have helped.

    The explanation is filled when the block ends, for the GPU that ran out of memory. The program continues after the
    block, and the failed block's tensors are not kept alive. gpus: see `helpers.measure.read_memory`, also for errors.
    """
    found = Explanation()
    with origins_remembered(), measure_memory(gpus, catch=True) as readings:
        try:
            yield found
        except torch.OutOfMemoryError as error:
            # This must happen here, while the error still keeps the frames and their variables alive.
            refused, now = read_refusal(error), read_memory(gpus)
            those = [reading for reading in now if refused and reading.index == refused.gpu]
            fullest = max(now, key=lambda reading: reading.allocated)  # if the text does not name a GPU
            found._look(those[0] if those else fullest, refused if those else None)
            raise
    peaks = ", ".join(f"GPU {each.index} {format_bytes(each.peak_allocated)}" for each in readings)
    found.said = f"Memory did not run out. The most that was allocated: {peaks}."
