"""Checks of arguments: of devices, in functions that C++ makes of several operators, since it sees CPU tensors; and of
values, in PyTorch's own Python. Without values, all are taken to be right."""

from collections.abc import Callable
from functools import partial
from pkgutil import resolve_name
from typing import Any

import torch
from torch.distributions import Distribution
from torch.nn import functional

from virtual_gpus import figures
from virtual_gpus.dispatch.valueless import assuming
from virtual_gpus.entrance import entrance
from virtual_gpus.patches.table import Patch, around
from virtual_gpus.placement.storages import device_of, tensors_in

_TEXTS: dict[str, dict[str, str]] = figures.beside(__file__)  # by rule, by names of functions


def _on_right_devices(rule: str, text: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function. Raises RuntimeError if a tensor is not where the first one is ("same_device") or if the second
    one is on a GPU ("on_cpu"). Numbers behind the second tensor may be elsewhere, as a value to fill with."""
    given = tensors_in((*args, *kwargs.values()))
    for number, tensor in enumerate(given[1:], 1):
        first, device = device_of(given[0]), device_of(tensor)
        if device != (first if rule == "same_device" else torch.device("cpu")) and (number == 1 or tensor.dim()):
            gpu_first = sorted((first, device), key=lambda device: device.type == "cpu")
            raise RuntimeError(text.format(*gpu_first, first=first, other=device, number=number))
    return function(*args, **kwargs)


def patches() -> list[Patch]:
    """What asks whether anything is wrong is told no, and what asks whether all is right is told yes."""
    of_loss: Patch = (functional, "gaussian_nll_loss", assuming(False)(functional.gaussian_nll_loss))
    methods = (Distribution.__init__, Distribution._validate_sample)
    rows = [of_loss, *((Distribution, method.__name__, assuming(True)(method)) for method in methods)]
    texts = [(rule, path, text) for rule in _TEXTS for paths, text in _TEXTS[rule].items() for path in paths.split()]
    for rule, path, text in texts:
        checked = entrance(around(resolve_name(path), partial(_on_right_devices, rule, text)))
        rows.append((resolve_name(path.rpartition(".")[0]), path.rpartition(".")[2], checked))
    return rows
