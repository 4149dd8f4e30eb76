"""PyTorch's rules for GPU memory as plain functions: blocks, segments, cuBLAS's workspaces, buffers of reductions.

    round_size(1000)                                  # 1024: the size of the block for this request
    segment_size(3 << 20)                             # 20 MiB: what the allocator takes from the GPU for 3 MiB
    blas_workspaces("H200", (2, 13)).size("cublas")   # 32 MiB
    reduction_scratch((65536, 768), "H200", dims=(0,))

The virtual GPUs use the same functions. You can call them without any GPU, and they do not switch virtual GPUs on.
All sizes are in bytes. `memory.allocator.CachingAllocator` is the complete allocator, which follows a running program.
"""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Literal

from virtual_gpus.arithmetic import ceil_div, power_of_2
from virtual_gpus.gpus import GPUSpec, spec
from virtual_gpus.memory.options import Options
from virtual_gpus.versions import Version

__all__ = ["BlasWorkspaces", "blas_workspaces", "reduction_scratch", "round_size", "segment_size"]

_DEFAULTS = Options()
_KIB = 1 << 10
_UNIFIED_WORKSPACES: Version = (2, 12)  # cuBLAS and cublasLt share one (ATen/cuda/CublasHandlePool.cpp)
_FREED_WORKSPACES: Version = (2, 15)  # each operator frees its own again (the same file)
Ints = tuple[int, ...]
Library = Literal["cublas", "cublaslt"]
_Dim = tuple[int, int]  # length and stride, in elements


# ---- the caching allocator


def round_size(nbytes: int, options: Options = _DEFAULTS) -> int:
    """The block size for a request of `nbytes` bytes. A remainder that is too small to split off comes on top."""
    return options.rounded(nbytes)


def segment_size(nbytes: int, options: Options = _DEFAULTS) -> int:
    """The bytes that the allocator takes from the GPU for a request of `nbytes` bytes if no cached block fits."""
    return options.segment_size(options.rounded(nbytes))


# ---- cuBLAS


@dataclass(frozen=True)
class BlasWorkspaces:
    """The workspaces of matrix multiplications on one GPU. Each thread and stream has its own.

    cublas, cublaslt: bytes.
    kept: a workspace stays allocated after its first use. Otherwise each operator allocates and frees its own.
    unified: cublasLt uses the workspace of cuBLAS.
    paired: an operator that allocates the workspace of cublasLt also allocates that of cuBLAS.
    """

    cublas: int
    cublaslt: int
    kept: bool
    unified: bool
    paired: bool

    def size(self, library: Library) -> int:
        """The bytes of the workspace of "cublas" or "cublaslt"."""
        if library == "cublas":
            return self.cublas
        return min(self.cublas, self.cublaslt) if self.unified else self.cublaslt

    def libraries(self, lt: bool = False) -> tuple[Library, ...]:
        """The libraries whose workspaces one operator allocates. lt: it uses cublasLt, as linear layers do."""
        if not lt or self.unified:
            return ("cublas",)
        return ("cublas", "cublaslt") if self.paired else ("cublaslt",)


def blas_workspaces(
    gpu: GPUSpec | str, torch_version: Version, environment: Mapping[str, str] | None = None
) -> BlasWorkspaces:
    """The workspaces for a kind of GPU and a version of PyTorch. environment: settings, by default os.environ.

    The workspace of cuBLAS has 32 MiB on Hopper and later GPUs, and 8.1 MiB on earlier ones. The variable
    CUBLAS_WORKSPACE_CONFIG=":SIZE:COUNT..." (KiB) changes it. That of cublasLt has 1 MiB, or CUBLASLT_WORKSPACE_SIZE
    (KiB). How long the workspaces stay allocated depends on the version of PyTorch:

    - 2.11: Workspaces are never freed. An operator with cublasLt allocates its workspace and that of cuBLAS.
    - 2.12 to 2.14: Workspaces are never freed. cublasLt uses the workspace of cuBLAS ("unified"), unless
      TORCH_CUBLASLT_UNIFIED_WORKSPACE=0.
    - 2.15: Each operator allocates its workspace and frees it again. An operator with cublasLt allocates only that of
      cublasLt. With TORCH_CUBLAS_WORKSPACE_CACHE=1, the rules are those of 2.12 to 2.14.

    Raises ValueError for an unknown kind. Sources: aten/src/ATen/cuda/CublasHandlePool.cpp and CUDABlas.cpp. Those of
    2.11, 2.13 and 2.15 were checked in the compiled libraries. The dates of the changes show that 2.12 is as 2.13.
    """
    settings = os.environ if environment is None else environment
    pairs = re.findall(r":(\d+):(\d+)", settings.get("CUBLAS_WORKSPACE_CONFIG", ""))
    if pairs:
        cublas = sum(int(size) * int(count) for size, count in pairs)
    else:
        cublas = 32_768 if _sheet(gpu).capability >= (9, 0) else 8_320
    text = settings.get("CUBLASLT_WORKSPACE_SIZE", "")
    kept = keeps_workspaces(torch_version, settings)
    asked = settings.get("TORCH_CUBLASLT_UNIFIED_WORKSPACE")
    unified = kept and (asked == "1" or (torch_version >= _UNIFIED_WORKSPACES and asked != "0"))
    paired = not unified and torch_version < _UNIFIED_WORKSPACES  # cublasLt's handle was cuBLAS's, with its workspace
    return BlasWorkspaces(cublas * _KIB, (int(text) if text.isdigit() else 1024) * _KIB, kept, unified, paired)


