"""scaled_dot_product_attention on a virtual GPU: CUDA's choice of kernel, its memory, the CPU's numbers.

A fused kernel keeps its inputs, its output and one float per row of the scores, where the formula keeps the scores.
The first one in the order of priority that takes the call is taken. torch.nn.attention.sdpa_kernel and
torch.backends.cuda.enable_*_sdp switch kernels off or set the order.
"""

import math
import os
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.overrides import handle_torch_function, has_torch_function

from virtual_gpus import figures
from virtual_gpus.clock.cost import moves
from virtual_gpus.dispatch.copies import is_transformed
from virtual_gpus.dispatch.half_precision import HALVES
from virtual_gpus.dispatch.operators import OpCall, Row
from virtual_gpus.entrance import entrance
from virtual_gpus.features.attention.kernels import FUSED, AttentionCall, Fused, cudnn_version, rule
from virtual_gpus.features.attention.values import Mask, Parts, Scale, for_all_heads
from virtual_gpus.features.autocast import cast_first
from virtual_gpus.features.tensors.attributes import gpu_as_seen
from virtual_gpus.gpus import GPUSpec
from virtual_gpus.machine import VirtualGPU
from virtual_gpus.patches.table import Patch
from virtual_gpus.placement.storages import device_of, gpu_of, is_hollow, is_wrapper
from virtual_gpus.placement.wrappers import arrived, is_dtensor
from virtual_gpus.settings import INSTALLED
from virtual_gpus.versions import Version

_raw = torch._C._nn.scaled_dot_product_attention
_THREE_DIMENSIONS: Version = (2, 14)  # get a batch of one (attention.cpp)
_CUDNN_COMES_FIRST = 91500  # if it is newer than this, on Hopper and Blackwell (sdp_utils.cpp)


def scaled_dot_product_attention(
    query: Any, key: Tensor, value: Tensor, attn_mask: Mask = None, dropout_p: float = 0.0, is_causal: bool = False, *,
    scale: Scale = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """torch.nn.functional's. (N, heads, rows, width) each, output as query. Raises PyTorch's errors."""
    inputs = (query, key, value) if attn_mask is None else (query, key, value, attn_mask)
    rest = {"scale": scale, "enable_gqa": enable_gqa}
    if has_torch_function(inputs):  # a subclass, or a mode
        given = query, key, value, attn_mask, dropout_p, is_causal
        return handle_torch_function(scaled_dot_product_attention, inputs, *given, **rest)
    if any(map(is_wrapper, map(type, inputs))):
        if is_dtensor(query) and (gpu := gpu_of(query.to_local())) is not None:  # its operators know what to shard
            return _attend(gpu, (query, key, value), attn_mask, dropout_p, is_causal, scale, enable_gqa)
        query, key, value, attn_mask = map(arrived, (query, key, value, attn_mask))
    # On the CPU, or under torch.func's transforms, which take operators apart themselves.
    is_wrapped = type(query) is not Tensor and is_hollow(query)
    is_elsewhere = gpu_as_seen(query) is None or is_wrapped or is_transformed()
    if is_elsewhere or _is_wrong(query, key, value, attn_mask, dropout_p):
        call = _raw
    else:
        call = cast_first("scaled_dot_product_attention", _on_gpu)
    return call(query, key, value, attn_mask, dropout_p, is_causal, **rest)


def _is_wrong(query: Tensor, key: Tensor, value: Tensor, mask: Mask, dropout: float) -> bool:
    """What PyTorch refuses before it looks for a kernel (validate_sdpa_input): its own operator says why."""
    mask_fits = mask is None or mask.dtype in (torch.bool, torch.float32, query.dtype)
    same = query.dtype == key.dtype == value.dtype
    return not (same and mask_fits and min(query.dim(), key.dim(), value.dim()) > 1 and 0 <= dropout <= 1)


@entrance
def _on_gpu(
    query: Tensor, key: Tensor, value: Tensor, mask: Mask, dropout: float, causal: bool, *,
    scale: Scale, enable_gqa: bool,
) -> Tensor:  # fmt: skip
    gpu = gpu_of(query)
    if gpu is None or not gpu is gpu_of(key) is gpu_of(value):
        q, k, v = map(device_of, (query, key, value))
        found = f"query.device: {q} key.device: {k} and value.device: {v}"
        raise RuntimeError(f"Expected query, key, and value to have the same device type, but got {found} instead.")
    parts, is_new = (query, key, value), gpu.machine.settings.version >= _THREE_DIMENSIONS
    if not is_new or not query.dim() == key.dim() == value.dim() == 3:
        return _attend(gpu, parts, mask, dropout, causal, scale, enable_gqa)
    parts = query.unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0)
    while mask is not None and mask.dim() < 4:
        mask = mask.unsqueeze(0)
    return _attend(gpu, parts, mask, dropout, causal, scale, enable_gqa).squeeze(0)


