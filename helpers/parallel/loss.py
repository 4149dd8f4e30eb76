"""Computes the loss on every GPU, next to the outputs, instead of on the one GPU that gathers all outputs.

`nn.DataParallel` gathers the outputs of all GPUs on the first GPU and computes the loss there. For masked words, these
outputs are the largest tensors of a training step. There are two ways to avoid the gather. The outputs can stay where
they are, and the targets are sent to them:

    net = DataParallelModel(model)                              # nn.DataParallel without the gather
    criterion = DataParallelCriterion(nn.CrossEntropyLoss())
    loss = criterion(net(images), labels)                       # one number, on the first GPU

Or the model returns its loss, and `nn.DataParallel` gathers two numbers per GPU:

    net = nn.DataParallel(LossInForward(model, nn.CrossEntropyLoss()))
    loss = total(net(images, labels))

Both give the loss and the gradients of one GPU, also where the shards have different sizes. Four GPUs cut a batch of 10
into 3, 3, 3 and 1 samples. The mean of the four means would count the last sample three times as much as the others, so
each mean is weighted by the number of samples (or labels) that it is a mean over:

    loss = sum(weight * mean) / sum(weight)

The first dimension of every tensor must be the samples, (N, ...). A loss that compares samples with each other cannot
be computed in shards. The idea of a parallel loss comes from the PyTorch-Encoding project.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import parallel_apply, replicate, scatter
from torch.utils._pytree import tree_leaves

DeviceIds = Sequence[torch.device | str | int]
Weight = Callable[..., Tensor | float]

IGNORED = -100  # PyTorch's default for ignore_index
LABEL_LOSSES = (nn.CrossEntropyLoss, nn.NLLLoss)


# ---- the outputs stay on their GPUs ---------------------------------------------------------------------------------


class DataParallelModel(nn.DataParallel):
    """`nn.DataParallel` that leaves the outputs on the GPUs that computed them.

    It returns a list: outputs[i] is what the module returned for shard i, on GPU i. A batch with fewer samples than
    there are GPUs gives a shorter list. With one GPU or none, it has one entry, so the same loop runs anywhere.

    Inputs are cut like those of `nn.DataParallel`, and their tensors must all have the same number of rows. All GPUs
    compute in the dtype of the caller's autocast.
    """

    def forward(self, *inputs: Any, **kwargs: Any) -> list[Any]:
        outputs = super().forward(*inputs, **kwargs)
        return outputs if len(self.device_ids) > 1 else [outputs]

    def scatter(self, inputs: tuple, kwargs: dict | None, device_ids: Sequence[int]) -> tuple[tuple, tuple]:
        if len(device_ids) > 1:
            _require_equal_rows("The inputs", [inputs, kwargs])
        # Cut together, because nn.DataParallel would send a keyword such as mask=None to GPUs that get no samples.
        shards = scatter((inputs, kwargs or {}), device_ids)
        return tuple(zip(*shards, strict=True))

    def parallel_apply(self, replicas: Sequence[nn.Module], inputs: Sequence, kwargs: Any) -> list[Any]:
        return _apply_in_threads(replicas, inputs, kwargs, self.device_ids[: len(replicas)])

    def gather(self, outputs: list[Any], output_device: Any) -> list[Any]:
        return outputs


class DataParallelCriterion(nn.DataParallel):
    """Computes the loss of `DataParallelModel`'s outputs, each on its own GPU.

        loss = criterion(outputs, targets)              # or (outputs, targets, mask)

    criterion   an nn.Module on the first GPU. Its parameters receive gradients
    device_ids  the same GPUs as the model's; all GPUs by default
    reduction   "mean" or "sum", whichever the criterion returns. The default is its attribute `reduction`, or "mean"
    weight      a function that gets the arguments of the criterion for one shard and returns the number that their
                mean is divided by. The default is `count_samples`. CrossEntropyLoss and NLLLoss need no weight,
                because their labels and class weights give it

    outputs     a list with one entry per GPU. A tuple in it becomes several arguments of the criterion
    targets     tensors (N, ...), or tuples, lists and dicts of them. They are cut as the inputs were

    Returns one number, shape (), on the first GPU.
    """

    def __init__(
        self,
        criterion: nn.Module,
        device_ids: DeviceIds | None = None,
        *,
        reduction: str | None = None,
        weight: Weight | None = None,
    ):
        super().__init__(_ShardLoss(criterion, reduction, weight), device_ids)

    def forward(self, outputs: list[Any], *targets: Any) -> Tensor:
        if not isinstance(outputs, list):
            raise TypeError(
                "The outputs must be a list with one entry per GPU, as DataParallelModel returns it, but they are a "
                f"{type(outputs).__name__}. Wrap the model in DataParallelModel instead of nn.DataParallel."
            )
        gpus = self.device_ids[: len(outputs)]
        shards = scatter(targets, gpus) if gpus else [targets]
        if len(shards) != len(outputs):
            raise ValueError(
                f"There are {len(outputs)} outputs, but the targets were cut into {len(shards)} shards for the GPUs "
                f"{gpus}. Pass all targets of the same batch, and give model and criterion the same device_ids."
            )
        if len(shards) == 1:
            return total(self.module(outputs[0], *shards[0]))
        arguments = [(output, *shard) for output, shard in zip(outputs, shards, strict=True)]
        return total(_apply_in_threads(replicate(self.module, gpus), arguments, None, gpus))


# ---- the loss in forward --------------------------------------------------------------------------------------------


class LossInForward(nn.Module):
    """A model that returns its loss instead of its outputs, for `nn.DataParallel`.

        net = nn.DataParallel(LossInForward(model, nn.CrossEntropyLoss()))
        loss = total(net(images, labels))               # the last argument is the targets
        loss.backward()

    criterion, reduction and weight are as for `DataParallelCriterion`. Use `DataParallelModel` instead of
    `nn.DataParallel` under autocast in bfloat16, because the threads of `nn.DataParallel` would compute in float16.
    """

    def __init__(
        self, module: nn.Module, criterion: nn.Module, *, reduction: str | None = None, weight: Weight | None = None
    ):
        super().__init__()
        self.module = module
        self.loss = _ShardLoss(criterion, reduction, weight)

    def forward(self, *inputs: Any, **kwargs: Any) -> Tensor:
        _require_equal_rows("The inputs and targets", [inputs, kwargs])
        *inputs, targets = inputs
        return self.loss(self.module(*inputs, **kwargs), targets)


def total(losses: Tensor | list[Tensor]) -> Tensor:
    """The loss of the batch, shape (), from the rows that `LossInForward` returns, one per GPU.

    A row is [weight * mean, weight], or [sum] if the criterion returns a sum. A list of rows, as `DataParallelModel`
    returns it, gives the loss on the first GPU.
    """
    if isinstance(losses, list):
        losses = torch.cat([row.to(losses[0].device) for row in losses])
    if losses.dim() != 2 or losses.size(1) not in (1, 2):
        raise ValueError(
            f"total() needs what LossInForward returns, of shape (GPUs, 2) or (GPUs, 1), not {tuple(losses.shape)}."
        )
    sums = losses.sum(0)
    return sums[0] / sums[1] if len(sums) == 2 else sums[0]


# ---- the loss of a shard --------------------------------------------------------------------------------------------


class _ShardLoss(nn.Module):
    """Computes the row of one shard for `total`: [weight * mean, weight] of shape (1, 2), or [sum] of shape (1, 1)."""

    def __init__(self, criterion: nn.Module, reduction: str | None, weight: Weight | None):
        super().__init__()
        if not isinstance(criterion, nn.Module):
            raise TypeError(f"The criterion must be an nn.Module, such as nn.CrossEntropyLoss(), not {criterion!r}.")
        self.criterion, self.weight = criterion, weight
        self.reduction = reduction or getattr(criterion, "reduction", "mean")
        if self.reduction not in ("mean", "batchmean", "sum"):
            raise ValueError(
                f"The reduction of {type(criterion).__name__} is {self.reduction!r}, but only a mean or a sum can be "
                'combined over GPUs. If it returns one of these, pass reduction="mean" or reduction="sum".'
            )
        if self.reduction != "sum" and weight is None and type(criterion) not in LABEL_LOSSES:
            _require_mean_over_samples(criterion)

    def forward(self, outputs: Any, *targets: Any) -> Tensor:
        outputs = outputs if isinstance(outputs, (tuple, list)) else (outputs,)
        _require_equal_rows("An output and its targets", [_tensors(outputs)[:1], targets])
        loss = self.criterion(*outputs, *targets).reshape(())  # raises an error if it is not one number
        if self.reduction == "sum":
            return loss.reshape(1, 1)
        mean = loss.to(_at_least_float32(loss))  # the weighted mean may be larger than float16 can hold
        weight = self._weight_of(*outputs, *targets)
        if isinstance(weight, Tensor):
            weight = weight.detach().reshape(()).to(mean)
        else:
            weight = torch.full_like(mean, weight, requires_grad=False)
        # The mean of a shard of weight 0 may be 0 / 0 = nan, and 0 * nan is nan.
        weighted = torch.where(weight > 0, mean, 0.0) * weight
        return torch.stack([weighted, weight]).unsqueeze(0)

    def _weight_of(self, *arguments: Any) -> Tensor | float:
        if self.weight is not None:
            return self.weight(*arguments)
        if isinstance(self.criterion, LABEL_LOSSES):
            return label_weight(self.criterion, arguments[1])
        return count_samples(*arguments)


def _require_mean_over_samples(criterion: nn.Module) -> None:
    """Raises ValueError if a part of the criterion may leave labels out or return a sum.

    To count samples would then give a wrong loss and no error.
    """
    for part in criterion.modules():
        if isinstance(part, LABEL_LOSSES) or getattr(part, "reduction", "mean") not in ("mean", "batchmean"):
            raise ValueError(
                f"It is not clear what the mean of {type(criterion).__name__} is over, because {part} can leave labels "
                "out or return a sum. Pass weight=, a function that gets the arguments of the criterion and returns "
                "the number that their mean is divided by. In helpers.parallel, count_labels counts the labels that "
                "are not -100, and count_samples counts all samples. If the criterion returns a sum, pass "
                'reduction="sum".'
            )


def _require_equal_rows(what: str, things: Any) -> None:
    """Raises ValueError if the tensors have different samples. nn.DataParallel or broadcasting would hide that."""
    rows = sorted({len(tensor) for tensor in _tensors(things) if tensor.dim()})
    if len(rows) > 1:
        raise ValueError(
            f"{what} have {' and '.join(map(str, rows))} rows, so they do not belong to the same samples. Give every "
            "tensor one row per sample, for example x.expand(samples, -1), or make it a buffer of the model."
        )


# ---- weights --------------------------------------------------------------------------------------------------------


def count_samples(*arguments: Any) -> int:
    """The number of samples in a shard: the length of the first tensor."""
    return len(_tensors(arguments)[0])


def count_labels(*arguments: Any) -> Tensor:
    """The number of labels in the last argument that are not -100, a tensor of shape ()."""
    return (arguments[-1] != IGNORED).sum()


def label_weight(criterion: Any, labels: Tensor) -> Tensor:
    """The number that the mean of `criterion` over `labels` is divided by, at least float32, shape ().

    It is the number of labels that are not ignored. For a CrossEntropyLoss or NLLLoss with class weights, it is the sum
    of the weights of these labels. If the labels are probabilities (N, C, ...), it is N times the size of the rest.
    """
    if labels.is_floating_point():
        count = labels.numel() // labels.size(1)
        return torch.full((), count, dtype=torch.float32, device=labels.device)  # filled there: no copy to wait for
    counted = labels != (IGNORED if (given := getattr(criterion, "ignore_index", None)) is None else given)
    # A criterion of your own may have a `weight` that means something else.
    weights = criterion.weight if isinstance(criterion, LABEL_LOSSES) else None
    if weights is None:
        return counted.sum().float()
    counted, labels = counted.to(weights.device), labels.to(weights.device)
    # An ignored label is not a class. Class 0 replaces it and is multiplied by 0.
    return (weights[torch.where(counted, labels, 0)] * counted).sum(dtype=_at_least_float32(weights))


# ---- tensors and threads --------------------------------------------------------------------------------------------


def _apply_in_threads(modules: Sequence[nn.Module], inputs: Sequence, kwargs: Any, gpus: Sequence[int]) -> list[Any]:
    """PyTorch's parallel_apply, in the dtype of the caller's autocast.

    PyTorch tells its threads whether autocast is on, but not its dtype. They would compute in float16, the default of a
    new thread, where the caller asked for bfloat16.
    """
    enabled, dtype = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    within = [torch.autocast("cuda", dtype, enabled)(module) for module in modules]
    return parallel_apply(within, inputs, kwargs, gpus)


def _at_least_float32(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _tensors(nested: Any) -> list[Tensor]:
    """Every tensor in nested lists, tuples and dicts, in order."""
    return [leaf for leaf in tree_leaves(nested) if isinstance(leaf, Tensor)]
