"""The fused attention kernels, `torch.ops.aten._scaled_dot_product_flash_attention` and the others.

The CPU has no such operators, but PyTorch's autograd knows their derivatives, and DTensor their shards. PyTorch's
context parallelism calls them as well, and so do programs that merge the results of several blocks of keys by the
logarithms of their sums. The order of the results is that of aten/src/ATen/native/native_functions.yaml.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import _len_torch_dispatch_stack

from virtual_gpus.dispatch.op_call import OpCall
from virtual_gpus.dispatch.timing import charge_attention
from virtual_gpus.features.attention import memory as memory
from virtual_gpus.features.attention.choice import CUDNN, EFFICIENT, FLASH, HALF
from virtual_gpus.features.attention.numbers import Numbers
from virtual_gpus.machine import VirtualGPU
from virtual_gpus.placement.random_numbers import count_draws, default_generator
from virtual_gpus.placement.storages import put
from virtual_gpus.threads import below, seen

_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA)
_PADDED = 32  # the memory-efficient kernel writes a multiple of so many logarithms per head
KERNELS: dict[int, type[memory.Kernel]] = {CUDNN: memory.Cudnn, FLASH: memory.Flash, EFFICIENT: memory.Efficient}


def fused(backend: int, trains: bool, query, key, value, bias, dropout: float, causal: bool, scale: float | None):
    """Attention by CUDNN, FLASH or EFFICIENT. `bias`: None, or what is added to the scores, in four dimensions."""
    options = () if backend == FLASH else (bias, trains)
    operator = getattr(torch.ops.aten, KERNELS[backend].name).default
    return operator(query, key, value, *options, dropout, causal, scale=scale)[0]


def _forward(backend: int, call: OpCall) -> tuple[Any, ...]:
    query, key, value, gpu = call["query"], call["key"], call["value"], call.gpu
    bias = None if backend == FLASH else call["attn_bias"]
    trains = backend == FLASH or call["compute_log_sumexp"]
    kernel, numbers = _kernel(backend, call, bias, trains)
    of_out, of_lse, of_seeds = kernel.forward()
    charge_attention(gpu, kernel.name, query, key, value, numbers)
    with unseen():
        seed = _draw(gpu) if numbers.dropout else None
        strides = kernel.strides(query, shape := (*query.shape[:3], value.shape[3]))
        if gpu.machine.shapes_only:
            out, lse = query.new_empty_strided(shape, strides), query.new_empty(shape[:3], dtype=torch.float32)
        else:
            out, lse = numbers.forward(query, key, value, bias, seed)
            out = _with_strides(out, strides)
        lse = query.new_empty(0) if lse is None else lse
        put(out, of_out)
        if backend == EFFICIENT:
            seed, offset = (torch.empty((), dtype=torch.int64) if s is None else s for s in (seed, None))  # on the host
            return out, _padded(lse, of_lse), seed, offset
        seed, offset = (query.new_empty((), dtype=torch.float64) if s is None else s for s in (seed, None))
        for number, allocation in zip((seed, offset), of_seeds, strict=True):
            put(number, allocation)
        lse = lse.unsqueeze(-1) if backend == CUDNN and lse.dim() == 3 else lse
        if of_lse is not None:
            put(lse, of_lse)
        mask = query.new_empty(0) if backend == FLASH else None  # for debugging
    return out, lse, None, None, query.shape[2], key.shape[2], seed, offset, mask  # None: of several texts in one


def _padded(lse: torch.Tensor, allocation) -> torch.Tensor:
    if allocation is None:
        return lse
    if lse.dim() == 3 and lse.shape[2] % _PADDED:
        lse = torch.nn.functional.pad(lse, (0, -lse.shape[2] % _PADDED), value=math.inf)
    return put(lse, allocation)


def _backward(backend: int, call: OpCall) -> tuple[Any, ...]:
    query, key, value, out, gpu = call["query"], call["key"], call["value"], call["out"], call.gpu
    gradient = call["grad_out_" if backend == EFFICIENT else "grad_out"]
    bias = None if backend == FLASH else call["attn_bias"]
    kernel, numbers = _kernel(backend, call, bias, trains=True)
    with seen():  # it asks transposed views whether they are packed, which costs CUDA's host the same
        allocations = kernel.backward(gradient, out)
    charge_attention(gpu, f"{kernel.name}_backward", query, key, value, numbers)
    inputs = (query, key, value, bias)[: len(allocations)]
    with unseen():
        strides = [kernel.strides(part, part.shape) for part in inputs]
        if gpu.machine.shapes_only:
            found = [part.new_empty_strided(part.shape, s) for part, s in zip(inputs, strides, strict=True)]
        else:
            lse = call["logsumexp"]
            lse = lse.squeeze(-1) if lse.dim() == 4 else lse[..., : query.shape[2]]
            found = numbers.backward(gradient, query, key, value, bias, out, lse, call["philox_seed"])
            found = [_with_strides(*pair) for pair in zip(found, strides, strict=False)]
        found = [put(*pair) for pair in zip(found, allocations, strict=True)]
    return (*found, *[None] * (4 - len(found))) if backend == EFFICIENT else tuple(found)


def _kernel(backend: int, call: OpCall, bias, trains: bool) -> tuple[Any, Numbers]:
    query, key, value = call["query"], call["key"], call["value"]
    if backend != EFFICIENT and query.dtype not in HALF:
        raise RuntimeError(f"aten::{call.op.name} takes fp16 and bf16 on CUDA, not {query.dtype}.")
    dropout = call["dropout_p"]
    sizes = memory.Sizes(call.gpu, query, key, value, bias, dropout, trains)
    return KERNELS[backend](sizes), Numbers(query, key, value, bias, dropout, call["is_causal"], call["scale"])


@contextmanager
def unseen():
    """The CPU's operators run below the accounting, below autocast, and unless others look on below dispatch modes."""
    with ExitStack() as stack:
        if torch.is_autocast_enabled("cuda"):
            stack.enter_context(torch._C._ExcludeDispatchKeyGuard(_AUTOCAST))
        if _len_torch_dispatch_stack() <= 1:
            stack.enter_context(torch._C._DisableTorchDispatch())
        with below():
            yield


def _with_strides(result, strides):
    """`result` as CUDA's kernel lays it into memory."""
    return result if result.stride() == strides else result.new_empty_strided(result.shape, strides).copy_(result)


def _draw(gpu: VirtualGPU):
    """A seed from the GPU's generator: one number per call, where CUDA moves its generator's offset on."""
    if gpu.machine.shapes_only:
        return None
    generator = default_generator(gpu)
    count_draws(generator, 1)
    return torch.empty((), dtype=torch.int64).random_(generator=generator)


_DIRECTIONS: dict[str, Callable[..., tuple[Any, ...]]] = {"": _forward, "_backward": _backward}
RECIPES = {
    f"{kernel.name}{direction}": functools.partial(recipe, backend)
    for backend, kernel in KERNELS.items()
    for direction, recipe in _DIRECTIONS.items()
}
