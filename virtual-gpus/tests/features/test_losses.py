"""Losses: what CUDA's kernels keep beside the result, and what they refuse."""

from itertools import product

import torch
import torch.nn.functional as F
from measuring import bytes_of, draw, sizes_of
from virtual_gpus import virtual_gpus


def test_lengths_of_a_ctc_loss_may_be_on_the_cpu():
    def loss(device, where, reduction):
        scores, targets = draw(50, 4, 20).to(device).requires_grad_(), torch.ones(4, 10).long().to(device)
        lengths = [torch.full((4,), number, device=where) for number in (50, 10)]
        result = F.ctc_loss(scores.log_softmax(2), targets, *lengths, reduction=reduction)
        return result, *torch.autograd.grad(result.sum(), scores)

    with virtual_gpus(1):
        for where, reduction in product(("cpu", "cuda"), ("none", "sum", "mean")):
            pair = loss("cpu", "cpu", reduction), loss("cuda", where, reduction)
            torch.testing.assert_close(*pair, check_device=False, atol=0, rtol=0)


def test_losses_take_nothing_beside_their_results(gpu):
    x = torch.zeros(1000, 1000, device=gpu, requires_grad=True)
    assert sizes_of(lambda: F.smooth_l1_loss(x, x, reduction="none")) == [4_000_256]
    _, stayed, _ = bytes_of(lambda: F.smooth_l1_loss(x, x))
    assert stayed == 4_000_256  # a mean keeps the storage of all losses


def test_cross_entropy_over_images_copies_logits_whose_channels_are_last(gpu):
    """SoftMax.cu takes `input_.contiguous()` after its result; NLLLoss2d.cu gets that result, which is packed."""
    logits, classes = torch.zeros(4, 8, 32, 32, device=gpu), torch.zeros(4, 32, 32, dtype=torch.long, device=gpu)
    last, size = logits.to(memory_format=torch.channels_last), logits.nbytes
    assert sizes_of(lambda: F.cross_entropy(logits, classes)) == [size, 512, 512]
    assert sizes_of(lambda: F.cross_entropy(last, classes)) == [size, size, 512, 512]
    assert sizes_of(lambda: F.nll_loss(last, classes)) == [512, 512, size]  # its own copy
    assert sizes_of(lambda: F.nll_loss(last, classes, reduction="none"))[1:] == [512]
