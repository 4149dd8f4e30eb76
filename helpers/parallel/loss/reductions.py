"""What a loss averages over, so that the losses of several GPUs add up to the loss of one.

A batch of 10 on 4 GPUs is cut into 3, 3, 3 and 1 samples. The mean of the four means is not the mean of the ten: the
last sample would count three times as much as the others. Each mean must count as often as what it averages over:

    mean = sum(weight_i * mean_i) / sum(weight_i)

For most losses of torch.nn the weight is the number of samples in the shard, also where they average over elements,
since every sample of a batch brings equally many. For CrossEntropyLoss and NLLLoss it is the number of labels that
count (those that are not `ignore_index`), or the sum of their class weights.
"""

import copy
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import loss as stock

from helpers.parallel.loss.shards import each, tensors_in

__all__ = [
    "IGNORED",
    "LABEL_LOSSES",
    "count_along",
    "count_labels",
    "count_samples",
    "find_reduction",
    "is_stock",
    "name_of",
    "one_number",
    "weight_along",
    "weighted_loss",
]

Weight = Callable[..., Any]  # one number, or one for each loss

# LinearCrossEntropyLoss came after PyTorch 2.11.
_LINEAR = getattr(stock, "LinearCrossEntropyLoss", ())
LABEL_LOSSES = tuple(filter(None, (nn.CrossEntropyLoss, nn.NLLLoss, _LINEAR)))
IGNORED = -100  # PyTorch's default for ignore_index


def count_samples(*arguments: Any, **options: Any) -> int:
    """Samples in a shard: the first dimension of the first tensor. ValueError where there is none.

    The default weight of a criterion of your own.
    """
    return count_along(0, *arguments, **options)


def count_along(dim: int, /, *arguments: Any, **options: Any) -> int:
    """The same with the samples in dimension `dim` of that tensor."""
    first = next(tensors_in([*arguments, options]), None)
    if first is None or first.dim() <= dim:
        raise ValueError(f"no samples to count: no tensor with samples in dimension {dim} is first. Give weight=")
    return first.size(dim)


def weight_along(dim: int, weight: Weight | None) -> Weight | None:
    """The weight to use with samples in dimension `dim`: `weight`, if it is given. None: what its kind of loss says."""
    return partial(count_along, dim) if weight is None and dim else weight


def count_labels(*arguments: Any, ignore_index: int = IGNORED) -> Tensor:
    """Labels that count, a tensor of shape (): those of the last argument that are not `ignore_index`.

    A weight for criteria of your own that leave labels out. Another index: functools.partial(count_labels,
    ignore_index=0).
    """
    return (arguments[-1] != ignore_index).sum()


def find_reduction(criterion: nn.Module, given: str | None = None) -> str:
    """ "mean", "sum" or "none": what `criterion` does with the losses of its samples.

    `given`, else the criterion's own `reduction`, else "mean". ValueError for any other reduction, for one that
    contradicts a loss of torch.nn, and where only a part of the criterion has one, and that is no mean.
    """
    own = getattr(criterion, "reduction", None)
    if given is None and own is None:
        _check_parts(criterion)
    if given is not None and is_stock(criterion) and given != own:
        raise ValueError(f'reduction="{given}" for a {name_of(criterion)} built with reduction="{own}": leave one out')
    reduction = {None: "mean", "batchmean": "mean"}.get(given or own, given or own)
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(
            f"the reduction {reduction!r} of {name_of(criterion)} cannot be combined over GPUs: only a mean, a sum or "
            'one loss per sample can. If its result is one of these, say which: reduction="mean", "sum" or "none"'
        )
    return reduction


def one_number(criterion: nn.Module, loss: Any) -> Tensor:
    """The loss of a shard, shape (); TypeError if the criterion returned anything else than one number."""
    if isinstance(loss, Tensor) and loss.numel() == 1:
        return loss.reshape(())
    got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
    raise TypeError(
        f"{name_of(criterion)} returned {got}, and losses of several GPUs are combined as one number each. Return a "
        'tensor of one number, or several in a tuple, list or dict; say reduction="none" for one loss per sample'
    )


