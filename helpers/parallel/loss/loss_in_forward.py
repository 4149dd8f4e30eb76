"""The loss as a part of the model: what `nn.DataParallel` gathers are then numbers instead of outputs.

Part of `helpers.parallel.loss`, where the idea stands beside the other cure.
"""

from typing import Any

import torch
from torch import Tensor, nn

from helpers.parallel.loss.loss_checks import check_dim, check_fit, check_ignored, check_weight
from helpers.parallel.loss.reductions import Weight, find_reduction, one_number, weight_along, weighted_loss
from helpers.parallel.loss.shards import arguments_of, device_of, each

__all__ = ["LossInForward", "total"]


class LossInForward(nn.Module):
    """A model that returns its loss instead of its outputs, for `nn.DataParallel`.

        net = nn.DataParallel(LossInForward(model, nn.CrossEntropyLoss()))
        loss = total(net(images, labels))               # the last argument are the targets
        loss.backward()

    The parameters are `net.module.module`'s; what the criterion may be, several losses too, and `reduction` and
    `weight`, is as for `DataParallelCriterion`. dim: that of nn.DataParallel(..., dim=dim), where the samples are.

    Only numbers are gathered, on one GPU or on four, for each loss:

        "mean"  (1, 2): [weight * mean loss, weight] of the shard; gathered (GPUs, 2)
        "sum"   (1, 1): the sum of the shard; gathered (GPUs, 1)

    with as many dimensions more, of size 1, in front as `dim` says. Under torch.autocast("cuda", dtype) other than
    float16 use DataParallelModel instead of nn.DataParallel, whose GPUs compute in float16 whatever the dtype; `total`
    takes its list too.

    ValueError for reduction "none": gathered, such losses are what nn.DataParallel returns anyway.
    """

    def __init__(
        self,
        module: nn.Module,
        criterion: nn.Module,
        *,
        reduction: str | None = None,
        weight: Weight | None = None,
        dim: int = 0,
    ):
        super().__init__()
        self.module, self.criterion, self.dim = module, criterion, dim
        self.reduction, self.weight = find_reduction(criterion, reduction), weight
        if self.reduction == "none":
            raise ValueError('a loss in forward must be a mean or a sum: build the criterion with reduction="mean"')
        check_dim(criterion, dim)
        if self.reduction == "mean":
            check_weight(criterion, weight)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if len(inputs) < 2:
            raise TypeError("call it with the inputs of the model and then the targets: net(images, labels)")
        *inputs, targets = inputs
        arguments = arguments_of(self.criterion, self.module(*inputs, **kwargs), [targets], {})
        where = str(device_of(targets, "the last argument, the targets,"))
        check_fit(self.criterion, arguments, {}, where, self.dim)
        if self.reduction == "sum":
            losses = [self.criterion(*arguments)]
            return _no_list(each(lambda alone: self._row([one_number(self.criterion, *alone)]), losses))
        check_ignored(self.criterion, self.weight, targets)
        weight = weight_along(self.dim, self.weight)
        return _no_list(each(self._row, weighted_loss(self.criterion, weight, *arguments)))

    def _row(self, numbers: list[Tensor]) -> Tensor:
        """What is gathered along `dim`."""
        return torch.stack(numbers).reshape(*[1] * (self.dim + 1), len(numbers))


def total(losses: Any) -> Any:
    """One loss, shape (), from what `LossInForward` returns: (GPUs, 2) for a mean, (GPUs, 1) for a sum.

    Of several losses the tuple or dict of them. A list, one entry per GPU, is what `DataParallelModel` returns: the
    result is on the first GPU. ValueError for other shapes.
    """
    if isinstance(losses, list):
        return total(each(lambda rows: torch.cat([row.to(rows[0].device) for row in rows], -2), losses))
    return each(lambda alone: _one_total(*alone), [losses])


def _no_list(losses: Any) -> Any:
    """A list is what several GPUs return, not several losses: see `total`."""
    return tuple(losses) if isinstance(losses, list) else losses


def _one_total(losses: Tensor) -> Tensor:
    if losses.dim() < 2 or losses.size(-1) not in (1, 2) or losses.numel() != losses.size(-1) * losses.size(-2):
        raise ValueError(f"total() takes what LossInForward returns, (GPUs, 2) or (GPUs, 1), not {tuple(losses.shape)}")
    sums, *weights = losses.flatten(0, -2).unbind(1)
    return sums.sum() / weights[0].sum() if weights else sums.sum()
