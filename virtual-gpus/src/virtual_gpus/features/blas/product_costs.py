"""Seconds of a matrix product as cuBLAS computes it: in tiles, one per multiprocessor at a time. No torch here.

A product of (m, k) and (k, n) is cut into tiles of the result. As many tiles as there are multiprocessors run at once,
so work comes in waves, and a wave that is not full leaves multiprocessors idle. For few tiles cuBLAS also cuts along k
and adds the parts up (split-K). cuBLAS takes what its heuristics say is fastest; here the fastest is taken.
"""

from __future__ import annotations

from functools import lru_cache
from math import ceil, inf

from virtual_gpus import figures
from virtual_gpus.clock.work import BYTES
from virtual_gpus.gpus import GPUSpec, Precision

_FITTED = figures.beside(__file__)["products"]
Tiles = tuple[tuple[int, int, float], ...]  # rows, columns, and the share of the peak that they reach


@lru_cache(maxsize=8192)
def product(
    spec: GPUSpec, m: int, n: int, k: int, batch: int, precision: Precision, with_bias: bool = False,
    aligned: bool = True, parts: int = 1
) -> tuple[float, int]:  # fmt: skip
    """(seconds, kernels) of `batch` products of (m, k) and (k, n). aligned: all rows begin at multiples of 16 bytes.
    parts: of a number. Two complex ones take four products, for two parts."""
    if not m * n * k * batch:
        return 0.0, 0
    seconds, kernels = in_tiles(spec, m, parts * n, parts * k, batch, precision, with_bias)
    if not aligned and batch == 1 and precision in spec.tensor_cores:
        seconds += (_FITTED["misaligned"] - 1) * (seconds - _FITTED["start_on_cores"] * spec.reached.kernel)
    nbytes = parts * BYTES[precision] * batch * (m * k + k * n + m * n)
    return max(seconds, spec.seconds_to_move(nbytes) + spec.reached.kernel), kernels


@lru_cache(maxsize=8192)
def in_tiles(
    spec: GPUSpec, m: int, n: int, k: int, batch: int, precision: Precision, with_bias: bool = False, tiles: Tiles = ()
) -> tuple[float, int]:
    """(seconds, kernels) of the arithmetic alone. tiles: others than those of cuBLAS."""
    reached, cores = spec.reached, precision in spec.tensor_cores
    rate = spec.flops_of(precision) * (reached.tensor if cores else reached.simt) / spec.multi_processor_count
    start = reached.kernel * _FITTED["start_on_cores" if cores else "start"]
    best = inf, 1
    for rows, columns, share in tiles or _FITTED["tiles_on_cores" if cores else "tiles"]:
        number = ceil(m / rows) * ceil(n / columns) * batch
        for split in (1,) if with_bias else _FITTED["splits"]:
            if split > 1 and k / split < _FITTED["least_k"]:
                break
            waves = ceil(number * split / spec.multi_processor_count)
            seconds = waves * 2 * rows * columns * ceil(k / split) / (rate * share)
            seconds += start + (split > 1) * _FITTED["add_up"] * reached.kernel
            if seconds < best[0]:
                best = seconds, 1 + (split > 1)
    return best[0] * (_FITTED["with_bias"] if with_bias and not cores else 1), best[1]
