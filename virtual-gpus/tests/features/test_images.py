"""Windows of images, pooling, padding and resizing: copies and buffers of CUDA's kernels."""

import torch
import torch.nn.functional as F
from measuring import sizes_of


def test_windows_and_rolls_take_the_buffers_of_cuda_s_kernels(gpu):
    """Im2Col.cu, Col2Im.cu and TensorTransformations.cu in aten/src/ATen/native/cuda."""
    rows = torch.ones(256, 8192, device=gpu)
    size, few = rows.nbytes, rows[:8]
    for work, taken in (
        (lambda: rows.roll((1, 1), (0, 1)), [size, size]),
        (lambda: F.unfold(few[None, None], (2, 1)), [1 << 18, 7 << 16]),
        (lambda: F.fold(few[None, :2, :7168], (8, 1024), (2, 1)), [56 << 10, 56 << 10]),
    ):
        assert sizes_of(work)[: len(taken)] == taken
