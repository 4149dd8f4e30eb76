"""nn.DataParallel and the functions below it, unmodified PyTorch, on virtual GPUs."""

import collections
import gc
import threading
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DataParallel, comm, data_parallel, gather, parallel_apply, replicate, scatter
from virtual_gpus import virtual_gpus

pytestmark = pytest.mark.usefixtures("workspaces_given_back")

Pair = collections.namedtuple("Pair", "left right")


@pytest.fixture(autouse=True)
def gpus():
    torch.set_num_threads(1)
    with virtual_gpus(4, memory="16 GiB") as devices:
        yield devices


def draw(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def same(one, other):
    torch.testing.assert_close(one.detach().cpu(), other.detach().cpu(), atol=0, rtol=0)


def close(one, other):
    torch.testing.assert_close(one.detach().cpu(), other.detach().cpu(), atol=1e-5, rtol=1e-5)


def alone(module):
    """Instead of DataParallel: the module itself."""
    return module


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
        assert self.weight.device == x.device
        self.seen.append((x.get_device(), len(x)))
        return x * self.weight


class Calls(nn.Module):
    """A module that is a function, without parameters."""

    def __init__(self, function):
        super().__init__()
        self.forward = function


# ---- equal to one GPU ----------------------------------------------------------------------------------------------


def train(wrap, device, batch=8, steps=3):
    model = wrap(net(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(steps):
        x, y = draw(batch, 3, 8, 8, seed=step), torch.arange(batch) % 5
        out = model(x.to(device))
        loss = F.cross_entropy(out, y.to(out.device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, list(model.parameters())


@pytest.mark.parametrize("ids, batch", [(None, 1), (None, 8), (None, 13), ([0, 2], 5), ([1], 3), ([3, 1, 0], 7)])
def test_training_equals_one_gpu_and_the_cpu(gpus, ids, batch):
    first = gpus[ids[0] if ids else 0]
    losses, weights = train(lambda m: DataParallel(m, ids), first, batch)
    for expected, other in (train(alone, first, batch), train(alone, "cpu", batch)):
        assert losses == pytest.approx(expected, abs=1e-5)
        for one, two in zip(weights, other, strict=True):
            assert one.device == one.grad.device == first
            close(one, two)
            close(one.grad, two.grad)


def test_equal_bits_in_a_second_run_and_in_a_thread(gpus):
    expected, results = train(DataParallel, gpus[0], 13), []

    def work(number):
        with torch.cuda.device(number):
            results.append(train(DataParallel, gpus[0], 13))
            assert torch.cuda.current_device() == number

    work(1)
    thread = threading.Thread(target=work, args=(2,))
    thread.start()
    thread.join()
    assert len(results) == 2 and torch.cuda.current_device() == 0
    for losses, weights in results:
        assert losses == expected[0]
        for one, other in zip(weights, expected[1], strict=True):
            assert torch.equal(one, other) and torch.equal(one.grad, other.grad)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(9, 4), nn.Linear(4, 9, bias=False)
        self.head.weight = self.words.weight
        self.frozen = nn.Linear(4, 4).requires_grad_(False)

    def forward(self, x):
        assert self.head.weight is self.words.weight
        return self.head(self.frozen(self.words(x)))


def tied_and_frozen(wrap, device):
    model = Tied().to(device)
    wrap(model)((torch.arange(10) % 9).to(device)).square().mean().backward()
    assert model.frozen.weight.grad is None and model.head.weight is model.words.weight
    return [model.words.weight.grad]


def sparse_gradients(wrap, device):
    table = nn.Embedding(9, 4, sparse=True).to(device)
    wrap(table)((torch.arange(10) % 7).to(device)).square().sum().backward()
    gradient = table.weight.grad
    assert gradient.is_sparse and gradient._values().device == gradient._indices().device == table.weight.device
    torch.optim.SparseAdam(list(table.parameters())).step()
    return [gradient.to_dense(), table.weight]


class Turn(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.complex(torch.ones(3), torch.arange(3.0)))
        self.bias = nn.Parameter(torch.ones(3, dtype=torch.float64))
        self.empty = nn.Parameter(torch.ones(0, 2))

    def forward(self, x):
        return (x * self.weight).abs() + self.bias + self.empty.sum()


def several_dtypes_and_no_elements(wrap, device):
    model = Turn().to(device)
    wrap(model)(draw(6, 3).to(device)).square().mean().backward()
    return [p.grad for p in model.parameters()]


def recurrent(wrap, device):
    model = nn.LSTM(3, 4, batch_first=True).to(device)
    out, (hidden, _) = wrap(model)(draw(6, 5, 3).to(device))
    out.square().sum().backward()
    # Hidden states have the batch in dimension 1, and are gathered in 0: a known trap.
    assert hidden.shape == ((1, 6, 4) if wrap is alone else (3, 2, 4))
    return [out, *(p.grad for p in model.parameters())]


def gradient_penalty(wrap, device):
    model = net(device)
    x = draw(8, 3, 8, 8).to(device).requires_grad_()
    (slope,) = torch.autograd.grad(wrap(model)(x).sum(), x, create_graph=True)
    slope.square().sum().backward()
    # Nothing depends on the last bias; Broadcast hands zeros back for it.
    return [torch.zeros(5, device=device) if p.grad is None else p.grad for p in model.parameters()]


@pytest.mark.parametrize(
    "run", [tied_and_frozen, sparse_gradients, several_dtypes_and_no_elements, recurrent, gradient_penalty]
)
def test_results_and_gradients_equal_the_cpus(gpus, run):
    torch.manual_seed(0)
    found = run(DataParallel, "cuda:0")
    torch.manual_seed(0)
    for one, other in zip(found, run(alone, "cpu"), strict=True):
        assert one.device == gpus[0] and one.dtype == other.dtype
        close(one, other)


# ---- which GPU gets what -------------------------------------------------------------------------------------------

PIECES = {
    "all": (None, 10, [(0, 3), (1, 3), (2, 3), (3, 1)]),
    "too few for the last": (None, 6, [(0, 2), (1, 2), (2, 2)]),
    "another order": ([2, 0, 1], 10, [(2, 4), (0, 4), (1, 2)]),
    "devices": ([torch.device("cuda", 1), "cuda:0"], 10, [(1, 5), (0, 5)]),
    "one": ([2], 10, [(2, 10)]),
}


@pytest.mark.parametrize("name", PIECES)
def test_which_gpu_gets_how_many_samples(gpus, name):
    ids, samples, expected = PIECES[name]
    module = Where().to(gpus[expected[0][0]])
    out = DataParallel(module, ids)(draw(samples, 2))
    assert module.seen == expected
    assert out.device == gpus[expected[0][0]]
    same(out, draw(samples, 2))


OUTPUTS = {"index": (1, "cuda:1"), "text": ("cuda:2", "cuda:2"), "device": (torch.device("cuda:3"), "cuda:3"),
           "first": (None, "cuda:0"), "cpu": (-1, "cpu")}  # fmt: skip


@pytest.mark.parametrize("name", OUTPUTS)
def test_output_device(gpus, name):
    output_device, expected = OUTPUTS[name]
    weights = Where().cuda()
    if expected == "cpu":  # DataParallel itself takes a GPU only; the function and gather take the CPU
        out = data_parallel(weights, draw(9, 2), range(4), output_device)
    else:
        out = DataParallel(weights, output_device=output_device)(draw(9, 2))
    assert str(out.device) == expected
    same(out, draw(9, 2))
    out.sum().backward()
    assert weights.weight.grad.device == gpus[0]
    close(weights.weight.grad, draw(9, 2).sum()[None])


def test_another_dimension_and_inputs_on_any_device():
    for place in ("cpu", "cuda:2"):
        x = draw(5, 7, 2).to(place).requires_grad_()
        out = DataParallel(Calls(lambda part: part.cumsum(0)), dim=1)(x)
        same(out, x.cumsum(0))
        out.sum().backward()
        assert str(x.grad.device) == place
        same(x.grad, torch.arange(5.0, 0, -1)[:, None, None].expand(5, 7, 2))


# ---- arguments and results of every shape --------------------------------------------------------------------------


def nested(pair, *rest, table, label=None, **more):
    assert type(pair) is Pair and label == "x" and more == {"none": None}
    assert pair.left.device == pair.right[0].device == table["a"][0].device == rest[0].device
    return {"tuple": (rest[0] + pair.left, pair), "list": [table["a"][0] * 2], "none": None}


@pytest.mark.parametrize("as_function", [False, True])
def test_nested_arguments_and_results(gpus, as_function):
    x = draw(8, 3)
    given, named = (Pair(x, [x + 1]), x * 2), {"table": {"a": [x * 3]}, "label": "x", "none": None}
    if as_function:
        out = data_parallel(Calls(nested), given, range(4), module_kwargs=named)
    else:
        out = DataParallel(Calls(nested), range(4))(*given, **named)
    total, pair = out["tuple"]
    assert type(pair) is Pair and out["none"] is None
    for one, other in zip([total, *pair.right, *out["list"]], [x * 3, x + 1, x * 6], strict=True):
        assert one.device == gpus[0]
        same(one, other)


def test_no_arguments_and_scalars_as_results(gpus):
    out = DataParallel(Calls(lambda: torch.ones(2, device="cuda")))()
    assert out.device == gpus[0] and out.tolist() == [1, 1]
    x = draw(8, 2).requires_grad_()
    with pytest.warns(UserWarning, match="Was asked to gather along dimension 0, but all input tensors were scalars"):
        out = DataParallel(Calls(torch.mean))(x)
    assert out.shape == (4,) and out.device == gpus[0]
    out.mean().backward()
    close(x.grad, torch.full((8, 2), 1 / 16))


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_evaluation_without_gradients(context):
    model, x, seen = net(), draw(9, 3, 8, 8), []
    model.eval()
    model[4].register_forward_hook(lambda m, args, out: seen.append((torch.is_grad_enabled(), m.training)))
    with context():
        out = DataParallel(model)(x)
    assert not out.requires_grad and seen == [(False, False)] * 3
    close(out, model(x.cuda()))


def test_buffers_come_from_the_first_gpu(gpus):
    norm, x = nn.BatchNorm1d(3).to(gpus[1]), draw(8, 3)
    expected = nn.BatchNorm1d(3)
    expected(x[:4])  # the running statistics of the replicas on other GPUs are lost, as on real ones
    out = DataParallel(norm, [1, 2])(x)
    close(norm.running_mean, expected.running_mean)
    close(norm.running_var, expected.running_var)
    assert norm.num_batches_tracked == 1 and norm.running_mean.device == gpus[1]
    close(out, torch.cat([nn.BatchNorm1d(3)(half) for half in x.split(4)]))


# ---- errors --------------------------------------------------------------------------------------------------------


def fails_on_gpu_1(x):
    if x.get_device() == 1:
        raise ValueError("no such word")
    return x


def test_an_exception_in_a_replica():
    with pytest.raises(ValueError) as caught:
        DataParallel(Calls(fails_on_gpu_1))(draw(8, 2))
    assert str(caught.value).startswith("Caught ValueError in replica 1 on device 1.\nOriginal Traceback")
    assert str(caught.value).rstrip().endswith("ValueError: no such word")
    assert torch.cuda.current_device() == 0 and torch.is_grad_enabled()
    same(DataParallel(nn.Identity())(draw(8, 2)), draw(8, 2))


WRONG = {
    "on the CPU": (lambda: DataParallel(nn.Linear(2, 2)), "on device cuda:0 .* but found one of them on device: cpu"),
    "no such GPU": (lambda: DataParallel(nn.Linear(2, 2).cuda(), [0, 4]), "nvalid device"),
    # PyTorch has no check of its own: the inner wrapper, replicated to GPU 1, wants its parameters on GPU 0.
    "wrapped twice": (lambda: DataParallel(DataParallel(nn.Linear(2, 2).cuda())),
                      "Caught RuntimeError in replica 1 on device 1."),
    "a tensor of the CPU": (lambda: DataParallel(Calls(lambda x: x + torch.zeros(2))),
                            "Caught RuntimeError in replica 0 on device 0.(?s:.*)at least two devices"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_pytorch_refuses(name):
    make, message = WRONG[name]
    with pytest.raises((RuntimeError, AssertionError, ValueError), match=message):
        make()(draw(4, 2))


# ---- the functions below -------------------------------------------------------------------------------------------


def test_replicate(gpus):
    model = net()
    first, second = replicate(model, [0, 2])
    for layer, name in ((0, "weight"), (1, "weight"), (4, "bias")):
        one, other = getattr(first[layer], name), getattr(second[layer], name)
        assert (one.device, other.device) == (gpus[0], gpus[2])
        assert one.data_ptr() == getattr(model[layer], name).data_ptr()
        same(one, other)
    (second[4].weight.sum().to(gpus[0]) * 3 + first[4].weight.sum()).backward()
    assert model[4].weight.grad.device == gpus[0]
    same(model[4].weight.grad, torch.full((5, 8 * 36), 4.0))
    detached = replicate(model, [0, 1], detach=True)
    assert detached[1][4].weight.device == gpus[1] and not detached[1][4].weight.requires_grad


def test_scatter_and_gather(gpus):
    x = draw(7, 2).requires_grad_()
    pieces = scatter(x, [1, 3, 0])
    assert [p.device for p in pieces] == [gpus[1], gpus[3], gpus[0]] and [len(p) for p in pieces] == [3, 3, 1]
    there = x.to(gpus[0])
    assert scatter(there, [0, 1])[0].data_ptr() == there.data_ptr()
    assert scatter({"a": x, "b": 3}, [0, 1])[1]["b"] == 3
    for target in (2, gpus[2], "cuda:2", -1, "cpu"):
        whole = gather(pieces, target)
        assert str(whole.device) == ("cpu" if target in (-1, "cpu") else "cuda:2")
        same(whole, x)
    with pytest.raises(ValueError, match="Expected a non cpu device, but got: cpu"):
        gather(pieces, torch.device("cpu"))  # PyTorch takes -1 and "cpu", but not this
    gather([p * (i + 1) for i, p in enumerate(pieces)], 2).sum().backward()
    assert x.grad.device.type == "cpu" and x.grad[:, 0].tolist() == [1, 1, 1, 2, 2, 2, 3]
    assert gather([{"a": p} for p in pieces], 0)["a"].device == gpus[0]


def test_parallel_apply(gpus):
    seen = []

    def ask(x, power=1):
        seen.append(torch.cuda.current_device())
        return x**power

    x = [torch.full((2,), 2.0, device=gpu) for gpu in (gpus[3], gpus[1])]
    out = parallel_apply([Calls(ask), Calls(ask)], x, [{"power": 2}, {}], gpus[3:0:-2])
    assert seen == [3, 1] and [o.device for o in out] == [gpus[3], gpus[1]] and out[0].tolist() == [4, 4]
    assert torch.cuda.current_device() == 0


def test_communication_functions(gpus):
    x = draw(3, 2).to(gpus[1])
    copies = comm.broadcast(x, [1, 0, 2])
    assert [c.device for c in copies] == [gpus[1], gpus[0], gpus[2]] and copies[0] is x
    assert all(torch.equal(c.cpu(), x.cpu()) for c in copies)
    total = comm.reduce_add(list(copies), destination=2)
    assert total.device == gpus[2]
    close(total, 3 * x)
    lists = comm.broadcast_coalesced([x, x[0] * 2], [1, 3])
    assert [t.device for t in lists[1]] == [gpus[3]] * 2
    same(lists[1][1], x[0] * 2)
    sums = comm.reduce_add_coalesced([[x, x + 1], [c.to(gpus[2]) for c in (x, x)]], destination=1)
    assert [t.device for t in sums] == [gpus[1]] * 2
    close(sums[1], 2 * x + 1)
    halves = comm.scatter(x, [0, 3], chunk_sizes=[1, 2])
    assert [len(h) for h in halves] == [1, 2]
    same(comm.gather(halves, destination=2), x)
    out = [torch.empty(3, 2, device=gpu) for gpu in gpus[:2]]
    comm.gather(halves, out=out[0])
    same(out[0], x)
    on_cpu = draw(3, 2, seed=2)
    comm.scatter(on_cpu, out=[out[0][:1], out[1][1:]], streams=[torch.cuda.Stream(0), None])
    same(torch.cat([out[0][:1].cpu(), out[1][1:].cpu()]), on_cpu)
    assert comm.broadcast(x, out=out)[0] is out[0]


def test_communication_functions_refuse_what_cuda_refuses(gpus):
    on_cpu, x = draw(3, 2), draw(3, 2).to(gpus[1])
    out = [torch.empty(3, 2, device=gpu) for gpu in gpus[:2]]
    refused = {
        "Exactly one of 'devices' and 'out'": lambda: comm.broadcast(x, [0], out=out),
        "output tensor at index 1 has device 'cpu'": lambda: comm.broadcast(x, out=[out[0], on_cpu]),
        r"source tensor \[3, 2\], but output tensor at index 0 has shape \[2, 2\]": lambda: comm.broadcast(
            x, out=[out[0][1:]]
        ),
        "All tensors must be on devices\\[0\\]: 0": lambda: comm.broadcast_coalesced([x], [0, 1]),
        "'devices' must not be specified when 'out'": lambda: comm.scatter(x, [0, 1], out=out),
        "at least one device to scatter to": lambda: comm.scatter(x, []),
        "len\\(devices\\) = 2 and len\\(chunk_sizes\\) = 1": lambda: comm.scatter(x, [0, 1], [3]),
        "at least one output tensor to scatter to": lambda: comm.scatter(x, out=[]),
        "index 0 has incorrect shape: \\[3, 1\\]": lambda: comm.scatter(x, out=[out[0][:, :1], out[1]]),
        "Expected 3, but got total size 6": lambda: comm.scatter(x, out=out),
        "the stream at index 0 \\(was 1\\)": lambda: comm.scatter(on_cpu, [0], streams=[torch.cuda.Stream(1)]),
        "at least one tensor to gather from": lambda: comm.gather([]),
        "tensor at index 1 has device cpu": lambda: comm.gather([x, on_cpu]),
        "same number of dimensions": lambda: comm.gather([x, x[0]]),
        "index 1 has invalid shape \\[3, 1\\], but expected \\[3, 2\\]": lambda: comm.gather([x, x[:, :1]]),
        "'destination' must not be specified": lambda: comm.gather([x], out=out[0], destination=0),
        "to have shape \\[6, 2\\], but got \\[3, 2\\]": lambda: comm.gather([x, x], out=out[0]),
    }
    for words, call in refused.items():
        with pytest.raises(RuntimeError, match=words):
            call()


# ---- memory and random numbers -------------------------------------------------------------------------------------


def test_memory_is_given_back(gpus):
    gc.collect()
    before = [torch.cuda.memory_allocated(gpu) for gpu in gpus]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        losses, weights = train(DataParallel, gpus[0])
    assert torch.cuda.memory_allocated(0) > before[0]
    peaks = [torch.cuda.max_memory_allocated(gpu) for gpu in gpus]
    assert peaks[0] > max(peaks[1:]) and min(peaks) > sum(weight.nbytes for weight in weights)  # a replica at least
    del losses, weights
    gc.collect()
    assert [torch.cuda.memory_allocated(gpu) for gpu in gpus] == before


def test_every_replica_draws_from_its_own_gpu():
    torch.manual_seed(0)
    model = DataParallel(nn.Dropout(0.5))
    first = model(torch.ones(4, 100)).cpu()
    assert torch.equal(first[0], first[1]), "all GPUs begin with the same seed, as real ones do"
    second = model(torch.ones(4, 100)).cpu()
    assert not torch.equal(first, second)
    torch.manual_seed(0)
    assert torch.equal(model(torch.ones(4, 100)).cpu(), first)
