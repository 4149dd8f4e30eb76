"""How long cuDNN takes for an LSTM, GRU or RNN: products of all inputs at once, then step by step.

The constants are in `figures/operators.toml`.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from virtual_gpus import figures
from virtual_gpus.clock.cost_matmul import product
from virtual_gpus.clock.work import Cost
from virtual_gpus.dispatch.timing import launch
from virtual_gpus.features.rnn.sizes import Network
from virtual_gpus.gpus import GPUSpec
from virtual_gpus.machine import VirtualGPU

_FITTED = figures.read("operators.toml")["recurrent"]


def charge_recurrent(gpu: VirtualGPU, net: Network, inputs: Iterable[torch.Tensor], backward: bool) -> None:
    """Put a network's forward or backward pass on the clock."""
    charge, pace = _cost(net, gpu.spec, backward), gpu.machine.clock.host
    name = "_cudnn_rnn_backward" if backward else "_cudnn_rnn"
    further = pace.kernel * _FITTED["host"] * (charge.kernels - 1)
    launch(gpu, name, inputs, charge.seconds, pace.operator + pace.training, further)


def _cost(net: Network, spec: GPUSpec, backward: bool) -> Cost:
    precision = {2: "fp16", 8: "fp64"}.get(net.itemsize, "fp32")
    fitted, rows, steps = _FITTED["backward" if backward else "forward"], net.gates * net.hidden, net.time * net.inner
    flops = 2 * net.batch * rows * net.output * (2 if backward else 1)
    step = fitted["chain"] * spec.reached.kernel + flops / (getattr(spec.flops, precision) * fitted["share"])
    inputs = 0.0
    for layer in range(net.layers):
        size = net.input if layer == 0 else net.output * net.directions
        seconds, _ = product(spec, net.time * net.batch, rows, size, 1, precision)
        inputs += net.directions * seconds * (3 if backward else 1)
    return Cost(steps * step + inputs, round(steps * fitted["kernels"]))
