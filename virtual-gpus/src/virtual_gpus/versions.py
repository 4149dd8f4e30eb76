"""The versions of PyTorch: which are supported, and since which one a rule of memory holds. Does not import torch.

A new PyTorch begins here: raise `NEWEST`, and give each rule that changed a name and the version that began it.
"""

from __future__ import annotations

import re

Version = tuple[int, int]  # (major, minor)

OLDEST: Version = (2, 11)
NEWEST: Version = (2, 15)

# cuBLAS and cublasLt share one workspace (aten/src/ATen/cuda/CublasHandlePool.cpp).
UNIFIED_WORKSPACES: Version = (2, 12)
# Each operator frees its workspace again (the same file).
FREED_WORKSPACES: Version = (2, 15)
# An out-of-memory error with expandable segments has a text of its own (c10/cuda/CUDACachingAllocator.cpp).
TEXT_OF_EXPANDABLE_SEGMENTS: Version = (2, 15)


def parse_version(text: str) -> Version:
    """The text "2.11", "2.11.0" or "2.11.0+cu130" as (2, 11). Raises ValueError if its memory rules are not known."""
    match = re.match(r"(\d+)\.(\d+)(?:[.+]|$)", str(text))
    version = match and (int(match[1]), int(match[2]))
    if not version or not OLDEST <= version <= NEWEST:
        oldest, newest = ("{}.{}".format(*v) for v in (OLDEST, NEWEST))
        raise ValueError(
            f"torch_version must be text from {oldest!r} to {newest!r}, for example '2.13', not {text!r}. "
            "The memory rules of other versions are not known."
        )
    return version
