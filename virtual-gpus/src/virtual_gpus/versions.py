"""Which PyTorch's rules of memory hold: the installed one's, or what `virtual_gpus(torch_version=...)` asked for."""

from __future__ import annotations

import torch

from virtual_gpus.machine import VirtualMachine, active

INSTALLED = tuple(int(part) for part in torch.__version__.split(".")[:2])


def version_of(machine: VirtualMachine | None) -> tuple[int, int]:
    """(major, minor) of the PyTorch that a machine's GPUs behave as in memory."""
    return INSTALLED if machine is None or machine.torch_version is None else machine.torch_version


def current() -> tuple[int, int]:
    """`version_of` the machine that answers now."""
    return version_of(active())
