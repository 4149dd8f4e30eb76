"""LSTM, GRU and RNN on virtual GPUs: the CPU's numbers and gradients, and the memory that a real H200's cuDNN took."""

import contextlib
import gc
import io
import json
import warnings
from pathlib import Path

import pytest
import torch
from pairwise import pairwise, product, title
from torch import nn
from torch.nn.utils import rnn
from torch.utils.checkpoint import checkpoint
from virtual_gpus import virtual_gpus
from virtual_gpus.machine import active
from virtual_gpus.ops.rnn.sizes import (
    Network,
    dropout_state_bytes,
    is_small,
    reserve_bytes,
    weight_offsets,
    workspace_bytes,
)

MEASURED = json.loads((Path(__file__).parent / "data" / "h200" / "operator_memory.json").read_text())
MIB = 1 << 20


@pytest.fixture
def gpus():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with virtual_gpus(2, memory="16 GiB") as devices:
        yield devices


def draw(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def same(one, other):
    """Equal up to the rounding of a sum in another order."""
    torch.testing.assert_close(one.detach().cpu(), other.detach().cpu(), atol=1e-6, rtol=1e-5)


def run(make, device, x, states=None, use=lambda out: out):
    """(everything that came out, all gradients) of one training step on `device`."""
    torch.manual_seed(0)
    net = make()
    net = net.to(device)
    x = x.clone().to(device).requires_grad_()
    states = None if states is None else [s.clone().to(device).requires_grad_() for s in states]
    torch.manual_seed(4)  # for dropout: the weights were drawn on the CPU
    given = () if states is None else (tuple(states) if isinstance(net, nn.LSTM) else states[0],)
    out, last = net(x, *given)
    last = last if isinstance(last, tuple) else (last,)
    use_all = [out, *last]
    sum((part * draw(*part.shape, seed=5).to(device)).sum() for part in use(use_all)).backward()
    used = [] if states is None else [s.grad for s in states][: len(last)]
    return use_all, [x.grad, *used, *(p.grad for p in net.parameters())]


# ---- numbers -------------------------------------------------------------------------------------------------------

KINDS = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn": nn.RNN, "relu": lambda *a, **k: nn.RNN(*a, nonlinearity="relu", **k)}


CASES = product(
    kind=KINDS,
    options=[{}, {"num_layers": 2, "batch_first": True}, {"bidirectional": True}, {"num_layers": 2, "bias": False},
             {"num_layers": 3, "bidirectional": True, "batch_first": True}],
    with_states=[True, False],
)  # fmt: skip


@pytest.mark.parametrize("case", pairwise(CASES), ids=title)
def test_numbers_and_gradients_are_those_of_the_cpu(gpus, case):
    kind, options, with_states = case.values()

    def make():
        return KINDS[kind](5, 6, **options)

    count = options.get("num_layers", 1) * (2 if options.get("bidirectional") else 1)
    x = draw(4, 3, 5)
    batch = 4 if options.get("batch_first") else 3
    states = [draw(count, batch, 6, seed=2), draw(count, batch, 6, seed=3)] if with_states else None
    for use in (lambda out: out, lambda out: out[:1], lambda out: out[1:]):
        found, expected = run(make, gpus[1], x, states, use), run(make, "cpu", x, states, use)
        for one, other in zip([*found[0], *found[1]], [*expected[0], *expected[1]], strict=True):
            assert one.device == gpus[1] and one.shape == other.shape
            same(one, other)


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize("bias", [True, False])
def test_projections(gpus, bias):
    def make():
        return nn.LSTM(5, 6, 2, proj_size=4, bidirectional=True, bias=bias)

    expected = run(make, "cpu", draw(4, 3, 5))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nor is the CPU's warning about them a GPU's
        found = run(make, gpus[0], draw(4, 3, 5))
    for one, other in zip([*found[0], *found[1]], [*expected[0], *expected[1]], strict=True):
        same(one, other)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes(gpus, dtype):
    def make():
        return nn.GRU(5, 6, 2).to(dtype)

    found, expected = run(make, gpus[0], draw(4, 3, 5).to(dtype)), run(make, "cpu", draw(4, 3, 5).to(dtype))
    for one, other in zip([*found[0], *found[1]], [*expected[0], *expected[1]], strict=True):
        assert one.dtype == dtype
        torch.testing.assert_close(
            one.detach().cpu(), other.detach(), atol=2e-2 if dtype != torch.float64 else 0, rtol=0
        )


@pytest.mark.parametrize("kind", ["lstm", "gru", "rnn"])
def test_packed_sequences_take_no_padded_copies(gpus, kind):
    def step(device):
        torch.manual_seed(0)
        net, x = KINDS[kind](5, 64, 2).to(device), draw(9, 4, 5).to(device).requires_grad_()
        torch.cuda.reset_peak_memory_stats()
        out, _ = net(rnn.pack_padded_sequence(x, torch.tensor([9, 9, 9, 9])))
        rnn.pad_packed_sequence(out)[0].square().sum().backward()
        return [out.data, x.grad, *(p.grad for p in net.parameters())]

    for one, other in zip(step(gpus[0]), step("cpu"), strict=True):
        same(one, other)
    shape = ({"lstm": "LSTM", "gru": "GRU", "rnn": "RNN"}[kind], 2, 1, 9, 4, 5, 64, 64, 4)
    assert workspace_bytes(Network(*shape, packed=True), False) < workspace_bytes(Network(*shape), False)


def test_without_gradients_and_in_evaluation(gpus):
    net, x = nn.LSTM(5, 6, 2, dropout=0.5).cuda(), draw(4, 3, 5).cuda()
    host = nn.LSTM(5, 6, 2)
    host.load_state_dict(net.state_dict())
    net.eval()
    with torch.no_grad():
        out = net(x)[0]
        assert not out.requires_grad
    same(out, host(x.cpu())[0])
    with torch.inference_mode():
        same(net(x)[0], host(x.cpu())[0])
    out = net(x)[0]
    with pytest.raises(RuntimeError, match="cudnn RNN backward can only be called in training mode"):
        out.sum().backward()


def test_dropout_draws_from_the_gpu_and_is_the_same_in_backward(gpus):
    def make():
        return nn.LSTM(5, 6, 3, dropout=0.5)

    host = torch.get_rng_state()
    net = make().cuda()
    x = draw(4, 3, 5).cuda()
    torch.set_rng_state(host)
    torch.manual_seed(3)
    first = net(x)[0]
    assert not torch.equal(first, net(x)[0])
    torch.manual_seed(3)
    assert torch.equal(first, net(x)[0])
    found, expected = run(make, gpus[1], draw(4, 3, 5)), run(make, "cpu", draw(4, 3, 5))
    for one, other in zip([*found[0], *found[1]], [*expected[0], *expected[1]], strict=True):
        same(one, other)


def test_the_layout_is_time_first(gpus):
    """So that what follows a batch_first net copies, as on a real GPU."""
    out = nn.GRU(5, 6, batch_first=True).cuda()(draw(2, 3, 5).cuda())[0]
    assert out.shape == (2, 3, 6) and out.stride() == (6, 12, 1)


# ---- what autograd may ask -------------------------------------------------------------------------------------------


def test_a_second_backward_pass(gpus):
    net, x = nn.LSTM(5, 6).cuda(), draw(4, 3, 5).cuda()
    out = net(x)[0].sum()
    out.backward(retain_graph=True)
    once = [p.grad.clone() for p in net.parameters()]
    out.backward()
    for one, p in zip(once, net.parameters(), strict=True):
        same(2 * one, p.grad)
    with pytest.raises(RuntimeError, match="Trying to backward through the graph a second time"):
        out.backward()


def test_double_backward_is_refused_in_cudnn_s_words(gpus):
    net, x = nn.GRU(5, 6).cuda(), draw(4, 3, 5).cuda().requires_grad_()
    (gradient,) = torch.autograd.grad(net(x)[0].square().sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="Double backwards is not supported for CuDNN RNNs"):
        gradient.square().sum().backward()
    with torch.backends.cudnn.flags(enabled=False):
        (gradient,) = torch.autograd.grad(net(x)[0].square().sum(), x, create_graph=True)
    gradient.square().sum().backward()
    assert x.grad is not None


def test_only_the_gradients_that_are_asked_for(gpus):
    net, x = nn.LSTM(5, 6).cuda(), draw(4, 3, 5).cuda().requires_grad_()
    net.weight_hh_l0.requires_grad_(False)
    found = torch.autograd.grad(net(x)[0].sum(), [x, net.bias_ih_l0])
    assert [g.shape for g in found] == [x.shape, net.bias_ih_l0.shape]
    net(x)[0].sum().backward()
    assert net.weight_hh_l0.grad is None and net.weight_ih_l0.grad is not None
    net.requires_grad_(False)
    (net(x)[0] * 2).sum().backward()
    assert x.grad.device == gpus[0]


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_frees_the_reserve(gpus, reentrant):
    def step(wrap, device):
        torch.manual_seed(0)
        net, x = nn.LSTM(64, 256, 2, dropout=0.3).to(device), draw(20, 16, 64).to(device).requires_grad_()
        if device != "cpu":
            net(x)  # makes the dropout state
            gc.collect()
        torch.manual_seed(1)
        before = torch.cuda.memory_allocated()
        out = wrap(net)(x)
        held = torch.cuda.memory_allocated() - before
        out.sum().backward()
        return held, [out, x.grad, *(p.grad for p in net.parameters())]

    def checkpointed(net):
        return lambda x: checkpoint(lambda x: net(x)[0], x, use_reentrant=reentrant)

    plain, expected = step(lambda net: lambda x: net(x)[0], gpus[0])
    held, found = step(checkpointed, gpus[0])
    for one, other in zip(found, expected, strict=True):
        same(one, other)
    reserve = reserve_bytes(Network("LSTM", 2, 1, 20, 16, 64, 256, 256, 4, dropout=True))
    assert plain - held >= reserve and held < reserve / 4


def test_saved_tensors_on_the_cpu(gpus):
    """The reserve leaves the GPU and comes back as another tensor; the gradients, and the dropout, stay the same."""

    def step(context):
        torch.manual_seed(0)
        net, x = nn.LSTM(16, 64, 2, dropout=0.5).cuda(), draw(20, 8, 16).cuda().requires_grad_()
        before = torch.cuda.memory_allocated()
        with context:
            out = net(x)[0]
        held = torch.cuda.memory_allocated() - before
        out.sum().backward()
        return held, [out, x.grad, *(p.grad for p in net.parameters())]

    step(contextlib.nullcontext())
    plain, expected = step(contextlib.nullcontext())
    held, found = step(torch.autograd.graph.save_on_cpu())
    assert plain - held > reserve_bytes(Network("LSTM", 2, 1, 20, 8, 16, 64, 64, 4)) / 2
    for one, other in zip(found, expected, strict=True):
        same(one, other)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*is deprecated")
def test_torch_func_and_scripts_keep_working(gpus):
    net, x = nn.GRU(3, 4).cuda(), draw(2, 2, 3).cuda()
    weights = dict(net.named_parameters())

    def loss(weights):
        return torch.func.functional_call(net, weights, (x,))[0].sum()

    gradients = torch.func.grad(loss)(weights)
    loss(weights).backward()
    for name, parameter in net.named_parameters():
        same(gradients[name], parameter.grad)
    script = torch.jit.script(nn.Sequential(net))
    same(script(x)[0], net(x)[0])


def test_autocast_runs_in_half_precision(gpus):
    net, x = nn.LSTM(8, 16, batch_first=True).cuda(), draw(4, 3, 8).cuda()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        out = net(x)[0]
    assert out.dtype == torch.float16  # cuDNN's autocast knows no other
    out.float().sum().backward()
    host = nn.LSTM(8, 16, batch_first=True)
    host.load_state_dict({k: v.cpu() for k, v in net.state_dict().items()})
    expected = host(x.cpu())[0]
    expected.sum().backward()
    torch.testing.assert_close(out.float().cpu(), expected, atol=2e-3, rtol=2e-2)
    for p, q in zip(net.parameters(), host.parameters(), strict=True):
        assert p.grad.dtype == torch.float32
        torch.testing.assert_close(p.grad.cpu(), q.grad, atol=2e-2, rtol=2e-2)


# ---- weights in one buffer -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shapes_only", [True, False])
def test_weights_move_into_one_buffer(shapes_only):
    with virtual_gpus(1, shapes_only=shapes_only):
        net = nn.LSTM(256, 512, 2).cuda()
        total = sum(p.numel() for p in net.parameters()) * 4
        assert torch.cuda.memory_allocated() == total == 14712832
        assert len({p.untyped_storage()._cdata for p in net.parameters()}) == 1
        net(torch.zeros(2, 1, 256, device="cuda"))[0].sum().backward()
        assert len({p.grad.untyped_storage()._cdata for p in net.parameters()}) == 1
        if shapes_only:
            return
        again = nn.LSTM(256, 512, 2)
        again.load_state_dict(net.state_dict())
        same(again.weight_hh_l1, net.weight_hh_l1)
        file = io.BytesIO()
        torch.save(net.state_dict(), file)
        file.seek(0)
        same(torch.load(file)["bias_hh_l1"], net.bias_hh_l1)


def test_a_weight_that_left_the_buffer(gpus):
    net, x = nn.GRU(5, 6).cuda(), draw(4, 3, 5).cuda()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        before = net(x)[0]
    net.weight_ih_l0.data = net.weight_ih_l0.detach().clone()
    with pytest.warns(UserWarning, match="not part of single contiguous chunk of memory"):
        out = net(x)[0]
    same(out, before)
    out.sum().backward()
    net.flatten_parameters()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        same(net(x)[0], before)


def test_data_parallel(gpus):
    def step(device):
        torch.manual_seed(0)
        net = nn.LSTM(5, 6, 2, batch_first=True).to(device)
        x = draw(6, 4, 5).to(device)
        out, _ = (nn.DataParallel(net) if device != "cpu" else net)(x)
        out.square().sum().backward()
        return [out, *(p.grad for p in net.parameters())]

    for one, other in zip(step("cuda:0"), step("cpu"), strict=True):
        same(one, other)


# ---- errors --------------------------------------------------------------------------------------------------------


def test_mixtures_of_devices_and_dtypes(gpus):
    net, x = nn.LSTM(5, 6).cuda(), draw(4, 3, 5)
    text = "parameter tensors are not at the same device, found input tensor at cpu and parameter tensor at cuda:0"
    with pytest.raises(RuntimeError, match=text):
        net(x)
    with pytest.raises(RuntimeError, match="found input tensor at cuda:1 and parameter tensor at cuda:0"):
        net(x.to(gpus[1]))
    with pytest.raises(RuntimeError, match="found input tensor at cuda:0 and hidden tensor at cpu"):
        net(x.cuda(), (torch.zeros(1, 3, 6), torch.zeros(1, 3, 6)))
    with pytest.raises(RuntimeError, match="found input tensor with Float and hidden tensor with Double"):
        net(x.cuda(), (torch.zeros(1, 3, 6).double().cuda(), torch.zeros(1, 3, 6).cuda()))
    with pytest.raises(RuntimeError, match="rnn: hx is not contiguous"):
        net(x.cuda(), (torch.zeros(1, 6, 3).cuda().transpose(1, 2), torch.zeros(1, 3, 6).cuda()))
    with pytest.raises(TypeError):
        torch.lstm(x.cuda())


@pytest.mark.parametrize("shapes_only", [True, False])
def test_out_of_memory_inside(shapes_only):
    with virtual_gpus(1, memory="60 MiB", shapes_only=shapes_only):
        net, x = nn.LSTM(64, 256).cuda(), torch.zeros(100, 32, 64, device="cuda")
        before = torch.cuda.memory_allocated()
        with pytest.raises(torch.OutOfMemoryError):
            net(x)
        gc.collect()
        assert torch.cuda.memory_allocated() == before
        assert net(x[:10])[0].shape == (10, 32, 256)


def test_backward_after_the_gpus_have_gone():
    with virtual_gpus(1):
        net = nn.LSTM(5, 6).cuda()
        out = net(draw(4, 3, 5).cuda())[0].sum()
    out.backward()
    assert all(p.grad is not None and p.grad.device.type == "cpu" for p in net.parameters())
    same(net(draw(4, 3, 5))[0].sum(), out)


def test_nothing_stays_changed():
    before = (
        torch.lstm,
        torch._VF.lstm,
        torch._VF.gru,
        nn.RNNBase.flatten_parameters,
        torch.backends.cudnn.is_acceptable,
    )
    with virtual_gpus(1):
        assert torch._VF.lstm is not before[1]
    after = torch.lstm, torch._VF.lstm, torch._VF.gru, nn.RNNBase.flatten_parameters, torch.backends.cudnn.is_acceptable
    assert after == before and "lstm" not in vars(torch._VF)
    assert nn.LSTM(5, 6)(draw(4, 3, 5))[0].shape == (4, 3, 6)


# ---- memory ----------------------------------------------------------------------------------------------------------

CASES = {
    "lstm_2x512": (lambda: nn.LSTM(256, 512, 2, batch_first=True), (32, 64, 256)),
    "lstm_bi": (lambda: nn.LSTM(128, 256, 1, bidirectional=True), (64, 32, 128)),
    "gru_1x256": (lambda: nn.GRU(128, 256, 1, batch_first=True), (64, 80, 128)),
    "rnn_tanh": (lambda: nn.RNN(128, 256, 2, batch_first=True), (64, 80, 128)),
    "lstm_dropout": (lambda: nn.LSTM(256, 256, 3, batch_first=True, dropout=0.2), (32, 64, 256)),
}


@pytest.mark.parametrize("shapes_only", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_memory_as_measured(name, shapes_only):
    """Two steps: what forward keeps and takes, what backward keeps and takes. All exact but one guessed workspace."""
    make, shape = CASES[name]
    with virtual_gpus(1, kind="H200", shapes_only=shapes_only):
        net = make().cuda()
        x = torch.zeros(shape, device="cuda", requires_grad=True)
        assert torch.cuda.memory_allocated() == MEASURED[name]["inputs"]
        for expected in MEASURED[name]["steps"]:
            torch.cuda.reset_peak_memory_stats()
            out = net(x)[0]
            found = {"after_forward": torch.cuda.memory_allocated(), "peak_forward": torch.cuda.max_memory_allocated()}
            torch.cuda.reset_peak_memory_stats()
            out.sum().backward()
            found["after_backward"] = torch.cuda.memory_allocated()
            found["peak_backward"] = torch.cuda.max_memory_allocated()
            del out
            found["after_del"] = torch.cuda.memory_allocated()
            for key, value in found.items():
                allowed = 0.02 * expected["peak_backward"] if name == "rnn_tanh" and "peak" in key else 0
                assert abs(value - expected[key]) <= allowed, key


def test_a_retained_graph_gets_a_clone_of_the_reserve(gpus):
    net, x = nn.LSTM(64, 256).cuda(), torch.zeros(50, 16, 64, device="cuda")
    peaks = []
    for retain in (False, True):
        out = net(x)[0].sum()
        torch.cuda.reset_peak_memory_stats()
        out.backward(retain_graph=retain)
        peaks.append(torch.cuda.max_memory_allocated())
        del out
        net.zero_grad()
    reserve = reserve_bytes(Network("LSTM", 1, 1, 50, 16, 64, 256, 256, 4))
    assert abs(peaks[1] - peaks[0] - reserve) < 512


def test_evaluation_keeps_no_reserve(gpus):
    net, x = nn.LSTM(64, 256).cuda(), torch.zeros(50, 16, 64, device="cuda")

    def peak():
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        with torch.no_grad():
            out = net(x)[0]
        assert torch.cuda.memory_allocated() == before + out.numel() * 4
        return torch.cuda.max_memory_allocated() - before

    training = peak()
    net.eval()
    assert peak() < training - reserve_bytes(Network("LSTM", 1, 1, 50, 16, 64, 256, 256, 4)) / 2


def test_dropout_state_is_kept_per_gpu(gpus):
    net, x = nn.LSTM(5, 6, 2, dropout=0.5).cuda(), draw(4, 3, 5).cuda()
    before = torch.cuda.memory_allocated()
    net(x)
    processors = active().gpus[0].spec.multi_processor_count
    gc.collect()
    assert torch.cuda.memory_allocated() - before == dropout_state_bytes(processors)
    net(x)
    torch.cuda.empty_cache()
    assert torch.cuda.memory_allocated() - before == dropout_state_bytes(processors)


# ---- sizes alone -----------------------------------------------------------------------------------------------------


def test_published_sizes_of_the_reserve():
    """Four layers of 320, 25,000 steps, as somebody printed them with cuDNN 6; newer versions add 256 bytes."""
    for cell, expected in (("LSTM", 736_000_000), ("GRU", 864_000_000)):
        assert reserve_bytes(Network(cell, 4, 1, 250, 100, 123, 320, 320, 4)) == expected + 256


def test_sizes_of_weights():
    for make, net in (
        (nn.LSTM(5, 6, 2, bidirectional=True, proj_size=4), Network("LSTM", 2, 2, 1, 1, 5, 6, 4, 4)),
        (nn.GRU(5, 6, 3), Network("GRU", 3, 1, 1, 1, 5, 6, 6, 4)),
        (nn.RNN(5, 6), Network("RNN", 1, 1, 1, 1, 5, 6, 6, 4)),
    ):
        offsets, total = weight_offsets(net, True)
        weights = make._flat_weights
        assert total == sum(w.numel() for w in weights)
        spans = sorted((at, at + w.numel()) for at, w in zip(offsets, weights, strict=True))
        assert spans[0][0] == 0 and all(a[1] == b[0] for a, b in zip(spans, spans[1:], strict=False))


def test_algorithm_for_small_hidden_sizes():
    def small(cell, hidden, backward=False, **changes):
        shape = {"layers": 1, "directions": 1, "time": 4, "batch": 4, "input": 8, "itemsize": 4}
        return is_small(Network(cell, hidden=hidden, **{"output": hidden, **shape, **changes}), backward, (9, 0))

    assert small("LSTM", 192) and not small("LSTM", 193) and not small("LSTM", 129, backward=True)
    assert small("RNN", 384) and not small("RNN", 257, backward=True)
    assert not small("LSTM", 64, packed=True) and not small("GRU", 64, itemsize=8) and not small("LSTM", 64, output=32)
