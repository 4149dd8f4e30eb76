"""scaled_dot_product_attention on a virtual GPU: CUDA's choice of kernel, its memory, the CPU's numbers.

A fused kernel keeps its inputs, its output and one float per row of the scores, where the formula keeps the scores.
`choice` says which one runs, `kernels` what memory it takes, `values` computes. The formula runs operator by operator,
as in PyTorch (_scaled_dot_product_attention_math in aten/src/ATen/native/transformers/attention.cpp).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.overrides import handle_torch_function, has_torch_function

from virtual_gpus.clock.cost import moves
from virtual_gpus.dispatch.copies import is_transformed
from virtual_gpus.dispatch.operators import OpCall, Row
from virtual_gpus.entrance import entrance
from virtual_gpus.features.attention.choice import EFFICIENT, FLASH, HALF, MATH, AttentionCall, Mask, Scale, T, choose
from virtual_gpus.features.attention.fused import KERNELS
from virtual_gpus.features.attention.values import for_all_heads
from virtual_gpus.features.autocast import casting
from virtual_gpus.features.tensors.attributes import gpu_as_seen
from virtual_gpus.machine import VirtualGPU
from virtual_gpus.patches.table import Patch
from virtual_gpus.placement.storages import device_of, gpu_of, is_wrapper
from virtual_gpus.placement.wrappers import arrived, is_dtensor
from virtual_gpus.versions import ATTENTION_IN_THREE_DIMENSIONS

_raw = torch._C._nn.scaled_dot_product_attention


def scaled_dot_product_attention(
    query: Any, key: T, value: T, attn_mask: Mask = None, dropout_p: float = 0.0, is_causal: bool = False, *,
    scale: Scale = None, enable_gqa: bool = False,
) -> T:  # fmt: skip
    """torch.nn.functional's. (N, heads, T, width) each, output as query. Raises PyTorch's errors."""
    inputs = (query, key, value) if attn_mask is None else (query, key, value, attn_mask)
    rest = {"scale": scale, "enable_gqa": enable_gqa}
    if has_torch_function(inputs):  # a subclass, or a mode
        return handle_torch_function(
            scaled_dot_product_attention, inputs, query, key, value, attn_mask, dropout_p, is_causal, **rest
        )
    if is_dtensor(query) and (gpu := gpu_of(query.to_local())) is not None:  # its operators know what to shard
        return _attention(gpu, query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    query, key, value, attn_mask = map(arrived, (query, key, value, attn_mask))
    inputs = (query, key, value) if attn_mask is None else (query, key, value, attn_mask)
    # On the CPU, or under torch.func's transforms, which take operators apart themselves.
    is_elsewhere = gpu_as_seen(query) is None or is_wrapper(type(query)) or is_transformed()
    call = _raw if is_elsewhere or _is_wrong(*inputs, dropout=dropout_p) else _on_gpu
    return call(query, key, value, attn_mask, dropout_p, is_causal, **rest)


def _is_wrong(query: torch.Tensor, *others: torch.Tensor, dropout: float) -> bool:
    """What PyTorch refuses before it looks for a kernel (validate_sdpa_input): its own operator says why."""
    dtypes = [part.dtype for part in others]
    mask_fits = len(others) < 3 or dtypes[2] in (torch.bool, torch.float32, query.dtype)
    same = query.dtype == dtypes[0] == dtypes[1]
    return not (same and mask_fits and query.dim() > 1 < min(part.dim() for part in others[:2]) and 0 <= dropout <= 1)


@casting("scaled_dot_product_attention")
@entrance
def _on_gpu(
    query: T, key: T, value: T, mask: Mask, dropout: float, causal: bool, *, scale: Scale, enable_gqa: bool
) -> T:
    gpu = gpu_of(query)
    if gpu is None or not gpu is gpu_of(key) is gpu_of(value):
        q, k, v = map(device_of, (query, key, value))
        raise RuntimeError(
            "Expected query, key, and value to have the same device type, but got "
            f"query.device: {q} key.device: {k} and value.device: {v} instead."
        )
    if gpu.machine.settings.version < ATTENTION_IN_THREE_DIMENSIONS or not query.dim() == key.dim() == value.dim() == 3:
        return _attention(gpu, query, key, value, mask, dropout, causal, scale, enable_gqa)
    query, key, value = (part.unsqueeze(0) for part in (query, key, value))
    while mask is not None and mask.dim() < 4:
        mask = mask.unsqueeze(0)
    return _attention(gpu, query, key, value, mask, dropout, causal, scale, enable_gqa).squeeze(0)


def _attention(
    gpu: VirtualGPU, query: T, key: T, value: T, mask: Mask, dropout: float, causal: bool, scale: Scale, gqa: bool
) -> T:
    version = gpu.machine.settings.version
    call = AttentionCall(query, key, value, mask, dropout, causal, gqa, gpu.spec.capability, version)
    backend = choose(call)
    if causal and mask is not None:
        raise RuntimeError("_scaled_dot_product_attention: Explicit attn_mask should not be set when is_causal=True")
    if mask is not None and mask.dtype == torch.bool:
        mask = _added(mask, query)
    if backend == MATH:
        return _math(query, key, value, mask, dropout, causal, scale, gqa)
    width = value.shape[-1]
    if backend == FLASH and width % 8:
        scale = 1 / math.sqrt(width) if scale is None else scale
        query, key, value = (torch.nn.functional.pad(part, (0, -width % 8)) for part in (query, key, value))
    if mask is not None:
        mask = _expanded(mask, query, key, backend)
    options = () if backend == FLASH else (mask, call.trains)
    operator = getattr(torch.ops.aten, KERNELS[backend].name).default
    out = operator(query, key, value, *options, dropout, causal, scale=scale)[0]
    return out if out.shape[-1] == width else out[..., :width]


def _added(mask: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """A mask of bools as one to add: 0 where allowed, -inf elsewhere, made of the same tensors as in PyTorch's C++."""
    allowed, hidden = (torch.scalar_tensor(v, dtype=query.dtype, device=query.device) for v in (0.0, -math.inf))
    return torch.where(mask, allowed, hidden)


