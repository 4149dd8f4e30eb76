"""The third set of operators that the H200 was measured with (tests/data/h200/third), after the second.

They hold what the first two do not: a convolution of one dimension, attention of a width that is not a power of two,
a GRU of two layers in two directions whose hidden size is small, and a class for each pixel.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.reference import operators


def class_of_each_pixel(device):
    """The loss of eight pictures of 128 x 128 pixels and five classes."""
    logits = operators.values((8, 5, 128, 128), device)
    targets = torch.randint(0, 5, (operators.part(8), 128, 128), device=device)
    return [logits], lambda: F.cross_entropy(logits, targets)


OPERATORS: dict[str, operators.Build] = {
    "conv1d": operators.module(lambda: nn.Conv1d(64, 128, 3, padding=1), 32, 64, 512),
    "sdpa_fp16_dropout": operators.attention(4, 8, 256, 80, dtype=operators.FP16, dropout_p=0.2),
    "gru_bi2": operators.module(lambda: nn.GRU(200, 100, 2, batch_first=True, bidirectional=True), 32, 40, 200),
    "ce_image": class_of_each_pixel,
}
