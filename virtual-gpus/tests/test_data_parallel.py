"""nn.DataParallel and the functions below it, unmodified PyTorch, on virtual GPUs."""

import collections
import threading
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DataParallel, data_parallel, gather, parallel_apply, replicate, scatter
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


def net(device="cuda:0"):
    torch.manual_seed(0)
    layers = (
        nn.Conv2d(3, 8, 3),
        nn.GroupNorm(2, 8),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(8 * 36, 5),
    )
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


@pytest.mark.parametrize("batch", [1, 2, 3, 5, 7, 8, 13])
@pytest.mark.parametrize("ids", [None, [0, 2], [1], [3, 1, 0]], ids=str)
def test_training_equals_one_gpu_and_the_cpu(gpus, ids, batch):
    first = gpus[ids[0] if ids else 0]
    losses, weights = train(lambda m: DataParallel(m, ids), first, batch)
    for expected, other in (train(lambda m: m, first, batch), train(lambda m: m, "cpu", batch)):
        assert losses == pytest.approx(expected, abs=1e-5)
        for one, two in zip(weights, other, strict=True):
            assert one.device == one.grad.device == first
            close(one, two)
            close(one.grad, two.grad)


def test_two_runs_give_equal_bits(gpus):
    (one, weights), (other, again) = (train(DataParallel, gpus[0], 13) for _ in range(2))
    assert one == other
    for a, b in zip(weights, again, strict=True):
        assert torch.equal(a, b) and torch.equal(a.grad, b.grad)


def test_a_thread_of_its_own(gpus):
    results = {}

    def work(number):
        with torch.cuda.device(number):
            assert torch.cuda.current_device() == number
            results[number] = train(DataParallel, gpus[0])[0]
            assert torch.cuda.current_device() == number

    threads = [threading.Thread(target=work, args=(number,)) for number in (1, 2)]
    for thread in threads:  # one after the other: torch.manual_seed is the whole process's
        thread.start()
        thread.join()
    assert results[1] == results[2] == train(DataParallel, gpus[0])[0] and torch.cuda.current_device() == 0


# ---- which GPU gets what -------------------------------------------------------------------------------------------

IDS = {
    "all": (None, [(0, 3), (1, 3), (2, 3), (3, 1)]),
    "two": ([1, 3], [(1, 5), (3, 5)]),
    "another order": ([2, 0, 1], [(2, 4), (0, 4), (1, 2)]),
    "devices": ([torch.device("cuda", 1), torch.device("cuda:0")], [(1, 5), (0, 5)]),
    "text": (["cuda:3", "cuda:2"], [(3, 5), (2, 5)]),
    "one": ([2], [(2, 10)]),
    "range": (range(2), [(0, 5), (1, 5)]),
}


@pytest.mark.parametrize("name", IDS)
def test_device_ids(gpus, name):
    ids, expected = IDS[name]
    module = Where().to(gpus[expected[0][0]])
    out = DataParallel(module, ids)(draw(10, 2))
    assert module.seen == expected
    assert out.device == gpus[expected[0][0]]
    same(out, draw(10, 2))


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


def test_another_dimension(gpus):
    class Sum(nn.Module):
        def forward(self, x):
            assert x.shape[0] == 5
            return x.cumsum(0)

    x = draw(5, 7, 2).requires_grad_()
    out = DataParallel(Sum(), dim=1)(x)
    same(out, x.cumsum(0))
    out.sum().backward()
    assert x.grad.device.type == "cpu"
    same(x.grad, torch.arange(5.0, 0, -1)[:, None, None].expand(5, 7, 2))


def test_inputs_on_any_device(gpus):
    for place in ("cpu", *gpus):
        x = draw(6, 2).to(place).requires_grad_()
        DataParallel(Where().cuda())(x).square().sum().backward()
        assert x.grad.device == x.device
        close(x.grad, 2 * x)


def test_one_gpu_takes_the_short_way(gpus):
    module = Where().to(gpus[2])
    wrapped = DataParallel(module, [2])
    with torch.cuda.device(2):
        same(wrapped(draw(3, 2)), draw(3, 2))
    assert module.seen == [(2, 3)]


