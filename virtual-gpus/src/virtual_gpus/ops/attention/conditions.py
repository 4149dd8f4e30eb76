"""The conditions that CUDA's fused attention kernels set, each with its reason in PyTorch's words.

A condition takes an `AttentionCall` and gives None if it is met. Sources: sdp_utils.cpp and sdp_utils_cpp.h in
aten/src/ATen/native/transformers, with what changed from PyTorch 2.11 to 2.15.
"""

from __future__ import annotations

import torch

from virtual_gpus.ops.attention.call import CUDNN, EFFICIENT, FLASH, HALF, AttentionCall, cudnn_version


def _flash_is_on(_: AttentionCall):
    return None if torch.backends.cuda.flash_sdp_enabled() else "Flash attention has been runtime disabled."


def _efficient_is_on(_: AttentionCall):
    on = torch.backends.cuda.mem_efficient_sdp_enabled()
    return None if on else "Memory Efficient attention has been runtime disabled."


def _cudnn_is_on(_: AttentionCall):
    return None if torch.backends.cuda.cudnn_sdp_enabled() else "cuDNN attention has been runtime disabled."


def _four_dimensions(call: AttentionCall):
    dims = [part.dim() for part in call.parts]
    if dims == [4, 4, 4]:
        return None
    got = ", ".join(f"{name} dim: {dim}" for name, dim in zip(("Query", "Key", "Value"), dims, strict=True))
    return f"All fused kernels requires query, key and value to be 4 dimensional, but got {got} instead."


def _no_mask(call: AttentionCall):
    return None if call.mask is None else "Flash Attention does not support non-null attn_mask."


def _at_least(name: str, lowest: tuple[int, int]):
    def condition(call: AttentionCall):
        if call.capability >= lowest:
            return None
        major, minor = call.capability
        return (
            f"{name} gpu architectures in the range [sm{lowest[0]}{lowest[1]}, sm121]. "
            f"Attempting to run on a sm {major}.{minor} gpu."
        )

    return condition


def _of_dtype(dtypes_of):
    def condition(call: AttentionCall):
        allowed, found = dtypes_of(call.capability), [part.dtype for part in call.parts]
        if found[0] == found[1] == found[2] and found[0] in allowed:
            return None
        return (
            f"Expected query, key and value to all be of dtype: {{{', '.join(map(_type_name, allowed))}}}. "
            f"Got Query dtype: {found[0]}, Key dtype: {found[1]}, and Value dtype: {found[2]} instead."
        )

    return condition


def _type_name(dtype: torch.dtype) -> str:
    return {torch.float16: "Half", torch.bfloat16: "BFloat16", torch.float32: "Float"}[dtype]


def _half_types(capability):
    return HALF if capability >= (8, 0) else HALF[:1]


def _efficient_types(capability):
    return (torch.float16, torch.float32, torch.bfloat16)[: 3 if capability >= (8, 0) else 2]


def _flash_width(call: AttentionCall):
    widths = [part.shape[-1] for part in call.parts]
    if widths[0] == widths[1] == widths[2] <= 256:
        return None
    return (
        "Flash attention requires q,k,v to have the same last dimension and to be less than or equal to 256. "
        f"Got Query.size(-1): {widths[0]}, Key.size(-1): {widths[1]}, Value.size(-1): {widths[2]} instead."
    )


def _square_if_causal(call: AttentionCall):
    rows, columns = call.query.shape[-2], call.key.shape[-2]
    if not call.causal or rows == columns:
        return None
    return (
        "Flash attention does not support the is_causal flag when seqlen_q != seqlen_k. "
        f"Got seqlen_q: {rows} seqlen_k: {columns}. If you would like to use causal attention with non-square masks, "
        "please see CausalAttnMask."
    )


def alignment(call: AttentionCall) -> int:
    """The memory-efficient kernel's width must be a multiple of this many numbers (minimum_gemm_alignment)."""
    major, half = call.capability[0], call.query.dtype in HALF
    if major >= 8 or (major == 7 and half):
        return 8 if half else 4
    return 1


def _efficient_width(call: AttentionCall):
    multiple, (query, key, value) = alignment(call), [part.shape[-1] for part in call.parts]
    if query == key and query > 0 and value > 0 and query % multiple == value % multiple == 0:
        return None
    return (
        f"Mem efficient attention requires last dimension of inputs to be divisible by {multiple}. "
        f"Got Query.size(-1): {query}, Key.size(-1): {key}, Value.size(-1): {value} instead."
    )


def _efficient_start(call: AttentionCall):
    """Blocks begin at multiples of 512 bytes, so where a view starts within its storage decides."""
    if call.version < (2, 13) or call.capability < (8, 0):
        return None
    multiple = alignment(call)
    if all(part.storage_offset() % multiple == 0 or not part.numel() for part in call.parts):
        return None
    return (
        "Mem efficient attention on sm80 or newer requires q, k, and v storage offsets * element_size to be aligned to "
        f"{multiple * call.query.element_size()} bytes."
    )


