"""Lists of tensors whose elements are on GPUs of their own: what `features.foreach` and collectives are given."""

from collections.abc import Sequence
from typing import Any

import torch

from virtual_gpus.dispatch.operators import OpCall
from virtual_gpus.machine import VirtualGPU
from virtual_gpus.placement.storages import gpu_of, place, place_all


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
    """The lists of tensors among the arguments, and the GPUs of the first.

    `_foreach_pow` may begin with a number. A collective's lone tensors count as lists of one.
    """
    columns: list[Sequence[torch.Tensor]] = []
    for value in (*call.args, *call.kwargs.values()):
        if isinstance(value, (list, tuple)) and value and isinstance(value[0], torch.Tensor):
            columns.append(value)
        elif isinstance(value, torch.Tensor) and not columns:
            columns.append([value])
    first: Sequence[torch.Tensor] = next(iter(columns), ())
    return columns, [call.gpu] * len(first) if call.on_one_gpu else list(map(gpu_of, first))