# ---- arguments and results of every shape --------------------------------------------------------------------------


class Nested(nn.Module):
    def forward(self, pair, *rest, table, label=None, **more):
        assert type(pair) is Pair and label == "x" and more == {"none": None, "number": 3}
        assert pair.left.device == pair.right[0].device == table["a"][0].device == rest[0].device
        shared = rest[0] + pair.left
        return {
            "tuple": (shared, pair),
            "list": [table["a"][0] * 2],
            "one": pair.right[0].sum(1),
            "none": None,
        }


def test_nested_arguments_and_results(gpus):
    x = draw(8, 3)
    module = DataParallel(Nested(), range(4))
    out = module(Pair(x, [x + 1]), x * 2, table={"a": [x * 3]}, label="x", none=None, number=3)
    same(out["tuple"][0], x * 3)
    assert type(out["tuple"][1]) is Pair
    same(out["tuple"][1].left, x)
    same(out["tuple"][1].right[0], x + 1)
    same(out["list"][0], x * 6)
    same(out["one"], (x + 1).sum(1))
    assert out["none"] is None
    assert {t.device for t in (out["tuple"][0], out["list"][0], out["one"], out["tuple"][1].left)} == {gpus[0]}


def test_only_keyword_arguments(gpus):
    class Keywords(nn.Module):
        def forward(self, *, x, scale=1):
            return x * scale

    same(DataParallel(Keywords())(x=draw(6, 2), scale=3), draw(6, 2) * 3)


def test_no_argument_at_all(gpus):
    class Nothing(nn.Module):
        def forward(self):
            return torch.ones(2, device="cuda")

    out = DataParallel(Nothing())()
    assert out.device == gpus[0] and out.tolist() == [1, 1]


def test_a_module_without_parameters(gpus):
    seen = []

    class Double(nn.Module):
        def forward(self, x):
            seen.append(x.get_device())
            return 2 * x

    same(DataParallel(Double())(draw(5, 2)), draw(5, 2) * 2)
    assert seen == [0, 1, 2]  # 5 samples in pieces of 2: the fourth GPU gets none


@pytest.mark.parametrize("samples, pieces", [(1, [1]), (2, [1, 1]), (3, [1, 1, 1]), (6, [2, 2, 2]), (7, [2, 2, 2, 1])])
def test_uneven_and_too_small_batches(gpus, samples, pieces):
    module = Where().cuda()
    out = DataParallel(module)(draw(samples, 2))
    assert module.seen == list(enumerate(pieces)) and out.shape == (samples, 2)


def test_scalars_are_gathered_with_a_warning(gpus):
    class Loss(nn.Module):
        def forward(self, x):
            return x.mean()

    x = draw(8, 2).requires_grad_()
    with pytest.warns(UserWarning, match="Was asked to gather along dimension 0, but all input tensors were scalars"):
        out = DataParallel(Loss())(x)
    assert out.shape == (4,) and out.device == gpus[0]
    close(out, x.view(4, -1).mean(1))
    out.mean().backward()
    close(x.grad, torch.full((8, 2), 1 / 16))


def test_evaluation_without_gradients(gpus):
    model, x = net(), draw(9, 3, 8, 8)
    model.eval()
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            out = DataParallel(model)(x)
        assert not out.requires_grad
        close(out, model(x.cuda()))
    seen = []

    class Asks(nn.Module):
        def forward(self, x):
            seen.append((torch.is_grad_enabled(), self.training))
            return x

    with torch.no_grad():
        DataParallel(Asks()).eval()(draw(4, 1))
    assert seen == [(False, False)] * 4


# ---- parameters and buffers ----------------------------------------------------------------------------------------


def test_buffers_come_from_the_first_gpu(gpus):
    norm, x = nn.BatchNorm1d(3).to(gpus[1]), draw(8, 3)
    expected = nn.BatchNorm1d(3)
    expected(x[:4])  # the running statistics of the replicas on other GPUs are lost, as on real ones
    out = DataParallel(norm, [1, 2])(x)
    close(norm.running_mean, expected.running_mean)
    close(norm.running_var, expected.running_var)
    assert norm.num_batches_tracked == 1 and norm.running_mean.device == gpus[1]
    close(out, torch.cat([nn.BatchNorm1d(3)(half) for half in x.split(4)]))


