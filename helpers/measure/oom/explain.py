"""Explains a GPU's memory, now or at the moment when it ran out: by kind, by line, and what would have helped."""

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

_WIDTH = 110  # characters of a notebook's output
_MOST_GROUPS = 5
_LEAST = 0.02  # of what is allocated: a cure that gives back less is not worth a sentence
_ROUNDING = 0.01  # of PyTorch's text


@dataclass(frozen=True)
class Group:
    """`count` blocks of one kind, shape and origin; `size` bytes together."""

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
    """GPU number `gpu` at one moment, in bytes. What `explain_oom` gives is False where memory did not run out.

    outside   what others took on the GPU: the CUDA context, libraries, other programs
    refused   what was asked for, if memory ran out then
    said      what is printed where there is nothing to explain

    Blocks are looked at a moment after the refusal: the operation that failed has freed its own by then (`gone`).
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
        """What the operation that failed held when memory ran out; 0 if it is within the rounding of PyTorch's text."""
        gone = self.refused.allocated - self.allocated if self.refused else 0
        return gone if gone > _ROUNDING * self.allocated else 0

    @property
    def cached(self) -> int:
        """Reserved by PyTorch, and in no tensor's use; when memory ran out, if it did."""
        return max(0, self.reserved - self.allocated - self.gone)

    def by_kind(self) -> dict[str, int]:
        """Bytes per kind; those of `KINDS` that are there, then what is gone, cached, taken by others, and free."""
        found = Counter()
        for block in self.blocks:
            found[block.kind] += block.size
        kinds = {kind: found[kind] for kind in KINDS if found[kind]}
        if self.gone:
            kinds["gone with the failed operation"] = self.gone
        kinds |= {"cached by PyTorch": self.cached, "context and other programs": self.outside}
        return kinds | {"free": max(0, self.capacity - self.reserved - self.outside)}

    def groups(self) -> list[Group]:
        """Blocks of one kind, shape and origin together, the largest groups first."""
        found = defaultdict(list)
        for block in self.blocks:
            found[block.kind, block.shape or None, block.dtype, block.origin].append(block.size)
        made = [Group(*key, len(sizes), sum(sizes)) for key, sizes in found.items()]
        return sorted(made, key=lambda group: (-group.size, group.origin))

    def advice(self) -> list[tuple[int, str]]:
        """(bytes that come back, what to do), the largest first; nothing that would not matter."""
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
        """Whether `size` bytes more would have made room."""
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
    """What is on one GPU now (a number, "cuda:1", a device), by kind, and the lines that made the largest tensors.

    Lines are known from `remember_origins()` on. Raises what `read_memory` raises.
    """
    found = Explanation()
    found._look(read_memory(gpu)[0], None)
    return found


@contextmanager
def explain_oom(gpus=None) -> Iterator[Explanation]:
    """Run the block; where it runs out of memory, say what was there, what was asked for, what would have helped.

    The explanation is filled when the block ends, for the GPU that ran out of memory. The program goes on after the
    block, and nothing that died with it is kept alive. `gpus`: see `helpers.measure.read_memory`.
    """
    found = Explanation()
    with origins_remembered(), measure_memory(gpus, catch=True) as readings:
        try:
            yield found
        except torch.OutOfMemoryError as error:
            # Now, while the error still holds the frames and their variables: after this block they are gone.
            refused, now = read_refusal(error), read_memory(gpus)
            those = [reading for reading in now if refused and reading.index == refused.gpu]
            fullest = max(now, key=lambda reading: reading.allocated)  # where the text does not say which it was
            found._look(those[0] if those else fullest, refused if those else None)
            raise
    peaks = ", ".join(f"GPU {each.index} {format_bytes(each.peak_allocated)}" for each in readings)
    found.said = f"Memory did not run out. The most that was allocated: {peaks}."
