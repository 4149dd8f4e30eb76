"""Operators on lists of tensors (`_foreach_*`, `_fused_*`): element i stays on its own GPU.

The foreach optimizers group by what C++ calls a device, so tensors of several GPUs may come in one call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from virtual_gpus import errors
from virtual_gpus.dispatch import valueless
from virtual_gpus.dispatch.operators import OpCall
from virtual_gpus.dispatch.timing import charge_foreach
from virtual_gpus.machine import VirtualGPU
from virtual_gpus.placement.storages import device_of, gpu_of, place, place_all


def run(call: OpCall) -> Any:
    """Run the operator; element i of the result belongs where element i of the first list is."""
    op, (columns, gpus) = call.op, columns_of(call)
    valueless.prepare(call)
    result = None  # fused ones change numbers in place, of which there may be none; not all have a meta kernel
    if not (op.is_fused and op.in_place and call.gpu.machine.shapes_only):
        result = call.compute() if op.row.recipe is None else op.row.recipe(call)
        place_rows(columns, gpus, result)
    charge_foreach(call, columns, gpus, result)
    return result


def place_rows(columns: list[Sequence[torch.Tensor]], gpus: Sequence[VirtualGPU | None], result: Any) -> None:
    """Give each result its block on the GPU of its row."""
    results = result if isinstance(result, (list, tuple)) else [result]
    for tensor, gpu in zip(next(iter(columns), ()), gpus, strict=True):
        if gpu is not None and tensor.layout != torch.strided:
            place(tensor, gpu)  # an in-place operator gives a sparse tensor new storages
    for gpu, part in zip(gpus, results, strict=False):
        if gpu is not None:
            place_all(part, gpu)


def columns_of(call: OpCall) -> tuple[list[Sequence[torch.Tensor]], list[VirtualGPU | None]]:
    """The lists of tensors among the arguments, and the GPUs of the first. Raises where a row is on several devices.

    `_foreach_pow` may begin with a number. A collective's lone tensors count as lists of one.
    """
    columns: list[Sequence[torch.Tensor]] = []
    for value in (*call.args, *call.kwargs.values()):
        if isinstance(value, (list, tuple)) and value and isinstance(value[0], torch.Tensor):
            columns.append(value)
        elif isinstance(value, torch.Tensor) and not columns:
            columns.append([value])
    if not (call.on_one_gpu or call.op.is_collective):  # these have rules of their own
        for row in zip(*columns, strict=False):  # a 0-dim CPU tensor counts as a number
            by_gpu = {gpu: tensor for tensor in row if (gpu := gpu_of(tensor)) is not None or tensor.dim()}
            if len(by_gpu) > 1:
                raise errors.two_devices(*sorted(map(device_of, [*by_gpu.values()][:2]), key=str, reverse=True))
    first: Sequence[torch.Tensor] = next(iter(columns), ())
    return columns, [call.gpu] * len(first) if call.on_one_gpu else list(map(gpu_of, first))
