"""Activations: softmax is one kernel also from half types into float32, and what gradients take."""

from functools import partial
from itertools import product

import torch
import torch.nn.functional as F
from measuring import same, sizes_of
from virtual_gpus.placement.storages import has_values


def test_a_softmax_of_halves_in_floats_is_one_kernel_and_its_backward_takes_a_product(gpu):
    """SoftMax.cpp asks for `half_to_float`; `softmax_backward_cuda_out` of SoftMax.cu multiplies first."""
    x, given = torch.randn(1024, 1024).half().requires_grad_(), torch.randn(1024, 1024)
    copy, gradient, size = x.detach().to(gpu).requires_grad_(), given.to(gpu), x.nbytes
    for name, owner in product(("softmax", "log_softmax"), (torch, torch.Tensor, torch.special, F)):
        one, other = (getattr(owner, name)(part, -1, dtype=torch.float32) for part in (x, copy))
        assert sizes_of(partial(getattr(owner, name), copy, -1, dtype=torch.float32)) == [2 * size]
        sizes = sizes_of(lambda y=other: torch.autograd.grad(y, copy, gradient, retain_graph=True))
        assert sizes == [size, 2 * size][: 1 + (name == "softmax")]
        if has_values(copy):
            same(one, other)
            same(*torch.autograd.grad(one, x, given), *torch.autograd.grad(other, copy, gradient))
    with torch.autocast("cuda", torch.float16):
        assert sizes_of(lambda: copy.softmax(axis=-1)) == sizes_of(lambda: F.log_softmax(copy, -1)) == [2 * size]


def test_a_log_sigmoid_keeps_nothing_for_its_gradient(gpu):
    assert sizes_of(lambda: F.logsigmoid(torch.zeros(1000, 1000, device=gpu, requires_grad=True)))[1:] == [4_000_256]
