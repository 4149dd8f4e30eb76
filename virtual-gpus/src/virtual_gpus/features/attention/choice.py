"""Which kernel CUDA takes for scaled_dot_product_attention: flash, memory-efficient, cuDNN's or none of them (math).

The rules are those of aten/src/ATen/native/transformers/cuda/sdp_utils.cpp and sdp_utils_cpp.h, with what changed from
PyTorch 2.11 to 2.15: each kernel has its conditions (`conditions`), and the first one in the order of priority that
takes the call is taken. torch.nn.attention.sdpa_kernel and torch.backends.cuda.enable_*_sdp switch kernels off or set
the order.
"""

from __future__ import annotations

import os
import warnings

import torch

from virtual_gpus.features.attention.attention_call import CUDNN, EFFICIENT, FLASH, MATH, AttentionCall, cudnn_version
from virtual_gpus.features.attention.conditions import TAKES
from virtual_gpus.settings import INSTALLED
from virtual_gpus.versions import Version

_ORDER = [FLASH, EFFICIENT, MATH]


def choose(call: AttentionCall) -> int:
    """MATH, FLASH, EFFICIENT or CUDNN. Raises PyTorch's RuntimeError, after a warning, when none is allowed."""
    for backend in order(call.capability, call.version):
        if backend == MATH and torch.backends.cuda.math_sdp_enabled():
            return MATH
        if backend in TAKES and TAKES[backend](call):
            return backend
    raise _nothing_left(call)


def order(capability: tuple[int, int], version: Version = INSTALLED) -> list[int]:
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
    query, (major, minor) = call.query, call.capability
    text = (
        f"No attention kernel that is switched on takes a query of {query.dtype} and of shape {tuple(query.shape)} "
        f"with this key, value and mask and these options on a GPU of compute capability {major}.{minor}."
    )
    warnings.warn(text, UserWarning, stacklevel=2)
    return RuntimeError("No available kernel. Aborting execution.")
