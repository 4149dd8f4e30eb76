"""Seconds of what CUDA does in one operator and the CPU in many: attention and recurrent networks. No torch here."""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

from virtual_gpus.clock.cost_matmul import product, tensor_cores
from virtual_gpus.clock.work import Cost
from virtual_gpus.gpus import GPUSpec

_TILE = 64  # rows and columns of the scores that a block of threads works on
# Share of the peak that the kernels reach: the memory-efficient one works without fp32 tensor cores.
_SHARE, _SHARE_ON_CORES = 0.21, 0.45
# Smaller tensor cores do not wait for the exponentials: of what large products reach, fitted to timm's inference on
# RTX 4090 (`benchmarks.timm_rows`), where the heads are 32 to 80 wide. T4: taken over.
_SHARE_OF_PRODUCTS, _SMALL_CORES = 0.75, ((7, 5), (8, 6), (8, 9), (12, 0))
_BACKWARD_FLOPS = 2.5  # five products where the forward pass has two
_DROPOUT = 1.25  # random numbers are drawn again in the backward pass
# In shortest kernels: to start; and the backward pass's other kernels, which read the gradient and the output once.
_START, _START_BACKWARD, _OTHERS = 4.5, 12.0, 4


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
    down, across = ceil(call.rows / _TILE), ceil(call.columns / _TILE)
    tiles = down * across
    if call.causal:
        tiles = sum(min(across, row + 1) for row in range(down))
    flops = 4 * call.heads * tiles * _TILE * _TILE * call.width * (_BACKWARD_FLOPS if backward else 1)
    cores, reached = tensor_cores(spec, precision), spec.reached
    share = _SHARE_ON_CORES if cores else _SHARE
    if cores and call.itemsize == 2 and spec.capability in _SMALL_CORES:
        share = _SHARE_OF_PRODUCTS * reached.tensor
    share /= _DROPOUT if call.dropout else 1
    read = call.heads * (2 * call.rows + 2 * call.columns) * call.width * call.itemsize
    seconds = max(flops / (getattr(spec.flops, precision) * share), read / (spec.bandwidth * reached.memory))
    if not backward:
        return Cost(seconds + _START * reached.kernel, 1, "product")
    seconds += 2 * read / (spec.bandwidth * reached.memory)
    return Cost(seconds + _START_BACKWARD * reached.kernel, 1 + _OTHERS, "product")


# A step of one layer in microseconds of an H200: the chain of kernels that nothing can shorten, and the share of the
# peak that its small products reach.
_STEP, _STEP_BACKWARD = 4.0, 11.0
_STEP_SHARE = 0.3
_KERNELS, _KERNELS_BACKWARD = 2, 3.5


def recurrent(net, spec: GPUSpec, backward: bool) -> Cost:
    """An LSTM, GRU or RNN: products of all inputs at once, then step by step. net: `features.rnn.sizes.Network`."""
    reached, steps = spec.reached, net.time * net.inner
    precision = {2: "fp16", 8: "fp64"}.get(net.itemsize, "fp32")
    rows, width = net.gates * net.hidden, net.output
    flops = 2 * net.batch * rows * width * (2 if backward else 1)
    chain = (_STEP_BACKWARD if backward else _STEP) * reached.kernel
    step = chain + flops / (getattr(spec.flops, precision) * _STEP_SHARE)
    inputs = 0.0
    for layer in range(net.layers):
        size = net.input if layer == 0 else net.output * net.directions
        seconds, _ = product(spec, net.time * net.batch, rows, size, 1, precision)
        inputs += net.directions * seconds * (3 if backward else 1)
    return Cost(steps * step + inputs, round(steps * (_KERNELS_BACKWARD if backward else _KERNELS)))
