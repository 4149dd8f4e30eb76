"""Dropout: CUDA's operator, which keeps a mask."""

import torch
import torch.nn.functional as F
from measuring import sizes_of


def test_the_mask_comes_before_the_result(gpu):
    """aten/src/ATen/native/cuda/Dropout.cu. In evaluation, and where all or nothing is kept, there is no mask."""
    x = torch.ones(1024, 1024, device=gpu)
    assert sizes_of(lambda: F.dropout(x)) == [x.numel(), x.nbytes]
    assert sizes_of(lambda: F.dropout(x, training=False)) == []
    assert x.numel() not in sizes_of(lambda: F.dropout(x, 0.0)) + sizes_of(lambda: F.dropout(x, 1.0))
