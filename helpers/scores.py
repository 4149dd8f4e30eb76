"""What a pass over a loader is counted in: sums per batch, a score per pass, a record per epoch.

The sums of a batch are one small tensor on the GPU, [loss x labels, right answers, labels], so that batches
(and, with several processes, ranks) are added up before anything is divided: the mean of the means of uneven
batches would be wrong.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["EpochRecord", "Score", "batch_sums", "score_of"]


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


def batch_sums(loss: Tensor, logits: Tensor, labels: Tensor, ignore_index: int = -100) -> Tensor:
    """[loss x labels, right answers, labels] of one batch, float32 (3,), left on the device of the logits.

    loss: the batch's mean; logits (..., classes); labels (...), except those equal to `ignore_index`.
    """
    valid = labels != ignore_index
    right = (logits.argmax(-1) == labels) & valid
    count = valid.sum().float()
    return torch.stack([loss.float() * count, right.sum().float(), count])


def score_of(sums: Tensor) -> Score:
    """Divide the sums, where the host waits for the GPU; nan where no label counts, or has a value."""
    loss, right, count = (total.item() for total in sums)
    return Score(loss / count, right / count) if count else Score(math.nan, math.nan)
