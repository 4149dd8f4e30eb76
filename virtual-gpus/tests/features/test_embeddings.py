"""Embeddings and bags of them: buffers, gradients, and what CUDA refuses."""

import torch
import torch.nn.functional as F
from measuring import sizes_of


def test_bags_take_the_buffers_of_cuda_s_kernel(gpu):
    """EmbeddingBag.cu."""
    table, there = torch.zeros(100, 64, device=gpu), torch.arange(1 << 16, device=gpu)
    offsets = there[: 1 << 14] * 4
    for mode, largest in (("sum", []), ("mean", []), ("max", [512 << 14])):
        taken = sizes_of(lambda m=mode: F.embedding_bag(there % 100, table, offsets, mode=m))
        assert taken[1:] == [8 << 14, 8 << 16, 256 << 14, *largest]


def test_the_gradient_of_a_look_up_takes_its_result_alone(gpu):
    table = torch.nn.Embedding(1000, 64, device=gpu)
    out = table(torch.zeros(3072, dtype=torch.long, device=gpu))
    gradient = torch.zeros_like(out)
    assert sizes_of(lambda: torch.autograd.grad(out, table.weight, gradient)) == [256_000]
