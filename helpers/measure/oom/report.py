"""A GPU's memory in a table that a person can read: by kind, then the largest tensors and where they were made."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from helpers.measure.memory import Refusal, format_bytes
from helpers.measure.oom.live import KINDS, Block

MOST_ROWS = 5
ROUNDING = 0.01


@dataclass(frozen=True)
class Group:
    """`count` blocks of one kind, shape and place; `size` bytes together."""

    kind: str
    shape: tuple[int, ...] | None
    dtype: str
    place: str
    count: int
    size: int

    def __str__(self) -> str:
        what = f"{self.shape} {self.dtype}" if self.shape is not None else "held by autograd or a library"
        times = f"{self.count} x " if self.count > 1 else ""
        return f"{format_bytes(self.size):>9}  {times}{what}, {self.kind}: {self.place}".replace(
            f"library, {KINDS[-1]}", "library"
        )


@dataclass(frozen=True)
class Picture:
    """GPU number `gpu` at one moment, in bytes. `outside`: what others took on the card: the CUDA context, libraries,
    other programs; `refused`: what was asked for, if memory ran out then.

    Blocks are looked at a moment after the refusal: the operation that failed has let go of its own by then (`gone`).
    """

    gpu: int
    capacity: int
    reserved: int
    outside: int
    blocks: Sequence[Block]
    refused: Refusal | None = None

    @property
    def allocated(self) -> int:
        return sum(block.size for block in self.blocks)

    @property
    def gone(self) -> int:
        """What the operation that failed held when memory ran out; 0 if it is within the rounding of PyTorch's text."""
        gone = self.refused.allocated - self.allocated if self.refused else 0
        return gone if gone > ROUNDING * self.allocated else 0

    @property
    def cached(self) -> int:
        """Reserved by PyTorch, and in no tensor's use; when memory ran out, if it did."""
        return max(0, self.reserved - self.allocated - self.gone)

    @property
    def free(self) -> int:
        return max(0, self.capacity - self.reserved - self.outside)

    def by_kind(self) -> dict[str, int]:
        """Bytes per kind; those of `KINDS` that are there, then what is gone, cached, taken by others, and free."""
        found = Counter()
        for block in self.blocks:
            found[block.kind] += block.size
        kinds = {kind: found[kind] for kind in KINDS if found[kind]}
        kinds |= {"gone with the failed operation": self.gone} if self.gone else {}
        rest = {"cached by PyTorch": self.cached, "context and other programs": self.outside, "free": self.free}
        return kinds | rest

    def groups(self) -> list[Group]:
        """Blocks of one kind, shape and place together, the largest groups first."""
        found = defaultdict(list)
        for block in self.blocks:
            found[block.kind, block.shape or None, block.dtype, block.place].append(block.size)
        made = [Group(*key, len(sizes), sum(sizes)) for key, sizes in found.items()]
        return sorted(made, key=lambda group: (-group.size, group.place))

    def __str__(self) -> str:
        lines = [f"{self.refused}."] if self.refused else [f"GPU {self.gpu}, {format_bytes(self.capacity)}"]
        lines += ["", "what is there"]
        lines += [f"  {kind:<30}{format_bytes(size):>10}" for kind, size in self.by_kind().items()]
        groups = self.groups()
        if groups:
            lines += ["", "the largest, and the line that made them"]
            lines += [f"  {group}" for group in groups[:MOST_ROWS]]
        rest = groups[MOST_ROWS:]
        if rest:
            lines.append(f"  {format_bytes(sum(g.size for g in rest)):>9}  in {sum(g.count for g in rest)} others")
        return "\n".join(lines)