def test_tied_and_frozen_parameters(gpus):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.words, self.head = nn.Embedding(9, 4), nn.Linear(4, 9, bias=False)
            self.head.weight = self.words.weight
            self.frozen = nn.Linear(4, 4).requires_grad_(False)

        def forward(self, x):
            assert self.head.weight is self.words.weight
            return self.head(self.frozen(self.words(x)))

    def run(wrap, device):
        model = Tied().to(device)
        wrap(model)((torch.arange(10) % 9).to(device)).square().mean().backward()
        assert model.frozen.weight.grad is None and model.head.weight is model.words.weight
        return model.words.weight.grad

    close(run(DataParallel, "cuda:0"), run(lambda m: m, "cpu"))


def test_sparse_embedding_gradients(gpus):
    def run(wrap, device):
        torch.manual_seed(0)
        table = nn.Embedding(9, 4, sparse=True).to(device)
        wrap(table)((torch.arange(10) % 7).to(device)).square().sum().backward()
        gradient = table.weight.grad
        assert gradient.is_sparse and gradient.device == table.weight.device
        assert gradient._values().device == gradient._indices().device == table.weight.device
        optimizer = torch.optim.SparseAdam(list(table.parameters()))
        optimizer.step()
        return gradient.to_dense(), table.weight

    for one, other in zip(run(DataParallel, "cuda:0"), run(lambda m: m, "cpu"), strict=True):
        close(one, other)


def test_complex_parameters(gpus):
    class Turn(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.complex(torch.ones(3), torch.arange(3.0)))
            self.bias = nn.Parameter(torch.ones(3))

        def forward(self, x):
            return (x * self.weight).abs() + self.bias

    def run(wrap, device):
        model = Turn().to(device)
        wrap(model)(draw(6, 3).to(device)).square().mean().backward()
        assert model.weight.grad.device == model.weight.device and model.weight.grad.is_complex()
        return model.weight.grad, model.bias.grad

    for one, other in zip(run(DataParallel, "cuda:0"), run(lambda m: m, "cpu"), strict=True):
        close(one, other)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_parameters_of_several_dtypes(gpus, dtype):
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2).to(dtype)).cuda()
    model[0].register_forward_hook(lambda m, args, out: out.to(dtype))
    DataParallel(model)(draw(4, 3)).sum().backward()
    assert [p.grad.dtype for p in model.parameters()] == [torch.float32] * 2 + [dtype] * 2


def test_recurrent_nets(gpus):
    def run(wrap, device):
        torch.manual_seed(0)
        model = nn.LSTM(3, 4, batch_first=True).to(device)
        out, (hidden, _) = wrap(model)(draw(6, 5, 3).to(device))
        out.square().sum().backward()
        return out, [p.grad for p in model.parameters()], hidden.shape

    (out, gradients, shape), (expected, other, _) = run(DataParallel, "cuda:0"), run(lambda m: m, "cpu")
    close(out, expected)
    assert shape == (
        3,
        2,
        4,
    )  # hidden states have the batch in dimension 1, and are gathered in 0: a known trap
    for one, two in zip(gradients, other, strict=True):
        close(one, two)


def test_state_dict_keys(gpus):
    wrapped = DataParallel(nn.Linear(3, 2).cuda())
    assert list(wrapped.state_dict()) == ["module.weight", "module.bias"]
    assert {v.device for v in wrapped.state_dict().values()} == {gpus[0]}
    wrapped.load_state_dict({f"module.{k}": v for k, v in nn.Linear(3, 2).state_dict().items()})
    nn.Linear(3, 2).load_state_dict(wrapped.module.state_dict())


def test_double_backward_and_gradient_penalty(gpus):
    def run(wrap, device):
        model = net(device)
        x = draw(8, 3, 8, 8).to(device).requires_grad_()
        (slope,) = torch.autograd.grad(wrap(model)(x).sum(), x, create_graph=True)
        slope.square().sum().backward()
        return [p.grad for p in model.parameters()]

    for one, other in zip(run(DataParallel, "cuda:0"), run(lambda m: m, "cpu"), strict=True):
        assert one.device == gpus[0]
        close(one, torch.zeros(5) if other is None else other)  # the last bias: Broadcast hands zeros back for it