def _lengths(call: AttentionCall):
    if call.query.shape[-2] and call.key.shape[-2]:
        return None
    return "All fused kernels do not support zero seq_len_q or seq_len_kv."


def _last_stride(ignore_width_one: bool):
    def condition(call: AttentionCall):
        packed = all(part.stride(-1) == 1 for part in call.parts)
        packed = packed or (ignore_width_one and call.query.shape[-1] == 1)
        if packed and (call.mask is None or call.mask.stride(-1) == 1):
            return None
        strides = ", ".join(
            f"{name}.stride(-1): {part.stride(-1)}"
            for name, part in zip(("Query", "Key", "Value"), call.parts, strict=True)
        )
        return f"All fused kernels require the last dimension of the input to have stride 1. Got {strides} instead."

    return condition


def _batch_and_heads(groups_since: tuple[int, int], same_heads: bool):
    """The kernel shares keys among heads (enable_gqa) from a version on. `same_heads`: keys and values must agree."""

    def condition(call: AttentionCall):
        (n, query), (key_n, key), (value_n, value) = (part.shape[:2] for part in call.parts)
        if not n == key_n == value_n:
            return "For dense inputs, both fused kernels require query, key and value to have the same batch_size."
        groups = call.version >= groups_since
        one_for_all = groups and call.version >= (2, 14) and query and key == value == 1
        if query == key == value or one_for_all:
            return None
        if not (groups and call.gqa):
            return "For dense input, both fused kernels require query, key and value to have the same num_heads."
        if same_heads and key != value:
            return "Both fused kernels require key and value to have the same num_heads and batch_size."
        if not key or not value or query % key or query % value:
            return "The number of heads in key/value must divide number of heads in query."
        return None

    return condition


def _deterministic(_: AttentionCall):
    strict = torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
    return "cuDNN SDPA is not deterministic." if strict else None


def _cudnn_mask(call: AttentionCall):
    mask, shape = call.mask, (*call.query.shape[:3], call.key.shape[2])
    if mask is None:
        return None
    fits = mask.dim() in (2, 4) and all(m in (1, n) for m, n in zip(mask.shape, shape[-mask.dim() :], strict=True))
    if fits and not mask.requires_grad:
        return None
    return (
        "Please use the following attn mask shapes: 2d - ({Q_seq_len, 1}  x {KV_seq_len, 1}); "
        "4d - ({Batch, 1} x {Num_heads, 1} x {Q_seq_len, 1}  x {KV_seq_len, 1})"
    )


def _cudnn_dropout(call: AttentionCall):
    if call.version < (2, 12) or call.dropout * 16 % 1 == 0:
        return None
    return (
        "cuDNN dropout probability resolution is limited to 1/16."
        "Use a dropout probability that is a multiple of 1/16 to select the cuDNN backend"
    )


def _cudnn_shapes(call: AttentionCall):
    width, value_width = call.query.shape[-1], call.value.shape[-1]
    wide = call.capability[0] in (9, 10)
    newest = wide and call.version >= (2, 15) and cudnn_version(call.version) > 92200
    limit = 256 if newest else 192 if wide and (width, value_width) == (192, 128) else 128
    if max(width, value_width) > limit:
        return f"head_dim should be no more than {limit}"
    if width % 8 or value_width % 8:
        return "head_dim should be a multiple of 8"
    if call.version >= (2, 13) and max(call.query.shape[:2]) > 65535:
        return "cuDNN SDPA does not support batch size or num_heads greater than 65535."
    if call.key.shape[-2] == 1:
        return "cudnn SDPA does not support key/value sequence length 1."
    if call.dropout and call.query.shape[-2] == 1:
        return "cudnn SDPA does not support query sequence length 1 with dropout."
    pair = (width, value_width)
    if newest and call.trains and max(pair) > 128 and pair not in ((192, 128), (256, 256)):
        return (
            "cuDNN SDPA on SM 9.0/10.x does not support backward with these head dimensions. "
            f"Got d_qk: {width}, d_v: {value_width}"
        )
    return None


CONDITIONS = {
    CUDNN: (
        _cudnn_is_on, _four_dimensions, _deterministic, _of_dtype(_half_types), _cudnn_mask,
        _at_least("cuDNN MHA only supports", (8, 0)), _cudnn_dropout, _lengths, _last_stride(True),
        _batch_and_heads((0, 0), False), _cudnn_shapes,
    ),
    FLASH: (
        _flash_is_on, _four_dimensions, _no_mask, _flash_width, _at_least("Flash attention only supports", (8, 0)),
        _square_if_causal, _of_dtype(_half_types), _batch_and_heads((0, 0), True), _lengths, _last_stride(True),
    ),
    EFFICIENT: (
        _efficient_is_on, _at_least("Mem Efficient Attention only supports", (5, 0)), _four_dimensions,
        _efficient_width, _efficient_start, _lengths, _last_stride(False),
        _batch_and_heads((2, 14), True), _of_dtype(_efficient_types),
    ),
}  # fmt: skip
