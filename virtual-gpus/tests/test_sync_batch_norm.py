"""SyncBatchNorm on two virtual GPUs, one rank each: the same numbers as BatchNorm on one GPU with all samples."""

import pytest
import torch
from ranks import in_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from virtual_gpus import virtual_gpus

pytestmark = pytest.mark.usefixtures("workspaces_given_back")

CASES = {  # shape, and samples per rank, unequal
    "images": ((7, 5, 3, 3), [3, 4]),
    "rows": ((7, 5), [3, 4]),
    "one sample on a rank": ((7, 5, 1, 1), [1, 6]),
}


def network(dimensions, affine):
    torch.manual_seed(1)
    norm = nn.BatchNorm2d(5, affine=affine) if dimensions == 4 else nn.BatchNorm1d(5, affine=affine)
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    first = nn.Conv2d(5, 5, 1) if dimensions == 4 else nn.Linear(5, 5)
    return nn.Sequential(first, norm, nn.Tanh())


def results(net, x, y, share):
    """Two steps: gradients of the second (of input and parameters), and the running statistics."""
    x = x.clone().requires_grad_()
    for _ in range(2):
        net.zero_grad()
        loss = ((net(x) - y) ** 2).sum() * share
        loss.backward()
    return [p.grad.cpu() for p in net.parameters()] + [b.cpu() for b in net.buffers()]


def synchronized(rank):
    """The results of each case, with parameters of the norm and without."""
    found = []
    for shape, sizes in CASES.values():
        for affine in (True, False):
            net = nn.SyncBatchNorm.convert_sync_batchnorm(network(len(shape), affine)).to("cuda")
            net = DistributedDataParallel(net, device_ids=[rank])
            x, y = (part.split(sizes)[rank].to("cuda") for part in data(shape))
            found.append(results(net, x, y, share=2))  # DDP takes the mean of two ranks
    return found


def data(shape):
    torch.manual_seed(0)
    return torch.randn(shape), torch.randn(shape)


def test_as_batch_norm_with_all_samples():
    with virtual_gpus(2):
        answers = in_ranks(synchronized, count=2)
    torch.testing.assert_close(*answers)
    expected = [results(network(len(shape), affine), *data(shape), share=1)
                for shape, _ in CASES.values() for affine in (True, False)]  # fmt: skip
    torch.testing.assert_close(answers[0], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types_are_added_up_in_float32(dtype):
    x = torch.randn(64, 3, 5, 5)
    with virtual_gpus(1):
        on_gpu = x.to("cuda", dtype)
        mean, invstd = torch.batch_norm_stats(on_gpu, 1e-5)
        assert mean.dtype == invstd.dtype == torch.float32 and mean.is_cuda
        normal = torch.batch_norm_elemt(on_gpu, None, None, mean, invstd, 1e-5)
        assert normal.dtype == dtype
        torch.testing.assert_close(mean.cpu(), x.to(dtype).float().mean((0, 2, 3)))
        assert normal.float().mean().abs().item() < 1e-2
        assert torch.cuda.memory_allocated() == 2 * (64 * 3 * 25 * 2 // 512 + 1) * 512 + 2 * 512
