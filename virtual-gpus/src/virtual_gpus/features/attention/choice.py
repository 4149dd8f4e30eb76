"""Which kernel CUDA takes for scaled_dot_product_attention: flash, memory-efficient, cuDNN's or none of them (math).

The rules are those of aten/src/ATen/native/transformers/cuda/sdp_utils.cpp and sdp_utils_cpp.h, with what changed from
PyTorch 2.11 to 2.15 (`versions`): each kernel has its conditions, and the first one in the order of priority that
takes the call is taken. torch.nn.attention.sdpa_kernel and torch.backends.cuda.enable_*_sdp switch kernels off or set
the order.
"""

from __future__ import annotations

import functools
import os

import torch

from virtual_gpus import versions
from virtual_gpus.settings import INSTALLED
from virtual_gpus.versions import CUDNN_OF_WHEELS, NEWEST, Version

MATH, FLASH, EFFICIENT, CUDNN = 0, 1, 2, 3  # as torch.nn.attention.SDPBackend
HALF = (torch.float16, torch.bfloat16)
_ORDER = [FLASH, EFFICIENT, MATH]
T, Mask, Scale = torch.Tensor, torch.Tensor | None, float | None  # None: no mask; 1 / sqrt(width)


class AttentionCall:
    """One call: tensors (N, heads, T, width), the mask or None, and the GPU's compute capability (major, minor).

    version: of the PyTorch whose rules hold, (major, minor).
    """

    __slots__ = ("capability", "causal", "dropout", "gqa", "key", "mask", "query", "trains", "value", "version")

    def __init__(
        self, query: T, key: T, value: T, mask: Mask, dropout: float, causal: bool, gqa: bool,
        capability: tuple[int, int], version: Version = INSTALLED,
    ):  # fmt: skip
        self.query, self.key, self.value, self.mask = query, key, value, mask
        self.dropout, self.causal, self.gqa, self.capability = dropout, causal, gqa, capability
        self.version = version
        self.trains = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)

    @property
    def parts(self) -> tuple[T, T, T]:
        """Query, key and value."""
        return self.query, self.key, self.value


def must_be_deterministic() -> bool:
    """True if PyTorch takes deterministic algorithms only, and does not just warn of others."""
    return torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()


@functools.cache
def cudnn_version(version: Version = INSTALLED) -> int:
    """cuDNN's version as PyTorch counts it, 91900 for 9.19.0: the installed one, or that of a version's wheels."""
    if version != INSTALLED or not torch.backends.cudnn.is_available():
        return CUDNN_OF_WHEELS.get(version, CUDNN_OF_WHEELS[NEWEST])
    major, minor, patch = torch._C._cudnn.getCompileVersion()
    return major * 10000 + minor * 100 + patch


def choose(call: AttentionCall) -> int:
    """MATH, FLASH, EFFICIENT or CUDNN. Raises PyTorch's RuntimeError when none that is switched on takes the call."""
    for backend in order(call.capability, call.version):
        if backend == MATH and torch.backends.cuda.math_sdp_enabled():
            return MATH
        if backend in _TAKES and _TAKES[backend](call):
            return backend
    raise RuntimeError("No available kernel. Aborting execution.")


def order(capability: tuple[int, int], version: Version = INSTALLED) -> list[int]:
    """The kernels in the order in which they are asked. cuDNN's comes first on Hopper and Blackwell."""
    wanted = torch._C._get_sdp_priority_order()
    prefers_cudnn = capability[0] in (9, 10) and cudnn_version(version) > versions.CUDNN_COMES_FIRST
    if os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") == "1" or wanted[:3] != _ORDER or not prefers_cudnn:
        return wanted
    return [CUDNN, *_ORDER]


def _flash(call: AttentionCall) -> bool:
    (rows, width), columns = call.query.shape[-2:], call.key.shape[-2]
    return (
        torch.backends.cuda.flash_sdp_enabled()
        and call.query.dtype in HALF
        and call.capability >= (8, 0)
        and call.mask is None
        and width == call.key.shape[-1] == call.value.shape[-1] <= 256
        and (not call.causal or rows == columns)
        and _dense(call, ignore_width_one=True)
        and _heads(call, may_share=True, same=True)
    )


