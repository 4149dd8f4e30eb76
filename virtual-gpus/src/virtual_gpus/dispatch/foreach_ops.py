"""Operators on lists of tensors (`_foreach_*`, `_fused_*`, collectives): element i stays on its own GPU.

The foreach optimizers group by what C++ calls a device, so tensors of several GPUs may come in one call.
"""

from __future__ import annotations

import torch

from virtual_gpus import errors
from virtual_gpus.dispatch.collectives import charge_collective
from virtual_gpus.dispatch.timing import charge_lists
from virtual_gpus.machine import VirtualMachine
from virtual_gpus.operators import Operator
from virtual_gpus.placement.storages import device_of, gpu_of, local, place, place_all
from virtual_gpus.shapes import known, valueless


def run(machine: VirtualMachine, func, op: Operator, args, kwargs):
    """Run `func`; element i of the result belongs where element i of the first list is."""
    first = _first_list(args)
    gpus = _gpus(first)
    if op.base.startswith("_") and not op.crosses:  # collectives have no underscore, and their own rules
        _refuse_mixtures(args, kwargs)
    if not op.is_collective:
        charge_lists(func, op, first, gpus, args, kwargs)
    if machine.shapes_only and op.is_collective:
        result = valueless.collective(func, args)
        charge_collective(op, args, gpus)
        return result
    if machine.shapes_only:
        args, kwargs = valueless.prepare(op, args, kwargs, True)
        if op.base.startswith("_fused_") and op.base.endswith("_"):
            return None  # they change numbers in place, of which there are none; not all have a meta kernel
    result = known.ask(func, op, args, kwargs, _run) if machine.shapes_only else _run(func, args, kwargs)
    _place(first, gpus, result)
    if op.is_collective:
        charge_collective(op, args, gpus)
    return result


def _run(func, args, kwargs):
    local.inside = True
    try:
        return func(*args, **kwargs)
    finally:
        local.inside = False


def _place(first: list[torch.Tensor], gpus, result) -> None:
    made = result if isinstance(result, (list, tuple)) else [result]
    for tensor, gpu in zip(first, gpus, strict=True):
        if gpu is not None and tensor.layout != torch.strided:
            place(tensor, gpu)  # an in-place operator gives a sparse tensor new storages
    for gpu, part in zip(gpus, made, strict=False):
        if gpu is not None:
            place_all(part, gpu)


def _first_list(args) -> list[torch.Tensor]:
    """The tensors of the first argument that has any (`_foreach_pow` may begin with a number)."""
    for value in args:
        if isinstance(value, torch.Tensor):
            return [value]
        if isinstance(value, (list, tuple)) and value and isinstance(value[0], torch.Tensor):
            return list(value)
    return []


def _gpus(tensors) -> list:
    """`gpu_of` each. Optimizers have hundreds of tensors, so it is written out for those that are on a GPU."""
    found = []
    for tensor in tensors:
        try:
            home = tensor.untyped_storage()._home
        except (NotImplementedError, RuntimeError):
            home = None
        found.append(home.gpu if home is not None and home.gpu.machine.on else gpu_of(tensor))
    return found


def _refuse_mixtures(args, kwargs) -> None:
    """Elements of one position must share a device; a 0-dim CPU tensor counts as a number."""
    values = (*args, *kwargs.values())
    columns = [v for v in values if isinstance(v, (list, tuple)) and v and isinstance(v[0], torch.Tensor)]
    gpus = [gpu for column in columns for gpu in _gpus(column)]
    if gpus and gpus[0] is not None and gpus.count(gpus[0]) == len(gpus):  # as almost always
        return
    for first, *others in zip(*columns, strict=False):
        gpu = gpu_of(first)
        for other in others:
            where = gpu_of(other)
            if where is not gpu and not _is_number(first, gpu) and not _is_number(other, where):
                raise errors.two_devices(*sorted((device_of(first), device_of(other)), key=str, reverse=True))


def _is_number(tensor: torch.Tensor, gpu) -> bool:
    return gpu is None and tensor.dim() == 0
