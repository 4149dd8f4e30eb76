"""PyTorch's rules for GPU memory as plain functions: blocks, segments, cuBLAS's workspaces, buffers of reductions.

    round_size(1000)                                  # 1024: what the caching allocator hands out
    segment_size(3 << 20)                             # 20 MiB: what it takes from the GPU for that
    blas_workspaces("H200", (2, 13)).size("cublas")   # 32 MiB
    reduction_scratch((65536, 768), "H200", dims=(0,))
    for state in replay(trace): print(state.allocated, state.reserved, state.segments)

The virtual GPUs count with these functions. Nothing is switched on by importing or calling them, and no GPU is needed.
Sizes are bytes. `memory.allocator.CachingAllocator` is the whole allocator, which needs a program to run on it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

from virtual_gpus.gpus import GPUSpec, spec
from virtual_gpus.memory.options import SMALL_SEGMENT, Options

__all__ = [
    "BlasWorkspaces",
    "MemoryState",
    "blas_workspaces",
    "reduction_scratch",
    "replay",
    "round_size",
    "segment_size",
]

_DEFAULTS = Options()
_KIB = 1 << 10


# ---- the caching allocator


def round_size(nbytes: int, options: Options = _DEFAULTS) -> int:
    """The size of the block that serves a request of `nbytes` bytes, before what is too small to split off."""
    return options.rounded(nbytes)


def segment_size(nbytes: int, options: Options = _DEFAULTS) -> int:
    """What the allocator takes from the GPU for a request of `nbytes` bytes that no cached block serves."""
    return options.segment_size(options.rounded(nbytes))


class MemoryState(NamedTuple):
    """What a GPU's allocator holds: bytes in used blocks, bytes taken from the GPU, the number of segments."""

    allocated: int
    reserved: int
    segments: int


def replay(
    trace: Iterable[Mapping[str, Any]], segments: Sequence[Mapping[str, Any]] = (), options: Options = _DEFAULTS
) -> Iterator[MemoryState]:
    """Follow what an allocator did: yields its state before the first event of `trace`, and after each of them.

    trace: one GPU's events, as in `torch.cuda.memory._snapshot()["device_traces"]`. segments: that GPU's segments
    before the first event, as in the same snapshot's "segments"; without them nothing was there. A trace notes the
    bytes that were asked for. How large the blocks became follows from the rules: sizes round up, and a remainder
    that is too small to be split off stays with its block. Addresses that `trace` and `segments` do not explain, and
    expandable segments, which split to the last 512 bytes, count as their rounded size.
    """
    blocks = _Blocks(segments, options)
    used = (block for segment in segments for block in segment["blocks"] if block["state"] == "active_allocated")
    allocated, reserved = sum(block["size"] for block in used), sum(s["total_size"] for s in segments)
    count = sum(not segment.get("is_expandable") for segment in segments)
    state = MemoryState(allocated, reserved, count)
    yield state
    for event in trace:
        action, size = event["action"], event["size"]
        if action == "free_completed":
            blocks.free(event["addr"])
            yield state
            continue
        if action == "alloc":
            allocated += blocks.allocate(event["addr"], size)
        elif action == "free_requested":
            allocated -= blocks.size_of(event["addr"], size)
        elif action == "segment_alloc":
            blocks.add_segment(event["addr"], size)
            reserved, count = reserved + size, count + 1
        elif action == "segment_free":
            blocks.remove_segment(event["addr"])
            reserved, count = reserved - size, count - 1
        elif action == "segment_map":
            reserved += size
        elif action == "segment_unmap":
            reserved -= size
        state = MemoryState(allocated, reserved, count)
        yield state


_Place = tuple[int, int, int]  # a block: its size, its segment's address (0: not known), the least that is split off it


