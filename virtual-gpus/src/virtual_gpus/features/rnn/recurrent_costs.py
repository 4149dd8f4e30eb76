"""How long cuDNN takes for an LSTM, GRU or RNN: products of all inputs at once, then step by step."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from virtual_gpus import figures
from virtual_gpus.clock.cost_matmul import product
from virtual_gpus.clock.work import Cost, Format
from virtual_gpus.dispatch.timing import launch, precision_of
from virtual_gpus.features.rnn.sizes import Network
from virtual_gpus.gpus import GPUSpec
from virtual_gpus.machine import VirtualGPU

_FITTED = figures.beside(__file__)["time"]


def charge_recurrent(
    gpu: VirtualGPU, net: Network, inputs: Sequence[torch.Tensor], trains: bool, backward: bool
) -> None:
    """Put a network's forward or backward pass on the clock. trains: if autograd notes it down."""
    charge = _cost(net, gpu.spec, precision_of("", [part.dtype for part in inputs]), backward)
    launch(gpu, "_cudnn_rnn_backward" if backward else "_cudnn_rnn", charge, inputs, trains)


def _cost(net: Network, spec: GPUSpec, precision: Format, backward: bool) -> Cost:
    fitted, rows, steps = _FITTED["backward" if backward else "forward"], net.gates * net.hidden, net.time * net.inner
    flops = 2 * net.batch * rows * net.output * (2 if backward else 1)
    step = fitted["chain"] * spec.reached.kernel + flops / (getattr(spec.flops, precision) * fitted["share"])
    inputs = 0.0
    for layer in range(net.layers):
        size = net.input if layer == 0 else net.output * net.directions
        seconds, _ = product(spec, net.time * net.batch, rows, size, 1, precision)
        inputs += net.directions * seconds * (3 if backward else 1)
    return Cost(steps * step + inputs, 1 + _FITTED["host"] * (round(steps * fitted["kernels"]) - 1))
