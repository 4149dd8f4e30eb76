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
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import loss as stock

from helpers.shards import tensors_in

__all__ = [
    "check_fit",
    "check_ignored",
    "check_weight",
    "count_labels",
    "count_samples",
    "find_reduction",
    "one_number",
    "weighted_loss",
]

Weight = Callable[..., Tensor | float]

# LinearCrossEntropyLoss came after PyTorch 2.11.
_LINEAR = getattr(stock, "LinearCrossEntropyLoss", ())
_LABEL_LOSSES = tuple(filter(None, (nn.CrossEntropyLoss, nn.NLLLoss, _LINEAR)))
_IGNORED = -100  # PyTorch's default for ignore_index


def count_samples(*arguments: Any, **options: Any) -> int:
    """Samples in a shard: the first dimension of the first tensor. ValueError where there is none.

    The default weight of a criterion of your own.
    """
    first = next(tensors_in([*arguments, options]), None)
    if first is None or first.dim() == 0:
        raise ValueError("no samples to count: the criterion got no tensor of shape (samples, ...). Give weight=")
    return first.size(0)


def count_labels(*arguments: Any, ignore_index: int = _IGNORED) -> Tensor:
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
    if given is not None and _is_stock(criterion) and given != own:
        raise ValueError(f'reduction="{given}" for a {_name(criterion)} built with reduction="{own}": leave one out')
    reduction = {None: "mean", "batchmean": "mean"}.get(given or own, given or own)
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(
            f"the reduction {reduction!r} of {_name(criterion)} cannot be combined over GPUs: only a mean, a sum or "
            'one loss per sample can. If its result is one of these, say which: reduction="mean", "sum" or "none"'
        )
    return reduction


def check_weight(criterion: nn.Module, weight: Weight | None) -> None:
    """ValueError if the number of samples cannot be the right weight for the mean of a criterion of your own."""
    if weight is not None or _is_stock(criterion):
        return
    for part in _label_losses(criterion):
        if part.weight is not None or part.ignore_index not in (_IGNORED, None):
            raise ValueError(_weight_advice(criterion, "class weights or an ignore_index"))


def check_ignored(criterion: nn.Module, weight: Weight | None, targets: Any) -> None:
    """ValueError if such a criterion would count samples although labels are -100, which do not count.

    Only where a CrossEntropyLoss or NLLLoss is part of a criterion of your own. Reading labels that are on a GPU makes
    the host wait for it: leave them on the CPU, or give weight=.
    """
    if weight is not None or _is_stock(criterion) or not _label_losses(criterion):
        return
    for target in tensors_in(targets):
        if not target.is_floating_point() and _any_ignored(criterion, target):
            raise ValueError(_weight_advice(criterion, "labels of -100, which are left out"))


def check_fit(criterion: nn.Module, arguments: Any, options: dict[str, Any], where: str) -> None:
    """ValueError if the shard of a loss of torch.nn has tensors of different numbers of samples.

    CTCLoss is not looked at: its outputs have time first, (T, N, C).
    """
    if not _is_stock(criterion) or isinstance(criterion, nn.CTCLoss):
        return
    sizes = [tensor.size(0) for tensor in tensors_in([arguments, options]) if tensor.dim()]
    if len(set(sizes)) > 1:
        raise ValueError(
            f"the outputs and targets on {where} have {' and '.join(map(str, sizes))} samples: {_name(criterion)} "
            "needs the same number. Give the targets of this batch, all of them, in the order of the inputs"
        )
    weight = getattr(criterion, "weight", None) if isinstance(criterion, (nn.BCELoss, nn.BCEWithLogitsLoss)) else None
    if weight is not None and weight.dim() >= arguments[0].dim() and weight.size(0) > 1:
        raise ValueError(
            f"the weight {tuple(weight.shape)} of {_name(criterion)} has one row per sample, and every GPU would get "
            "all rows. Give such weights as a target, to a criterion of your own"
        )


def one_number(criterion: nn.Module, loss: Any) -> Tensor:
    """The loss of a shard, shape (); TypeError if the criterion returned anything else than one number."""
    if isinstance(loss, Tensor) and loss.numel() == 1:
        return loss.reshape(())
    got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
    raise TypeError(
        f"{_name(criterion)} returned {got}, and losses of several GPUs are combined as one number each. Return "
        'one number, or say reduction="none" if it returns one loss per sample'
    )


def weighted_loss(
    criterion: nn.Module, weight: Weight | None, *arguments: Any, **options: Any
) -> tuple[Tensor, Tensor]:
    """(weight * mean loss, weight) of one shard, both of shape (), on its GPU, in float32 at least.

    criterion  has reduction "mean" ("batchmean")
    weight     called with the arguments of the criterion; None for what its kind of loss averages over

    A shard of weight 0 adds nothing, although its own mean is 0 / 0 = nan.
    """
    if weight is None and isinstance(criterion, _LABEL_LOSSES) and _is_stock(criterion):
        bound = inspect.signature(criterion.forward).bind(*arguments, **options).arguments
        return _label_loss(criterion, bound["input"], bound["target"])
    if weight is None:
        weight = _count_sequences if isinstance(criterion, nn.CTCLoss) and _is_stock(criterion) else count_samples
    loss = one_number(criterion, criterion(*arguments, **options))
    loss = loss.to(_wide(loss))
    times = _weight_tensor(weight(*arguments, **options), loss)
    return torch.where(times > 0, loss, 0.0) * times, times


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
    ignored = _IGNORED if criterion.ignore_index is None else criterion.ignore_index
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
    raise TypeError(f"weight= must return one number, what the shard's mean averages over, not {type(weight).__name__}")


def _wide(loss: Tensor) -> torch.dtype:
    return torch.promote_types(loss.dtype, torch.float32)


def _name(criterion: nn.Module) -> str:
    return type(criterion).__name__


def _is_stock(criterion: nn.Module) -> bool:
    """Whether its forward is PyTorch's: a subclass with a forward of its own may average over anything."""
    return type(criterion).forward.__module__ == stock.__name__


def _label_losses(criterion: nn.Module) -> list[nn.Module]:
    return [part for part in criterion.modules() if isinstance(part, _LABEL_LOSSES)]


def _any_ignored(criterion: nn.Module, target: Tensor) -> bool:
    found = (target == _IGNORED).any()
    try:
        return bool(found)
    except RuntimeError as error:  # as with shapes only
        raise ValueError(_weight_advice(criterion, "perhaps; these labels have no values to look at")) from error


def _check_parts(criterion: nn.Module) -> None:
    odd = {getattr(part, "reduction", "mean") for part in criterion.modules()} - {"mean", "batchmean"}
    if odd:
        raise ValueError(
            f"{_name(criterion)} does not say whether it is a mean, and a part of it has the reduction "
            f'"{odd.pop()}": give reduction="mean" (with weight=), "sum" or "none", whichever its result is'
        )


def _weight_advice(criterion: nn.Module, reason: str) -> str:
    return (
        f"the mean of {_name(criterion)} is not over samples ({reason}), and what it is over cannot be known from "
        "outside. Give weight=, a function that gets the arguments of the criterion and returns what their mean is "
        "divided by: count_labels, or count_samples if each sample counts the same (helpers.reductions)"
    )