class _Blocks:
    """Which bytes of which segment are free, by address: that tells how large a block an allocation got."""

    def __init__(self, segments: Sequence[Mapping[str, Any]], options: Options):
        self._options = options
        self._free: dict[int, _Place] = {}
        self._ends: dict[int, int] = {}  # end of a free block -> its address
        self._used: dict[int, _Place] = {}
        for segment in segments:
            known = not segment.get("is_expandable")
            split_from = options.split_from(segment["segment_type"] == "small")
            for block in segment["blocks"]:
                place = block["size"], segment["address"] if known else 0, split_from
                if block["state"] != "inactive":
                    self._used[block["address"]] = place
                elif known:
                    self._put(block["address"], place)

    def _put(self, address: int, place: _Place) -> None:
        self._free[address] = place
        self._ends[address + place[0]] = address

    def add_segment(self, address: int, size: int) -> None:
        self._put(address, (size, address, self._options.split_from(size <= SMALL_SEGMENT)))

    def remove_segment(self, address: int) -> None:
        place = self._free.pop(address, None)
        if place is not None:
            del self._ends[address + place[0]]

    def size_of(self, address: int, requested: int) -> int:
        place = self._used.get(address)
        return self._options.rounded(requested) if place is None else place[0]

    def allocate(self, address: int, requested: int) -> int:
        """The bytes that a request at `address` got."""
        size, place = self._options.rounded(requested), self._free.pop(address, None)
        if place is None:
            self._used[address] = size, 0, 0
            return size
        found, segment, split_from = place
        if found - size >= split_from:
            self._free[address + size] = found - size, segment, split_from
            self._ends[address + found] = address + size
        else:
            del self._ends[address + found]
            size = found
        self._used[address] = size, segment, split_from
        return size

    def free(self, address: int) -> None:
        """A block that may be used again: it merges with the free neighbours in its segment."""
        size, segment, split_from = self._used.pop(address, (0, 0, 0))
        if not segment:
            return
        free, ends = self._free, self._ends
        after = free.get(address + size)
        if after is not None and after[1] == segment:
            del free[address + size]
            size += after[0]
        before = ends.get(address)
        if before is not None and free[before][1] == segment:
            del free[before], ends[address]
            address, size = before, address - before + size
        free[address] = size, segment, split_from
        ends[address + size] = address


# ---- cuBLAS


@dataclass(frozen=True)
class BlasWorkspaces:
    """The workspaces that matrix multiplications take on one GPU, for each thread and stream.

    cublas, cublaslt: bytes. kept: once taken a workspace stays; otherwise each operator takes its own and gives it
    back. unified: cublasLt works in cuBLAS's workspace. paired: whoever takes cublasLt's takes cuBLAS's as well.
    """

    cublas: int
    cublaslt: int
    kept: bool
    unified: bool
    paired: bool

    def size(self, library: str) -> int:
        """Bytes of the workspace of "cublas" or "cublaslt"."""
        if library == "cublas":
            return self.cublas
        return min(self.cublas, self.cublaslt) if self.unified else self.cublaslt

    def libraries(self, lt: bool = False) -> tuple[str, ...]:
        """Whose workspaces one operator takes. lt: it goes through cublasLt, as products with a bias vector do."""
        if not lt or self.unified:
            return ("cublas",)
        return ("cublas", "cublaslt") if self.paired else ("cublaslt",)


def blas_workspaces(
    gpu: GPUSpec | str, torch_version: tuple[int, int], environment: Mapping[str, str] | None = None
) -> BlasWorkspaces:
    """The workspaces on a kind of GPU with a version of PyTorch, under the settings of `environment` (os.environ).

    cuBLAS has 32 MiB on Hopper and later, 8.1 MiB before, or what CUBLAS_WORKSPACE_CONFIG=":SIZE:COUNT..." (KiB) says.
    cublasLt has 1 MiB, or CUBLASLT_WORKSPACE_SIZE (KiB). What happens to them changed with PyTorch:

    - 2.11: kept for ever; cublasLt takes cuBLAS's workspace and its own.
    - 2.12 to 2.14: kept for ever; cublasLt works in cuBLAS's ("unified"), unless TORCH_CUBLASLT_UNIFIED_WORKSPACE=0.
    - from 2.15: each operator takes its workspace and gives it back, cublasLt its own alone. With
      TORCH_CUBLAS_WORKSPACE_CACHE=1 as in 2.12 to 2.14.

    Sources: aten/src/ATen/cuda/CublasHandlePool.cpp, CUDABlas.cpp. The rules of 2.11, 2.13 and 2.15 were read in their
    libraries; that 2.12 is like 2.13 follows from the dates of the changes. Raises ValueError for an unknown kind.
    """
    settings = os.environ if environment is None else environment
    pairs = re.findall(r":(\d+):(\d+)", settings.get("CUBLAS_WORKSPACE_CONFIG", ""))
    if pairs:
        cublas = sum(int(size) * int(count) for size, count in pairs)
    else:
        cublas = 4096 * 8 if _sheet(gpu).capability >= (9, 0) else 4096 * 2 + 16 * 8
    text = settings.get("CUBLASLT_WORKSPACE_SIZE", "")
    kept = keeps_workspaces(torch_version, settings)
    asked = settings.get("TORCH_CUBLASLT_UNIFIED_WORKSPACE")
    unified = kept and (asked == "1" or (torch_version >= (2, 12) and asked != "0"))
    paired = torch_version < (2, 12) and not unified  # cublasLt's handle was cuBLAS's, and came with the workspace
    return BlasWorkspaces(cublas * _KIB, (int(text) if text.isdigit() else 1024) * _KIB, kept, unified, paired)


def keeps_workspaces(torch_version: tuple[int, int], environment: Mapping[str, str]) -> bool:
    """True if workspaces stay once taken: always before 2.15, since then only when asked to."""
    return torch_version < (2, 15) or environment.get("TORCH_CUBLAS_WORKSPACE_CACHE") == "1"


