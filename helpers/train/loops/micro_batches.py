"""An optimizer step over several batches: what each of them counts.

The mean over all labels of a step is not the mean of its batches' means, unless all have as many labels. With
`accumulate` batches per step, and with several ranks, each batch's mean is therefore multiplied by its share,

    share = weight of the batch / weight of all batches of the step, on all ranks

before `backward`, and the gradients add up to those of one large batch. The labels are known before the forward
pass, so that the ranks can add up their weights while it, or the step before, runs.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DistributedSampler

from helpers.train.loops.scores import label_weight

__all__ = ["Batch", "Shares", "groups", "real_batches"]


class Batch(NamedTuple):
    """`counts` is False where the samples are there only so that no rank is without a batch."""

    inputs: Tensor
    labels: Tensor
    counts: bool = True


class Shares:
    """shares[i] is what the mean loss of batch i of this step is multiplied by, a tensor of shape ().

    criterion  the loss, which says what its mean is over
    device     where the losses are
    ranks      with more than one, all of them must make their shares at the same time. The gradients that
               DistributedDataParallel averages are then the gradients of the mean over all labels
    """

    def __init__(self, batches: Sequence[Batch], criterion: Any, device: torch.device, ranks: int = 1):
        weights = [label_weight(criterion, batch.labels) * batch.counts for batch in batches]
        self._weights = torch.stack(weights).to(device, non_blocking=True)
        self._total, self._ranks = self._weights.sum(), ranks
        self._waiting = dist.all_reduce(self._total, async_op=True) if ranks > 1 else None

    def __getitem__(self, number: int) -> Tensor:
        if self._waiting is not None:
            self._waiting.wait()
            self._waiting = None
        # DistributedDataParallel divides by the number of ranks. Without a label all weights are 0, and so are shares.
        return self._ranks * self._weights[number] / self._total.clamp(min=torch.finfo(torch.float32).tiny)


def groups(batches: Iterable[Batch], size: int) -> Iterator[list[Batch]]:
    """`size` batches at a time; the last group may be smaller."""
    batches = iter(batches)
    while group := list(islice(batches, size)):
        yield group


def real_batches(loader: Iterable[Any], batches: Iterable[Any]) -> Iterator[Batch]:
    """The `batches` that `loader` gave, without the sample with which DistributedSampler filled up this rank's share.

    The sampler repeats a few samples so that all ranks have equally many: at most one on each rank, its last one. A
    batch that is nothing else stays, marked as not counting: the other ranks wait for this one in `backward`.
    """
    last, seen = _last_is_padding(loader), 0
    for inputs, labels in batches:
        seen += len(labels)
        if not last or seen < last:
            yield Batch(inputs, labels)
        elif len(labels) > 1:
            yield Batch(inputs[:-1], labels[:-1])
        else:
            yield Batch(inputs, labels, counts=False)


def _last_is_padding(loader: Iterable[Any]) -> int:
    """How many samples this rank is given if the last of them is a repeated one, else 0."""
    sampler = getattr(loader, "sampler", None)
    if not isinstance(sampler, DistributedSampler) or sampler.drop_last:
        return 0
    position = (sampler.num_samples - 1) * sampler.num_replicas + sampler.rank
    return sampler.num_samples if position >= len(sampler.dataset) else 0
