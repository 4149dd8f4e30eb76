"""One matrix on several GPUs: linear layers cut by columns or by rows, one part per rank.

    up = ColumnLinear(full_up)        # each rank has some of the outputs: no exchange forward, an all-reduce backward
    down = RowLinear(full_down)       # each rank has some of the inputs: an all-reduce forward, none backward
    y = down(torch.relu(up(x)))       # the same y on every rank, and the same gradient of x

In a process group, every rank calls the same. "Columns" are those of the matrix A in y = x A; `nn.Linear` stores A
transposed, so they are the rows of its `weight`. Source: Megatron-LM, arXiv 1909.08053, section 3, whose functions f
and g are `copy_to_ranks` and `sum_of_ranks`. Lesson 05 builds these by hand; `torch.distributed.tensor.parallel` has
them ready.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import linear

__all__ = ["ColumnLinear", "RowLinear", "copy_to_ranks", "sum_of_ranks"]


class _CopyToRanks(torch.autograd.Function):
    """Forward: nothing. Backward: each rank knows only what its part did with the input, so the gradients add up."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        gradient = gradient.clone(memory_format=torch.contiguous_format)  # it may be somebody else's, too
        dist.all_reduce(gradient)
        return gradient


class _SumOfRanks(torch.autograd.Function):
    """Forward: the parts' results add up. Backward: each part's gradient is that of the sum."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        x = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return gradient


def copy_to_ranks(x: Tensor) -> Tensor:
    """x, the same on all ranks; in the backward pass an all-reduce of its gradient."""
    return _CopyToRanks.apply(x)


def sum_of_ranks(x: Tensor) -> Tensor:
    """The sum of all ranks' x, an all-reduce; in the backward pass nothing is sent."""
    return _SumOfRanks.apply(x)


class ColumnLinear(nn.Module):
    """This rank's share of the outputs of `full`: x (..., inputs), the same on all ranks -> (..., outputs / ranks).

    `full` must be the same on all ranks; its weights are copied. Raises ValueError if the ranks cannot share the
    outputs equally.
    """

    def __init__(self, full: nn.Linear):
        super().__init__()
        mine = _share(full.out_features, "outputs")
        self.weight = nn.Parameter(full.weight.detach()[mine].clone())
        self.bias = None if full.bias is None else nn.Parameter(full.bias.detach()[mine].clone())

    def forward(self, x: Tensor) -> Tensor:
        return linear(copy_to_ranks(x), self.weight, self.bias)


class RowLinear(nn.Module):
    """This rank's share of the inputs of `full`: x (..., inputs / ranks) -> (..., outputs), the same on all ranks.

    `full` must be the same on all ranks; its weights are copied, the bias whole, and added once. Raises ValueError if
    the ranks cannot share the inputs equally.
    """

    def __init__(self, full: nn.Linear):
        super().__init__()
        mine = _share(full.in_features, "inputs")
        self.weight = nn.Parameter(full.weight.detach()[:, mine].clone())
        self.bias = None if full.bias is None else nn.Parameter(full.bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        y = sum_of_ranks(linear(x, self.weight))
        return y if self.bias is None else y + self.bias


def _share(features: int, name: str) -> slice:
    ranks = dist.get_world_size()
    if features % ranks:
        raise ValueError(f"{features} {name} cannot be shared equally by {ranks} ranks")
    size = features // ranks
    return slice(dist.get_rank() * size, (dist.get_rank() + 1) * size)