def _expanded(mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor, backend: int) -> torch.Tensor:
    """The mask in four dimensions. The memory-efficient kernel wants its rows to begin at multiples of 8."""
    heads = mask.shape[1] if mask.dim() == 4 else 1
    if backend == EFFICIENT:
        if mask.dtype != query.dtype:
            raise RuntimeError("invalid dtype for bias - should match query's dtype")
        heads = query.shape[1]
        if mask.stride(-1) != 1 or any(stride % 8 for stride in mask.stride()[:-1]):
            length = mask.shape[-1]
            mask = torch.nn.functional.pad(mask, (0, 8 - length % 8))[..., :length]
    return mask.expand(query.shape[0], heads, query.shape[2], key.shape[2])


# ---- the formula -----------------------------------------------------------------------------------------------------


def _math(query: T, key: T, value: T, mask: Mask, dropout: float, causal: bool, scale: Scale, gqa: bool) -> T:
    dtype = query.dtype
    if dtype in HALF and not torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed():
        query, key, value = query.float(), key.float(), value.float()
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    root = math.sqrt(abs(factor))
    query = query * (-root if factor < 0 else root)
    if causal:
        allowed = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device)
        mask = _added(allowed.tril(), query)
    if gqa:
        key, value = for_all_heads(query, key), for_all_heads(query, value)
    weights = torch.matmul(query, key.transpose(-2, -1) * root)
    if mask is not None:
        weights = weights.add_(mask)
    weights = torch._safe_softmax(weights, -1)
    if dropout:
        weights = torch.dropout(weights, dropout, True)
    out = torch.matmul(weights, value).to(dtype)
    weights.to(dtype)  # PyTorch returns them as well; they are not used
    return out


def safe_softmax(call: OpCall) -> torch.Tensor:
    """Rows without any finite score get zeros: found with operators that each have a result of their own."""
    scores, dim = call["self"], call["dim"]
    rows = max(1, scores.shape[dim]) if scores.dim() else 1
    dtype = call["dtype"] or scores.dtype
    count, number = scores.numel(), dtype.itemsize
    with call.scratch(count * number, number, count, count // rows, number):
        return call.run()


def get_fastpath_enabled() -> bool:
    """False: `nn.MultiheadAttention` and `nn.TransformerEncoder` run operator by operator in evaluation too.

    PyTorch's own fast path is one operator for a whole layer, whose memory on CUDA nobody measured, and nested tensors.
    """
    return False


OPERATORS = {"_safe_softmax": Row(moves("safe_softmax"), safe_softmax)}


def patches() -> list[Patch]:
    owners = (torch.nn.functional, torch._C._nn)
    rows = [(owner, scaled_dot_product_attention.__name__, scaled_dot_product_attention) for owner in owners]
    return [*rows, (torch.backends.mha, "get_fastpath_enabled", get_fastpath_enabled)]
