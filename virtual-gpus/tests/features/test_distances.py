"""Distances between vectors: the CPU's numbers, and the buffer of their gradients."""

import torch
from measuring import draw, same, sizes_of
from virtual_gpus.placement.storages import has_values


def test_distances_are_the_cpus_and_their_gradient_takes_a_buffer_of_all_pairs(gpu):
    """Distance.cpp and cuda/DistanceKernel.cu."""
    vectors, pairs = torch.ones(16, 512, device=gpu), torch.ones(16, 16, device=gpu)
    sizes = sizes_of(lambda: torch.ops.aten._cdist_backward(pairs, vectors, vectors, 1.0, pairs))
    assert sizes[:2] == [32 << 10, 512 << 10]
    x, y = draw(40, 8), draw(50, 8, seed=2)
    for p in (1.0, 2.0) if has_values(pairs) else ():
        same(torch.cdist(x.to(gpu), y.to(gpu), p), torch.cdist(x, y, p), atol=1e-5, rtol=1e-5)