def _efficient(call: AttentionCall) -> bool:
    major, half = call.capability[0], call.query.dtype in HALF
    multiple = 1  # of the width, in numbers (minimum_gemm_alignment)
    if major >= 8 or (major == 7 and half):
        multiple = 8 if half else 4
    dtypes = (torch.float16, torch.float32, torch.bfloat16) if major >= 8 else (torch.float16, torch.float32)
    query, key, value = (part.shape[-1] for part in call.parts)
    # Blocks begin at multiples of 512 bytes, so where a view starts within its storage decides.
    aligned = all(part.storage_offset() % multiple == 0 or not part.numel() for part in call.parts)
    return (
        torch.backends.cuda.mem_efficient_sdp_enabled()
        and call.query.dtype in dtypes
        and call.capability >= (5, 0)
        and query == key > 0 < value
        and query % multiple == value % multiple == 0
        and (aligned or call.version < versions.EFFICIENT_NEEDS_ALIGNMENT or major < 8)
        and _dense(call, ignore_width_one=False)
        and _heads(call, may_share=call.version >= versions.SHARED_HEADS, same=True)
    )


def _cudnn(call: AttentionCall) -> bool:
    return (
        torch.backends.cuda.cudnn_sdp_enabled()
        and call.query.dtype in HALF
        and call.capability >= (8, 0)
        and not must_be_deterministic()
        and (call.version < versions.CUDNN_DROPOUT_IN_SIXTEENTHS or call.dropout * 16 % 1 == 0)
        and _dense(call, ignore_width_one=True)
        and _heads(call, may_share=True, same=False)
        and _cudnn_mask(call)
        and _cudnn_sizes(call)
    )


def _dense(call: AttentionCall, ignore_width_one: bool) -> bool:
    """What all kernels want: four dimensions, one dtype, rows of numbers that lie together, and something to do."""
    query, key, value = call.parts
    packed = all(part.stride(-1) == 1 for part in call.parts) or (ignore_width_one and query.shape[-1] == 1)
    return (
        query.dim() == key.dim() == value.dim() == 4
        and query.dtype == key.dtype == value.dtype
        and packed
        and (call.mask is None or call.mask.stride(-1) == 1)
        and query.shape[-2] > 0 < key.shape[-2]
    )


def _heads(call: AttentionCall, may_share: bool, same: bool) -> bool:
    """may_share: the kernel shares keys among heads (enable_gqa). same: keys and values must agree."""
    (n, query), (key_n, key), (value_n, value) = (part.shape[:2] for part in call.parts)
    if not n == key_n == value_n:
        return False
    one_for_all = may_share and call.version >= versions.SHARED_HEADS and query and key == value == 1
    if query == key == value or one_for_all:
        return True
    if not (may_share and call.gqa) or (same and key != value):
        return False
    return bool(key and value) and query % key == query % value == 0


def _cudnn_mask(call: AttentionCall) -> bool:
    mask, shape = call.mask, (*call.query.shape[:3], call.key.shape[2])
    if mask is None:
        return True
    fits = mask.dim() in (2, 4) and all(m in (1, n) for m, n in zip(mask.shape, shape[-mask.dim() :], strict=True))
    return fits and not mask.requires_grad


def _cudnn_sizes(call: AttentionCall) -> bool:
    pair = width, value_width = call.query.shape[-1], call.value.shape[-1]
    wide = call.capability[0] in (9, 10)
    may_be_wider = wide and call.version >= versions.CUDNN_WIDE_HEADS
    newest = may_be_wider and cudnn_version(call.version) > versions.CUDNN_HAS_WIDE_HEADS
    limit = 256 if newest else 192 if wide and pair == (192, 128) else 128
    one_row = call.key.shape[-2] == 1 or (call.dropout and call.query.shape[-2] == 1)
    too_many = call.version >= versions.CUDNN_LIMITS_BATCH_AND_HEADS and max(call.query.shape[:2]) > 65535
    if max(pair) > limit or width % 8 or value_width % 8 or one_row or too_many:
        return False
    # Such wide heads have no backward pass otherwise.
    return not (newest and call.trains and max(pair) > 128) or pair in ((192, 128), (256, 256))


_TAKES = {CUDNN: _cudnn, FLASH: _flash, EFFICIENT: _efficient}
