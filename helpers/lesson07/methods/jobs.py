"""The two jobs of the comparison: a BERT on words and a PyramidNet on images, as the article had them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from helpers.lesson04 import LENGTH, WordLoss
from helpers.models import bert_article, pyramidnet_article

__all__ = ["BERT", "PYRAMIDNET", "Job", "micro_batches_on"]


def micro_batches_on(gpus: int) -> int:
    """Of a pipeline on so many GPUs, here and in the guide: one per GPU. More shorten the bubble (lesson 05)."""
    return gpus


@dataclass(frozen=True)
class Job:
    """A training job. batch: samples of a step on several GPUs together; alone: on one GPU. inputs, targets: shapes of
    one sample's; words: whether the inputs are whole numbers. optimizer: a function of the parameters. criterion: of
    outputs and targets."""

    name: str
    build: Callable[[], nn.Module]
    batch: int
    alone: int
    inputs: tuple[int, ...]
    targets: tuple[int, ...]
    words: bool
    optimizer: Callable[..., torch.optim.Optimizer]
    criterion: Callable[[Tensor, Tensor], Tensor] = WordLoss()

    def loss(self, net: nn.Module, inputs: Tensor, targets: Tensor, gpu: torch.device) -> Tensor:
        """The loss of a net that takes its inputs on `gpu`."""
        return self.criterion(net(inputs.to(gpu)), targets)

    def batch_of(self, size: int) -> tuple[Tensor, Tensor]:
        """Invented inputs and targets of `size` samples, on the CPU; all zeros, since nothing here looks at values."""
        dtype = torch.long if self.words else torch.float32
        return torch.zeros(size, *self.inputs, dtype=dtype), torch.zeros(size, *self.targets, dtype=torch.long)


def _momentum(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


BERT = Job("BERT", bert_article, 200, 50, (LENGTH,), (LENGTH,), True, torch.optim.Adam)
PYRAMIDNET = Job("PyramidNet", pyramidnet_article, 768, 240, (3, 32, 32), (), False, _momentum)
