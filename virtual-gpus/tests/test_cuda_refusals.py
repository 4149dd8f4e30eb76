"""What CUDA refuses, waits for or can do where the CPU does otherwise, in its words."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from virtual_gpus import virtual_gpus


@pytest.fixture(autouse=True)
def gpus():
    with virtual_gpus(2):
        yield
        torch.use_deterministic_algorithms(False)
        torch.cuda.set_sync_debug_mode(0)


def image(*sizes):
    return torch.rand(*sizes, device="cuda", requires_grad=True)


ROWS = torch.tensor([0, 1])
REFUSED = [
    ("avg_pool3d_backward_cuda", lambda: F.avg_pool3d(image(1, 3, 3, 3), 3).sum().backward()),
    ("adaptive_avg_pool2d_backward_cuda", lambda: F.adaptive_avg_pool2d(image(1, 3, 3), 2).sum().backward()),
    ("reflection_pad1d_backward_out_cuda", lambda: F.pad(image(2, 4), (1, 1), "reflect").sum().backward()),
    ("upsample_bicubic2d_backward_out_cuda",
     lambda: torch._C._nn.upsample_bicubic2d(image(1, 1, 4, 4), (8, 8), False).sum().backward()),
    ("embedding_bag_backward_cuda_max",
     lambda: F.embedding_bag(ROWS[None].cuda(), image(4, 3), mode="max").sum().backward()),
    ("grid_sampler_2d_backward_cuda",
     lambda: F.grid_sample(image(1, 1, 2, 2), image(1, 1, 1, 2), align_corners=False).sum().backward()),
    ("nll_loss2d_forward_out_cuda_template", lambda: F.nll_loss(image(1, 2, 1, 1), ROWS[:1, None, None].cuda())),
    ("_histc_cuda with floating point input", lambda: image(4).detach().histc()),
    ("_bincount_cuda", lambda: ROWS.cuda().bincount(weights=image(2).detach())),
    ("median CUDA with indices output", lambda: image(4).median(0)),
    ("put_", lambda: image(4).detach().put_(ROWS.cuda(), image(2).detach(), accumulate=True)),
    ("index_reduce_cuda", lambda: image(4).detach().index_reduce_(0, ROWS.cuda(), image(2).detach(), "mean")),
    ("scatter_reduce_cuda_prod_", lambda: image(4).scatter_reduce(0, ROWS.cuda(), image(2), "prod")),
]  # fmt: skip


def test_operators_without_a_deterministic_algorithm_are_refused():
    torch.use_deterministic_algorithms(True)
    for name, work in REFUSED:
        with pytest.raises(RuntimeError, match=f"^{name} does not have a deterministic implementation"):
            work()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        image(4).median()
        ROWS.cuda().bincount()
        ROWS.cuda().histc(bins=2, min=0, max=1)
        image(4).scatter_reduce(0, ROWS.cuda(), image(2), "sum")
        F.embedding_bag(ROWS[None].cuda(), image(4, 3), mode="sum").sum().backward()
        F.grid_sample(image(1, 1, 2, 2), image(1, 1, 1, 2), align_corners=True).sum().backward()  # cuDNN's
        F.interpolate(image(1, 1, 4, 4), 8, mode="bilinear").sum().backward()
    torch.use_deterministic_algorithms(True, warn_only=True)
    with pytest.warns(UserWarning, match="^put_ does not have a deterministic implementation"):
        dict(REFUSED)["put_"]()


def test_kernels_that_cuda_has_not():
    number = torch.tensor(2.0)
    x = torch.ones(2, device="cuda")
    torch.addcmul(x, x, number)
    with pytest.raises(RuntimeError, match="CPU Scalar support for tensor1 argument .* please swap"):
        torch.addcmul(x, number, x)
    with pytest.raises(RuntimeError, match="not implemented for 'ComplexFloat'"):
        x.cfloat().scatter_(0, ROWS.cuda(), x.cfloat(), reduce="multiply")


def test_kernels_that_only_cuda_has():
    assert ROWS.cuda().histc(bins=2, min=0, max=1).tolist() == [1, 1]
    x, weight, grid = image(1, 1, 4, 4).detach(), image(1, 1, 3, 3).detach(), image(1, 2, 2, 2).detach()
    got = torch.cudnn_convolution(x, weight, (0, 0), (1, 1), (1, 1), 1, False, True, False)
    assert torch.equal(got, F.conv2d(x, weight)) and got.is_cuda
    assert torch.equal(torch.cudnn_grid_sampler(x, grid), F.grid_sample(x, grid, align_corners=True))
    means, counted = image(2, 3).detach(), torch.full((2,), 4.0, device="cuda")
    found = torch.batch_norm_gather_stats(x, means, means, None, None, 0.1, 1e-5, 4)
    wanted = torch.batch_norm_gather_stats_with_counts(x, means, means, None, None, 0.1, 1e-5, counted)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_the_host_waits_for_a_gpu_where_cuda_s_does():
    x, one, mask = image(4).detach(), image(1)[0].detach(), torch.tensor([True, False, True, False])
    repeats = torch.full((1,), 2, device="cuda")
    gpu_mask, gpu_rows = mask.cuda(), ROWS.cuda()
    quiet = [
        lambda: x.__setitem__(gpu_mask, 1.0),
        lambda: x.__setitem__(mask, one),
        lambda: x.__setitem__(gpu_rows, one),
        lambda: x[mask],
        lambda: F.one_hot(gpu_rows, 2),
        lambda: torch.repeat_interleave(x, repeats, output_size=8),
    ]
    waiting = [
        lambda: x.__setitem__(gpu_mask, one),
        lambda: x.__setitem__(ROWS, one),
        lambda: x[gpu_mask],
        lambda: x[ROWS],
        lambda: F.one_hot(gpu_rows),
        lambda: torch.repeat_interleave(x, repeats),
    ]
    torch.cuda.set_sync_debug_mode("error")
    for work in quiet:
        work()
    for work in waiting:
        with pytest.raises(RuntimeError, match="called a synchronizing CUDA operation"):
            work()
    torch.cuda.set_sync_debug_mode("default")
    assert F.one_hot(gpu_rows, 3).tolist() == [[1, 0, 0], [0, 1, 0]]


def test_old_names_warn_and_copies_of_storages_are_pinned():
    torch.set_warn_always(True)
    try:
        with pytest.warns(UserWarning, match="DtypeTensor constructors are no longer recommended"):
            torch.cuda.FloatTensor([0])
        with pytest.warns(UserWarning, match="set_default_tensor_type.. is deprecated as of PyTorch 2.1"):
            torch.set_default_tensor_type("torch.cuda.FloatTensor")
    finally:
        torch.set_warn_always(False)
        torch.set_default_tensor_type("torch.FloatTensor")
    storage = torch.ones(2, device="cuda").untyped_storage()
    assert storage.to(device="cpu", non_blocking=True).is_pinned()
    assert not storage.to(device="cpu").is_pinned()
