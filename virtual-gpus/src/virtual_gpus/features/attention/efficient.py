"""The memory of the memory-efficient attention kernel, which is cutlass's and comes in many sizes of blocks.

Sources: attention.cu, attention_backward.cu, and kernel_forward.h, kernel_backward.h and kernels/cutlassB.h of
mem_eff_attention, in aten/src/ATen/native/transformers/cuda.
"""

from __future__ import annotations

from contextlib import ExitStack

import torch

from virtual_gpus.features.attention.attention_call import must_be_deterministic
from virtual_gpus.features.attention.memory import FLOAT, Kernel, Sizes, packed, up
from virtual_gpus.placement.storages import StorageAllocation, scratch


class Efficient(Kernel):
    """The memory-efficient kernel (cutlass). Its output and gradients lie in memory as (N, rows, heads, width)."""

    name = "_scaled_dot_product_efficient_attention"

    def strides(self, like: torch.Tensor, shape) -> tuple[int, ...]:
        """Of the output or a gradient of `shape`: packed as (N, rows, heads, width)."""
        return packed((0, 2, 1, 3), shape)

    def forward(self) -> tuple[StorageAllocation, StorageAllocation | None, list[StorageAllocation]]:
        """Blocks of the output and, if it trains, of one float per row (rows rounded up to 32). Seeds stay here."""
        sizes = self.sizes
        out = self.allocate(sizes.out)
        lse = self.allocate(sizes.n * sizes.heads * up(sizes.rows, 32) * FLOAT) if sizes.trains else None
        if sizes.half and max(sizes.width, sizes.value_width) > 128:  # the output does not fit into registers
            with scratch(self.gpu, sizes.per_row * sizes.value_width * FLOAT):
                pass
        return out, lse, []

    def backward(self, gradient, out) -> list[StorageAllocation]:
        """Blocks of the gradients of query, key, value and, if it wants one, bias."""
        sizes = self.sizes
        with ExitStack() as stack:
            if not gradient.transpose(1, 2).is_contiguous():
                self.scratch(stack, sizes.out)
            query, key, value = sizes.gradients
            grouped = sizes.heads != sizes.kv_heads
            if grouped:  # one gradient per head of the query, added up in the end
                share = sizes.heads // sizes.kv_heads
                gradients = [self.allocate(query)]
                self.scratch(stack, key * share, value * share)
            else:
                gradients = [self.allocate(nbytes) for nbytes in (query, key, value)]
            bias = []
            if sizes.bias:
                bias = [self.allocate(sizes.per_row * up(sizes.columns, 16) * sizes.bytes)]
            kernel = _BackwardKernel(sizes)
            with ExitStack() as sums:
                self._delta(kernel, stack, sums)
            self.scratch(stack, kernel.workspace())
            if grouped:
                gradients += [self.allocate(key), self.allocate(value)]
        return gradients + bias

    def _delta(self, kernel: _BackwardKernel, stack: ExitStack, sums: ExitStack) -> None:
        """The sum over each row of gradient times output: by the kernel, or by operators with temporaries."""
        sizes = self.sizes
        rows, product = sizes.per_row * FLOAT, sizes.per_row * sizes.value_width * FLOAT
        if not kernel.finds_delta:
            self.scratch(sums, *([product] * 3 if sizes.half else [product]))
            if sizes.heads > 1 and sizes.rows > 1:  # (N, rows, heads), copied to (N, heads, rows)
                self.scratch(sums, rows)
        self.scratch(stack, rows)


class _BackwardKernel:
    """Which of the backward kernels runs, and the workspace it asks for (mem_eff_attention/kernels/cutlassB.h)."""

    def __init__(self, sizes: Sizes):
        self.sizes = sizes
        major = sizes.gpu.spec.capability[0]
        self.splits_keys = major >= 7
        widest = next(w for w in (32, 64, 128, 1 << 16) if max(sizes.width, sizes.value_width) <= w)
        large = widest > 64 and (major >= 8 or (major == 7 and sizes.half))
        self.rows = 128 if large else 64
        in_registers = sizes.half and widest <= self.rows
        self.columns = 128 if large and in_registers and major >= 8 else 64
        self.sums_keys = sizes.half and not in_registers
        self.finds_delta = sizes.half and (in_registers or sizes.gpu.spec.capability != (7, 0))

    def workspace(self) -> int:
        """Bytes: sums of query's gradient and, where registers cannot hold them, of key's and value's."""
        sizes, numbers = self.sizes, 0
        if self.sums_keys:
            widths = up(sizes.width, self.rows) + up(sizes.value_width, self.rows)
            numbers += self._splits() * self.columns * widths
        if self.splits_keys or sizes.half:
            blocks = -(-sizes.rows // self.rows) * -(-sizes.width // self.columns)
            numbers += blocks * (4 + self.rows * self.columns)  # a lock and a counter each
        return sizes.n * sizes.heads * up(numbers, 4) * FLOAT

    def _splits(self) -> int:
        """In how many parts the keys are worked on at the same time."""
        sizes = self.sizes
        splits = -(-sizes.columns // self.columns)
        if sizes.n * sizes.heads >= 256 and sizes.columns <= 2 * self.columns:
            splits = 1
        splits = min(splits, 200 // max(1, sizes.n * sizes.heads))
        if not self.splits_keys or must_be_deterministic():
            splits = 1
        return max(1, splits)