def _sheet(gpu: GPUSpec | str) -> GPUSpec:
    return spec(gpu) if isinstance(gpu, str) else gpu


# ---- reductions

_MIN_VALUES, _MAX_VALUES = 16, 256  # values that one thread adds up
_MAX_THREADS, _WARP = 512, 32
_VECTOR = 4  # elements that a thread loads at once


def reduction_scratch(
    shape: Sequence[int],
    gpu: GPUSpec | str,
    dims: Sequence[int] | None = None,
    *,
    strides: Sequence[int] | None = None,
    partial_bytes: int = 4,
) -> tuple[int, int]:
    """Bytes of partial results and of semaphores that reducing a tensor takes for a moment, for example its `sum`.

    A sum of few outputs over many inputs is cut across thread blocks. Each block leaves its partial results in a
    buffer, and counts itself off on a semaphore; the last block adds them up. For the bias gradient of a linear layer,
    a sum over the rows of a wide matrix, that buffer is often larger than the matrix itself. How the work is cut
    follows `setReduceConfig` (aten/src/ATen/native/cuda/Reduce.cuh). The figures equal those in the traces of an H200
    to the byte.

    dims: what is reduced; None: everything. strides: in elements; None: those of a contiguous tensor. partial_bytes: of
    one partial result, for example 4 for a sum of floats, 16 for a maximum and its index. (0, 0) if one thread block
    per output is enough. Raises ValueError for an unknown kind of GPU.
    """
    if prod(shape) <= _MAX_VALUES:  # far too little for more than one block
        return 0, 0
    sheet, ndim = _sheet(gpu), len(shape)
    if strides is None:
        strides = [prod(shape[dim + 1 :]) for dim in range(ndim)]
    reduced = tuple(sorted({dim % ndim for dim in dims})) if dims else tuple(range(ndim))
    threads = 1024 if sheet.capability == (7, 5) else 2048  # of a multiprocessor; Turing has half
    return _buffers(tuple(shape), tuple(strides), reduced, partial_bytes, sheet.multi_processor_count, threads)


_Dim = tuple[int, int]  # length and stride, in elements


@lru_cache(maxsize=4096)
def _buffers(
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    reduced: frozenset[int],
    partial_bytes: int,
    multiprocessors: int,
    threads_per_multiprocessor: int,
) -> tuple[int, int]:
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
    width, height = _thread_block(dim0, dim1, _MAX_THREADS // vector)
    step_input, step_output = (width, 1) if along_input else (1, width)
    if -(-inputs // step_input) < min(height * 16, _MAX_VALUES):
        return 0, 0
    values = -(-inputs // (step_input * height))
    grid = -(-(outputs // vector) // step_output)
    wanted = multiprocessors * (threads_per_multiprocessor // (width * height))
    if values < _MAX_VALUES or grid > wanted:
        return 0, 0
    blocks = max(min(-(-wanted // grid), -(-values // _MIN_VALUES)), -(-values // _MAX_VALUES))
    if blocks <= 1:
        return 0, 0
    return partial_bytes * outputs * blocks * (1 if along_input else width * vector), 4 * grid


def _merged(shape: tuple[int, ...], strides: tuple[int, ...], reduced: frozenset[int]) -> tuple[list[_Dim], list[_Dim]]:
    """The reduced and the kept dimensions as (length, stride), fastest first, neighbours in memory joined."""
    both: tuple[list[_Dim], list[_Dim]] = [], []
    for dim in reversed(range(len(shape))):
        if shape[dim] != 1:
            both[dim not in reduced].append((shape[dim], strides[dim]))
    inner, outer = both
    inner.sort(key=lambda entry: entry[1])  # the output's own order decides for the others: they keep theirs
    return _joined(inner), _joined(outer)


def _joined(dims: Sequence[_Dim]) -> list[_Dim]:
    found: list[_Dim] = []
    for length, stride in dims:
        if found and found[-1][0] * found[-1][1] == stride:
            found[-1] = (found[-1][0] * length, found[-1][1])
        else:
            found.append((length, stride))
    return found


def _output_vector(inner: Sequence[_Dim], outer: Sequence[_Dim]) -> int:
    """How many neighbouring outputs one thread takes: 4, 2 or 1, as all strides and the length divide."""
    vector = _VECTOR
    for number in (outer[0][0], *(stride for _, stride in inner), *(stride for _, stride in outer[1:])):
        while number % vector:
            vector //= 2
    return vector


def _thread_block(dim0: int, dim1: int, limit: int) -> tuple[int, int]:
    """Width and height of a thread block."""
    width0, height0 = (_last_power(n) if n < limit else limit for n in (dim0, dim1))
    height = min(height0, limit // min(width0, _WARP))
    return min(width0, limit // height), height


def _last_power(n: int) -> int:
    return 1 << max(n.bit_length() - 1, 0)
