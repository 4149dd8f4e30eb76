"""Pieces of a batch on several GPUs: what tensors are in them, and where those are. Used by `helpers.parallel_loss`."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

__all__ = ["as_arguments", "device_of", "is_cut", "tensors_in"]


def tensors_in(thing: Any) -> Iterator[Tensor]:
    """Every tensor in a tensor, or in nested lists, tuples and dicts, in order: where `nn.DataParallel` looks too."""
    if isinstance(thing, Tensor):
        yield thing
    elif isinstance(thing, dict):
        yield from tensors_in(list(thing.values()))
    elif isinstance(thing, (list, tuple)):
        for part in thing:
            yield from tensors_in(part)


def as_arguments(output: Any) -> tuple:
    """A plain tuple or list is several arguments; a named tuple is one, since its fields are reached by name."""
    return tuple(output) if isinstance(output, (tuple, list)) and not hasattr(output, "_fields") else (output,)


def device_of(thing: Any, name: str) -> torch.device:
    """The device of all tensors in a shard; ValueError if it has none, or some elsewhere."""
    devices = {tensor.device for tensor in tensors_in(thing)}
    if len(devices) != 1:
        found = "no tensor" if not devices else f"tensors on {', '.join(sorted(map(str, devices)))}"
        raise ValueError(f"{name} has {found}: a shard must have tensors, all on one GPU")
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
