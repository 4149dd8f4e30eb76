"""What a card takes for each layer of a net, modelled: part of `helpers.lesson07.advice`; `times` says how."""

from __future__ import annotations

from helpers.lesson07.advice.nets import Layers, Net
from helpers.lesson07.scaling import Cluster

_LOSS = 8  # log-softmax: 2; picking a word's and its gradient: 3; the log-softmax's gradient: 3
_WEIGHTS = 3  # read in both passes, gradients written
# What an operator takes however little it has to do, in shortest kernels: an addition 1, a product 4, a convolution 12,
# its backward pass 33. In steps of one sample the course's BERT takes 5 per operator, the PyramidNet 8.
_START = 5


def layer_seconds(net: Net, samples: float, cluster: Cluster) -> list[float]:
    """Of each layer on one card, both passes; the loss counts to the last."""
    found = {run: _seconds(net, run, samples, cluster) for run in net.runs}
    seconds = [found[layer] for layer in net.layers]
    seconds[-1] += loss_seconds(net, samples, cluster)
    return seconds


def _seconds(net: Net, layer: Layers, samples: float, cluster: Cluster) -> float:
    pace = cluster.rates.convolutions if net.convolutions else cluster.rates.products
    moved = samples * layer.moved + _WEIGHTS * 4 * layer.parameters
    started = _START * layer.operators * cluster.rates.kernel
    return started + samples * layer.flops / pace + moved / cluster.rates.memory


def loss_seconds(net: Net, samples: float, cluster: Cluster) -> float:
    """Of the loss and its gradient."""
    return _LOSS * samples * net.outputs / cluster.rates.memory
