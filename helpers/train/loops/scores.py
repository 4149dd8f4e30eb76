"""What a pass over a loader is counted in: sums per batch, a score per pass, a record per epoch.

The sums of a batch are one small tensor on the GPU, [loss x weight, right answers, labels, weight], so that batches
(and, with several processes, ranks) are added up before anything is divided: the mean of the means of uneven
batches would be wrong. The weight of a batch is the number of its labels, unless the loss has class weights.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["EpochRecord", "Score", "batch_sums", "ignored_label", "label_weight", "score_of", "values_of"]


@dataclass(frozen=True)
class Score:
    """The mean loss and the share of right answers (0 to 1), over all labels that count."""

    loss: float
    accuracy: float


@dataclass(frozen=True)
class EpochRecord:
    """One epoch of training; printed, it is the log line. `accuracy` is a share from 0 to 1.

    The line has few digits, since it is stored in notebooks, and no time, since no two runs take the same.
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


def ignored_label(loss: Any) -> int:
    """The label that `loss` leaves out: its `ignore_index`, or -100."""
    given = getattr(loss, "ignore_index", None)
    return -100 if given is None else given


def _class_weights(loss: Any) -> Tensor | None:
    # Losses of one's own may well have a `weight` that means something else.
    return loss.weight if isinstance(loss, (nn.CrossEntropyLoss, nn.NLLLoss)) else None


def label_weight(loss: Any, labels: Tensor) -> Tensor:
    """What the mean over `labels` is divided by, float32 (): the labels that count, or their class weights' sum.

    On the device of the labels; where `loss` has class weights (nn.CrossEntropyLoss(weight=...)), on theirs.
    """
    counts = labels != ignored_label(loss)
    weights = _class_weights(loss)
    if weights is None:
        return counts.sum().float()
    counts, labels = counts.to(weights.device), labels.to(weights.device)
    # An ignored label is no class: class 0 stands in, and counts for nothing.
    return (weights[torch.where(counts, labels, 0)] * counts).sum().float()


def batch_sums(loss: Tensor, logits: Tensor, labels: Tensor, criterion: Any = None) -> Tensor:
    """[loss x weight, right answers, labels, weight] of one batch, float32 (4,), left on the device of the logits.

    loss: the batch's mean; logits (..., classes); labels (...), except those that `criterion`, which computed
    the loss, leaves out; weight: as `label_weight`, the number of labels if there are no class weights.
    """
    valid = labels != ignored_label(criterion)
    right = (logits.argmax(-1) == labels) & valid
    count = valid.sum().float()
    weight = count if _class_weights(criterion) is None else label_weight(criterion, labels)
    # Without a label the mean is 0 / 0 = nan, and a rank or a micro-batch may well have none.
    total = torch.where(count > 0, loss.float() * weight, 0.0)
    return torch.stack([total, right.sum().float(), count, weight])


def values_of(sums: Tensor) -> list[float]:
    """`batch_sums` as numbers: here the host waits for the GPU. They are nan where tensors have no values."""
    return [total.item() for total in sums]


def score_of(sums: Sequence[float]) -> Score:
    """Divide the four sums; nan where no label counts, or has a value."""
    loss, right, count, weight = sums
    return Score(loss / weight if weight else math.nan, right / count if count else math.nan)
