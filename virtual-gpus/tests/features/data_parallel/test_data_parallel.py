"""nn.DataParallel and the functions below it, unmodified PyTorch, on virtual GPUs."""

import pytest
import torch
import torch.nn.functional as F
from measuring import draw, same
from torch import nn
from torch.nn.parallel import DataParallel, comm, data_parallel
from virtual_gpus.clock.clock import Clock
from virtual_gpus.features.data_parallel.parallel import ConcurrentThreads

pytestmark = pytest.mark.usefixtures("workspaces_given_back", "gpus")
GPUS = {"count": 4, "memory": "16 GiB"}


def close(one, other):
    same(one, other, atol=1e-5, rtol=1e-5)


def net(device="cuda:0"):
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(8 * 36, 5)
    return nn.Sequential(*layers).to(device)


class Where(nn.Module):
    """Remembers the device and the size of what every replica was given."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.seen = []

    def forward(self, x):
        assert self.weight.device == x.device and torch.cuda.current_device() == x.get_device()
        self.seen.append((x.get_device(), len(x)))
        return x * self.weight


def train(wrap, device, batch=13):
    model = wrap(net(device))
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), []
    for step in range(3):
        x, y = draw(batch, 3, 8, 8, seed=step), torch.arange(batch) % 5
        out = model(x.to(device))
        loss = F.cross_entropy(out, y.to(out.device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, list(model.parameters())


@pytest.mark.parametrize("ids, batch", [(None, 1), (None, 13), ([3, 1, 0], 7)])
def test_training_equals_the_cpu(gpus, ids, batch):
    first = gpus[ids[0] if ids else 0]
    losses, weights = train(lambda m: DataParallel(m, ids), first, batch)
    expected, others = train(nn.Sequential, "cpu", batch)
    assert losses == pytest.approx(expected, abs=1e-5)
    for one, other in zip(weights, others, strict=True):
        assert one.device == one.grad.device == first
        close(one, other)
        close(one.grad, other.grad)


@pytest.mark.parametrize(
    "ids, pieces, output_device, expected",
    [
        (None, [(0, 3), (1, 3), (2, 3), (3, 1)], None, "cuda:0"),
        (None, [(0, 2), (1, 2), (2, 2)], torch.device("cuda:3"), "cuda:3"),  # too few for the last
        ([torch.device("cuda", 2), "cuda:0", 1], [(2, 4), (0, 4), (1, 2)], 1, "cuda:1"),
        ([2], [(2, 10)], None, "cuda:2"),
        ([0, 1], [(0, 5), (1, 5)], -1, "cpu"),
    ],
)
def test_which_gpu_gets_how_many_samples_and_the_output(gpus, ids, pieces, output_device, expected):
    first, x = gpus[pieces[0][0]], draw(sum(count for _, count in pieces), 2)
    module = Where().to(first)
    with torch.cuda.device(first):
        if expected == "cpu":  # DataParallel itself takes a GPU only
            out = data_parallel(module, x, ids, output_device)
        else:
            out = DataParallel(module, ids, output_device)(x)
    assert module.seen == pieces and str(out.device) == expected
    same(out, x)
    out.sum().backward()
    assert module.weight.grad.device == first
    close(module.weight.grad, x.sum()[None])


def test_another_dimension_inputs_on_any_device_and_inference_mode():
    for place in ("cpu", "cuda:2"):
        x, module = draw(5, 7, 2).to(place).requires_grad_(), nn.Module()
        module.forward = lambda part: part.cumsum(0)
        out = DataParallel(module, dim=1)(x)
        same(out, x.cumsum(0))
        out.sum().backward()
        assert str(x.grad.device) == place
        same(x.grad, torch.arange(5.0, 0, -1)[:, None, None].expand(5, 7, 2))
    model, x = net().eval(), draw(9, 3, 8, 8)
    with torch.inference_mode():
        out = DataParallel(model)(x)
        assert not torch.is_grad_enabled() and not out.requires_grad
    close(out, model(x.cuda()))


def test_communication_functions(gpus):
    x = draw(3, 2).to(gpus[1])
    copies = comm.broadcast(x, [1, 0, 2])
    assert [c.device for c in copies] == [gpus[1], gpus[0], gpus[2]] and copies[0] is x
    total = comm.reduce_add(list(copies), destination=2)
    assert total.device == gpus[2]
    close(total, 3 * x)
    lists = comm.broadcast_coalesced([x, x[0] * 2], [1, 3])
    assert [t.device for t in lists[1]] == [gpus[3]] * 2
    same(lists[1][1], x[0] * 2)
    sparse, dense = comm.broadcast_coalesced([x.to_sparse(), x], [1, 3])[1]
    assert sparse.is_sparse and sparse.device == dense.device == gpus[3]
    same(sparse.to_dense(), dense)
    (sparse,) = comm.reduce_add_coalesced([[sparse], [x.to_sparse()]], destination=1)
    assert sparse.is_sparse and sparse._values().device == sparse._indices().device == gpus[1]
    close(sparse.to_dense(), 2 * x)
    sums = comm.reduce_add_coalesced([[x, x + 1, x[:0]], [c.to(gpus[2]) for c in (x, x, x[:0])]], destination=1)
    assert [t.device for t in sums] == [gpus[1]] * 3  # the one without elements too
    close(sums[1], 2 * x + 1)
    halves = comm.scatter(x, [0, 3], chunk_sizes=[1, 2])
    assert [len(h) for h in halves] == [1, 2] and comm.scatter(x, [1, 0])[0].data_ptr() == x.data_ptr()
    same(comm.gather(halves, destination=2), x)


def test_communication_functions_refuse_what_cuda_refuses(gpus):
    on_cpu, x = draw(3, 2), draw(3, 2).to(gpus[1])
    refused = {
        "comm.broadcast with out": lambda: comm.broadcast(x, out=[x]),
        "All tensors must be on devices\\[0\\]: 0": lambda: comm.broadcast_coalesced([x], [0, 1]),
        "len\\(devices\\) = 2 and len\\(chunk_sizes\\) = 1": lambda: comm.scatter(x, [0, 1], [3]),
        "tensor at index 1 has device cpu": lambda: comm.gather([x, on_cpu]),
        "index 1 has invalid shape \\[3, 1\\], but expected \\[3, 2\\]": lambda: comm.gather([x, x[:, :1]]),
    }
    for words, call in refused.items():
        with pytest.raises(RuntimeError, match=words):
            call()
    with pytest.raises(AssertionError, match="Invalid device id"):
        DataParallel(nn.Linear(2, 2).cuda(), [0, 4])
    with pytest.raises(RuntimeError, match="Modules with uninitialized parameters can't be used with `DataParallel`"):
        nn.DataParallel(nn.LazyLinear(10).to(gpus[0]), gpus)(torch.zeros(4, 10))


def test_threads_of_one_interpreter_slow_each_other_down_and_autograds_do_not():
    clock = Clock(2)
    threads = ConcurrentThreads(clock, 2)
    for gpu in (0, 1):
        with threads:
            for _ in range(10):
                clock.launch(gpu, 0, 1.0, 1.0, "kernel")
    assert clock.now == 20.0 and clock.share == 1
    assert clock.mark(0, 0) == clock.mark(1, 0) == 21.0
    clock.start_backward()
    for gpu in (0, 1):
        for _ in range(10):
            clock.launch(gpu, 0, 0.5, 1.0, "kernel")
    clock.end_backward()
    assert clock.now == 30.0 and clock.mark(0, 0) == clock.mark(1, 0) == 30.5
