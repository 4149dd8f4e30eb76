"""One call of scaled_dot_product_attention as the choice of kernel sees it, and the versions that it hangs on."""

from __future__ import annotations

import functools

import torch

from virtual_gpus.settings import INSTALLED
from virtual_gpus.versions import CUDNN_OF_WHEELS, NEWEST, Version

MATH, FLASH, EFFICIENT, CUDNN = 0, 1, 2, 3  # as torch.nn.attention.SDPBackend
HALF = (torch.float16, torch.bfloat16)


class AttentionCall:
    """One call: tensors (N, heads, T, width), the mask or None, and the GPU's compute capability (major, minor).

    version: of the PyTorch whose rules hold, (major, minor).
    """

    __slots__ = ("capability", "causal", "dropout", "gqa", "key", "mask", "query", "trains", "value", "version")

    def __init__(self, query, key, value, mask, dropout, causal, gqa, capability, version=INSTALLED):
        self.query, self.key, self.value, self.mask = query, key, value, mask
        self.dropout, self.causal, self.gqa, self.capability = dropout, causal, gqa, capability
        self.version = version
        self.trains = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)

    @property
    def parts(self):
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
