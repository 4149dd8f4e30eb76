"""Seconds of a matrix product as cuBLAS computes it: in tiles, one per multiprocessor at a time. No torch here.

A product of (m, k) and (k, n) is cut into tiles of the result. As many tiles as there are multiprocessors run at once,
so work comes in waves, and a wave that is not full leaves multiprocessors idle. For few tiles cuBLAS also cuts along k
and adds the parts up (split-K). cuBLAS takes what its heuristics say is fastest; here the fastest is taken.
"""

from __future__ import annotations

from functools import lru_cache
from math import ceil

from virtual_gpus.gpus import GPUSpec

# Tile (rows, columns) and the share of the large products' speed that a kernel with such tiles reaches.
_SIMT_TILES = ((128, 64, 1.0), (64, 64, 0.65), (32, 32, 0.55))
_TENSOR_TILES = ((128, 256, 1.0), (128, 128, 0.85), (64, 64, 0.65))
_SPLITS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32)
_LEAST_K = 96  # of a part, in split-K
_START = 4.2  # kernels' floors: to start, and to add the parts of split-K up, in shortest kernels
_ADD_UP = 3.9
_TENSOR_START = 2.8
# An estimate: rows that begin anywhere are read in smaller pieces. With 50,304 words instead of 50,257, a step of GPT-2
# (github.com/karpathy/nanoGPT, which pads them) is reported to be about a quarter faster, and the words' products are a
# fifth to a quarter of it. Batches of small products do not show it: timm's rows for 197 tokens fit without.
_MISALIGNED = 2.0
_WITH_BIAS = 1.13  # cublasLt's kernels that add the bias do not split k, and are a little slower


def tensor_cores(spec: GPUSpec, precision: str) -> bool:
    """True if a product of that precision ("fp32", "tf32", "fp16", "bf16", "fp64") runs on tensor cores."""
    least = {"fp16": (7, 0), "bf16": (8, 0), "tf32": (8, 0)}.get(precision)
    return least is not None and spec.capability >= least


@lru_cache(maxsize=8192)
def product(
    spec: GPUSpec, m: int, n: int, k: int, batch: int, precision: str, with_bias: bool = False, aligned: bool = True
):
    """(seconds, kernels) of `batch` products of (m, k) and (k, n). aligned: all rows begin at multiples of 16 bytes."""
    if not m * n * k * batch:
        return 0.0, 0
    seconds, kernels = in_tiles(spec, m, n, k, batch, precision, with_bias)
    reached = spec.reached
    if not aligned and batch == 1 and tensor_cores(spec, precision):
        seconds += (_MISALIGNED - 1) * (seconds - _TENSOR_START * reached.kernel)
    nbytes = (2 if precision in ("fp16", "bf16") else 4) * batch * (m * k + k * n + m * n)
    least = nbytes / (spec.bandwidth * reached.memory)
    return max(seconds, least + reached.kernel), kernels


@lru_cache(maxsize=8192)
def in_tiles(spec: GPUSpec, m: int, n: int, k: int, batch: int, precision: str, with_bias: bool = False, tiles=()):
    """(seconds, kernels) of the arithmetic alone. tiles: others than those of cuBLAS on tensor cores."""
    reached, cores = spec.reached, tensor_cores(spec, precision)
    rate = getattr(spec.flops, precision) * (reached.tensor if cores else reached.simt) / spec.multi_processor_count
    start = reached.kernel * (_TENSOR_START if cores else _START)
    best = None
    for rows, columns, share in tiles or (_TENSOR_TILES if cores else _SIMT_TILES):
        number = ceil(m / rows) * ceil(n / columns) * batch
        for split in (1,) if with_bias else _SPLITS:
            if split > 1 and k / split < _LEAST_K:
                break
            waves = ceil(number * split / spec.multi_processor_count)
            seconds = waves * 2 * rows * columns * ceil(k / split) / (rate * share)
            seconds += start + (split > 1) * _ADD_UP * reached.kernel
            if best is None or seconds < best[0]:
                best = seconds, 1 + (split > 1)
    return best[0] * (_WITH_BIAS if with_bias and not cores else 1), best[1]
