"""Norms: statistics and partial sums of CUDA's kernels, their times, and what they refuse."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from measuring import sizes_of, times_of
from torch import nn
from virtual_gpus import virtual_gpus
from virtual_gpus.clock.work import Operand
from virtual_gpus.dispatch.operators import cost
from virtual_gpus.gpus import spec


def test_evaluation_keeps_statistics_where_cudnn_does_not_run(gpu):
    """Normalization.cu and cudnn/BatchNorm.cpp."""
    for norm, kind, kept in ((nn.BatchNorm1d, torch.half, 2), (nn.BatchNorm2d, torch.float, 0)):
        x = torch.ones(8, 4096, *[2] * 2 * (not kept)).to(gpu, kind)
        assert sizes_of(partial(norm(4096).to(gpu, kind).eval(), x)) == [x.nbytes, *[4 * 4096] * kept]


def test_batch_norm_of_few_rows_takes_no_partial_sums(gpu):
    norm, x = nn.BatchNorm1d(1024, device=gpu), torch.zeros(4096, 1024, device=gpu)
    sizes = sizes_of(lambda: norm(x))
    assert sum(sizes[-2:]) == 262_656 and sizes[-1] == 512
    assert len(sizes_of(lambda: norm(x[:6]))) == len(sizes) - 2  # one block of threads


def test_a_batch_norm_takes_the_memory_and_the_time_of_the_same_kernels():
    def of(x, kind=torch.float, on=True, train=True, mask=(True, True, True)):
        stats, grad = torch.ones(x.shape[1], dtype=kind or torch.float, device="cuda"), x.new_ones(()).expand(x.shape)
        weight, norm = stats if kind else None, torch.ops.aten.native_batch_norm_backward
        with torch.backends.cudnn.flags(enabled=on):
            times = times_of(lambda: torch.native_batch_norm(x, weight, weight, stats, stats, train, 0.1, 1e-5))
            back = partial(norm, grad, x, weight, *[stats] * 4, train, 1e-5, mask)
            sizes = sizes_of(lambda: times.update(times_of(back)))
        return *times.values(), sizes.count(x.nbytes)  # a packed gradient, and one of x

    with virtual_gpus(1, kind="H200", shapes_only=True):
        x, grey = torch.ones(64, 64, 32, 32, device="cuda"), torch.bfloat16
        cudnns, own = of(x.half()), of(x.to(grey))
        assert cudnns[2] == 2 and own[2] == 1 and min(own[:2]) > max(cudnns[:2])
        assert of(x.half(), torch.half) == of(x.half(), on=False) == of(x.half(), None) == own
        once, adds, _ = of(x.half(), train=False)
        assert once < cudnns[0] and adds == own[1]  # the gradients of its weights
        assert of(x.half(), train=False, mask=(True, False, False)) == (once, once, 1)
        assert of(x.to(grey).view(-1, 64)) == of(x.to(grey, memory_format=torch.channels_last))[:2] + (1,)


@pytest.mark.parametrize("weighted", [False, True])
def test_rms_norms_derivatives_are_the_cpus(weighted):
    found = []
    for device in ("cpu", "cuda"):
        with virtual_gpus(1):
            torch.manual_seed(0)
            x, weight = (torch.randn(size, device=device, requires_grad=True) for size in ((50, 8), (8,)))
            leaves = (x, weight)[: 1 + weighted]
            out = F.rms_norm(x, (8,), *leaves[1:])
            once = torch.autograd.grad(out.sum(), leaves, retain_graph=True)
            first = torch.autograd.grad(out.sum(), leaves, create_graph=True)
            found.append([out, *once, *first, *torch.autograd.grad(first[0].square().sum(), x)])
    torch.testing.assert_close(*found, check_device=False, atol=0, rtol=0)


def test_a_group_norm_of_few_groups_leaves_the_gpu_half_idle():
    def seconds(groups):
        outputs = [Operand(shape, 4) for shape in ((8, 64, 64, 64), (8, groups), (8, groups))]
        return cost("native_group_norm", outputs[:1], outputs, spec("H200")).seconds

    assert seconds(4) > 1.5 * seconds(8) > 2 * seconds(64)


def test_synchronized_half_types_are_added_up_in_float32():
    x = torch.randn(64, 3, 5, 5)
    with virtual_gpus(1):
        on_gpu = x.to("cuda", torch.bfloat16)
        mean, invstd = torch.batch_norm_stats(on_gpu, 1e-5)
        assert mean.dtype == invstd.dtype == torch.float32 and mean.is_cuda
        normal = torch.batch_norm_elemt(on_gpu, None, None, mean, invstd, 1e-5)
        assert normal.dtype == torch.bfloat16 and normal.float().mean().abs().item() < 1e-2
        torch.testing.assert_close(mean.cpu(), x.bfloat16().float().mean((0, 2, 3)))
        assert torch.cuda.memory_allocated() == 2 * (64 * 3 * 25 * 2 // 512 + 1) * 512 + 2 * 512
        given = torch.empty(0, device="cuda", dtype=torch.bfloat16)
        assert torch.batch_norm_elemt(on_gpu, None, None, mean, invstd, 1e-5, out=given) is given
        assert torch.equal(given, normal)
