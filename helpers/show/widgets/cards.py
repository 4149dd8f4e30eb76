"""What a step's memory takes from the kind of GPU: capacity, CUDA's context, cuBLAS's workspaces, partial sums.

    card("TITAN Xp")                       # 11.9 GiB, of which 11.6 GiB are room for PyTorch
    card("H200", memory="12 GiB")          # an H200 with less

For `helpers.show.widgets.bert_memory`, which computes what virtual GPUs would count; the data sheets are the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from helpers.gpus import data_sheet, parse_bytes
from helpers.measure import MiB

ROUND = 512  # every block of PyTorch's allocator is a multiple of it
_KiB = 2**10
_MANY_ROWS = 64 * 1024
_LARGE, _STEP, _REST, _LEFTOVER = 10 * MiB, 2 * MiB, MiB, 102 * ROUND


@dataclass(frozen=True)
class Card:
    """A GPU of `kind`. Sizes in bytes; `capability` is CUDA's compute capability, `torch` PyTorch's (major, minor)."""

    kind: str
    name: str
    capacity: int
    context: int
    multiprocessors: int
    capability: tuple[int, int]
    torch: tuple[int, int]

    @property
    def room(self) -> int:
        """What PyTorch can have: the capacity without CUDA's context."""
        return self.capacity - self.context

    @property
    def workspace(self) -> int:
        """What cuBLAS takes for a product of matrices (aten/src/ATen/cuda/CublasHandlePool.cpp)."""
        return 32 * MiB if self.capability >= (9, 0) else 8320 * _KiB

    @property
    def keeps_workspaces(self) -> bool:
        """Before PyTorch 2.15 a workspace, once taken, was kept for ever; since then it is taken for each product."""
        return self.torch < (2, 15)

    @property
    def kept_workspaces(self) -> int:
        """What is kept from the first step on: cuBLAS's for forward and backward; in 2.11 also cublasLt's 1 MiB."""
        return 2 * self.workspace + (MiB if self.torch < (2, 12) else 0) if self.keeps_workspaces else 0

    def partial_sums(self, rows: int, columns: int) -> int:
        """Bytes for adding up the rows of a matrix of floats, as for the gradient of a bias.

        Many thread blocks share a column, and each leaves its sum in memory. How the work is cut is setReduceConfig's
        of aten/src/ATen/native/cuda/Reduce.cuh; with very many rows it takes about an eighth of the matrix itself.
        """
        vector = next(n for n in (4, 2, 1) if columns % n == 0)  # columns that a thread takes at once
        limit = 512 // vector
        height = min(_power(rows, limit), limit // min(_power(columns // vector, limit), 32))
        width = min(limit // height, _power(columns // vector, limit))
        values, grid = -(-rows // height), -(-(columns // vector) // width)
        at_once = self.multiprocessors * (self._threads // (width * height))
        if values < 256 or grid > at_once:
            return 0
        blocks = max(min(-(-at_once // grid), -(-values // 16)), -(-values // 256))
        return rounded(4 * columns * blocks * width * vector) + rounded(4 * grid) if blocks > 1 else 0

    def norm_sums(self, rows: int, columns: int) -> int:
        """Bytes for the gradients of a layer norm's weight and bias, which very many rows are added up to in two steps.

        aten/src/ATen/native/cuda/layer_norm_kernel.cu.
        """
        if rows <= _MANY_ROWS or columns // 32 >= self.multiprocessors // 2:
            return 0
        return 2 * rounded(4 * columns * min(_MANY_ROWS // 2 // -(-columns // 32), -(-rows // 32)))

    @property
    def _threads(self) -> int:
        return 1024 if self.capability == (7, 5) else 2048  # of a multiprocessor; Turing has half


def card(kind: str = "TITAN Xp", memory: int | str | None = None) -> Card:
    """A GPU of `kind` (K80, TITAN Xp, V100, T4, A100, H100, H200), with its own memory or `memory` ("12 GiB", bytes).

    CUDA's context takes an eighth of the memory at most, as on virtual GPUs, so that small ones can be looked at.
    Raises ValueError for another kind, and for a size that cannot be read.
    """
    sheet = data_sheet(kind)
    capacity = sheet.memory if memory is None else parse_bytes(memory)
    context = min(sheet.context, capacity // 8)
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    return Card(sheet.kind, sheet.name, capacity, context, sheet.multi_processor_count, sheet.capability, version)


def rounded(size: int) -> int:
    """A size as PyTorch's allocator rounds it up."""
    return -(-size // ROUND) * ROUND


def block(size: int) -> int:
    """Bytes that a tensor of `size` bytes takes, with what PyTorch's allocator cannot cut off: less than 1 MiB.

    From 10 MiB on a tensor has a segment of its own, a multiple of 2 MiB. Tensors of 1 to 10 MiB share segments of
    20 MiB, and what is left over there depends on what was freed before: 0.05 MiB per tensor is the mean of many runs
    on virtual GPUs, the one figure of the formula that was fitted.
    """
    size = rounded(size)
    if size >= _LARGE:
        rest = -size % _STEP
        return size + rest if rest <= _REST else size
    return size + _LEFTOVER if size > _REST else size


def _power(number: int, limit: int) -> int:
    """The largest power of two up to `number`, or `limit` if that is less."""
    return limit if number >= limit else 1 << max(number.bit_length() - 1, 0)
