"""What training counts: labels, summed over batches and ranks before anything is divided.

The number of labels differs from batch to batch: the last batch of an epoch is smaller, and masked words hide a
different number in each sentence. The mean of the batches' means is then not the mean over all labels. So a score is
made of sums.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DistributedSampler

from helpers.parallel.loss import ignored_label, label_weight

__all__ = ["EpochRecord", "Score", "batch_sums", "score_of", "without_padding"]

Batch = Sequence[Tensor]  # inputs, labels


@dataclass(frozen=True)
class Score:
    """The mean loss, and the share of correct answers from 0 to 1, over all labels that count."""

    loss: float
    accuracy: float


@dataclass(frozen=True)
class EpochRecord:
    """One epoch of training; printed, it is the log line. `accuracy` is a share from 0 to 1.

    The line is stored in notebooks: it has few digits, and no time, which differs from run to run.
    """

    device: str
    epoch: int
    batch_size: int
    steps: int
    learning_rate: float
    loss: float
    accuracy: float

    def __str__(self) -> str:
        rate = f"{self.learning_rate:.4f}" if self.learning_rate >= 1e-3 else f"{self.learning_rate:.1e}"
        return (
            f"[{self.device}] epoch {self.epoch} | batch {self.batch_size} | steps {self.steps} | "
            f"lr {rate} | loss {self.loss:.3f} | accuracy {100 * self.accuracy:.2f} %"
        )


# -------------------------------------------------------------------------------------------------- sums of a batch


def batch_sums(criterion: Any, loss: Tensor, logits: Tensor, labels: Tensor) -> Tensor:
    """[loss x weight, correct answers, labels, weight] of one batch, float32 (4,), on the device of the logits.

    loss: the mean that `criterion` returned; logits (..., classes); labels (...); weight: `label_weight`.
    """
    valid = labels != ignored_label(criterion)
    right = (logits.argmax(-1) == labels) & valid
    count, weight = valid.sum().float(), label_weight(criterion, labels)
    # Without a label the mean is 0 / 0 = nan, and a rank may well have none.
    total = torch.where(count > 0, loss.float() * weight, 0.0)
    return torch.stack([total, right.sum().float(), count, weight])


def score_of(sums: Sequence[float]) -> Score:
    """Divide the four sums of `batch_sums`; nan where no label counts."""
    loss, right, count, weight = sums
    return Score(loss / weight if weight else math.nan, right / count if count else math.nan)


# ----------------------------------------------------------------------------------------------------- padding


def without_padding(loader: Iterable[Batch], ignored: int) -> Iterator[Batch]:
    """The batches of `loader`, with `ignored` for the labels of a sample that a DistributedSampler repeated.

    The sampler repeats a few samples so that all ranks have equally many: at most one on each rank, its last one.
    """
    sampler, seen = getattr(loader, "sampler", None), 0
    padded = False
    if isinstance(sampler, DistributedSampler) and not sampler.drop_last:
        last = (sampler.num_samples - 1) * sampler.num_replicas + sampler.rank
        padded = last >= len(sampler.dataset)
    for inputs, labels in loader:
        seen += len(labels)
        if padded and seen == sampler.num_samples:
            labels = labels.clone()
            labels[-1] = ignored
        yield inputs, labels
