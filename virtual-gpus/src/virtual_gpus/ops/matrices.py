"""Copies of matrices that cuBLAS cannot read as they lie (aten/src/ATen/native/cuda/Blas.cpp, prepare_*_for_cublas).

cuBLAS reads rows or columns that are packed, at any distance from each other. Anything else, such as a gradient that
was expanded from one number, is copied first.
"""

from __future__ import annotations

import torch

from virtual_gpus.dispatch.call import Call, nbytes


def copied_bytes(matrix: torch.Tensor) -> int:
    """Bytes of the copy of a matrix, or of a batch of them, that goes into a product; 0 if none is made."""
    if matrix.dim() < 2 or matrix.is_contiguous():
        return 0
    rows, columns = matrix.shape[-2:]
    down, across = matrix.stride()[-2:]
    by_rows = across == 1 and down >= max(1, columns)
    by_columns = down == 1 and across >= max(1, rows)
    return 0 if by_rows or by_columns else nbytes(matrix)


# Where the two matrices stand among an operator's arguments.
_FIRST = {"mm": 0, "bmm": 0, "addmm": 1, "addmm_": 1, "baddbmm": 1, "baddbmm_": 1, "_addmm_activation": 1}


def copies(call: Call) -> list[int]:
    """Bytes of each copy that an operator on matrices makes of its inputs."""
    first = _FIRST.get(call.op.base)
    if first is None:
        return []
    return [size for matrix in call.args[first : first + 2] if (size := copied_bytes(matrix))]
