"""The fused attention kernels by their own names: `torch.ops.aten._scaled_dot_product_flash_attention` and the others.

PyTorch's context parallelism calls them, and so do programs that merge the results of several blocks of keys by the
logarithms of their sums. The CPU has no such operators. Memory, seconds and numbers are those of `fused`. The order of
the results is that of aten/src/ATen/native/native_functions.yaml. Dropout is refused.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch

from virtual_gpus.dispatch.op_call import OpCall
from virtual_gpus.errors import not_modelled
from virtual_gpus.features.attention.attention_call import CUDNN, EFFICIENT, FLASH, HALF, AttentionCall
from virtual_gpus.features.attention.fused import KERNELS, Plan, unseen
from virtual_gpus.features.attention.memory import Sizes, up
from virtual_gpus.features.attention.numbers import Numbers
from virtual_gpus.placement.storages import put

_PADDED = 32  # the memory-efficient kernel writes a multiple of so many logarithms per head


def _forward(backend: int, call: OpCall) -> tuple[Any, ...]:
    query, key, value = call["query"], call["key"], call["value"]
    bias = None if backend == FLASH else call["attn_bias"]
    plan = _plan(backend, call, bias, trains=backend == FLASH or call["compute_log_sumexp"])
    out, lse, seed, offset = plan.forward(query, key, value, bias)
    with unseen():
        if backend == EFFICIENT:
            seed, offset = (torch.empty((), dtype=torch.int64) for _ in range(2))  # on the host
            return out, _padded(lse), seed, offset
        mask = query.new_empty(0) if backend == FLASH else None  # for debugging
        if backend == CUDNN and lse.dim() == 3:
            lse = lse.unsqueeze(-1)
    return out, lse, None, None, query.shape[2], key.shape[2], seed, offset, mask  # None: of several texts in one


def _padded(lse: torch.Tensor) -> torch.Tensor:
    """In the same block, which is large enough."""
    if lse.dim() != 3 or lse.shape[2] % _PADDED == 0:
        return lse
    wider = torch.nn.functional.pad(lse, (0, up(lse.shape[2], _PADDED) - lse.shape[2]), value=math.inf)
    return put(wider, lse.untyped_storage()._record)


def _backward(backend: int, call: OpCall) -> tuple[Any, ...]:
    query, key, value = call["query"], call["key"], call["value"]
    gradient = call["grad_out_" if backend == EFFICIENT else "grad_out"]
    bias = None if backend == FLASH else call["attn_bias"]
    if backend == EFFICIENT and call["grad_input_mask"][3]:
        raise not_modelled(f"aten::{call.op.name} with the gradient of a mask")
    plan, lse = _plan(backend, call, bias, trains=True), call["logsumexp"]
    with unseen():
        lse = lse.squeeze(-1) if lse.dim() == 4 else lse[..., : query.shape[2]]
    gradients = plan.backward(gradient, query, key, value, bias, call["out"], lse, None, None)
    return gradients if backend == EFFICIENT else gradients[:3]


def _plan(backend: int, call: OpCall, bias, trains: bool) -> Plan:
    query, key, value = call["query"], call["key"], call["value"]
    if backend != EFFICIENT and query.dtype not in HALF:
        raise RuntimeError(f"aten::{call.op.name} takes fp16 and bf16 on CUDA, not {query.dtype}.")
    dropout, causal = call["dropout_p"], call["is_causal"]
    numbers = Numbers(query, key, value, bias, dropout, causal, call["scale"])
    if not numbers.fused:
        raise not_modelled(f"aten::{call.op.name} with dropout, with values of another width, or without any row")
    return Plan(call.gpu, KERNELS[backend](Sizes(call.gpu, query, key, value, bias, dropout, trains)), numbers)


def by_name(backend: int, call: AttentionCall, scale: float | None) -> torch.Tensor:
    """The output of `backend`'s operator, as PyTorch's C++ calls it for scaled_dot_product_attention."""
    attend = getattr(torch.ops.aten, f"_scaled_dot_product_{_NAMES[backend]}_attention")
    options = () if backend == FLASH else (None, call.trains)
    return attend(*call.parts, *options, call.dropout, call.causal, scale=scale)[0]


_NAMES = {FLASH: "flash", EFFICIENT: "efficient", CUDNN: "cudnn"}
_DIRECTIONS: dict[str, Callable[..., tuple[Any, ...]]] = {"": _forward, "_backward": _backward}
RECIPES = {
    f"_scaled_dot_product_{name}_attention{direction}": functools.partial(recipe, backend)
    for backend, name in _NAMES.items()
    for direction, recipe in _DIRECTIONS.items()
}
