"""Recipes: the memory that CUDA's kernels use and the CPU's do not. What those of several features are made of.

What a recipe is, and where its rules come from, is in ARCHITECTURE.md; docs/accuracy.md compares with a real GPU.

Many of CUDA's kernels want *packed inputs*: others are copied first, and the copy lives as long as the kernel. The
CPU's kernels copy as well, but not always the same inputs, and on no GPU. Most often it is a gradient that was expanded
from one number, as after `loss.sum()`. Sources: `contiguous` and `expect_contiguous` in aten/src/ATen/native/cuda
(SoftMax.cu, layer_norm_kernel.cu, group_norm_kernel.cu, DilatedMaxPool2d.cu, ...) and cudnn/BatchNorm.cpp.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from virtual_gpus.clock.cost import READS_AND_WRITES, moves
from virtual_gpus.dispatch.half_precision import widened_if_refused
from virtual_gpus.dispatch.operators import OpCall, Row
from virtual_gpus.memory_model import MAX_VALUES, reduction_scratch
from virtual_gpus.placement.storages import CHANNELS_LAST, nbytes

_CopyBytes, _Result = Callable[[torch.Tensor], int], torch.Tensor | tuple[torch.Tensor, ...]
_THREADS = {torch.complex128: 256}  # max_reduce_threads in cuda/Reduce.cuh; 512 for others


def packed_copy(tensor: torch.Tensor | None) -> int:
    """Bytes of the packed copy that CUDA makes of `tensor`; 0 if it is packed, in either order of channels."""
    if tensor is None or tensor.is_contiguous():
        return 0
    last = CHANNELS_LAST.get(tensor.dim())
    return 0 if last is not None and tensor.is_contiguous(memory_format=last) else nbytes(tensor)


def channels_first_copy(tensor: torch.Tensor) -> int:
    """The same for kernels that do not know channels last, such as that of a cross entropy over images."""
    return 0 if tensor.is_contiguous() else nbytes(tensor)


def packed_copies(call: OpCall, names: tuple[str, ...], copy_of: _CopyBytes = packed_copy) -> list[int]:
    """Bytes of the copy of each named input that is not packed."""
    return [size for name in names if (size := copy_of(call[name]))]


def packed(*names: str, copy_of: _CopyBytes = packed_copy) -> Callable[[OpCall], _Result]:
    """The recipe of a kernel that has its results first, then packed copies. names: of inputs, in their order."""
    return lambda call: call.run(*packed_copies(call, names, copy_of))


channels_first = partial(packed, copy_of=channels_first_copy)


def take_buffers(call: OpCall, tensor: torch.Tensor, partial_bytes: int) -> None:
    """Take and give back what reducing `tensor` needs, along the call's dimensions if it has any, after the result."""
    if tensor.numel() <= MAX_VALUES:  # a block of threads is enough
        return
    dims, threads = call["dim"] if "dim" in call.op.positions else None, _THREADS.get(tensor.dtype, 512)
    dims, spec, strides = (dims,) if isinstance(dims, int) else dims, call.gpu.spec, tensor.stride()
    sizes = reduction_scratch(tensor.shape, spec, dims, strides=strides, partial_bytes=partial_bytes, threads=threads)
    if any(sizes):
        call.scratch(*sizes)


def radix_sort(call: OpCall, count: int, size: int) -> None:
    """Have buffers of `count` keys and values: the positions to sort along, and second copies of both."""
    call.scratch(count * size, 2 * count * size)


def not_deterministic(kernel: str, only_if: Callable[[OpCall], bool] = lambda call: True) -> Callable[[OpCall], None]:
    """A `check` that raises or warns, under `torch.use_deterministic_algorithms(True)`, if `only_if` is true.
    kernel: its name in CUDA's message. Source: the calls of `alertNotDeterministic` in aten/src/ATen/native/cuda, as
    they are in the CUDA libraries of 2.11 to 2.15. What the CPU's kernel refuses itself is not repeated."""
    return lambda call: torch._prims_common.alert_not_deterministic(kernel) if only_if(call) else None


def row(
    figures: dict[str, Any], time: str = "", either_order: str = "", channels_first: str = "", on_host: str = "",
    refused: str = "", cpu: str = "",
) -> Row:  # fmt: skip
    """What `[rows]` in the figures of a feature says of an operator. time: the table for `moves`; without one, it reads
    and writes its bytes. either_order, channels_first: inputs of which the kernel reads packed copies, with channels
    last or first, or first. on_host: see `Row`. refused: its name, if it is `not_deterministic`. cpu: "no halves" if
    it takes them, and the CPU's kernel takes none or one kind."""
    copies, copy_of = (either_order, packed_copy) if either_order else (channels_first, channels_first_copy)
    recipe = packed(*copies.split(), copy_of=copy_of) if copies else None
    check, cpu_kernel = not_deterministic(refused) if refused else None, widened_if_refused if cpu else None
    return Row(moves(**figures[time]) if time else READS_AND_WRITES, recipe, check, cpu_kernel, on_host.split())
