"""Seconds of what CUDA does in one operator and the CPU in many: attention and recurrent networks. No torch here."""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

from virtual_gpus import figures
from virtual_gpus.clock.cost_matmul import product, tensor_cores
from virtual_gpus.clock.work import Cost
from virtual_gpus.gpus import GPUSpec

_FIGURES = figures.read("operators.toml")
_ATTENTION, _RECURRENT = _FIGURES["attention"], _FIGURES["recurrent"]


class Attention(NamedTuple):
    """Sizes of a call: samples times heads, rows and columns of the scores, width of a head, bytes of an element."""

    heads: int
    rows: int
    columns: int
    width: int
    itemsize: int
    causal: bool
    dropout: bool


def attention(call: Attention, spec: GPUSpec, precision: str, backward: bool) -> Cost:
    """A fused kernel (flash, memory-efficient, cuDNN), which skips tiles that the causal mask empties."""
    fitted, cores, reached = _ATTENTION, tensor_cores(spec, precision), spec.reached
    tile = fitted["tile"]
    down, across = ceil(call.rows / tile), ceil(call.columns / tile)
    tiles = down * across
    if call.causal:
        tiles = sum(min(across, row + 1) for row in range(down))
    flops = 4 * call.heads * tiles * tile * tile * call.width * (fitted["backward"] if backward else 1)
    share = fitted["share_on_cores" if cores else "share"]
    if cores and call.itemsize == 2 and list(spec.capability) in fitted["small_cores"]:
        share = fitted["share_of_products"] * reached.tensor
    share /= fitted["dropout"] if call.dropout else 1
    read = call.heads * (2 * call.rows + 2 * call.columns) * call.width * call.itemsize
    seconds = max(flops / (getattr(spec.flops, precision) * share), read / (spec.bandwidth * reached.memory))
    if not backward:
        return Cost(seconds + fitted["floor"] * reached.kernel, 1, "product")
    seconds += 2 * read / (spec.bandwidth * reached.memory)
    return Cost(seconds + fitted["floor_backward"] * reached.kernel, 1 + fitted["other_kernels"], "product")


def recurrent(net, spec: GPUSpec, backward: bool) -> Cost:
    """An LSTM, GRU or RNN: products of all inputs at once, then step by step. net: `features.rnn.sizes.Network`."""
    reached, steps = spec.reached, net.time * net.inner
    precision = {2: "fp16", 8: "fp64"}.get(net.itemsize, "fp32")
    rows, width = net.gates * net.hidden, net.output
    flops = 2 * net.batch * rows * width * (2 if backward else 1)
    fitted = _RECURRENT["backward" if backward else "forward"]
    step = fitted["chain"] * reached.kernel + flops / (getattr(spec.flops, precision) * fitted["share"])
    inputs = 0.0
    for layer in range(net.layers):
        size = net.input if layer == 0 else net.output * net.directions
        seconds, _ = product(spec, net.time * net.batch, rows, size, 1, precision)
        inputs += net.directions * seconds * (3 if backward else 1)
    return Cost(steps * step + inputs, round(steps * fitted["kernels"]))
