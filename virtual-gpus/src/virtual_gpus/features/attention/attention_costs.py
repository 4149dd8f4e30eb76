"""How long the fused attention kernels take. The recipe that runs one charges it, since it knows of a causal mask."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import ceil
from typing import Any

import torch

from virtual_gpus import figures
from virtual_gpus.clock.work import Cost, added_on_host
from virtual_gpus.dispatch.measured_calls import argument, key_of
from virtual_gpus.dispatch.timing import launch, precision_of
from virtual_gpus.features.attention.kernels import Cudnn, Efficient, Flash
from virtual_gpus.features.attention.values import Numbers, T
from virtual_gpus.gpus import GPUSpec
from virtual_gpus.machine import VirtualGPU

_FITTED, _HOST = figures.beside(__file__)["time"], added_on_host("product")


def charge_attention(gpu: VirtualGPU, name: str, query: T, key: T, value: T, numbers: Numbers) -> None:
    """Put a kernel on the clock, `name` as PyTorch calls it."""
    charge = _cost(query, key, numbers, gpu.spec, name.endswith("_backward"))
    if gpu.machine.measured is not None:
        settings = {"is_causal": numbers.causal, "dropout_p": numbers.dropout}
        asked = key_of(name, (query, key, value), settings)
        charge = charge._replace(seconds=gpu.machine.measured.seconds(asked, charge.seconds))
    launch(gpu, name, charge, (query, key, value))


def _cost(query: T, key: T, numbers: Numbers, spec: GPUSpec, backward: bool) -> Cost:
    """Tiles of the scores (rows of the query, columns of the key) that the causal mask empties are skipped."""
    (samples, heads, rows, width), columns, itemsize = query.shape, key.shape[2], query.dtype.itemsize
    precision, reached, tile = precision_of("", [query.dtype]), spec.reached, _FITTED["tile"]
    down, across = ceil(rows / tile), ceil(columns / tile)
    tiles = sum(min(across, row + 1) for row in range(down)) if numbers.causal else down * across
    flops = 4 * samples * heads * tiles * tile * tile * width * (_FITTED["backward"] if backward else 1)
    cores = precision in spec.tensor_cores
    share = _FITTED["share_on_cores" if cores else "share"]
    if cores and itemsize == 2 and list(spec.capability) in _FITTED["small_cores"]:
        share = _FITTED["share_of_products"] * reached.tensor
    share /= _FITTED["dropout"] if numbers.dropout else 1
    read = samples * heads * (2 * rows + 2 * columns) * width * itemsize
    seconds = max(flops / (getattr(spec.flops, precision) * share), spec.seconds_to_move(read))
    if not backward:
        return Cost(seconds + _FITTED["floor"] * reached.kernel, 1, _HOST)
    seconds += spec.seconds_to_move(2 * read)
    return Cost(seconds + _FITTED["floor_backward"] * reached.kernel, 1 + _FITTED["other_kernels"], _HOST)


def _timed(backward: bool, tensors: list[Any], settings: dict[str, Any], device: str) -> Callable[[], Any]:
    """A kernel on zeros, for `measure`: what `charge_attention` asks for."""
    query, key, value = (argument(part, device).requires_grad_() for part in tensors)
    attend = partial(torch.nn.functional.scaled_dot_product_attention, query, key, value, **settings)
    if not backward:
        return attend
    out = attend()
    return partial(torch.autograd.grad, out, (query, key, value), torch.zeros_like(out), retain_graph=True)


_DIRECTIONS = {"": partial(_timed, False), "_backward": partial(_timed, True)}
TIMED = {f"{kernel.name}{end}": timed for kernel in (Cudnn, Efficient, Flash) for end, timed in _DIRECTIONS.items()}
