"""What would have helped: each cure with the bytes that it gives back, the largest first.

A rule looks at a `Picture` and yields (bytes, sentence). Bytes are what is known to come back: of halves and other
shares the sentence says so.
"""

from collections.abc import Callable, Iterator

from helpers.measure.memory import MiB, format_bytes
from helpers.measure.oom.live import KINDS
from helpers.measure.oom.report import Group, Picture

LEAST = 0.02  # of what is allocated: less is not worth a sentence
MANY = 4  # tensors from one line that are all still there
Advice = tuple[int, str]


def advise(picture: Picture) -> list[Advice]:
    """(bytes that come back, what to do), the largest first; nothing that would not matter."""
    found = [advice for rule in RULES for advice in rule(picture)]
    least = LEAST * max(1, picture.allocated)
    return sorted((each for each in found if each[0] > least), key=lambda each: -each[0])


def _too_large_for_any(picture: Picture) -> Iterator[Advice]:
    asked = picture.refused
    if asked and asked.requested > picture.capacity - picture.outside:
        yield asked.requested, "Nothing: this one request is larger than the whole card. Make that tensor smaller."


def _fragmented(picture: Picture) -> Iterator[Advice]:
    asked = picture.refused
    if asked and picture.cached + asked.room >= asked.requested:
        yield (
            picture.cached,
            f"{format_bytes(picture.cached)} lie cached in pieces, enough for the request, had they been one: "
            "expandable_segments:True, or make the large tensors first.",
        )


def _collected(picture: Picture) -> Iterator[Advice]:
    for group in picture.groups():
        if group.kind == "tensors in variables" and group.count >= MANY:
            yield (
                _but_one(group),
                f"{group.count} tensors of one line are all still there ({group.place}). Does a list collect them? "
                "Keep numbers (.item()), or .detach().cpu().",
            )


def _graph(picture: Picture) -> Iterator[Advice]:
    held = picture.by_kind().get(KINDS[-1], 0)
    share = format_bytes(held // 2)
    if held:
        yield held, "For validation: torch.inference_mode(), which keeps nothing for backward."
        yield held // 2, f"Half the batch: about {share} of what autograd holds. Accumulate gradients over two halves."
        yield (
            held // 2 - 1,
            f"Half of {format_bytes(held)} and often more: torch.utils.checkpoint around the blocks of the net, or "
            "autocast to bfloat16.",
        )


def _optimizer(picture: Picture) -> Iterator[Advice]:
    held, parameters = (picture.by_kind().get(kind, 0) for kind in ("optimizer state", "parameters"))
    if held > 1.5 * parameters:
        yield held // 2, "SGD with momentum instead of Adam: one number less per parameter."


def _gradients(picture: Picture) -> Iterator[Advice]:
    yield (
        picture.by_kind().get("gradients", 0),
        "optimizer.zero_grad() before the forward pass: gradients of the last step need not be there in it.",
    )


def _others(picture: Picture) -> Iterator[Advice]:
    most = max(2 * 2**30, picture.capacity // 4)  # no context is so large
    if picture.outside > most:
        yield picture.outside - most, "Another program holds memory on this card: look at nvidia-smi."


def _but_one(group: Group) -> int:
    return group.size - group.size // group.count


def enough(picture: Picture, size: int) -> str:
    """Whether `size` bytes more would have made room, in a few words; "" where nothing was refused."""
    if picture.refused is None:
        return ""
    lacking = picture.refused.over
    return "enough" if size >= lacking else f"not enough: {format_bytes(max(lacking, MiB // 100))} were lacking"


RULES: tuple[Callable[[Picture], Iterator[Advice]], ...] = (
    _too_large_for_any,
    _fragmented,
    _collected,
    _graph,
    _optimizer,
    _gradients,
    _others,
)
