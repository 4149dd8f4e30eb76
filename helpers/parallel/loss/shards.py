"""Pieces of a batch on several GPUs: what tensors are in them, and where those are. Used by `helpers.parallel.loss`."""

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

__all__ = ["arguments_of", "device_of", "each", "is_cut", "left_whole", "tensors_in"]


def tensors_in(thing: Any) -> Iterator[Tensor]:
    """Every tensor in a tensor, or in nested lists, tuples, dicts (other mappings too) and dataclasses, in order."""
    if isinstance(thing, Tensor):
        yield thing
    elif isinstance(thing, (Mapping, list, tuple)):
        for part in thing.values() if isinstance(thing, Mapping) else thing:
            yield from tensors_in(part)
    elif dataclasses.is_dataclass(thing) and not isinstance(thing, type):
        yield from tensors_in([getattr(thing, field.name) for field in dataclasses.fields(thing)])


def left_whole(thing: Any) -> Iterator[Any]:
    """What has tensors in it, and yet is not cut: `nn.DataParallel` looks into lists, tuples and dicts only."""
    if isinstance(thing, (dict, list, tuple)) and not isinstance(thing, PackedSequence):
        for part in thing.values() if isinstance(thing, dict) else thing:
            yield from left_whole(part)
    elif not isinstance(thing, Tensor) and any(True for _ in tensors_in(thing)):
        yield thing


def each(function: Callable[[list], Any], things: Sequence[Any]) -> Any:
    """`function` of what stands at the same place in each of `things`, in the tuple, list or dict that the first is.

    What is no tuple, list or dict is one place. TypeError where `things` are built differently.
    """
    first, *others = things
    if not isinstance(first, (dict, tuple, list)):
        return function(list(things))
    if any(not _alike(first, other) for other in others):
        raise TypeError(f"not built alike: {' and '.join(map(_shown, things))}. Every GPU must return the same losses")
    if isinstance(first, dict):
        return {key: each(function, [thing[key] for thing in things]) for key in first}
    parts = [each(function, column) for column in zip(*things, strict=True)]
    return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)


def _alike(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys()
    return isinstance(other, (tuple, list)) and len(one) == len(other)


def _shown(thing: Any) -> str:
    if isinstance(thing, dict):
        return f"a dict of {', '.join(map(str, thing))}"
    return f"{len(thing)} parts" if isinstance(thing, (tuple, list)) else f"a {type(thing).__name__}"


def arguments_of(criterion: nn.Module, output: Any, targets: Sequence, options: dict[str, Any]) -> tuple:
    """What `criterion` is called with, `options` apart: an output and its targets.

    A plain tuple or list is several arguments, unless the criterion takes it only as one. A named tuple is one, since
    its fields are reached by name.
    """
    whole = (output, *targets)
    if not isinstance(output, (tuple, list)) or hasattr(output, "_fields"):
        return whole
    several = (*output, *targets)
    return whole if _takes(criterion, whole, options) and not _takes(criterion, several, options) else several


def _takes(criterion: nn.Module, arguments: tuple, options: dict[str, Any]) -> bool:
    try:
        inspect.signature(criterion.forward).bind(*arguments, **options)
    except (TypeError, ValueError):  # ValueError: written in C++, so that nobody knows
        return False
    return True


def device_of(thing: Any, name: str) -> torch.device:
    """The device of all tensors in a shard; ValueError if it has none, or some elsewhere."""
    devices = {tensor.device for tensor in tensors_in(thing)}
    if len(devices) != 1:
        found = f"tensors on {', '.join(sorted(map(str, devices)))}" if devices else "no tensor that can be found"
        raise ValueError(
            f"{name}, a {type(thing).__name__}, has {found}: a shard must have tensors, all on one GPU, alone or in "
            "tuples, lists, dicts or dataclasses"
        )
    return devices.pop()


def is_cut(target: Any, devices: list[torch.device], name: str) -> bool:
    """Whether a target is one piece per output already; ValueError if it is cut otherwise."""
    if not isinstance(target, list):
        return False
    held = [{tensor.device for tensor in tensors_in(piece)} for piece in target]
    if held == [{device} for device in devices]:
        return True
    if len({device for found in held for device in found if device.type == "cuda"}) > 1:
        places = [" and ".join(sorted(map(str, found))) for found in held]
        raise ValueError(
            f"{name} is a list of {len(target)} pieces on {places}, and the {len(devices)} outputs are on "
            f"{[str(device) for device in devices]}: one piece per output, on its GPU, or a whole target on one device"
        )
    return False
