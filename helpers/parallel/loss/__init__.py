"""The loss where the outputs are: two cures for the GPU that holds everybody's outputs.

`nn.DataParallel` gathers all outputs on one GPU, where the loss is computed. For masked words they are the largest
tensors of all. Either they stay on their GPUs, and targets and criterion go to them:

    net = DataParallelModel(model)                              # nn.DataParallel without the gather
    criterion = DataParallelCriterion(nn.CrossEntropyLoss())
    loss = criterion(net(images), labels)                       # on the first GPU; the same number as on one GPU

or the loss is part of the model, and what is gathered are two numbers per GPU:

    net = nn.DataParallel(LossInForward(model, nn.CrossEntropyLoss()))
    loss = total(net(images, labels))

Both give the loss and the gradients of a single GPU, also when the last batch is cut unevenly (`reductions`).
No cut of a batch can do that for a loss that compares samples with each other, or for BatchNorm: each GPU sees its own
samples only. The first idea is the PyTorch-Encoding project's.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import gather, scatter

from helpers.parallel.loss.loss_checks import check_dim, check_fit, check_ignored, check_weight
from helpers.parallel.loss.loss_in_forward import LossInForward, total
from helpers.parallel.loss.on_gpus import Devices, OnGPUs, check_alike, sizes_in
from helpers.parallel.loss.reductions import (
    Weight,
    count_labels,
    count_samples,
    find_reduction,
    one_number,
    weight_along,
    weighted_loss,
)
from helpers.parallel.loss.shards import arguments_of, device_of, each, is_cut, tensors_in

__all__ = [
    "DataParallelCriterion",
    "DataParallelModel",
    "LossInForward",
    "count_labels",
    "count_samples",
    "total",
]


class DataParallelModel(OnGPUs):
    """`nn.DataParallel` whose outputs stay where they are computed.

    module      its parameters are on the first GPU (`model.to("cuda:0")`), as for nn.DataParallel
    device_ids  all GPUs by default
    dim         the dimension of the samples in all inputs: 1 for (T, N, ...)

    Called with a batch, returns a list: outputs[i] is what the module returned for shard i, on GPU i. A batch of fewer
    samples than GPUs has as many entries as it has shards. With one GPU, or on a machine with none, it is a list
    too, of one, so that the same training loop and the same `DataParallelCriterion` run anywhere.

    `state_dict` has the keys of nn.DataParallel ("module." in front), and each loads the other's. There is no
    `output_device`, since nothing is gathered. eval() and no_grad() work as ever, and where all outputs are wanted
    in order, torch.cat([output.cpu() for output in outputs]) has them. Under torch.autocast("cuda", dtype) every
    GPU computes in that dtype; those of nn.DataParallel compute in float16, whatever the dtype.

    ValueError for device_ids on a machine without GPUs, and for inputs that nn.DataParallel would drop, cut at other
    samples than the rest, or hand whole to every GPU (a dataclass).
    """

    def __init__(self, module: nn.Module, device_ids: Devices | None = None, *, dim: int = 0):
        super().__init__(module, device_ids, dim)

    def forward(self, *inputs: Any, **kwargs: Any) -> list[Any]:
        outputs = super().forward(*inputs, **kwargs)
        return outputs if len(self.device_ids) > 1 else [outputs]

    def gather(self, outputs: list[Any], output_device: Any) -> list[Any]:
        """The outputs as they are: what nn.DataParallel would copy to one GPU."""
        return outputs


class DataParallelCriterion(OnGPUs):
    """Computes the loss of `DataParallelModel`'s outputs, each on its GPU, as if all were on one.

        loss = criterion(outputs, targets)              # or (outputs, targets, more_targets, mask=mask)

    criterion   an nn.Module; its parameters and buffers (class weights) are on the first GPU, and are copied to the
                others at each call. Gradients flow back to them
    device_ids  the same as the model's; all GPUs by default
    reduction   "mean", "sum" or "none": what a criterion of your own does, if it has no attribute `reduction`.
                "mean" by default
    weight      what a mean of your own is divided by: a function of the arguments of the criterion, called for each
                shard on its GPU, which returns one number; 0 on all of them makes the loss nan. The number of samples
                by default. Not needed for the losses of torch.nn: what they average over is known
    dim         the dimension of the samples in the targets, and in what the criterion gets: 1 for (T, N, ...)

    outputs     a list, one entry per GPU. A tuple or a list in it becomes several arguments of the criterion, so that
                a model that returns (anchor, positive, negative) fits nn.TripletMarginLoss; it stays one if the
                criterion takes it only so. A dict, a named tuple or a dataclass always stays one argument
    targets     any number of tensors (N, ...), or nested tuples, lists and dicts of them, on one device: they are cut
                as the inputs were, each tensor along `dim`, so stack a list of one tensor per sample. What is no
                tensor goes whole to every GPU. A list of one entry per output, each on its output's GPU, is taken as
                cut already; so are the outputs of another call of the model

    Returns, on the first GPU: for "mean" and "sum" one number, shape (); for "none" the losses (N, ...) in order.
    A criterion that returns several losses, in a tuple, list or dict, gets them back so, each one combined; what
    `weight` returns is then for all of them, or one number for each in the same tuple, list or dict.
    A mean over several GPUs is float32 at least. Nothing here makes the host wait for a GPU, except for a criterion of
    your own with a CrossEntropyLoss or NLLLoss in it, no weight=, and labels on a GPU (`check_ignored`).

    Raises TypeError for outputs that are no list, ValueError for outputs and targets that do not fit each other or
    the GPUs, and for a reduction or a mean that cannot be combined. All say what to do.
    """

    def __init__(
        self,
        criterion: nn.Module,
        device_ids: Devices | None = None,
        *,
        reduction: str | None = None,
        weight: Weight | None = None,
        dim: int = 0,
    ):
        super().__init__(criterion, device_ids, dim)
        self.reduction, self.weight = find_reduction(criterion, reduction), weight
        check_dim(criterion, dim)
        if self.reduction == "mean":
            check_weight(criterion, weight)

    def forward(self, outputs: list[Any], *targets: Any, **options: Any) -> Tensor:
        devices = self._devices_of(outputs)
        self._check_parameters(devices[0])
        if self.reduction == "mean":
            check_ignored(self.module, self.weight, [targets, options])
        arguments, options = self._shards(outputs, targets, options, devices)
        for shard, device in enumerate(devices):
            check_fit(self.module, arguments[shard], options[shard], str(device), self.dim)
        if len(devices) == 1:
            loss = self.module(*arguments[0], **options[0])
            return loss if self.reduction == "none" else self._numbers(loss)
        return self._combine(self._losses(arguments, options))

    def _losses(self, arguments: list[tuple], options: list[dict]) -> list[Any]:
        replicas = self.replicate(self.module, self.device_ids[: len(arguments)])
        if self.reduction == "mean":
            weight = weight_along(self.dim, self.weight)
            replicas = [partial(weighted_loss, replica, weight) for replica in replicas]
        try:
            return self.parallel_apply(replicas, arguments, options)
        except Exception as error:
            shapes = [[tuple(tensor.shape) for tensor in tensors_in(shard)] for shard in arguments]
            error.add_note(f"the criterion got, GPU by GPU, tensors of the shapes {shapes}: do targets fit outputs?")
            raise

    def _combine(self, losses: list[Any]) -> Any:
        """One loss of each kind on the first GPU. `to` copies numbers there, and in backward their gradients back."""
        if self.reduction == "none":
            found = [list(tensors_in(loss)) for loss in losses]
            if not all(found) or any(loss.dim() <= self.dim for shard in found for loss in shard):
                raise TypeError('reduction="none" needs one loss per sample from the criterion, shape (N, ...)')
            return gather(losses, self.device_ids[0], self.dim)
        if self.reduction == "sum":
            return each(_add, [self._numbers(loss) for loss in losses])
        sums, weights = zip(*losses, strict=True)
        return each(lambda pair: pair[0] / pair[1], [each(_add, sums), each(_add, weights)])

    def _numbers(self, loss: Any) -> Any:
        return each(lambda alone: one_number(self.module, *alone), [loss])

    def _devices_of(self, outputs: Any) -> list[torch.device]:
        """Where each output is; an error unless that is where it should be."""
        if not isinstance(outputs, list):
            raise TypeError(
                f"outputs must be a list with one entry per GPU, as DataParallelModel returns it, not "
                f"{type(outputs).__name__}: wrap the model in DataParallelModel instead of nn.DataParallel"
            )
        most = max(1, len(self.device_ids))
        if not 0 < len(outputs) <= most:
            raise ValueError(
                f"{len(outputs)} outputs for {most} GPUs (device_ids {self.device_ids}): give the "
                "criterion the device_ids of the model, and a batch of at least one sample"
            )
        devices = [device_of(output, f"outputs[{number}]") for number, output in enumerate(outputs)]
        for number, (gpu, device) in enumerate(zip(self.device_ids, devices, strict=False)):
            if device != torch.device("cuda", gpu):
                raise ValueError(
                    f"outputs[{number}] is on {device}, and its GPU is cuda:{gpu}: give the model and the criterion "
                    "the same device_ids, and leave outputs where they are"
                )
        return devices

    def _check_parameters(self, device: torch.device) -> None:
        for tensor in [*self.module.parameters(), *self.module.buffers()]:
            if tensor.device != device:
                raise ValueError(
                    f"the criterion has a parameter or buffer on {tensor.device}, the first output is on {device}: "
                    f'call criterion.to("{device}") before the optimizer is built'
                )

    def _shards(self, outputs: list, targets: tuple, options: dict, devices: list) -> tuple[list[tuple], list[dict]]:
        """The arguments and the keyword arguments of the criterion, GPU by GPU."""
        given = {f"target {number}": target for number, target in enumerate(targets)} | options
        cut = {name: value for name, value in given.items() if is_cut(value, devices, name)}
        whole = {name: value for name, value in given.items() if name not in cut}
        check_alike("targets", list(whole.values()), len(devices), self.dim)
        cut |= {name: self._cut(value, devices, name) for name, value in whole.items()}
        named = [{name: cut[name][number] for name in options} for number in range(len(outputs))]
        columns = [cut[f"target {number}"] for number in range(len(targets))]
        arguments = [
            arguments_of(self.module, output, [column[number] for column in columns], named[number])
            for number, output in enumerate(outputs)
        ]
        return arguments, named

    def _cut(self, target: Any, devices: list[torch.device], name: str) -> list[Any]:
        """One piece of a target per output."""
        pieces = scatter(target, self.device_ids[: len(devices)], self.dim) if self.device_ids else [target]
        if len(pieces) != len(devices):
            sizes = sorted(set(sizes_in(target, self.dim)))
            raise ValueError(
                f"{name} has {', '.join(map(str, sizes))} samples, which make {len(pieces)} pieces, and there are "
                f"{len(devices)} outputs: give the targets of the same batch, all of them, with samples in dimension "
                f"{self.dim}"
            )
        return list(pieces)


def _add(numbers: Sequence[Tensor]) -> Tensor:
    return torch.stack([number.to(numbers[0].device) for number in numbers]).sum()
