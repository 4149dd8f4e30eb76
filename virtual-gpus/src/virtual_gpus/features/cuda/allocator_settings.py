"""The caching allocator's settings: PYTORCH_ALLOC_CONF and `torch.cuda.memory._set_allocator_settings`.

    parse("max_split_size_mb:128,garbage_collection_threshold:0.8").max_split == 128 << 20

What they do: `memory.options`. Those that change no figure of GPU memory are accepted. All others are refused by name.
"""

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from virtual_gpus import errors
from virtual_gpus.machine import VirtualMachine, get_machine
from virtual_gpus.memory.options import LARGE_SEGMENT, MIB, UNLIMITED, Options
from virtual_gpus.patches.table import Patch

_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")  # the first that is set counts
# How host memory is pinned, when a lock is held, what a graph capture does: how such keys begin.
_WITHOUT_EFFECT = ("pinned_", "release_lock_on_", "graph_capture_")
# Key -> the field of `Options`, how its value is read, and which values there are.
_KEYS: dict[str, tuple[str, Callable[[str], Any], Callable[[Any], bool]]] = {
    "max_split_size_mb": ("max_split", lambda text: int(text) * MIB, lambda size: size >= LARGE_SEGMENT),
    "garbage_collection_threshold": ("gc_threshold", float, lambda part: 0 < part < 1),
    "expandable_segments": ("expandable", {"True": True, "False": False}.get, lambda value: value is not None),
    "roundup_power2_divisions": ("divisions", int, lambda number: number > 0 and number.bit_count() == 1),
    "per_process_memory_fraction": ("fraction", float, lambda part: 0 <= part <= 1),
}


def parse(text: str, before: Options | None = None) -> Options:
    """The options after `text` was set, where `before` held.

    As in PyTorch, only expandable_segments and per_process_memory_fraction stay where `text` does not name them. Raises
    NotModelled for a key that is not modelled, and ValueError for a value that cannot be.
    """
    before = before or Options()
    options = Options(expandable=before.expandable, fraction=before.fraction, text=text)
    for setting in filter(None, "".join(text.split()).split(",")):
        key, _, value = setting.partition(":")
        if key.startswith(_WITHOUT_EFFECT) or setting == "backend:native":
            continue
        if key not in _KEYS or value.startswith("["):
            raise errors.not_modelled(f'the allocator setting "{setting}"')
        field, read, is_possible = _KEYS[key]
        try:
            number = read(value)
        except ValueError:
            number = None
        if number is None or not is_possible(number):
            raise ValueError(f"The allocator setting {setting} has no value that PyTorch takes.")
        options = replace(options, **{field: number})
    return options


def from_environment() -> Options:
    """The options that PYTORCH_CUDA_ALLOC_CONF (else PYTORCH_ALLOC_CONF) asks for."""
    return parse(next((os.environ[name] for name in _VARIABLES if name in os.environ), ""))


def start(machine: VirtualMachine) -> None:
    """The allocators of a machine begin with these options."""
    machine.first_options = from_environment


def _now(machine: VirtualMachine) -> Options:
    return machine.options or machine.first_options()


def _accelerator_setAllocatorSettings(settings: str) -> None:
    """Behind `torch.cuda.memory._set_allocator_settings`. The fraction counts until the first use of a GPU."""
    machine = get_machine()
    options = parse(settings, _now(machine))
    if machine.options is None:
        machine.first_options = lambda: options
    else:
        machine.set_options(options)


def _accelerator_getAllocatorSettings() -> str:
    """What was set last: by a call, or else in the environment."""
    return _now(get_machine()).text


def described() -> dict[str, Any]:
    """The settings as a snapshot lists them (torch/csrc/cuda/Module.cpp), those that change figures."""
    options = _now(get_machine())
    return {
        "PYTORCH_CUDA_ALLOC_CONF": options.text,
        "max_split_size": -1 if options.max_split == UNLIMITED else options.max_split,
        "garbage_collection_threshold": options.gc_threshold,
        "expandable_segments": options.expandable,
    }


def patches() -> list[Patch]:
    """See `features`. Builds without CUDA, and older versions, have not all of them."""
    rows: list[Patch] = [(torch._C, "_accelerator_setAllocatorSettings", _accelerator_setAllocatorSettings)]
    if hasattr(torch._C, "_accelerator_getAllocatorSettings"):
        rows.append((torch._C, "_accelerator_getAllocatorSettings", _accelerator_getAllocatorSettings))
    return rows
