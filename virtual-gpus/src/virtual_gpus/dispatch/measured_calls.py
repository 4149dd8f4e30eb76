"""A call of an operator as text, its key among measured operators (`clock.measured`), and arguments made from text."""

from typing import Any, NamedTuple

import torch

from virtual_gpus.clock.measured import key


class KernelCall(NamedTuple):
    """A call that the dispatch mode does not see: what `OpCall` has for one that it sees. func: a name in `TIMED`."""

    func: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def key_of(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """The key of a call. operator: an ATen overload, or the name of a fused kernel."""
    return key(str(operator), [_described(args), {name: _described(value) for name, value in kwargs.items()}])


def _described(value: Any) -> Any:
    """A tensor as its shape, type and strides; types, layouts and devices by their names in torch."""
    if isinstance(value, torch.Tensor):
        kind = str(value.dtype).removeprefix("torch.")
        return {"shape": list(value.shape), "dtype": kind, "strides": list(value.stride())}
    if isinstance(value, (list, tuple)):
        return [_described(part) for part in value]
    if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
        return {"torch": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"torch": "device"}
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def argument(value: Any, device: str) -> Any:
    """An argument as `key_of` wrote it, on a device; a tensor is full of zeros."""
    if isinstance(value, list):
        return [argument(part, device) for part in value]
    if not isinstance(value, dict):
        return value
    if "torch" in value:
        return torch.device(device) if value["torch"] == "device" else getattr(torch, value["torch"])
    kind = getattr(torch, value["dtype"])
    return torch.empty_strided(value["shape"], value["strides"], dtype=kind, device=device).zero_()