def weighted_loss(criterion: nn.Module, weight: Weight | None, *arguments: Any, **options: Any) -> tuple[Any, Any]:
    """(weight * mean loss, weight) of one shard, both of shape (), on its GPU, in float32 at least.

    criterion  has reduction "mean" ("batchmean"). If it returns several losses, in a tuple, list or dict, both results
               are such tuples, lists or dicts
    weight     called with the arguments of the criterion; None for what its kind of loss averages over. Several
               losses: one number for all of them, or one for each

    A shard of weight 0 adds nothing, although its own mean is 0 / 0 = nan.
    """
    if weight is None and isinstance(criterion, LABEL_LOSSES) and is_stock(criterion):
        bound = inspect.signature(criterion.forward).bind(*arguments, **options).arguments
        return _label_loss(criterion, bound["input"], bound["target"])
    means = each(lambda alone: _in_float32(one_number(criterion, *alone)), [criterion(*arguments, **options)])
    if weight is None:
        weight = _count_sequences if isinstance(criterion, nn.CTCLoss) and is_stock(criterion) else count_samples
    return _times(means, weight(*arguments, **options))


def _times(means: Any, given: Any) -> tuple[Any, Any]:
    """Each mean times its weight, and the weights."""
    if isinstance(given, (tuple, list, dict)):
        weights = each(lambda pair: _weight_tensor(pair[1], pair[0]), [means, given])
    else:
        weights = each(lambda alone: _weight_tensor(given, *alone), [means])
    return each(lambda pair: torch.where(pair[1] > 0, pair[0], 0.0) * pair[1], [means, weights]), weights


def _in_float32(loss: Tensor) -> Tensor:
    return loss.to(_wide(loss))


def _label_loss(criterion: nn.Module, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The same for labels: from the loss of each, since the mean and its gradient may be 0 / 0 in a shard.

    Summed in float32: the sum over a large batch can be more than float16 holds.
    """
    each = copy.copy(criterion)
    # LinearCrossEntropyLoss exists to save memory, and adds up as it goes.
    each.reduction = "sum" if _LINEAR and isinstance(criterion, _LINEAR) else "none"
    losses = each(outputs, targets)
    return losses.sum(dtype=_wide(losses)), _label_weight(criterion, targets, losses)


def _label_weight(criterion: nn.Module, targets: Tensor, losses: Tensor) -> Tensor:
    if targets.is_floating_point():  # probabilities of every class, (N, C, ...): each of them counts, as 1
        return _weight_tensor(targets.numel() // targets.size(1), losses)
    ignored = IGNORED if criterion.ignore_index is None else criterion.ignore_index
    counts = targets != ignored
    if criterion.weight is None:
        return counts.sum().to(_wide(losses))
    # An ignored label is no class: class 0 stands in, and counts for nothing.
    return (criterion.weight[torch.where(counts, targets, 0)] * counts).sum(dtype=_wide(losses))


def _count_sequences(outputs: Tensor, targets: Tensor, input_lengths: Any, target_lengths: Any) -> int:
    return len(target_lengths)


def _weight_tensor(weight: Any, loss: Tensor) -> Tensor:
    if isinstance(weight, Tensor) and weight.numel() == 1:
        return weight.detach().reshape(()).to(loss.device, _wide(loss))
    if isinstance(weight, (int, float)):
        # Filled in on the GPU: copying a number there would make the host wait.
        return torch.full((), weight, dtype=_wide(loss), device=loss.device)
    got = f"a tensor of shape {tuple(weight.shape)}" if isinstance(weight, Tensor) else f"a {type(weight).__name__}"
    raise TypeError(f"weight= must return one number, what the shard's mean averages over, not {got}")


def _wide(loss: Tensor) -> torch.dtype:
    return torch.promote_types(loss.dtype, torch.float32)


def name_of(criterion: nn.Module) -> str:
    """The name of its class."""
    return type(criterion).__name__


def is_stock(criterion: nn.Module) -> bool:
    """Whether it is a loss of torch.nn. A subclass with a forward of its own is none: it may average over anything."""
    return type(criterion).forward.__module__ == stock.__name__


def _check_parts(criterion: nn.Module) -> None:
    odd = {getattr(part, "reduction", "mean") for part in criterion.modules()} - {"mean", "batchmean"}
    if odd:
        raise ValueError(
            f"{name_of(criterion)} does not say whether it is a mean, and a part of it has the reduction "
            f'"{odd.pop()}": give reduction="mean" (with weight=), "sum" or "none", whichever its result is'
        )
