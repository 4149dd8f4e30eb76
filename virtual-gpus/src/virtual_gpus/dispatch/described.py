"""The arguments of an operator as JSON: the key of its row among measured operators (`clock.measured`)."""

from __future__ import annotations

from typing import Any

import torch

from virtual_gpus.clock.measured import key


def key_of(operator: Any, args: tuple, kwargs: dict[str, Any]) -> str:
    """The key of a call. operator: an ATen overload, or the name of a fused kernel."""
    return key(str(operator), [described(args), {name: described(value) for name, value in kwargs.items()}])


def described(value: Any) -> Any:
    """A tensor as its shape, type and strides; types, layouts and devices by their names in torch."""
    if isinstance(value, torch.Tensor):
        kind = str(value.dtype).removeprefix("torch.")
        return {"shape": list(value.shape), "dtype": kind, "strides": list(value.stride())}
    if isinstance(value, (list, tuple)):
        return [described(part) for part in value]
    if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
        return {"torch": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"torch": "device"}
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)
