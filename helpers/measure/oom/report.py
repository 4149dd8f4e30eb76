"""A GPU's memory in a table: by kind, then the largest tensors and the lines that made them, then what would help."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from helpers.measure.oom.blocks import KINDS, Block
from helpers.measure.refusals import Refusal
from helpers.measure.sizes import GiB, MiB, format_bytes

MOST_ROWS = 5
_ROUNDING = 0.01  # of PyTorch's text
_MANY = 4  # tensors from one line that are all still there
_LEAST = 0.02  # of what is allocated: a cure that gives back less is not worth a sentence


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


@dataclass(frozen=True)
class Picture:
    """GPU number `gpu` at one moment, in bytes. `outside`: what others took on the GPU: the CUDA context, libraries,
    other programs; `refused`: what was asked for, if memory ran out then.

    Blocks are looked at a moment after the refusal: the operation that failed has freed its own by then (`gone`).
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
        return gone if gone > _ROUNDING * self.allocated else 0

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
        """Blocks of one kind, shape and origin together, the largest groups first."""
        found = defaultdict(list)
        for block in self.blocks:
            found[block.kind, block.shape or None, block.dtype, block.origin].append(block.size)
        made = [Group(*key, len(sizes), sum(sizes)) for key, sizes in found.items()]
        return sorted(made, key=lambda group: (-group.size, group.origin))

    def __str__(self) -> str:
        lines = [f"{self.refused}." if self.refused else f"GPU {self.gpu}, {format_bytes(self.capacity)}"]
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


def advise(picture: Picture) -> list[tuple[int, str]]:
    """(bytes that come back, what to do), the largest first; nothing that would not matter."""
    held, refused = picture.by_kind(), picture.refused
    graph, state, parameters = (held.get(kind, 0) for kind in ("held by autograd", "optimizer state", "parameters"))
    found = [
        (graph, "For validation: torch.inference_mode(), which keeps nothing for backward."),
        (
            graph // 2,
            f"Half the batch: about {format_bytes(graph // 2)} of what autograd holds. "
            "Accumulate gradients over two halves.",
        ),
        (
            graph // 2,
            f"Half of {format_bytes(graph)} and often more: torch.utils.checkpoint around the blocks of the net, "
            "or autocast to bfloat16.",
        ),
        (
            held.get("gradients", 0),
            "optimizer.zero_grad() before the forward pass: gradients of the last step need not be there in it.",
        ),
    ]
    if refused and refused.requested > picture.capacity - picture.outside:
        why = "Nothing: this one request is larger than the whole GPU. Make that tensor smaller."
        found.append((refused.requested, why))
    if refused and picture.cached + refused.room >= refused.requested:
        why = f"{format_bytes(picture.cached)} lie cached in pieces, enough for the request, had they been one: "
        found.append((picture.cached, why + "expandable_segments:True, or make the large tensors first."))
    for group in picture.groups():
        if group.kind == "tensors in variables" and group.count >= _MANY:
            why = f"{group.count} tensors of one line are all still there ({group.origin}). Does a list collect them? "
            all_but_one = group.size - group.size // group.count
            found.append((all_but_one, why + "Keep numbers (.item()), or .detach().cpu()."))
    if state > 1.5 * parameters:
        found.append((state // 2, "SGD with momentum instead of Adam: one number less per parameter."))
    context = max(2 * GiB, picture.capacity // 4)  # at most
    found.append((picture.outside - context, "Another program holds memory on this GPU: look at nvidia-smi."))
    least = _LEAST * max(1, picture.allocated)
    return sorted((each for each in found if each[0] > least), key=lambda each: -each[0])


def enough(picture: Picture, size: int) -> str:
    """Whether `size` bytes more would have made room, in a few words; "" where nothing was refused."""
    if picture.refused is None:
        return ""
    lacking = picture.refused.over
    return "enough" if size >= lacking else f"not enough: {format_bytes(max(lacking, MiB // 100))} were lacking"
