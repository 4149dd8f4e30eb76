"""shapes_only: sizes without values. The figures must be those of a run with real numbers."""

import math

import pytest
import torch
import torch.nn.functional as F
from benchmarks.reference.networks import GPT
from nets import PyramidNet, unfused_transformer
from torch import nn
from virtual_gpus import virtual_gpus

NAMES = ("allocated_bytes.all", "reserved_bytes.all", "requested_bytes.all", "allocation.all", "segment.all")


def figures():
    """The allocator's counters of every GPU."""
    wanted = [f"{name}.{when}" for name in NAMES for when in ("current", "peak", "allocated")]
    return [{key: torch.cuda.memory_stats(i)[key] for key in wanted} for i in range(torch.cuda.device_count())]


def train(net, batch, target, optimizer, steps=2):
    torch.manual_seed(0)
    net = nn.DataParallel(net().cuda())
    optimizer = optimizer(net.parameters())
    for _ in range(steps):
        loss = F.cross_entropy(net(batch.cuda()).flatten(0, -2), target.cuda().flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
    return loss.item(), figures()


IMAGES = (torch.randn(6, 3, 32, 32), torch.randint(0, 10, (6,)))
WORDS = (torch.randint(0, 100, (6, 12)), torch.randint(0, 100, (6, 12)))
ADAM, SGD = torch.optim.AdamW, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)
JOBS = {
    "pyramidnet": (lambda: PyramidNet(8, 12), *IMAGES, SGD),
    "fused attention, dropout": (lambda: GPT(0.1, 100, 32, 2, 2, 12), *WORDS, ADAM),
}


@pytest.mark.parametrize("job", JOBS)
def test_same_memory_as_with_numbers(job):
    """Single GPUs and larger networks: test_reference_memory.py."""
    results = []
    for shapes_only in (False, True):
        with virtual_gpus(3, memory="8 GiB", shapes_only=shapes_only):
            results.append(train(*JOBS[job]))
    (loss, with_numbers), (unknown, with_shapes) = results
    assert math.isfinite(loss) and math.isnan(unknown)
    assert with_shapes == with_numbers


def test_what_needs_values_says_so():
    with virtual_gpus(2, shapes_only=True):
        x, n = torch.randn(3, device="cuda:1"), torch.ones(3, dtype=torch.long, device="cuda")
        assert x.device == torch.device("cuda", 1) and x.is_cuda and not x.is_meta
        assert math.isnan(x.sum().item()) and math.isnan(float(x[0])) and torch.isnan(x.cpu()).all()
        assert torch.isnan(torch.zeros(3).copy_(x)).all()
        reads = [lambda: n.sum().item(), lambda: bool((x > 0).any()), n.cpu, x.tolist, x.nonzero, lambda: x[x > 0],
                 lambda: torch.equal(x, x), lambda: torch.zeros(3, dtype=torch.long).copy_(n),
                 lambda: torch.save(x, "/dev/null")]  # fmt: skip
        for read in reads:
            with pytest.raises(RuntimeError, match="shapes_only=True, virtual GPUs keep no values"):
                read()


def test_cpu_tensors_keep_their_values():
    with virtual_gpus(2, shapes_only=True):
        assert torch.tensor([1, 2]).sum().item() == 3
        x = torch.zeros(4, 2, device="cuda")
        assert x[torch.tensor([0, 1])].shape == (2, 2) and x[0].shape == (2,)
        assert (x + torch.tensor(1.0)).device.index == 0


def test_module_to_keeps_the_parameters_that_an_optimizer_knows():
    with virtual_gpus(2, shapes_only=True):
        net = nn.Linear(3, 4)
        weight, optimizer = net.weight, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        assert net.to("cuda:1") is net and net.weight is weight and weight.device.index == 1
        net(torch.ones(2, 3, device="cuda:1")).sum().backward()
        optimizer.step()
        assert optimizer.state[weight]["momentum_buffer"].device.index == 1


def test_a_large_job_needs_no_memory_of_this_computer():
    """A transformer at an article's size, with fewer layers: the logits alone are 4 GB, and twice that is collected."""
    with virtual_gpus(4, memory="24 GiB", shapes_only=True):
        net = nn.DataParallel(unfused_transformer(30_000, 256, 2, 8, 163, dropout=0.1).cuda())
        tokens = torch.randint(0, 30_000, (200, 163))
        F.cross_entropy(net(tokens.cuda()).flatten(0, 1), tokens.cuda().flatten()).backward()
        peaks = [torch.cuda.max_memory_allocated(i) for i in range(4)]
        logits = 200 * 163 * 30_000 * 4
        assert peaks[0] - peaks[1] > 2.5 * logits and max(peaks[1:]) - min(peaks[1:]) < 2**24