def keeps_workspaces(torch_version: Version, environment: Mapping[str, str]) -> bool:
    """True if workspaces are never freed. This is always the case before 2.15, and since then only on request."""
    return torch_version < _FREED_WORKSPACES or environment.get("TORCH_CUBLAS_WORKSPACE_CACHE") == "1"


def _sheet(gpu: GPUSpec | str) -> GPUSpec:
    return spec(gpu) if isinstance(gpu, str) else gpu


# ---- reductions

_MIN_VALUES, MAX_VALUES = 16, 256  # values that one thread adds up
_WARP = 32
_VECTOR = 4  # elements that a thread loads at once


def reduction_scratch(
    shape: Sequence[int], gpu: GPUSpec | str, dims: Sequence[int] | None = None, *,
    strides: Sequence[int] | None = None, partial_bytes: int = 4, threads: int = 512,
) -> tuple[int, int]:  # fmt: skip
    """The bytes of two temporary buffers of a reduction such as `sum`: for partial results and for semaphores.

    shape: the shape of the tensor.
    dims: the dimensions that are reduced. None: all of them.
    strides: the strides in elements. None: those of a contiguous tensor.
    partial_bytes: bytes of one partial result, for example 4 for a sum of floats, 16 for a maximum and its index.
    threads: at most, in a block. 256 for complex128.

    Returns (0, 0) if one thread block per output is enough. Raises ValueError for an unknown kind of GPU.

    CUDA divides a reduction of many inputs to few outputs among several thread blocks. Each block writes its partial
    results to a buffer and increments a semaphore. The last block adds them up. The bias gradient of a linear layer is
    such a sum over the rows of a wide matrix, and its buffer is often larger than the matrix itself. The division
    follows `setReduceConfig` (aten/src/ATen/native/cuda/Reduce.cuh). The bytes equal those in the traces of an H200.
    """
    sheet, ndim = _sheet(gpu), len(shape)
    if strides is None:
        strides = [prod(shape[dim + 1 :]) for dim in range(ndim)]
    reduced = tuple(sorted({dim % (ndim or 1) for dim in dims})) if dims else tuple(range(ndim))
    processors = sheet.multi_processor_count, sheet.threads
    return _buffers(tuple(shape), tuple(strides), reduced, partial_bytes, threads, *processors)


@lru_cache(maxsize=4096)
def _buffers(
    shape: Ints, strides: Ints, reduced: Ints, partial_bytes: int, threads: int, processors: int, per_processor: int
) -> tuple[int, int]:
    """processors: multiprocessors of the GPU. per_processor: threads that each of them holds at a time."""
    inner, outer = _merged(shape, strides, reduced)
    inputs, outputs = prod(n for n, _ in inner), prod(n for n, _ in outer)
    along_input = not outer or not inner or inner[0][1] < outer[0][1]
    dim0, dim1 = (inputs, outputs) if along_input else (outputs, inputs)
    fastest = (inner or [(1, 1)])[0][1] if along_input else outer[0][1]
    vector = 1
    if fastest == 1 and along_input and dim0 > 128 and len(inner) + len(outer) == 1:
        dim0 //= _VECTOR
    elif fastest == 1 and not along_input:
        vector = _output_vector(inner, outer)
        dim0 //= vector
    width, height = _thread_block(dim0, dim1, threads // vector)
    step_input, step_output = (width, 1) if along_input else (1, width)
    if ceil_div(inputs, step_input) < min(height * 16, MAX_VALUES):
        return 0, 0
    values = ceil_div(inputs, step_input * height)
    grid = ceil_div(outputs // vector, step_output)
    wanted = processors * (per_processor // (width * height))
    if values < MAX_VALUES or grid > wanted:
        return 0, 0
    blocks = max(min(ceil_div(wanted, grid), ceil_div(values, _MIN_VALUES)), ceil_div(values, MAX_VALUES))
    if blocks <= 1:
        return 0, 0
    return partial_bytes * outputs * blocks * (1 if along_input else width * vector), 4 * grid


def _merged(shape: Ints, strides: Ints, reduced: Sequence[int]) -> tuple[list[_Dim], list[_Dim]]:
    """The reduced and the kept dimensions as (length, stride), fastest first, with neighbours in memory merged."""
    both: tuple[list[_Dim], list[_Dim]] = [], []
    for dim in reversed(range(len(shape))):
        if shape[dim] != 1:
            both[dim not in reduced].append((shape[dim], strides[dim]))
    inner, outer = both
    inner.sort(key=lambda entry: entry[1])  # the output's own order decides for the others: they keep theirs
    return _joined(inner), _joined(outer)


def _joined(dims: Sequence[_Dim]) -> list[_Dim]:
    joined: list[_Dim] = []
    for length, stride in dims:
        if joined and joined[-1][0] * joined[-1][1] == stride:
            joined[-1] = (joined[-1][0] * length, joined[-1][1])
        else:
            joined.append((length, stride))
    return joined


def _output_vector(inner: Sequence[_Dim], outer: Sequence[_Dim]) -> int:
    """The neighbouring outputs per thread: the largest of 4, 2 and 1 that divides all strides and the length."""
    vector = _VECTOR
    for number in (outer[0][0], *(stride for _, stride in inner), *(stride for _, stride in outer[1:])):
        while number % vector:
            vector //= 2
    return vector


def _thread_block(dim0: int, dim1: int, limit: int) -> tuple[int, int]:
    """Width and height of a thread block."""
    width0, height0 = (power_of_2(n) if n < limit else limit for n in (dim0, dim1))
    height = min(height0, limit // min(width0, _WARP))
    return min(width0, limit // height), height
