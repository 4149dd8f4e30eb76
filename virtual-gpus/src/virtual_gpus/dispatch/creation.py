"""Operators that make a tensor where they are told to: they have a device argument."""

from __future__ import annotations

import torch

from virtual_gpus.dispatch.kernels import refuse_gpu_generator, run_kernel
from virtual_gpus.dispatch.timing import charge
from virtual_gpus.machine import VirtualGPU, VirtualMachine
from virtual_gpus.operators import Operator
from virtual_gpus.placement.storages import Home, caller, find_gpu, place_all, remember_birth, storages
from virtual_gpus.shapes import valueless

_CPU = torch.device("cpu")
_META = torch.device("meta")


def create(machine: VirtualMachine, func, op: Operator, gpu: VirtualGPU | None, args, kwargs):
    """Factories (`zeros`, `empty`), `*_like`, `new_*` and `_to_copy`: they have a device argument."""
    device = kwargs.get("device")
    from_python = "pin_memory" in kwargs  # PyTorch's Python bindings always pass it, its C++ code does not
    if device is not None and device.type == "cuda":
        target = find_gpu(machine, device)
    elif device is None or (gpu is not None and not from_python and device.type != "meta"):
        target = gpu  # C++ passing on "the options of this input"
    elif gpu is not None and machine.shapes_only and device == _META and not from_python:
        target = gpu
    else:
        target = None
    if target is None:
        return _create_on_host(func, op, gpu, args, kwargs, caller(4))
    machine = target.machine
    kwargs = {**kwargs, "device": _META if machine.shapes_only else _CPU}
    if kwargs.get("pin_memory"):
        raise RuntimeError("Only dense CPU tensors can be pinned")
    home = None
    if not machine.shapes_only:
        home = _home_before_filling(func, target, args, kwargs, gpu)
    else:
        args, kwargs = valueless.prepare(op, args, kwargs, True)
    result = run_kernel(func, op, target, args, kwargs)
    if home is not None:
        result.untyped_storage()._home = home
    place_all(result, target)
    charge(target, func, op, _inputs(args), result)
    return result


def _inputs(args) -> list[torch.Tensor]:
    return [value for value in args[:1] if isinstance(value, torch.Tensor)]


def _create_on_host(func, op: Operator, gpu, args, kwargs, key):
    """A CPU tensor, noted down if C++ made it for itself."""
    if op.has_generator:
        refuse_gpu_generator(op, args, kwargs)
    pinned = bool(kwargs.get("pin_memory"))
    if pinned:
        kwargs = {**kwargs, "pin_memory": False}
    result = func(*args, **kwargs)
    if pinned:
        for storage in storages(result):
            storage._pinned = True
    elif "pin_memory" not in kwargs and gpu is None and isinstance(result, torch.Tensor):
        remember_birth(result, key)
    return result


def _home_before_filling(func, gpu: VirtualGPU, args, kwargs, source: VirtualGPU | None) -> Home | None:
    """Ask the allocator first: a tensor that cannot fit on the GPU must not fill the laptop's memory.

    Only worth it for large tensors, and only factories without inputs can be asked cheaply (on the meta device).
    """
    if source is not None:
        return None
    size = args[0] if args else ()
    elements = 1
    for n in size if isinstance(size, (list, tuple)) else (size,):
        elements *= n if isinstance(n, int) else 1
    if elements < 1 << 24:
        return None
    without = {k: v for k, v in kwargs.items() if k != "generator"}
    nbytes = func(*args, **{**without, "device": _META}).untyped_storage().nbytes()
    return Home(gpu, nbytes)
