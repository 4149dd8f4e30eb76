"""Run an operator's own kernel: with the GPU's generator where it draws random numbers, and errors that explain."""

from __future__ import annotations

import torch

from virtual_gpus import errors
from virtual_gpus.machine import VirtualGPU
from virtual_gpus.operators import Operator
from virtual_gpus.placement.random_numbers import default_generator, device_of_generator, drawing_from
from virtual_gpus.placement.storages import local
from virtual_gpus.shapes import known


def run_kernel(func, op: Operator, gpu: VirtualGPU, args, kwargs):
    """Run the operator's own kernel, with this GPU's random generator where it draws numbers."""
    if op.has_generator:
        kwargs = {**kwargs, "generator": _generator(op, gpu, args, kwargs)}
        if len(args) > op.names.index("generator"):
            position = op.names.index("generator")
            args = (*args[:position], kwargs.pop("generator"), *args[position + 1 :])
    elif op.with_generator is not None:
        func, kwargs = op.with_generator, {**kwargs, "generator": default_generator(gpu)}
    if gpu.machine.shapes_only:
        return known.ask(func, op, args, kwargs, lambda *call: _run(*call, op, gpu))
    return _run(func, args, kwargs, op, gpu)


def _run(func, args, kwargs, op: Operator, gpu: VirtualGPU):
    local.inside = True
    try:
        if op.draws_by_default:
            with drawing_from(default_generator(gpu)):
                return func(*args, **kwargs)
        return func(*args, **kwargs)
    except RuntimeError as error:
        if "DefaultCPUAllocator" in str(error):
            raise errors.host_memory_ran_out(op.name) from None
        if str(error).startswith("Could not run 'aten::") and "'CPU' backend" in str(error):
            raise errors.not_modelled(f"aten::{op.name}, which only CUDA has,") from None
        raise
    finally:
        local.inside = False


def refuse_gpu_generator(op: Operator, args, kwargs) -> None:
    """A GPU's generator draws no numbers on the CPU."""
    wanted = _wanted_generator(op, args, kwargs)
    if wanted is not None and device_of_generator(wanted).type == "cuda":
        raise errors.wrong_generator("cpu", "cuda")


def _wanted_generator(op: Operator, args, kwargs) -> torch.Generator | None:
    position = op.names.index("generator")
    return args[position] if len(args) > position else kwargs.get("generator")


def _generator(op: Operator, gpu: VirtualGPU, args, kwargs) -> torch.Generator:
    """The generator that was asked for, checked for its device, or the GPU's default one."""
    wanted = _wanted_generator(op, args, kwargs)
    if wanted is None:
        return default_generator(gpu)
    if device_of_generator(wanted).type != "cuda":
        raise errors.wrong_generator("cuda", device_of_generator(wanted).type)
    return wanted
