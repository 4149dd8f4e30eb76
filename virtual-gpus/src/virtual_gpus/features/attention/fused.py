"""The fused attention kernels, `torch.ops.aten._scaled_dot_product_flash_attention` and the others.

The CPU has no such operators, but PyTorch's autograd knows their derivatives, and DTensor their shards. PyTorch's
context parallelism calls them as well, and so do programs that merge the results of several blocks of keys by the
logarithms of their sums. The order of the results is that of aten/src/ATen/native/native_functions.yaml.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from virtual_gpus.clock.cost import CHARGED_ELSEWHERE, READS_AND_WRITES
from virtual_gpus.dispatch.half_precision import widened
from virtual_gpus.dispatch.operators import OpCall, Row
from virtual_gpus.features.attention import kernels
from virtual_gpus.features.attention.attention_costs import charge_attention
from virtual_gpus.features.attention.choice import CUDNN, EFFICIENT, FLASH, HALF
from virtual_gpus.features.attention.values import Numbers
from virtual_gpus.features.autocast import below_autocast
from virtual_gpus.placement.random_numbers import count_draws, default_generator
from virtual_gpus.placement.storages import empty_in, put
from virtual_gpus.threads import below, seen

KERNELS: dict[int, type[kernels.Kernel]] = {CUDNN: kernels.Cudnn, FLASH: kernels.Flash, EFFICIENT: kernels.Efficient}


def _forward(backend: int, call: OpCall) -> tuple[Any, ...]:
    query, key, value, gpu = call["query"], call["key"], call["value"], call.gpu
    bias = None if backend == FLASH else call["attn_bias"]
    trains = backend == FLASH or call["compute_log_sumexp"]
    kernel, numbers = _kernel(backend, call, bias, trains)
    of_out, of_lse, of_seeds = kernel.forward()
    charge_attention(gpu, kernel.name, query, key, value, numbers)
    seed = offset = lse = None
    shape = (*query.shape[:3], value.shape[3])
    strides = kernel.strides(query, shape)
    if gpu.machine.shapes_only:
        out = empty_in(of_out, shape, query.dtype, strides)
    else:
        with unseen():
            if numbers.dropout:  # a seed from the GPU's generator: one number, where CUDA moves its offset on
                generator = default_generator(gpu)
                count_draws(generator, 1)
                seed = torch.empty((), dtype=torch.int64).random_(generator=generator)
            out, lse = numbers.forward(query, key, value, bias, seed)
            out = put(_with_strides(out, strides), of_out)
            lse = None if lse is None or of_lse is None else put(_shaped(lse, kernel.lse), of_lse)
    if lse is None:
        lse = empty_in(of_lse, kernel.lse if of_lse else (0,), torch.float32)
    if backend == EFFICIENT:
        return out, lse, *(empty_in(None, (), torch.int64) if s is None else s for s in (seed, offset))  # on the host
    seed, offset = (
        empty_in(allocation, (), torch.float64) if number is None else put(number, allocation)
        for number, allocation in zip((seed, offset), of_seeds, strict=True)
    )
    mask = empty_in(None, (0,), query.dtype) if backend == FLASH else None  # for debugging
    return out, lse, None, None, query.shape[2], key.shape[2], seed, offset, mask  # None: of several texts in one


def _shaped(lse: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """The logarithms (N, heads, rows) with as many rows and dimensions as the kernel gives."""
    if lse.shape[2] < shape[2]:
        lse = torch.nn.functional.pad(lse, (0, shape[2] - lse.shape[2]), value=math.inf)
    return lse.unsqueeze(-1) if len(shape) == 4 else lse


def _backward(backend: int, call: OpCall) -> tuple[Any, ...]:
    query, key, value, out, gpu = call["query"], call["key"], call["value"], call["out"], call.gpu
    gradient = call["grad_out_" if backend == EFFICIENT else "grad_out"]
    bias: Any = None if backend == FLASH else call["attn_bias"]
    kernel, numbers = _kernel(backend, call, bias, trains=True)
    with seen():  # it asks transposed views whether they are packed, which costs CUDA's host the same
        allocations = kernel.backward(gradient, out)
    charge_attention(gpu, f"{kernel.name}_backward", query, key, value, numbers)
    inputs = (query, key, value, bias)[: len(allocations)]
    strides = [kernel.strides(part, part.shape) for part in inputs]
    if gpu.machine.shapes_only:
        placed = [
            empty_in(allocation, part.shape, part.dtype, stride)
            for part, allocation, stride in zip(inputs, allocations, strides, strict=True)
        ]
    else:
        with unseen():
            lse = call["logsumexp"]
            lse = lse.squeeze(-1) if lse.dim() == 4 else lse[..., : query.shape[2]]
            gradients: Any = numbers.backward(gradient, query, key, value, bias, out, lse, call["philox_seed"])
            placed = list(map(put, map(_with_strides, gradients, strides), allocations))
    return (*placed, *[None] * (4 - len(placed))) if backend == EFFICIENT else tuple(placed)


def _kernel(backend: int, call: OpCall, bias: torch.Tensor | None, trains: bool) -> tuple[Any, Numbers]:
    query, key, value = call["query"], call["key"], call["value"]
    if backend != EFFICIENT and query.dtype not in HALF:
        raise RuntimeError(f"aten::{call.op.name} takes fp16 and bf16 on CUDA, not {query.dtype}.")
    dropout = call["dropout_p"]
    kernel = KERNELS[backend](call.gpu, query, key, value, bias, dropout, trains)
    return kernel, Numbers(query, key, value, bias, dropout, call["is_causal"], call["scale"])


@contextmanager
def unseen() -> Iterator[None]:
    """The CPU's operators run below the accounting and below autocast."""
    with below(), below_autocast():
        yield


def _with_strides(result: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """`result` as CUDA's kernel lays it into memory."""
    return result if result.stride() == strides else result.new_empty_strided(result.shape, strides).copy_(result)


_DIRECTIONS: dict[str, Callable[..., tuple[Any, ...]]] = {"": _forward, "_backward": _backward}
_OF_CPU = "_scaled_dot_product_flash_attention_for_cpu"  # torch.func's transforms come to it
OPERATORS = {
    f"{kernel.name}{direction}": Row(CHARGED_ELSEWHERE, functools.partial(recipe, backend))
    for backend, kernel in KERNELS.items()
    for direction, recipe in _DIRECTIONS.items()
} | {
    _OF_CPU: Row(READS_AND_WRITES, cpu_kernel=functools.partial(widened, rounded=1)),
    f"{_OF_CPU}_backward": Row(READS_AND_WRITES, cpu_kernel=widened),
}
