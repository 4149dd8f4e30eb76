"""Operators that make a tensor where they are told to: they have a device argument."""

from math import prod
from typing import Any

import torch

from virtual_gpus.dispatch import valueless
from virtual_gpus.dispatch.operators import OpCall, asked_generator
from virtual_gpus.dispatch.timing import charge_op
from virtual_gpus.machine import VirtualGPU, VirtualMachine, find_gpu, get_machine
from virtual_gpus.placement.creation_sites import record_creation_site
from virtual_gpus.placement.storages import StorageAllocation, pin, put

_LARGE = 1 << 24  # elements


def create(call: OpCall) -> Any:
    """Factories (`zeros`, `empty`), `*_like`, `new_*` and `_to_copy`. `call.gpu`: that of their inputs, if any."""
    source = call.gpu
    call.gpu = target = _target(call, get_machine())
    if target is None:
        return _create_on_host(call, source)
    if call.kwargs.get("pin_memory"):
        raise RuntimeError("Only dense CPU tensors can be pinned")
    call.kwargs = {**call.kwargs, "device": target.machine.tensor_device}
    allocation = None
    if call.tensors:
        valueless.prepare(call)
    if source is None and not target.machine.shapes_only and call.op.row.recipe is None:
        allocation = _allocation_before_filling(call)
    result = call.op.recipe(call) if allocation is None else call.place(put(call.compute(), allocation))
    charge_op(call, result)
    return result


def _is_from_python(call: OpCall) -> bool:
    """PyTorch's Python bindings always pass pin_memory; its C++ code, which makes helpers for itself, does not."""
    return "pin_memory" in call.kwargs


def _target(call: OpCall, machine: VirtualMachine) -> Any:
    """The GPU where the result belongs; None: in the computer's memory."""
    device = call.kwargs.get("device")
    if device is None:
        return call.gpu
    if device.type == "cuda":
        return find_gpu(machine, device)
    # C++ passing on "the options of this input", which for C++ is on the CPU or, with shapes only, on meta.
    is_passed_on = device.type != "meta" or device == machine.tensor_device
    return call.gpu if is_passed_on and not _is_from_python(call) else None


def _create_on_host(call: OpCall, source: VirtualGPU | None) -> Any:
    """A CPU tensor, noted down if C++ made it for itself, and not of a tensor of the program."""
    if call.op.has_generator:
        asked_generator(call, "cpu")
    kwargs = call.kwargs
    pinned = bool(kwargs.get("pin_memory"))
    result = call.kernel(*call.args, **({**kwargs, "pin_memory": False} if pinned else kwargs))
    if pinned:
        pin(result)
    elif source is None and not _is_from_python(call):
        record_creation_site(result, call.tensors, call.site)
    return result


def _allocation_before_filling(call: OpCall) -> StorageAllocation | None:
    """Ask the allocator first: a tensor that cannot fit on the GPU must not fill this computer's memory.

    Only worth it for large tensors, and only factories without inputs can be asked cheaply (on the meta device).
    """
    elements = 1  # at most, of all numbers that are given
    for value in call.args * 2 if call.op.name == "eye" else call.args:
        number = prod(value) if isinstance(value, list) else value
        elements *= abs(number) if isinstance(number, (int, float)) and abs(number) > 1 else 1
    if elements < _LARGE:
        return None
    without = {k: v for k, v in call.kwargs.items() if k != "generator"}
    sized = call.func(*call.args, **{**without, "device": torch.device("meta")})
    return StorageAllocation(call.gpu, sized.untyped_storage().nbytes())
