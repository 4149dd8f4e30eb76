"""What cannot be right about a loss on several GPUs: errors that say what to do instead of wrong numbers.

For `helpers.parallel.loss` and `loss_in_forward`; what a loss averages over stands in `reductions`.
"""

from typing import Any

from torch import Tensor, nn

from helpers.parallel.loss.reductions import IGNORED, LABEL_LOSSES, Weight, is_stock, name_of
from helpers.parallel.loss.shards import tensors_in

__all__ = ["check_dim", "check_fit", "check_ignored", "check_weight"]

# Losses of torch.nn that compare tensors element by element: any dimension may be that of the samples.
_BY_ELEMENT = (nn.L1Loss, nn.MSELoss, nn.SmoothL1Loss, nn.HuberLoss, nn.BCELoss, nn.BCEWithLogitsLoss, nn.KLDivLoss,
               nn.PoissonNLLLoss, nn.GaussianNLLLoss, nn.HingeEmbeddingLoss, nn.SoftMarginLoss)  # fmt: skip


def check_dim(criterion: nn.Module, dim: int) -> None:
    """ValueError if a loss of torch.nn cannot have its samples in dimension `dim`."""
    if not dim or not is_stock(criterion):
        return
    if not isinstance(criterion, _BY_ELEMENT) or criterion.reduction == "batchmean":
        raise ValueError(
            f"{name_of(criterion)} has its samples first, and dim={dim} says otherwise: leave dim out if the outputs "
            "and targets are (N, ...), else put it into a module of your own that puts the samples first, with weight="
        )


def check_weight(criterion: nn.Module, weight: Weight | None) -> None:
    """ValueError if the number of samples cannot be the right weight for the mean of a criterion of your own."""
    if weight is not None or is_stock(criterion):
        return
    for part in _label_losses(criterion):
        if part.weight is not None or part.ignore_index not in (IGNORED, None):
            raise ValueError(_weight_advice(criterion, "class weights or an ignore_index"))


def check_ignored(criterion: nn.Module, weight: Weight | None, targets: Any) -> None:
    """ValueError if such a criterion would count samples although labels are -100, which do not count.

    Only where a CrossEntropyLoss or NLLLoss is part of a criterion of your own. Reading labels that are on a GPU makes
    the host wait for it: leave them on the CPU, or give weight=.
    """
    if weight is not None or is_stock(criterion) or not _label_losses(criterion):
        return
    for target in tensors_in(targets):
        if not target.is_floating_point() and _any_ignored(criterion, target):
            raise ValueError(_weight_advice(criterion, "labels of -100, which are left out"))


def check_fit(criterion: nn.Module, arguments: Any, options: dict[str, Any], where: str, dim: int = 0) -> None:
    """ValueError if the shard of a loss of torch.nn has tensors of different numbers of samples, in dimension `dim`.

    CTCLoss is not looked at: its outputs have time first, (T, N, C).
    """
    if not is_stock(criterion) or isinstance(criterion, nn.CTCLoss):
        return
    sizes = [tensor.size(dim) for tensor in tensors_in([arguments, options]) if tensor.dim() > dim]
    if len(set(sizes)) > 1:
        raise ValueError(
            f"the outputs and targets on {where} have {' and '.join(map(str, sizes))} samples: {name_of(criterion)} "
            "needs the same number. Give the targets of this batch, all of them, in the order of the inputs"
        )
    weight = getattr(criterion, "weight", None) if isinstance(criterion, (nn.BCELoss, nn.BCEWithLogitsLoss)) else None
    place = -1 if weight is None else weight.dim() - (arguments[0].dim() - dim)  # shapes are lined up at their ends
    if place >= 0 and weight.size(place) > 1:
        raise ValueError(
            f"the weight {tuple(weight.shape)} of {name_of(criterion)} has one row per sample, and every GPU would get "
            "all rows. Give such weights as a target, to a criterion of your own"
        )


def _label_losses(criterion: nn.Module) -> list[nn.Module]:
    return [part for part in criterion.modules() if isinstance(part, LABEL_LOSSES)]


def _any_ignored(criterion: nn.Module, target: Tensor) -> bool:
    found = (target == IGNORED).any()
    try:
        return bool(found)
    except RuntimeError as error:  # as with shapes only
        raise ValueError(_weight_advice(criterion, "perhaps; these labels have no values to look at")) from error


def _weight_advice(criterion: nn.Module, reason: str) -> str:
    return (
        f"the mean of {name_of(criterion)} is not over samples ({reason}), and what it is over cannot be known from "
        "outside. Give weight=, a function that gets the arguments of the criterion and returns what their mean is "
        "divided by: count_labels, or count_samples if each sample counts the same (helpers.parallel.loss)"
    )
