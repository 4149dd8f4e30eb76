"""A net cut into parts, each on a GPU of its own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torchvision.models import ResNet

from helpers.models import Bert

__all__ = ["OnGPU", "layers_of", "split"]


class OnGPU(nn.Module):
    """A part of a net on one GPU. Its input is copied there, and autograd copies the gradient back."""

    def __init__(self, part: nn.Module, gpu: torch.device | str | int):
        super().__init__()
        self.part = part.to(gpu)
        self.gpu = gpu

    def forward(self, x: Tensor) -> Tensor:
        return self.part(x.to(self.gpu))


def split(layers: Sequence[nn.Module], gpus: Sequence, cuts: Sequence[int] | None = None) -> nn.Sequential:
    """The layers in order, in as many parts as there are GPUs: input on any device, output on the last GPU.

    cuts: the numbers of the layers that begin the second, third, ... part; None: as many layers in each part, as near
    as that goes. Raises ValueError for cuts that leave a part without layers.
    """
    layers = list(layers)
    if cuts is None:
        cuts = [round(len(layers) * part / len(gpus)) for part in range(1, len(gpus))]
    edges = [0, *cuts, len(layers)]
    if len(edges) != len(gpus) + 1 or any(start >= end for start, end in zip(edges, edges[1:], strict=False)):
        raise ValueError(
            f"{len(layers)} layers cannot be cut at {list(cuts)} for {len(gpus)} GPUs: {len(gpus) - 1} growing numbers "
            f"between 1 and {len(layers) - 1} are needed, so that each GPU gets a layer"
        )
    parts = [nn.Sequential(*layers[start:end]) for start, end in zip(edges, edges[1:], strict=False)]
    return nn.Sequential(*[OnGPU(part, gpu) for part, gpu in zip(parts, gpus, strict=True)])


def layers_of(net: nn.Module) -> list[nn.Module]:
    """The layers of a ResNet or a `Bert` as a list that can be cut anywhere; called in turn they are the net.

    They are the net's own layers, not copies. Raises TypeError for another net.
    """
    if isinstance(net, ResNet):
        blocks = [block for stage in (net.layer1, net.layer2, net.layer3, net.layer4) for block in stage]
        return [net.conv1, net.bn1, net.relu, net.maxpool, *blocks, net.avgpool, nn.Flatten(), net.fc]
    if isinstance(net, Bert):
        return [_Embedding(net), *net.blocks, net.norm, net.head]
    raise TypeError(f"layers_of knows ResNet and Bert, not {type(net).__name__}: list its layers yourself")


class _Embedding(nn.Module):
    """What a `Bert` does before its blocks."""

    def __init__(self, net: Bert):
        super().__init__()
        self.token, self.place, self.dropout = net.token, net.place, net.dropout

    def forward(self, tokens: Tensor) -> Tensor:
        return self.dropout(self.token(tokens) + self.place(torch.arange(tokens.shape[1], device=tokens.device)))