# ---- errors --------------------------------------------------------------------------------------------------------


class Fails(nn.Module):
    def forward(self, x):
        if x.get_device() == 1:
            raise ValueError("no such word")
        return x


def test_an_exception_in_a_replica(gpus):
    with pytest.raises(ValueError) as caught:
        DataParallel(Fails())(draw(8, 2))
    assert str(caught.value).startswith("Caught ValueError in replica 1 on device 1.\nOriginal Traceback")
    assert str(caught.value).rstrip().endswith("ValueError: no such word")
    assert torch.cuda.current_device() == 0 and torch.is_grad_enabled()
    same(DataParallel(nn.Identity())(draw(8, 2)), draw(8, 2))


def test_module_on_the_wrong_device(gpus):
    message = r"module must have its parameters and buffers on device {} \(device_ids\[0\]\) but found one of them on "
    message += "device: {}"
    for place, ids, found in (("cpu", None, "cpu"), ("cuda:1", None, "cuda:1"), ("cuda:0", [1, 0], "cuda:0")):
        with pytest.raises(RuntimeError, match=message.format(f"cuda:{ids[0] if ids else 0}", found)):
            DataParallel(nn.Linear(2, 2).to(place), ids)(draw(4, 2))
    with pytest.raises(RuntimeError, match=message.format("cuda:0", "cuda:1")):
        data_parallel(nn.Linear(2, 2).to("cuda:1"), draw(4, 2), [0, 1])


def test_bad_device_ids(gpus):
    with pytest.raises((RuntimeError, AssertionError), match="invalid device ordinal|Invalid device id"):
        DataParallel(nn.Linear(2, 2).cuda(), [0, 4])(draw(4, 2))
    with pytest.raises(ValueError, match="Expected a cuda device|Expected a non cpu device|cuda"):
        DataParallel(nn.Linear(2, 2).cuda(), ["cpu", 0])(draw(4, 2))


def test_wrapped_twice(gpus):
    """PyTorch has no check of its own: the inner wrapper, replicated to GPU 1, wants its parameters on GPU 0."""
    twice = DataParallel(DataParallel(nn.Linear(2, 2).cuda()))
    with pytest.raises(RuntimeError, match="Caught RuntimeError in replica 1 on device 1."):
        twice(draw(4, 2))


def test_a_tensor_made_on_the_cpu_in_forward(gpus):
    class Mixes(nn.Module):
        def forward(self, x):
            return x + torch.zeros(2)

    with pytest.raises(RuntimeError, match="Caught RuntimeError in replica 0 on device 0.(?s:.*)at least two devices"):
        DataParallel(Mixes())(draw(4, 2))


def test_results_of_different_shapes(gpus):
    class Grows(nn.Module):
        def forward(self, x):
            return x.new_zeros(len(x), 1 + x.get_device())

    with pytest.raises(
        RuntimeError, match=r"Input tensor at index 1 has invalid shape \[1, 2\], but expected \[1, 1\]"
    ):
        DataParallel(Grows())(draw(2, 2))


# ---- the functions below -------------------------------------------------------------------------------------------


def test_replicate(gpus):
    model = net()
    first, second = replicate(model, [0, 2])
    for layer, name in ((0, "weight"), (0, "bias"), (1, "weight"), (4, "weight"), (4, "bias")):
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


def test_scatter_shares_what_is_there_already(gpus):
    x = draw(4, 2).to(gpus[0])
    before = torch.cuda.memory_allocated(0)
    first, second = scatter(x, [0, 1])
    assert first.data_ptr() == x.data_ptr() and torch.cuda.memory_allocated(0) == before
    assert torch.cuda.memory_allocated(1) > 0
    same(second, x[2:])


