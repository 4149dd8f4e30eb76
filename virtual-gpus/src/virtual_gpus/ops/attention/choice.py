"""Which kernel CUDA takes for scaled_dot_product_attention: flash, memory-efficient, cuDNN's or none of them (math).

The rules are those of aten/src/ATen/native/transformers/cuda/sdp_utils.cpp and sdp_utils_cpp.h, with what changed from
PyTorch 2.11 to 2.15: each kernel has a list of conditions, the first kernel in the order of priority that meets all of
its own is taken. torch.nn.attention.sdpa_kernel and torch.backends.cuda.enable_*_sdp switch kernels off or set the
order. A condition that fails gives its reason in PyTorch's words, for the warnings that come when nothing is left.
"""

from __future__ import annotations

import os
import warnings

import torch

from virtual_gpus.ops.attention.call import CUDNN, EFFICIENT, FLASH, HALF, MATH, AttentionCall, cudnn_version
from virtual_gpus.ops.attention.conditions import CONDITIONS
from virtual_gpus.settings import INSTALLED

_ORDER = [FLASH, EFFICIENT, MATH]


def choose(call: AttentionCall) -> int:
    """MATH, FLASH, EFFICIENT or CUDNN. Raises PyTorch's RuntimeError, after its warnings, when none is allowed."""
    half = call.query.dtype in HALF
    for backend in order(call.capability, call.version):
        if backend == MATH and torch.backends.cuda.math_sdp_enabled():
            return MATH
        if not half and backend in (FLASH, CUDNN):  # one of their conditions, asked first since it is quickest
            continue
        if backend in CONDITIONS and why_not(backend, call) is None:
            return backend
    raise _nothing_left(call)


def why_not(backend: int, call: AttentionCall) -> str | None:
    """The first condition of FLASH, EFFICIENT or CUDNN that `call` does not meet; None if it meets all."""
    for condition in CONDITIONS[backend]:
        reason = condition(call)
        if reason is not None:
            return reason
    return None


def order(capability: tuple[int, int], version: tuple[int, int] = INSTALLED) -> list[int]:
    """The kernels in the order in which they are asked. cuDNN's comes first on Hopper and Blackwell."""
    wanted = torch._C._get_sdp_priority_order()
    return (
        [CUDNN, *_ORDER] if wanted[:3] == [FLASH, EFFICIENT, MATH] and _prefers_cudnn(capability, version) else wanted
    )


def _prefers_cudnn(capability, version) -> bool:
    if os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") == "1":
        return False
    return capability[0] in (9, 10) and cudnn_version(version) > 91500


def _nothing_left(call: AttentionCall) -> RuntimeError:
    switches = torch.backends.cuda
    if not (switches.flash_sdp_enabled() or switches.mem_efficient_sdp_enabled() or switches.cudnn_sdp_enabled()):
        return RuntimeError(
            "No viable backend for scaled_dot_product_attention was found. "
            "This is likely due to turning off both the math kernel and the fused kernels."
        )
    names = {EFFICIENT: "Memory efficient", FLASH: "Flash attention", CUDNN: "cuDNN attention"}
    for backend, name in names.items():
        for text in (f"{name} kernel not used because:", why_not(backend, call)):
            if text:  # a kernel that could run but that the order leaves out has no reason
                warnings.warn(text, UserWarning, stacklevel=2)
    return RuntimeError("No available kernel. Aborting execution.")
