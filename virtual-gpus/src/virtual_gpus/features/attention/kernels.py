"""The memory that CUDA's fused attention kernels take, block by block in CUDA's order. Nothing is computed here.

Each kernel is a class with `forward` and `backward`, which take blocks and give back the allocations of what stays.
Sources: attention.cu, attention_backward.cu, flash_attn/flash_api.cpp, and kernel_forward.h, kernel_backward.h and
kernels/cutlassB.h of mem_eff_attention, in aten/src/ATen/native/transformers/cuda; aten/src/ATen/native/cudnn/MHA.cpp;
for cuDNN's workspace include/cudnn_frontend/node/scaled_dot_product_flash_attention.h of cudnn-frontend, whose buffers
are what a real H200 measured but for 512 bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

from virtual_gpus import figures
from virtual_gpus.arithmetic import ceil_div, rounded_up
from virtual_gpus.features.attention.choice import HALF, T, must_be_deterministic
from virtual_gpus.machine import VirtualGPU
from virtual_gpus.placement.storages import StorageAllocation, scratch

FLOAT = 4
_CUDNN_OWN: int = figures.beside(__file__)["memory"]["cudnn"]


class Kernel:
    """One call with query (N, heads, rows, width), key and value (N, kv_heads, columns, ...) and its numbers.

    name: of the operator. trains: a gradient will be wanted. bias: None, or whether it needs a gradient.
    """

    name = ""

    def __init__(self, gpu: VirtualGPU, query: T, key: T, value: T, bias: T | None, dropout: float, trains: bool):
        self.gpu, self.dropout, self.trains = gpu, dropout, trains
        self.n, self.heads, self.rows, self.width = query.shape
        self.kv_heads, self.columns = key.shape[1:3]
        self.value_width = value.shape[3]
        self.bytes, self.half = query.element_size(), query.dtype in HALF
        self.bias = None if bias is None else bias.requires_grad
        self.per_row = self.n * self.heads * self.rows  # rows of the scores in all heads and samples
        self.out = self.per_row * self.value_width * self.bytes  # bytes of the output
        self.lse: tuple[int, ...] = (self.n, self.heads, self.rows)  # shape of the logarithms of the rows' sums
        keys = self.n * self.kv_heads * self.columns * self.bytes
        # Bytes of the gradients of query, key and value.
        self.gradients = self.per_row * self.width * self.bytes, keys * self.width, keys * self.value_width

    def strides(self, like: T, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Of the output or a gradient of `shape`, made for the input `like`: packed, in the order of its dimensions."""
        if 0 in like.stride():
            return packed(range(4), shape)
        return packed(sorted(range(4), key=like.stride().__getitem__, reverse=True), shape)

    def allocate(self, nbytes: int) -> StorageAllocation:
        """A block that stays."""
        return StorageAllocation(self.gpu, nbytes)