def test_parallel_apply(gpus):
    seen = []

    class Ask(nn.Module):
        def forward(self, x, power=1):
            seen.append(torch.cuda.current_device())
            return x**power

    x = [torch.full((2,), 2.0, device=gpu) for gpu in (gpus[3], gpus[1])]
    out = parallel_apply([Ask(), Ask()], x, [{"power": 2}, {}], gpus[3:0:-2])
    assert seen == [3, 1] and [o.device for o in out] == [gpus[3], gpus[1]] and out[0].tolist() == [4, 4]
    assert torch.cuda.current_device() == 0


def test_data_parallel_as_a_function(gpus):
    module = Where().to(gpus[1])
    same(data_parallel(module, draw(5, 2), [1, 2]), draw(5, 2))
    assert module.seen == [(1, 3), (2, 2)]
    same(data_parallel(Where().cuda(), draw(4, 2), [0], output_device=0), draw(4, 2))
    same(data_parallel(Nested(), (Pair(draw(4, 3), [draw(4, 3)]), draw(4, 3)), [0, 1], module_kwargs={
        "table": {"a": [draw(4, 3)]}, "label": "x", "none": None, "number": 3})["one"], draw(4, 3).sum(1))  # fmt: skip


def test_a_parameter_without_elements(gpus):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.empty = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(0, 2))

        def forward(self, x):
            return (x * self.weight).sum(1) + self.empty.sum()

    wrapped = DataParallel(Net().cuda())
    wrapped(draw(4, 3)).sum().backward()
    assert [(p.grad.shape, p.grad.device) for p in wrapped.parameters()] == [((3,), gpus[0]), ((0, 2), gpus[0])]


def test_communication_functions(gpus):
    from torch.nn.parallel import comm

    x = draw(3, 2).to(gpus[1])
    copies = comm.broadcast(x, [1, 0, 2])
    assert [c.device for c in copies] == [gpus[1], gpus[0], gpus[2]]
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
    whole = comm.gather(halves, destination=2)
    same(whole, x)
    out = torch.empty(3, 2, device=gpus[0])
    comm.gather(halves, out=out)
    same(out, x)


def test_communication_functions_refuse_what_cuda_refuses(gpus):
    from torch.nn.parallel import comm

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
    comm.scatter(on_cpu, out=[out[0][:1], out[1][1:]], streams=[torch.cuda.Stream(0), None])
    same(torch.cat([out[0][:1].cpu(), out[1][1:].cpu()]), on_cpu)
    assert comm.broadcast(x, [0, 1])[1] is x and comm.broadcast(x, out=out)[0] is out[0]


# ---- memory and random numbers -------------------------------------------------------------------------------------


def test_memory_is_given_back(gpus):
    import gc

    gc.collect()
    before = [torch.cuda.memory_allocated(gpu) for gpu in gpus]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        losses, weights = train(DataParallel, gpus[0])
    assert torch.cuda.memory_allocated(0) > before[0]
    del losses, weights
    gc.collect()
    assert [torch.cuda.memory_allocated(gpu) for gpu in gpus] == before


def test_the_first_gpu_carries_most(gpus):
    """Parameters, gradients and outputs stay on GPU 0; the other GPUs hold a replica while it is needed."""
    model = nn.Linear(512, 512).cuda()
    out = DataParallel(model)(draw(64, 512))
    out.sum().backward()
    assert all(torch.cuda.max_memory_allocated(gpu) >= 2**20 for gpu in gpus)
    assert torch.cuda.max_memory_allocated(0) > max(torch.cuda.max_memory_allocated(gpu) for gpu in gpus[1:])
    del out
    assert torch.cuda.memory_allocated(0) > 2 * 2**20 and torch.cuda.memory_allocated(3) < 2**20


def test_every_replica_draws_from_its_own_gpu(gpus):
    torch.manual_seed(0)
    model = DataParallel(nn.Dropout(0.5))
    first = model(torch.ones(4, 100)).cpu()
    assert torch.equal(first[0], first[1]), "all GPUs begin with the same seed, as real ones do"
    second = model(torch.ones(4, 100)).cpu()
    assert not torch.equal(first, second)
    torch.manual_seed(0)
    assert torch.equal(model(torch.ones(4, 100)).cpu(), first)
