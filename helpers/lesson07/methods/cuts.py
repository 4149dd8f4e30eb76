"""A net cut into stages that take equally long, for a pipeline.

    stages = stages_of(bert_article(), 4, tokens, "cuda:0")      # four nn.Sequential, to be put on four GPUs

The forward pass of every layer is timed on one GPU (modelled); the cuts are those that make the
slowest stage as fast as it can be.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, combinations

import torch
from torch import Tensor, nn
from torch.nn.functional import relu

from helpers.measure.timeline import record_timeline
from helpers.models import PyramidNet
from helpers.parallel.pipeline import layers_of

__all__ = ["balanced_cuts", "layers_to_cut", "stages_of"]


class _PyramidTail(nn.Module):
    """What a `PyramidNet` does after its blocks."""

    def __init__(self, net: PyramidNet):
        super().__init__()
        self.norm, self.head = net.norm, net.head

    def forward(self, x: Tensor) -> Tensor:
        return self.head(relu(self.norm(x), inplace=True).mean((2, 3)))


def stages_of(net: nn.Module, stages: int, inputs: Tensor, gpu) -> list[nn.Sequential]:
    """The layers of a ResNet, `Bert` or `PyramidNet`, cut for `stages` GPUs. inputs: some samples, to time them with.

    The layers are moved to `gpu`. Raises TypeError for another net.
    """
    layers = layers_to_cut(net)
    edges = [0, *balanced_cuts(_seconds(layers, inputs, gpu), stages), len(layers)]
    return [nn.Sequential(*layers[start:end]) for start, end in zip(edges, edges[1:], strict=False)]


def layers_to_cut(net: nn.Module) -> list[nn.Module]:
    """The layers of a ResNet, `Bert` or `PyramidNet`, between which it can be cut. Raises TypeError for another net."""
    return [net.stem, *net.blocks, _PyramidTail(net)] if isinstance(net, PyramidNet) else layers_of(net)


def _seconds(layers: list[nn.Module], x: Tensor, gpu) -> list[float]:
    gpu, found, x = torch.device(gpu), [], x.to(gpu)
    with torch.no_grad():
        for layer in layers:
            layer.to(gpu)
            with record_timeline() as timeline:
                x = layer(x)
            found.append(timeline.busy_seconds(gpu.index))
    return found


def balanced_cuts(costs: Sequence[float], parts: int) -> list[int]:
    """The numbers of the layers that begin the second, third, ... part, so that the dearest part is as cheap as can be.

    Every part gets a layer. Raises ValueError for more parts than layers.
    """
    if not 1 <= parts <= len(costs):
        raise ValueError(f"{len(costs)} layers cannot be cut into {parts} parts")
    sums = [0.0, *accumulate(costs)]

    def dearest(cuts):
        edges = [0, *cuts, len(costs)]
        found = [sums[end] - sums[start] for start, end in zip(edges, edges[1:], strict=False)]
        return max(found), sum(each * each for each in found)  # the others as even as can be

    return list(min(combinations(range(1, len(costs)), parts - 1), key=dearest))