def packed(order: Iterable[int], shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a tensor whose dimensions lie in memory in this order, the first one outermost."""
    strides, step = [0] * len(shape), 1
    for dim in reversed(list(order)):
        strides[dim] = step
        step *= max(1, shape[dim])
    return tuple(strides)


class Cudnn(Kernel):
    """cuDNN's kernel. Output and gradients lie in memory as query, key and value do."""

    name = "_scaled_dot_product_cudnn_attention"

    def __init__(self, *call: Any):
        super().__init__(*call)
        self.lse = (*self.lse, 1)

    def forward(self) -> tuple[StorageAllocation, StorageAllocation | None, list[StorageAllocation]]:
        """Blocks of the output, of one float per row (if it trains) and of seed and offset of the random numbers."""
        seeds = [self.allocate(8), self.allocate(8)]
        out = self.allocate(self.out)
        lse = self.allocate(self.per_row * FLOAT) if self.trains else None
        with scratch(self.gpu, _CUDNN_OWN):
            return out, lse, seeds

    def backward(self, gradient: T, out: T) -> list[StorageAllocation]:
        """Blocks of the gradients of query, key and value."""
        gradients = [self.allocate(nbytes) for nbytes in self.gradients]
        copies = [self.out] if gradient.stride(-1) != 1 else []  # as after out.sum()
        summed = self.per_row * (self.width + 1) * FLOAT  # of query's gradient, and of gradient times output
        grouped = 0  # gradients of key and value before heads that share them are added up
        if self.heads != self.kv_heads:
            grouped = self.n * self.heads * self.columns * (self.width + self.value_width) * self.bytes
        with scratch(self.gpu, *copies, summed + grouped + _CUDNN_OWN):
            return gradients


class Flash(Kernel):
    """FlashAttention 2. Output and gradients lie in memory as query, key and value do."""

    name = "_scaled_dot_product_flash_attention"

    def forward(self) -> tuple[StorageAllocation, StorageAllocation, list[StorageAllocation]]:
        """Blocks of the output, of one float per row and of the random numbers' state (two numbers, one unused)."""
        out, lse = self.allocate(self.out), self.allocate(self.per_row * FLOAT)
        splits = 1 if self.dropout else self._splits()
        rows = splits * self.per_row * FLOAT
        with scratch(self.gpu, *((rows, rows * self._rounded_width()) if splits > 1 else ())):
            state, unused = self.allocate(16), self.allocate(8)
            if self.dropout:  # made a second time, before the first goes
                state = self.allocate(16)
        return out, lse, [state, unused]

    def backward(self, gradient: T, out: T) -> list[StorageAllocation]:
        """Blocks of the gradients of query, key and value."""
        copies = [self.out for tensor in (gradient, out) if not tensor.transpose(1, 2).is_contiguous()]
        rows, keys = self.n * self.heads * rounded_up(self.rows, 128) * FLOAT, self.n * self.heads * self.columns
        grouped: list[int] = []  # before heads that share them are added up
        if self.heads != self.kv_heads:
            grouped = [keys * self.width * self.bytes] * 2
        with scratch(self.gpu, *copies):
            gradients = [self.allocate(nbytes) for nbytes in self.gradients]
            with scratch(self.gpu, rows, rows * self._rounded_width() * self._copies(), *grouped):
                return gradients

    def _rounded_width(self) -> int:
        return rounded_up(self.width, 32 if self.width <= 128 else 64)

    def _copies(self) -> int:
        """Sums of query's gradient: one, or one per group of thread blocks when the order of adding must be fixed."""
        if not must_be_deterministic():
            return 1
        return ceil_div(self.gpu.spec.multi_processor_count, self.n * self.heads)

    def _splits(self) -> int:
        """In how many parts the keys are worked on at the same time (num_splits_heuristic)."""
        processors = 2 * self.gpu.spec.multi_processor_count
        blocks = self.n * self.heads * ceil_div(self.rows, 64)
        key_blocks = ceil_div(self.columns, 256 if self.width <= 64 else 128 if self.width <= 128 else 64)
        return 1 if blocks >= 0.8 * processors else _best_split(blocks, processors, key_blocks)


def _best_split(blocks: int, processors: int, key_blocks: int) -> int:
    """The smallest number of parts that keeps the processors at least 85 % as busy as the best number does."""
    busy = {}
    for splits in range(1, min(128, processors, key_blocks) + 1):
        if splits == 1 or ceil_div(key_blocks, splits) != ceil_div(key_blocks, splits - 1):  # else it is the same work
            waves = blocks * splits / processors
            busy[splits] = waves / ceil_div(blocks * splits, processors)
    best = max(busy.values(), default=0)
    return next((splits for splits, share in busy.items() if share >= 0.85 * best), 1)


class Efficient(Kernel):
    """The memory-efficient kernel (cutlass). Its output and gradients lie in memory as (N, rows, heads, width)."""

    name = "_scaled_dot_product_efficient_attention"

    def __init__(self, *call: Any):
        super().__init__(*call)
        self.lse = (self.n, self.heads, rounded_up(self.rows, 32))

    def strides(self, like: T, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Of the output or a gradient of `shape`: packed as (N, rows, heads, width)."""
        return packed((0, 2, 1, 3), shape)

    def forward(self) -> tuple[StorageAllocation, StorageAllocation | None, list[StorageAllocation]]:
        """Blocks of the output and, if it trains, of one float per row (rows rounded up to 32). Seeds stay here."""
        out = self.allocate(self.out)
        lse = self.allocate(math.prod(self.lse) * FLOAT) if self.trains else None
        if self.half and max(self.width, self.value_width) > 128:  # the output does not fit into registers
            with scratch(self.gpu, self.per_row * self.value_width * FLOAT):
                pass
        return out, lse, []

    def backward(self, gradient: T, out: T) -> list[StorageAllocation]:
        """Blocks of the gradients of query, key, value and, if it wants one, bias."""
        with ExitStack() as stack:
            if not gradient.transpose(1, 2).is_contiguous():
                stack.enter_context(scratch(self.gpu, self.out))
            query, key, value = self.gradients
            grouped = self.heads != self.kv_heads
            if grouped:  # one gradient per head of the query, added up in the end
                share = self.heads // self.kv_heads
                gradients = [self.allocate(query)]
                stack.enter_context(scratch(self.gpu, key * share, value * share))
            else:
                gradients = [self.allocate(nbytes) for nbytes in (query, key, value)]
            bias: list[StorageAllocation] = []
            if self.bias:
                bias = [self.allocate(self.per_row * rounded_up(self.columns, 16) * self.bytes)]
            kernel = _BackwardKernel(self)
            # The sum over each row of gradient times output: by the kernel, or by operators with temporaries.
            rows, sums = self.per_row * FLOAT, list[int]()
            if not kernel.finds_delta:
                sums = [self.per_row * self.value_width * FLOAT] * (3 if self.half else 1)
                if self.heads > 1 and self.rows > 1:  # (N, rows, heads), copied to (N, heads, rows)
                    sums.append(rows)
            with scratch(self.gpu, *sums):
                stack.enter_context(scratch(self.gpu, rows))
            stack.enter_context(scratch(self.gpu, kernel.workspace()))
            if grouped:
                gradients += [self.allocate(key), self.allocate(value)]
        return gradients + bias


class _BackwardKernel:
    """Which of the backward kernels runs, and the workspace it asks for (mem_eff_attention/kernels/cutlassB.h)."""

    def __init__(self, sizes: Kernel):
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
            widths = rounded_up(sizes.width, self.rows) + rounded_up(sizes.value_width, self.rows)
            numbers += self._splits() * self.columns * widths
        if self.splits_keys or sizes.half:
            blocks = ceil_div(sizes.rows, self.rows) * ceil_div(sizes.width, self.columns)
            numbers += blocks * (4 + self.rows * self.columns)  # a lock and a counter each
        return sizes.n * sizes.heads * rounded_up(numbers, 4) * FLOAT

    def _splits(self) -> int:
        """In how many parts the keys are worked on at the same time."""
        sizes = self.sizes
        splits = ceil_div(sizes.columns, self.columns)
        if sizes.n * sizes.heads >= 256 and sizes.columns <= 2 * self.columns:
            splits = 1
        splits = min(splits, 200 // max(1, sizes.n * sizes.heads))
        if not self.splits_keys or must_be_deterministic():
            splits = 1
        return max(1, splits)
