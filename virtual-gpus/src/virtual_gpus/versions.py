"""The versions of PyTorch: which are supported, and since which one a rule holds. Does not import torch.

A new PyTorch begins here: ARCHITECTURE.md ("A new PyTorch") says how. A rule that changed has a name here, also if only
one feature has it, so that what a new PyTorch changes is one page. No other module compares versions with numbers.
"""

import re

Version = tuple[int, int]  # (major, minor)

OLDEST: Version = (2, 11)
NEWEST: Version = (2, 15)

# ---- memory and errors, by the version that `torch_version` sets -----------------------------------------------------

# cuBLAS and cublasLt share one workspace (aten/src/ATen/cuda/CublasHandlePool.cpp).
UNIFIED_WORKSPACES: Version = (2, 12)
# Each operator frees its workspace again (the same file).
FREED_WORKSPACES: Version = (2, 15)
# addmm with a matrix as bias goes through cublasLt in half precision (aten/src/ATen/native/cuda/Blas.cpp).
LT_FOR_MATRICES_AS_BIAS: Version = (2, 15)

# ---- which kernel attention takes, by the same version ---------------------------------------------------------------

# All are in aten/src/ATen/native/transformers (cuda/sdp_utils.cpp, attention.cpp).
CUDNN_DROPOUT_IN_SIXTEENTHS: Version = (2, 12)  # cuDNN's kernel takes no other probability
EFFICIENT_NEEDS_ALIGNMENT: Version = (2, 13)  # of where its inputs begin, from Ampere on
CUDNN_LIMITS_BATCH_AND_HEADS: Version = (2, 13)  # to 65535
ATTENTION_IN_THREE_DIMENSIONS: Version = (2, 14)  # gets a batch of one
SHARED_HEADS: Version = (2, 14)  # the memory-efficient kernel shares keys among heads, and all kernels one key
CUDNN_WIDE_HEADS: Version = (2, 15)  # of up to 256 numbers
# The same file asks for cuDNN above these versions, as PyTorch counts them (91900 for 9.19.0).
CUDNN_COMES_FIRST = 91500  # on Hopper and Blackwell
CUDNN_HAS_WIDE_HEADS = 92200
# Where torch was built without cuDNN or NCCL: what the wheels for Linux bring.
CUDNN_OF_WHEELS: dict[Version, int] = {(2, 11): 91900, (2, 12): 92000, (2, 13): 92000, (2, 14): 92600, (2, 15): 92600}
NCCL_OF_WHEELS = (2, 28, 9)  # of PyTorch 2.11

# ---- what PyTorch's own Python code expects, by the installed version ------------------------------------------------

POOLS_IN_HISTORY: Version = (2, 12)  # this and the next one: torch/csrc/cuda/Module.cpp
HOST_IN_SNAPSHOTS: Version = (2, 14)
GLOO_SPLITS: Version = (2, 14)  # torch/csrc/distributed/c10d/ProcessGroupGloo.cpp


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
