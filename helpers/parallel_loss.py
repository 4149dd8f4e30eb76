"""The loss where the outputs are: two cures for the GPU that holds everybody's outputs.

`nn.DataParallel` gathers all outputs on one GPU, where the loss is computed. For masked words they are the largest
tensors of all. Either they stay on their GPUs, and targets and criterion go to them:

    net = DataParallelModel(model)                              # nn.DataParallel without the gather
    criterion = DataParallelCriterion(nn.CrossEntropyLoss())
    loss = criterion(net(images), labels)                       # on the first GPU; the same number as on one GPU

or the loss is part of the model, and what is gathered are two numbers per GPU:

    net = nn.DataParallel(LossInForward(model, nn.CrossEntropyLoss()))
    loss = total(net(images, labels))

Both give the loss and the gradients of a single GPU, also when the last batch is cut unevenly (`helpers.reductions`).
No cut of a batch can do that for a loss that compares samples with each other, or for BatchNorm: each GPU sees its own
samples only. The first idea is the PyTorch-Encoding project's.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import gather, scatter

from helpers.loss_in_forward import LossInForward, total
from helpers.reductions import (
    Weight,
    check_fit,
    check_ignored,
    check_weight,
    find_reduction,
    one_number,
    weighted_loss,
)
from helpers.shards import as_arguments, device_of, is_cut, tensors_in

__all__ = ["DataParallelCriterion", "DataParallelModel", "LossInForward", "total"]

Devices = Sequence[torch.device | str | int]


class _OnGPUs(nn.DataParallel):
    """nn.DataParallel that says so when there is no GPU, and gives no GPU work without samples."""

    def __init__(self, module: nn.Module, device_ids: Devices | None = None):
        if not isinstance(module, nn.Module):
            raise TypeError(
                f"need an nn.Module, such as nn.CrossEntropyLoss(), not {module!r}: only modules are copied"
            )
        if device_ids is not None and not device_ids:
            raise ValueError(
                "device_ids is empty: name GPUs, or leave it out for all of them (the CPU if there is none)"
            )
        super().__init__(module, None if device_ids is None else [torch.device(_named(gpu)) for gpu in device_ids])
        if device_ids and not self.device_ids:
            raise ValueError(
                f"no GPU for device_ids={list(device_ids)}: PyTorch sees none. Call use_gpus(...) before, or leave "
                "device_ids out to run on the CPU"
            )

    def scatter(self, inputs: tuple, kwargs: dict | None, device_ids: Sequence) -> tuple[tuple, tuple]:
        """One (args, kwargs) per GPU that gets samples.

        Together, so that both end with the last sample: nn.DataParallel hands a keyword such as mask=None to every
        GPU, and calls the model without inputs where a small batch has left some of them without samples.
        """
        if not inputs and not kwargs:
            return (), ()
        pieces = scatter((inputs, kwargs or {}), device_ids, self.dim)
        sizes = sorted({tensor.size(self.dim) for tensor in tensors_in([inputs, kwargs])})
        if sizes and len(pieces) < _pieces(sizes[-1], len(device_ids)):
            raise ValueError(
                f"inputs of {' and '.join(map(str, sizes))} samples cannot be cut alike, and samples would be lost: "
                "every tensor needs one row per sample (x.expand(samples, -1)), or is a buffer of the module"
            )
        return tuple(piece[0] for piece in pieces), tuple(piece[1] for piece in pieces)


class DataParallelModel(_OnGPUs):
    """`nn.DataParallel` whose outputs stay where they are computed.

    module      its parameters are on the first GPU (`model.to("cuda:0")`), as for nn.DataParallel
    device_ids  all GPUs by default

    Called with a batch, returns a list: outputs[i] is what the module returned for shard i, on GPU i. A batch of fewer
    samples than GPUs has as many entries as it has shards. With one GPU, or on a machine with none, it is a list
    too, of one, so that the same training loop and the same `DataParallelCriterion` run anywhere.

    `state_dict` has the keys of nn.DataParallel ("module." in front), and each loads the other's. There is no
    `output_device`, since nothing is gathered. eval() and no_grad() work as ever, and where all outputs are wanted
    in order, torch.cat([output.cpu() for output in outputs]) has them.

    ValueError for device_ids on a machine without GPUs, and for inputs that cannot be cut alike, of which
    nn.DataParallel would drop samples.
    """

    def forward(self, *inputs: Any, **kwargs: Any) -> list[Any]:
        outputs = super().forward(*inputs, **kwargs)
        return outputs if len(self.device_ids) > 1 else [outputs]

    def gather(self, outputs: list[Any], output_device: Any) -> list[Any]:
        """The outputs as they are: what nn.DataParallel would copy to one GPU."""
        return outputs


class DataParallelCriterion(_OnGPUs):
    """Computes the loss of `DataParallelModel`'s outputs, each on its GPU, as if all were on one.

        loss = criterion(outputs, targets)              # or (outputs, targets, more_targets, mask=mask)

    criterion   an nn.Module; its parameters and buffers (class weights) are on the first GPU, and are copied to the
                others at each call. Gradients flow back to them
    device_ids  the same as the model's; all GPUs by default
    reduction   "mean", "sum" or "none": what a criterion of your own does, if it has no attribute `reduction`.
                "mean" by default
    weight      what a mean of your own is divided by: a function of the arguments of the criterion, called for each
                shard on its GPU, which returns one number. The number of samples by default. Not needed for the
                losses of torch.nn: what they average over is known

    outputs     a list, one entry per GPU. A tuple or a list in it becomes several arguments of the criterion, so that
                a model that returns (anchor, positive, negative) fits nn.TripletMarginLoss; a dict or a named tuple
                stays one argument
    targets     any number of tensors (N, ...), or nested tuples, lists and dicts of them, on one device: they are cut
                as the inputs were. A list of one entry per output, each on its output's GPU, is taken as cut
                already; so are the outputs of another call of the model

    Returns, on the first GPU: for "mean" and "sum" one number, shape (); for "none" the losses (N, ...) in order.
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
    ):
        super().__init__(criterion, device_ids)
        self.reduction, self.weight = find_reduction(criterion, reduction), weight
        if self.reduction == "mean":
            check_weight(criterion, weight)

    def forward(self, outputs: list[Any], *targets: Any, **options: Any) -> Tensor:
        devices = self._devices_of(outputs)
        self._check_parameters(devices[0])
        if self.reduction == "mean":
            check_ignored(self.module, self.weight, [targets, options])
        arguments, options = self._shards(outputs, targets, options, devices)
        for shard, device in enumerate(devices):
            check_fit(self.module, arguments[shard], options[shard], str(device))
        if len(devices) == 1:
            loss = self.module(*arguments[0], **options[0])
            return loss if self.reduction == "none" else one_number(self.module, loss)
        return self._combine(self._losses(arguments, options))

    def _losses(self, arguments: list[tuple], options: list[dict]) -> list[Any]:
        replicas = self.replicate(self.module, self.device_ids[: len(arguments)])
        if self.reduction == "mean":
            replicas = [partial(weighted_loss, replica, self.weight) for replica in replicas]
        try:
            return self.parallel_apply(replicas, arguments, options)
        except Exception as error:
            shapes = [[tuple(tensor.shape) for tensor in tensors_in(shard)] for shard in arguments]
            error.add_note(f"the criterion got, GPU by GPU, tensors of the shapes {shapes}: do targets fit outputs?")
            raise

    def _combine(self, losses: list[Any]) -> Tensor:
        """One loss on the first GPU. `to` copies numbers there, and in backward their gradients back."""
        if self.reduction == "none":
            if any(not isinstance(loss, Tensor) or loss.dim() == 0 for loss in losses):
                raise TypeError('reduction="none" needs one loss per sample from the criterion, shape (N, ...)')
            return gather(losses, self.device_ids[0], self.dim)
        if self.reduction == "sum":
            return self._add([one_number(self.module, loss) for loss in losses])
        sums, weights = zip(*losses, strict=True)
        return self._add(sums) / self._add(weights)

    def _add(self, numbers: Sequence[Tensor]) -> Tensor:
        return torch.stack([number.to(numbers[0].device) for number in numbers]).sum()

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
        columns = [self._cut(target, devices, f"target {number}") for number, target in enumerate(targets)]
        named = {name: self._cut(value, devices, name) for name, value in options.items()}
        arguments = [
            (*as_arguments(output), *(column[number] for column in columns)) for number, output in enumerate(outputs)
        ]
        return arguments, [{name: cut[i] for name, cut in named.items()} for i in range(len(outputs))]

    def _cut(self, target: Any, devices: list[torch.device], name: str) -> list[Any]:
        """One piece of a target per output."""
        if is_cut(target, devices, name):
            return target
        pieces = scatter(target, self.device_ids[: len(devices)], self.dim) if self.device_ids else [target]
        if len(pieces) != len(devices):
            sizes = sorted({tensor.size(0) for tensor in tensors_in(target)})
            raise ValueError(
                f"{name} has {', '.join(map(str, sizes))} samples, which make {len(pieces)} pieces, and there are "
                f"{len(devices)} outputs: give the targets of the same batch, all of them, with samples first"
            )
        return list(pieces)


def _pieces(samples: int, gpus: int) -> int:
    """How many pieces torch.chunk makes: all of the first one's size, but for the last."""
    return math.ceil(samples / math.ceil(samples / gpus)) if samples else 0


def _named(gpu: torch.device | str | int) -> Any:
    return f"cuda:{gpu}" if isinstance(gpu, int) else gpu
