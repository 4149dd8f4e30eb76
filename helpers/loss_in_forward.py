"""The loss as a part of the model: what `nn.DataParallel` gathers are then numbers instead of outputs.

Part of `helpers.parallel_loss`, where the idea stands beside the other cure.
"""

from typing import Any

import torch
from torch import Tensor, nn

from helpers.reductions import Weight, check_fit, check_ignored, check_weight, find_reduction, one_number, weighted_loss
from helpers.shards import as_arguments, device_of

__all__ = ["LossInForward", "total"]


class LossInForward(nn.Module):
    """A model that returns its loss instead of its outputs, for `nn.DataParallel`.

        net = nn.DataParallel(LossInForward(model, nn.CrossEntropyLoss()))
        loss = total(net(images, labels))               # the last argument are the targets
        loss.backward()

    The parameters are `net.module.module`'s; what the criterion may be, and `reduction` and `weight`, is as for
    `DataParallelCriterion`. Only numbers are gathered, on one GPU or on four:

        "mean"  (1, 2): [weight * mean loss, weight] of the shard; gathered (GPUs, 2)
        "sum"   (1,): the sum of the shard; gathered (GPUs,)

    ValueError for reduction "none": gathered, such losses are what nn.DataParallel returns anyway.
    """

    def __init__(
        self, module: nn.Module, criterion: nn.Module, *, reduction: str | None = None, weight: Weight | None = None
    ):
        super().__init__()
        self.module, self.criterion = module, criterion
        self.reduction, self.weight = find_reduction(criterion, reduction), weight
        if self.reduction == "none":
            raise ValueError('a loss in forward must be a mean or a sum: build the criterion with reduction="mean"')
        if self.reduction == "mean":
            check_weight(criterion, weight)

    def forward(self, *inputs: Any, **kwargs: Any) -> Tensor:
        if len(inputs) < 2:
            raise TypeError("call it with the inputs of the model and then the targets: net(images, labels)")
        *inputs, targets = inputs
        arguments = (*as_arguments(self.module(*inputs, **kwargs)), targets)
        check_fit(self.criterion, arguments, {}, str(device_of(targets, "the last argument, the targets,")))
        if self.reduction == "sum":
            return one_number(self.criterion, self.criterion(*arguments)).reshape(1)
        check_ignored(self.criterion, self.weight, targets)
        return torch.stack(weighted_loss(self.criterion, self.weight, *arguments)).reshape(1, 2)


def total(losses: Tensor) -> Tensor:
    """One loss, shape (), from what `LossInForward` returns: (GPUs, 2) for a mean, (GPUs,) for a sum.

    ValueError for other shapes.
    """
    if losses.dim() == 1:
        return losses.sum()
    if losses.dim() != 2 or losses.size(1) != 2:
        raise ValueError(f"total() takes what LossInForward returns, (GPUs, 2) or (GPUs,), not {tuple(losses.shape)}")
    sums, weights = losses.unbind(1)
    return sums.sum() / weights.sum()