def _attend(gpu: VirtualGPU, parts: Parts, mask: Mask, dropout: float, causal: bool, scale: Scale, gqa: bool) -> Tensor:
    call = AttentionCall(*parts, mask, dropout, causal, gqa, gpu.spec, gpu.machine.settings.version, scale)
    kernel = choose(call)
    if causal and mask is not None:
        raise RuntimeError("_scaled_dot_product_attention: Explicit attn_mask should not be set when is_causal=True")
    if mask is not None and mask.dtype == torch.bool:
        call.mask = added_mask(mask, call.query)
    return kernel.attend(call)


def choose(call: AttentionCall) -> "type[Fused | Formula]":
    """What computes it. Raises PyTorch's RuntimeError when none that is switched on takes the call."""
    for backend in order(call.spec, call.version):
        kernel = _BY_BACKEND.get(backend)
        if kernel is not None and kernel.takes(call):
            return kernel
    raise RuntimeError("No available kernel. Aborting execution.")


def order(spec: GPUSpec, version: Version = INSTALLED) -> list[SDPBackend]:
    """The kernels in the order in which they are asked (priority_order in sdp_utils.cpp)."""
    prefers_cudnn = rule("prefers_cudnn", spec) and cudnn_version(version) > _CUDNN_COMES_FIRST
    may_come_first = prefers_cudnn and os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") != "1"
    return _order(tuple(torch._C._get_sdp_priority_order()), may_come_first)


@lru_cache
def _order(numbers: tuple[int, ...], prefers_cudnn: bool) -> list[SDPBackend]:
    wanted = list(map(SDPBackend, numbers))
    return [SDPBackend.CUDNN_ATTENTION, *_ORDER] if prefers_cudnn and wanted[:3] == _ORDER else wanted


# ---- the formula -----------------------------------------------------------------------------------------------------


class Formula:
    """What `Kernel` is, operator by operator: _scaled_dot_product_attention_math in transformers/attention.cpp."""

    backend = SDPBackend.MATH

    @staticmethod
    def takes(call: AttentionCall) -> bool:
        """True: it has no conditions, but can be switched off."""
        return torch.backends.cuda.math_sdp_enabled()

    @staticmethod
    def attend(call: AttentionCall) -> Tensor:
        """The output (N, heads, rows, width of the value)."""
        (query, key, value), mask, dtype = call.parts, call.mask, call.query.dtype
        if dtype in HALVES and not torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed():
            query, key, value = query.float(), key.float(), value.float()
        factor = 1 / math.sqrt(query.shape[-1]) if call.scale is None else call.scale
        root = math.sqrt(abs(factor))
        query = query * (-root if factor < 0 else root)
        if call.causal:
            allowed = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device)
            mask = added_mask(allowed.tril(), query)
        if call.gqa:
            key, value = for_all_heads(query, key), for_all_heads(query, value)
        weights = torch.matmul(query, key.transpose(-2, -1) * root)
        if mask is not None:
            weights = weights.add_(mask)
        weights = torch._safe_softmax(weights, -1)
        if call.dropout:
            weights = torch.dropout(weights, call.dropout, True)
        out = torch.matmul(weights, value).to(dtype)
        weights.to(dtype)  # PyTorch returns them as well; they are not used
        return out


_BY_BACKEND = {kernel.backend: kernel for kernel in (Formula, *FUSED)}
_ORDER = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def added_mask(mask: Tensor, query: Tensor) -> Tensor:
    """A mask of bools as one to add: 0 where allowed, -inf elsewhere, made of the same tensors as in PyTorch's C++."""
    allowed, hidden = (torch.scalar_tensor(v, dtype=query.dtype, device=query.device) for v in (0.0, -math.inf))
    return torch.where(mask, allowed, hidden)


def safe_softmax(call: OpCall) -> Tensor:
    """Rows without any finite score get zeros: found with operators that each have a result of their own."""
    scores, dim = call["self"], call["dim"]
    rows = max(1, scores.shape[dim]) if scores.dim() else 1
    count, number = scores.numel(), (call["dtype"] or scores.dtype).itemsize
    return call.run_with(count * number, number, count, count // rows, number)


OPERATORS = {"_safe_softmax": Row(moves(**figures.beside(__file__)["safe_softmax"]), safe_softmax)}


def patches() -> list[Patch]:
    owners = (torch.nn.functional, torch._C._nn)
    rows = [(owner, scaled_dot_product_attention.__name__, scaled_dot_product_attention) for owner in owners]
    # `nn.MultiheadAttention` and `nn.TransformerEncoder` run operator by operator in evaluation too.
    return [*rows, (torch.backends.mha, "get_fastpath_enabled", lambda: False)]
