"""The loss on every GPU, beside its outputs, instead of on the one GPU that gathers them all.

`nn.DataParallel` gathers the outputs of all GPUs on one GPU, where the loss is computed. For masked words these outputs
are the largest tensors of the training step. Either they stay where they are, and the targets go to them:

    net = DataParallelModel(model)                              # nn.DataParallel without the gather
    criterion = DataParallelCriterion(nn.CrossEntropyLoss())
    loss = criterion(net(images), labels)                       # one number, on the first GPU

or the model returns its loss, and DataParallel gathers two numbers per GPU:

    net = nn.DataParallel(LossInForward(model, nn.CrossEntropyLoss()))
    loss = total(net(images, labels))

Both give the loss and the gradients of one GPU, also where the GPUs get shards of different sizes. Four GPUs cut a
batch of 10 into 3, 3, 3 and 1 samples, and the mean of the four means would count the last sample three times as much
as the others. So each mean is weighted by what it is a mean over:

    loss = sum(weight * mean) / sum(weight)

For most losses of torch.nn the weight is the number of samples in the shard. For CrossEntropyLoss and NLLLoss it is the
number of labels that are not ignored, or the sum of their class weights. A criterion of your own says it with weight=.

Samples come first in every tensor, (N, ...). A loss that compares samples with each other cannot be computed in shards,
and neither can BatchNorm, because each GPU sees its own samples only. The first idea is the PyTorch-Encoding project's.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import parallel_apply, replicate, scatter
from torch.utils._pytree import tree_leaves

__all__ = [
    "DataParallelCriterion",
    "DataParallelModel",
    "LossInForward",
    "count_labels",
    "count_samples",
    "ignored_label",
    "label_weight",
    "total",
]

DeviceIds = Sequence[torch.device | str | int]
Weight = Callable[..., Tensor | float]

IGNORED = -100  # PyTorch's default for ignore_index
_LABEL_LOSSES = (nn.CrossEntropyLoss, nn.NLLLoss)
# The other losses of torch.nn whose mean counts every sample the same.
_SAMPLE_LOSSES = (
    nn.L1Loss, nn.MSELoss, nn.SmoothL1Loss, nn.HuberLoss, nn.BCELoss, nn.BCEWithLogitsLoss, nn.KLDivLoss,
    nn.PoissonNLLLoss, nn.GaussianNLLLoss, nn.HingeEmbeddingLoss, nn.SoftMarginLoss, nn.MultiMarginLoss,
    nn.MultiLabelMarginLoss, nn.MultiLabelSoftMarginLoss, nn.CosineEmbeddingLoss, nn.MarginRankingLoss,
    nn.TripletMarginLoss, nn.TripletMarginWithDistanceLoss,
)  # fmt: skip


# ---- the outputs stay on their GPUs ---------------------------------------------------------------------------------


class DataParallelModel(nn.DataParallel):
    """`nn.DataParallel` that leaves the outputs where they are computed.

    Called with a batch, it returns a list: outputs[i] is what the module returned for shard i, on GPU i. A batch of
    fewer samples than GPUs makes fewer entries. With one GPU or none the list has one entry, so that the same loop and
    the same `DataParallelCriterion` run anywhere. `state_dict` has the keys of nn.DataParallel. Unlike there, all GPUs
    compute in the dtype of the caller's autocast.

    device_ids: all GPUs by default; the parameters of the module are on the first one. Raises ValueError for inputs
    that nn.DataParallel would drop or hand whole to every GPU.
    """

    def __init__(self, module: nn.Module, device_ids: DeviceIds | None = None):
        super().__init__(module, _gpu_numbers(device_ids) or None)

    def forward(self, *inputs: Any, **kwargs: Any) -> list[Any]:
        outputs = super().forward(*inputs, **kwargs)
        return outputs if len(self.device_ids) > 1 else [outputs]

    def scatter(self, inputs: tuple, kwargs: dict | None, device_ids: Sequence[int]) -> tuple[tuple, tuple]:
        """One (args, kwargs) per GPU that gets samples.

        Both are cut together: nn.DataParallel hands a keyword such as mask=None to every GPU, and so calls the model
        without inputs on those that a small batch does not reach.
        """
        kwargs = kwargs or {}
        if not inputs and not kwargs:
            return (), ()
        if len(device_ids) > 1:
            _check_rows_alike("inputs", [inputs, kwargs])
        return tuple(zip(*scatter((inputs, kwargs), device_ids), strict=True))

    def parallel_apply(self, replicas: Sequence, inputs: Sequence, kwargs: Any) -> list[Any]:
        """Each replica on its shard, in a thread of its own."""
        return _apply_in_threads(replicas, inputs, kwargs, self.device_ids[: len(replicas)])

    def gather(self, outputs: list[Any], output_device: Any) -> list[Any]:
        """The outputs as they are."""
        return outputs


class DataParallelCriterion(nn.Module):
    """Computes the loss of `DataParallelModel`'s outputs, each on its GPU, as if all were on one GPU.

        loss = criterion(outputs, targets)              # or (outputs, targets, mask)

    criterion   an nn.Module with its parameters and buffers (class weights) on the first GPU; gradients flow to them
    device_ids  the same as the model's; all GPUs by default
    reduction   "mean" or "sum": what a criterion of your own does; by default its attribute `reduction`, or "mean"
    weight      what a mean of your own is divided by: a function of the arguments of the criterion that returns one
                number, called for each shard. The number of samples by default. Losses of torch.nn do not need it

    outputs     a list with one entry per GPU. An entry that is a tuple or a list becomes several arguments of the
                criterion, so that a model that returns (anchor, positive, negative) fits nn.TripletMarginLoss. A dict
                stays one argument
    targets     tensors (N, ...), or nested tuples, lists and dicts of them, on one device. They are cut as the inputs
                were. What is not a tensor goes to every GPU

    Returns one number, shape (), on the first GPU. Raises TypeError for outputs that are not a list, ValueError for
    losses that cannot be combined and for outputs and targets that do not fit each other.
    """

    def __init__(
        self,
        criterion: nn.Module,
        device_ids: DeviceIds | None = None,
        *,
        reduction: str | None = None,
        weight: Weight | None = None,
    ):
        super().__init__()
        self.rule = _ShardLoss(criterion, reduction, weight)
        self.module, self.device_ids = criterion, _gpu_numbers(device_ids)

    def forward(self, outputs: list[Any], *targets: Any) -> Tensor:
        if not isinstance(outputs, list):
            raise TypeError(
                "The outputs must be a list with one entry per GPU, as DataParallelModel returns it, and not a "
                f"{type(outputs).__name__}. Wrap the model in DataParallelModel instead of nn.DataParallel."
            )
        self.rule.check_labels(self.module, targets)
        gpus = self.device_ids[: len(outputs)]
        if len(gpus) > 1:
            _check_rows_alike("targets", list(targets))
        pieces = scatter(targets, gpus) if gpus else [targets]
        if len(pieces) != len(outputs):
            raise ValueError(
                f"There are {len(outputs)} outputs, and the targets make {len(pieces)} shards on the GPUs {gpus}. Give "
                "all targets of the same batch, and the model and the criterion the same device_ids."
            )
        arguments = [self.rule.arguments(self.module, *shard) for shard in zip(outputs, pieces, strict=True)]
        if not gpus:
            return _quotient(self.rule.parts(self.module, *arguments[0]))
        replicas = replicate(self.module, gpus) if len(gpus) > 1 else [self.module]
        parts = _apply_in_threads([partial(self.rule.parts, each) for each in replicas], arguments, None, gpus)
        on_first = [[part.to(column[0].device) for part in column] for column in zip(*parts, strict=True)]
        return _quotient([torch.stack(column) for column in on_first])


# ---- the loss in forward --------------------------------------------------------------------------------------------


class LossInForward(nn.Module):
    """A model that returns its loss instead of its outputs, for `nn.DataParallel`.

        net = nn.DataParallel(LossInForward(model, nn.CrossEntropyLoss()))
        loss = total(net(images, labels))               # the last argument is the targets
        loss.backward()

    The parameters of the model are those of `net.module.module`. criterion, reduction and weight are as for
    `DataParallelCriterion`. Only numbers are gathered: [weight * mean, weight] of each shard, (GPUs, 2), and for a sum
    (GPUs, 1). Under autocast in bfloat16 wrap it in DataParallelModel, because nn.DataParallel computes in float16
    whatever the dtype; `total` takes its list too.
    """

    def __init__(
        self, module: nn.Module, criterion: nn.Module, *, reduction: str | None = None, weight: Weight | None = None
    ):
        super().__init__()
        self.rule = _ShardLoss(criterion, reduction, weight)
        self.module, self.criterion = module, criterion

    def forward(self, *inputs: Any, **kwargs: Any) -> Tensor:
        _check_rows_alike("inputs and targets", [inputs, kwargs])
        *inputs, targets = inputs
        self.rule.check_labels(self.criterion, targets)
        outputs = self.module(*inputs, **kwargs)
        parts = self.rule.parts(self.criterion, *self.rule.arguments(self.criterion, outputs, (targets,)))
        return torch.stack(parts).unsqueeze(0)


def total(losses: Tensor | list[Tensor]) -> Tensor:
    """One loss, shape (), from what `LossInForward` returns: (GPUs, 2) for a mean, (GPUs, 1) for a sum.

    A list with one entry per GPU, as DataParallelModel returns it, gives the loss on the first GPU.
    """
    if isinstance(losses, list):
        losses = torch.cat([row.to(losses[0].device) for row in losses])
    if losses.dim() != 2 or losses.size(1) not in (1, 2):
        raise ValueError(
            f"total() takes what LossInForward returns, (GPUs, 2) or (GPUs, 1), not {tuple(losses.shape)}."
        )
    return _quotient(losses.unbind(1))


def _quotient(columns: Sequence[Tensor]) -> Tensor:
    """The sum of the weighted means by the sum of the weights; of a sum there are no weights."""
    sums = [column.sum() for column in columns]
    return sums[0] / sums[1] if len(sums) == 2 else sums[0]


# ---- the loss of a shard --------------------------------------------------------------------------------------------


class _ShardLoss:
    """How a criterion's loss of one shard is computed, so that the shards add up to the loss of the batch.

    Raises ValueError for a criterion whose losses cannot be added up, or where it is not known how.
    """

    def __init__(self, criterion: nn.Module, reduction: str | None, weight: Weight | None):
        if not isinstance(criterion, nn.Module):
            raise TypeError(f"The criterion must be an nn.Module, such as nn.CrossEntropyLoss(), not {criterion!r}.")
        self.reduction, self.weight = _reduction_of(criterion, reduction), weight
        of_labels = [part for part in criterion.modules() if isinstance(part, _LABEL_LOSSES)]
        own_mean = self.reduction == "mean" and weight is None and not _is_stock(criterion)
        self._counts_samples_of_labels = own_mean and bool(of_labels)
        if own_mean and any(part.weight is not None or ignored_label(part) != IGNORED for part in of_labels):
            raise ValueError(_weight_advice(criterion, "class weights or an ignore_index"))

    def parts(self, criterion: nn.Module, *arguments: Any) -> list[Tensor]:
        """[weight * mean, weight] of a mean, in float32 at least; [sum] of a sum. Each has the shape ()."""
        if self.reduction == "mean" and self.weight is None and _is_stock(criterion, _LABEL_LOSSES):
            return _sum_and_weight(criterion, *arguments)
        loss = criterion(*arguments)
        loss = loss.reshape(())  # refuses what is not one number
        if self.reduction == "sum":
            return [loss]
        mean = loss.to(_at_least_float32(loss))
        weight = (self.weight or count_samples)(*arguments)
        if isinstance(weight, Tensor):
            weight = weight.detach().reshape(()).to(mean)
        else:
            weight = torch.full_like(mean, weight, requires_grad=False)
        # A shard of weight 0 may have the mean 0 / 0 = nan, and nan times 0 is nan.
        return [torch.where(weight > 0, mean, 0.0) * weight, weight]

    def arguments(self, criterion: nn.Module, output: Any, targets: tuple) -> tuple:
        """What the criterion is called with. ValueError where broadcasting could hide that the samples differ."""
        outputs = output if isinstance(output, (tuple, list)) else (output,)
        rows = [[len(tensor) for tensor in _tensors(thing) if tensor.dim()] for thing in (outputs, targets)]
        if all(rows) and rows[0][0] != rows[1][0]:
            raise ValueError(
                f"An output has {rows[0][0]} samples and its targets have {rows[1][0]}. Give all targets of this batch "
                "in the order of the inputs, and return outputs with the samples first."
            )
        if _is_stock(criterion, (nn.BCELoss, nn.BCEWithLogitsLoss)):
            for weight in (criterion.weight, getattr(criterion, "pos_weight", None)):
                if weight is not None and weight.dim() >= outputs[0].dim() and len(weight) > 1:
                    raise ValueError(
                        f"The weight of {_name(criterion)} has one row per sample, and every GPU would get all rows. "
                        "Give such weights as a target to a criterion of your own."
                    )
        return (*outputs, *targets)

    def check_labels(self, criterion: nn.Module, targets: Any) -> None:
        """ValueError if samples would be counted although labels are -100, which do not count.

        Only where a CrossEntropyLoss or NLLLoss is part of a criterion of your own. The host waits for labels on a GPU.
        """
        if not self._counts_samples_of_labels:
            return
        for labels in _tensors(targets):
            if not labels.is_floating_point() and (labels == IGNORED).any():
                raise ValueError(_weight_advice(criterion, "labels of -100, which are left out"))


def _reduction_of(criterion: nn.Module, given: str | None) -> str:
    """ "mean" or "sum": what `criterion` does with the losses of its samples."""
    own, name = getattr(criterion, "reduction", None), _name(criterion)
    if _is_stock(criterion) and not isinstance(criterion, (*_LABEL_LOSSES, *_SAMPLE_LOSSES)):
        raise ValueError(
            f"{name} cannot be computed in shards, because its mean is not over samples that come first in every "
            "tensor. Use nn.DataParallel, and compute the loss on one GPU."
        )
    odd_parts = {getattr(part, "reduction", "mean") for part in criterion.modules()} - {"mean", "batchmean"}
    if given is None and own is None and odd_parts:
        raise ValueError(
            f"{name} does not say whether it is a mean, and a part of it has the reduction {odd_parts.pop()!r}. Give "
            'reduction="mean" (with weight=) or "sum", whichever its result is.'
        )
    said = own if _is_stock(criterion) else given or own
    reduction = "mean" if said in (None, "batchmean") else said
    if reduction not in ("mean", "sum"):
        raise ValueError(
            f"The reduction {reduction!r} of {name} cannot be combined over GPUs: only a mean or a sum can. If its "
            'result is one of these, say which: reduction="mean" or "sum".'
        )
    return reduction


def _weight_advice(criterion: nn.Module, reason: str) -> str:
    return (
        f"The mean of {_name(criterion)} is not over samples ({reason}), and what it is over cannot be known from "
        "outside. Give weight=, a function that gets the arguments of the criterion and returns what their mean is "
        "divided by: count_labels, or count_samples if each sample counts the same (helpers.parallel)."
    )


# ---- weights --------------------------------------------------------------------------------------------------------


def count_samples(*arguments: Any) -> int:
    """Samples in a shard: the length of the first tensor. The default weight of a criterion of your own."""
    return len(_tensors(arguments)[0])


def count_labels(*arguments: Any, ignore_index: int = IGNORED) -> Tensor:
    """Labels that count, a tensor of shape (): those of the last argument that are not `ignore_index`.

    A weight for a criterion of your own that leaves labels out. For another index use functools.partial(count_labels,
    ignore_index=0).
    """
    return (arguments[-1] != ignore_index).sum()


def ignored_label(criterion: Any) -> int:
    """The label that `criterion` leaves out: its `ignore_index`, or -100."""
    given = getattr(criterion, "ignore_index", None)
    return IGNORED if given is None else given


def label_weight(criterion: Any, labels: Tensor) -> Tensor:
    """What the mean of `criterion` over `labels` is divided by, float32 at least, shape ().

    The number of labels that are not ignored. For a CrossEntropyLoss or NLLLoss with class weights it is the sum of
    their weights, on the device of the weights. Where labels are probabilities, (N, C, ...), each pixel counts as 1.
    """
    if labels.is_floating_point():
        count = labels.numel() // labels.size(1)
        return torch.full((), count, dtype=torch.float32, device=labels.device)  # filled in there: no copy to wait for
    counts = labels != ignored_label(criterion)
    # A criterion of your own may have a `weight` that means something else.
    weights = criterion.weight if isinstance(criterion, _LABEL_LOSSES) else None
    if weights is None:
        return counts.sum().float()
    counts, labels = counts.to(weights.device), labels.to(weights.device)
    # An ignored label is not a class: class 0 stands in for it and counts for nothing.
    return (weights[torch.where(counts, labels, 0)] * counts).sum(dtype=_at_least_float32(weights))


def _sum_and_weight(criterion: nn.Module, outputs: Tensor, labels: Tensor) -> list[Tensor]:
    """Both from the loss of each label, since the mean may be 0 / 0 in a shard.

    Summed in float32, since the sum over a large batch can be more than float16 holds.
    """
    per_label = copy.copy(criterion)
    per_label.reduction = "none"
    losses = per_label(outputs, labels)
    summed = losses.sum(dtype=_at_least_float32(losses))
    return [summed, label_weight(criterion, labels).to(summed)]


def _at_least_float32(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _is_stock(criterion: nn.Module, kinds: type | tuple = nn.Module) -> bool:
    """Whether it is a loss of torch.nn. A subclass with a forward of its own may average over anything."""
    return isinstance(criterion, kinds) and type(criterion).forward.__module__ == nn.modules.loss.__name__


def _name(criterion: nn.Module) -> str:
    return type(criterion).__name__


# ---- shards on GPUs -------------------------------------------------------------------------------------------------


def _gpu_numbers(device_ids: DeviceIds | None) -> list[int]:
    """The numbers of the GPUs to use: all of them by default, none on a machine without GPUs."""
    if not torch.cuda.is_available():
        return []
    gpus = device_ids or range(torch.cuda.device_count())
    return [gpu if isinstance(gpu, int) else torch.device(gpu).index for gpu in gpus]


def _apply_in_threads(modules: Sequence, inputs: Sequence, options: Any, gpus: Sequence[int]) -> list[Any]:
    """PyTorch's parallel_apply, in the dtype of the caller's autocast and in its inference mode.

    PyTorch tells its threads whether autocast is on, but not its dtype. They would compute in float16, a thread's
    default, where bfloat16 was asked for.
    """
    autocast = partial(torch.autocast, "cuda", torch.get_autocast_dtype("cuda"), torch.is_autocast_enabled("cuda"))
    inference = torch.inference_mode if torch.is_inference_mode_enabled() else nullcontext

    def here(module: Callable, *arguments: Any, **named: Any) -> Any:
        with autocast(), inference():
            return module(*arguments, **named)

    return parallel_apply([partial(here, module) for module in modules], inputs, options, gpus)


def _check_rows_alike(what: str, things: list) -> None:
    """ValueError unless all tensors have one row per sample and are cut: else samples would be dropped or mixed up."""
    for leaf in tree_leaves(things):
        fields = leaf if isinstance(leaf, Mapping) else getattr(leaf, "__dict__", {})
        if not isinstance(leaf, Tensor) and _tensors(dict(fields)):
            raise ValueError(
                f"The tensors in a {type(leaf).__name__} among the {what} would go to every GPU whole. PyTorch cuts "
                "tensors, and tuples, lists and dicts of them. Give one of these."
            )
    rows = sorted({len(tensor) if tensor.dim() else 1 for tensor in _tensors(things)})
    if len(rows) > 1:
        raise ValueError(
            f"The {what} have {' and '.join(map(str, rows))} rows and cannot be cut at the same samples. Every tensor "
            "needs one row per sample (for example x.expand(samples, -1)); other tensors are buffers of the module."
        )


def _tensors(thing: Any) -> list[Tensor]:
    """Every tensor in a tensor, or in nested lists, tuples and dicts, in order."""
    return [leaf for leaf in tree_leaves(thing) if isinstance(leaf, Tensor)]
