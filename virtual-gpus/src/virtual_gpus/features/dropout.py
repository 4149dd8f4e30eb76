"""Dropout on CUDA (aten/src/ATen/native/Dropout.cpp, is_fused_kernel_acceptable; cuda/Dropout.cu). On a CPU PyTorch
multiplies by a mask of floats. On CUDA it calls `native_dropout`, whose mask is of bools: a quarter of the size, and
made before the result."""

import torch

from virtual_gpus.clock.cost import READS_AND_WRITES
from virtual_gpus.dispatch.operators import OpCall, Row
from virtual_gpus.machine import active
from virtual_gpus.patches.table import Patch
from virtual_gpus.placement.storages import gpu_of

_raw_dropout = torch.dropout


def dropout(input: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    """`torch.dropout`, with CUDA's choice of operator for a tensor on a GPU."""
    if active() is None or gpu_of(input) is None or not train or not 0 < p < 1 or input.numel() == 0:
        return _raw_dropout(input, p, train)
    return torch.native_dropout(input, p, True)[0]


def native_dropout(call: OpCall) -> tuple[torch.Tensor, torch.Tensor]:
    """The mask, then the result."""
    result = call.compute()
    call.place(result[1])
    return call.place(result)


def patches() -> list[Patch]:
    return [(torch, "dropout", dropout), (torch._VF, "dropout", dropout)]  # torch.nn.functional calls the second


OPERATORS = {"native_dropout": Row(READS_AND_WRITES, native_dropout)}
