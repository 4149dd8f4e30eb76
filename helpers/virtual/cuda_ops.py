"""What CUDA does otherwise than the CPU, where it shows in memory.

Dropout: on a CPU PyTorch multiplies by a mask of floats, on CUDA it calls `native_dropout`, whose mask is of bools: a
quarter of the size (aten/src/ATen/native/Dropout.cpp, is_fused_kernel_acceptable).

Attention: CUDA's fused kernels keep the output and one number per row of the scores, as the CPU's flash kernel does.
With `shapes_only` PyTorch would not take that kernel, since meta tensors have none to choose from, so it is chosen here
by the CPU's own rules (aten/src/ATen/native/transformers/sdp_utils_cpp.cpp).

RNNs and library workspaces are still those of the CPU; see "Known limits" in `helpers.virtual`.
"""

from __future__ import annotations

import torch

from helpers.virtual.machine import active
from helpers.virtual.placement import gpu_of

_raw_dropout = torch.dropout
_raw_attention = torch._C._nn.scaled_dot_product_attention
_FLASH_TYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def dropout(input, p: float, train: bool):
    """`torch.dropout`, with CUDA's choice of operator for a tensor on a GPU."""
    if active() is None or gpu_of(input) is None or not train or not 0 < p < 1 or input.numel() == 0:
        return _raw_dropout(input, p, train)
    return torch.native_dropout(input, p, True)[0]


def scaled_dot_product_attention(
    query, key, value, attn_mask=None, dropout_p: float = 0.0, is_causal: bool = False, *, scale=None, enable_gqa=False
):
    """torch.nn.functional's, with the fused kernel for shapes as well. (N, heads, T, width) each, output as query."""
    gpu = None if active() is None else gpu_of(query)
    fused = gpu is not None and gpu.machine.shapes_only and _takes_flash(query, key, value, attn_mask, dropout_p)
    if not fused or enable_gqa:
        return _raw_attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = _added(attn_mask, query)
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return flash(query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)[0]


def _added(mask, query):
    """A mask of bools as one to add: 0 where allowed, -inf elsewhere, made of the same tensors as in PyTorch's C++."""
    allowed, hidden = (torch.scalar_tensor(v, dtype=query.dtype, device=query.device) for v in (0.0, float("-inf")))
    return torch.where(mask, allowed, hidden)


def _takes_flash(query, key, value, attn_mask, dropout_p: float) -> bool:
    """The CPU's conditions for its fused kernel."""
    parts = (query, key, value)
    same = query.shape[:2] == key.shape[:2] == value.shape[:2] and query.shape[-1] == key.shape[-1] == value.shape[-1]
    plain = all(t.dim() == 4 and t.stride(-1) == 1 and t.dtype in _FLASH_TYPES and t.numel() for t in parts)
    masked = attn_mask is not None and (attn_mask.requires_grad or attn_mask.dim() not in (2, 4))
    return plain and same and not masked and dropout_p == 0 and torch.backends.cuda.flash_sdp_enabled()


def rows():
    """See `stand_ins`. torch.nn.functional calls dropout through torch._VF."""
    attention = scaled_dot_product_attention
    owners = (torch.nn.functional, torch._C._nn)
    return [(torch, "dropout", dropout), (torch._VF, "dropout", dropout)] + [
        (owner, attention.__name__, attention) for owner in owners
    ]
