"""LSTM, GRU and RNN on virtual GPUs: the CPU's numbers and gradients, and cuDNN's memory."""

import warnings
from functools import partial

import pytest
import torch
from measuring import bytes_of, draw, peak_of
from pairwise import pairwise, product, title
from torch import nn
from torch.nn.utils import rnn
from virtual_gpus import active_machine, virtual_gpus
from virtual_gpus.features.rnn.sizes import Network, is_small, reserve_bytes, workspace_bytes

GPUS = {"count": 2, "memory": "16 GiB"}
same = partial(torch.testing.assert_close, check_device=False, atol=1e-6, rtol=1e-5)  # a sum in another order


def run(make, device, x, states=None, use=slice(None)):
    """Everything that came out, then all gradients, of one training step on `device` whose loss is of out[use]."""
    torch.manual_seed(0)
    net, x = make().to(device), x.clone().to(device).requires_grad_()
    states = [s.clone().to(device).requires_grad_() for s in states or ()]
    torch.manual_seed(4)  # for dropout: the weights were drawn on the CPU
    given = () if not states else (tuple(states) if isinstance(net, nn.LSTM) else states[0],)
    out, last = net(x, *given)
    last = last if isinstance(last, tuple) else (last,)
    outputs = [out, *last]
    sum((part * draw(*part.shape, seed=5).to(device)).sum() for part in outputs[use]).backward()
    return [*outputs, x.grad, *[s.grad for s in states][: len(last)], *(p.grad for p in net.parameters())]


KINDS = {
    "lstm": nn.LSTM,
    "gru": nn.GRU,
    "rnn": nn.RNN,
    "relu": partial(nn.RNN, nonlinearity="relu"),
    "projected": partial(nn.LSTM, proj_size=4),
    "float64": partial(nn.GRU, dtype=torch.float64),
    "bfloat16": partial(nn.GRU, dtype=torch.bfloat16),
}
CASES = product(
    kind=KINDS,
    options=[{}, {"num_layers": 2, "batch_first": True}, {"bidirectional": True}, {"num_layers": 2, "bias": False},
             {"num_layers": 3, "dropout": 0.5},
             {"num_layers": 3, "bidirectional": True, "batch_first": True}],
    with_states=[True, False],
)  # fmt: skip


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize("case", pairwise(CASES), ids=title)
def test_numbers_and_gradients_are_those_of_the_cpu(gpus, case):
    kind, options, with_states = case.values()
    make = partial(KINDS[kind], 5, 6, **options)
    count = options.get("num_layers", 1) * (2 if options.get("bidirectional") else 1)
    dtype = {"float64": torch.float64, "bfloat16": torch.bfloat16}.get(kind, torch.float32)
    x, batch = draw(4, 3, 5).to(dtype), 4 if options.get("batch_first") else 3
    states = [draw(count, batch, 4 if kind == "projected" else 6), draw(count, batch, 6, seed=3)]
    states = [state.to(dtype) for state in states]
    close = {torch.float64: {"atol": 0, "rtol": 0}, torch.bfloat16: {"atol": 2e-2, "rtol": 0}}.get(dtype, {})
    for use in (slice(1), slice(1, None)):
        expected = run(make, "cpu", x, states if with_states else None, use)
        with warnings.catch_warnings(action="error"):  # what the CPU warns of is not a GPU's warning
            found = run(make, gpus[1], x, states if with_states else None, use)
        assert all(one.device == gpus[1] for one in found)
        same(found, expected, **close)
    if batch == 4:  # time comes first, so that what follows copies, as on a real GPU
        assert found[0].transpose(0, 1).is_contiguous()


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_packed_sequences_take_no_padded_copies_and_no_values(gpus, kind):
    def step(device):
        torch.manual_seed(0)
        net, x = KINDS[kind](5, 64, 2).to(device), draw(9, 4, 5).to(device).requires_grad_()
        out, _ = net(rnn.pack_padded_sequence(x, [9, 7, 7, 2]))
        rnn.pad_packed_sequence(out)[0].square().sum().backward()
        return [out.data, x.grad, *(p.grad for p in net.parameters())]

    same(step(gpus[0]), step("cpu"))
    taken = []
    for shapes_only in (False, True):
        with virtual_gpus(1, shapes_only=shapes_only) as (gpu,):
            taken.append((bytes_of(lambda device=gpu: step(device))[1:], active_machine().clock.now))
    assert taken[0] == taken[1]
    shape = (kind.upper(), 2, 1, 9, 4, 5, 64, 64, 4)
    assert workspace_bytes(Network(*shape, packed=True), False) < workspace_bytes(Network(*shape), False)


def test_evaluation_keeps_no_reserve_and_a_retained_graph_gets_a_clone_of_it(gpus):
    net, x = nn.LSTM(64, 256, dropout=0.5, num_layers=2).cuda(), draw(50, 16, 64).cuda()
    host = nn.LSTM(64, 256, 2)
    host.load_state_dict(net.state_dict())
    with torch.no_grad():
        net(x)  # makes the dropout state
        training = peak_of(lambda: net(x))[1]
        net.eval()
        out, stayed, evaluation = bytes_of(lambda: net(x)[0])
    assert not out.requires_grad and stayed == out.nbytes
    assert evaluation < training - reserve_bytes(Network("LSTM", 2, 1, 50, 16, 64, 256, 256, 4))
    same(out, host(x.cpu())[0])
    with torch.inference_mode():
        same(net(x)[0], out)
    with pytest.raises(RuntimeError, match="cudnn RNN backward can only be called in training mode"):
        net(x)[0].sum().backward()
    net, x = nn.LSTM(64, 256).cuda(), torch.zeros(50, 16, 64, device="cuda")
    peaks = []
    for retain in (False, True):
        out = net(x)[0].sum()
        peaks.append(peak_of(lambda out=out, retain=retain: out.backward(retain_graph=retain))[1])
        del out
        net.zero_grad()
    assert abs(peaks[1] - peaks[0] - reserve_bytes(Network("LSTM", 1, 1, 50, 16, 64, 256, 256, 4))) < 512


def test_autocast_runs_in_half_precision(gpus):
    make, x = partial(nn.LSTM, 8, 16, batch_first=True), draw(4, 3, 8)
    expected = run(make, "cpu", x, use=slice(1))
    with torch.autocast("cuda", dtype=torch.bfloat16):
        found = run(make, gpus[1], x, use=slice(1))
    assert found[0].dtype == torch.float16  # cuDNN's autocast knows no other
    same(found[0].float(), expected[0], atol=2e-3, rtol=2e-2)
    same([part.float() for part in found], expected, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("shapes_only", [True, False])
def test_weights_move_into_one_buffer(shapes_only):
    with virtual_gpus(1, shapes_only=shapes_only):
        net = nn.LSTM(256, 512, 2).cuda()
        assert torch.cuda.memory_allocated() == sum(p.nbytes for p in net.parameters()) == 14712832
        assert len({p.untyped_storage()._cdata for p in net.parameters()}) == 1
        net(torch.zeros(2, 1, 256, device="cuda"))[0].sum().backward()
        assert len({p.grad.untyped_storage()._cdata for p in net.parameters()}) == 1


def test_a_weight_that_left_the_buffer(gpus):
    net, x = nn.GRU(5, 6).cuda(), draw(4, 3, 5).cuda()
    before = net(x)[0]
    net.weight_ih_l0.data = net.weight_ih_l0.detach().clone()
    with pytest.warns(UserWarning, match="not part of single contiguous chunk of memory"):
        out = net(x)[0]
    out.sum().backward()
    net.flatten_parameters()
    with warnings.catch_warnings(action="error"):
        same([out, net(x)[0]], [before, before])


def test_mixtures_of_devices_and_dtypes(gpus):
    net, x = nn.LSTM(5, 6).cuda(), draw(4, 3, 5)
    state = torch.zeros(1, 3, 6, device="cuda")
    for words, given in (
        ("input tensor at cpu and parameter tensor at cuda:0", (x,)),
        ("input tensor at cuda:1 and parameter tensor at cuda:0", (x.to(gpus[1]),)),
        ("input tensor at cuda:0 and hidden tensor at cpu", (x.cuda(), (state.cpu(), state.cpu()))),
        ("input tensor with Float and hidden tensor with Double", (x.cuda(), (state.double(), state))),
        ("rnn: hx is not contiguous", (x.cuda(), (torch.zeros(1, 6, 3).cuda().transpose(1, 2), state))),
    ):
        with pytest.raises(RuntimeError, match=words):
            net(*given)
    with pytest.raises(TypeError):
        torch.lstm(x.cuda())


def test_backward_after_the_gpus_have_gone():
    with virtual_gpus(1):
        net = nn.LSTM(5, 6).cuda()
        out = net(draw(4, 3, 5).cuda())[0].sum()
    out.backward()
    assert all(p.grad is not None and p.grad.device.type == "cpu" for p in net.parameters())
    same(net(draw(4, 3, 5))[0].sum(), out)


def test_published_sizes_of_the_reserve_and_the_algorithm_for_small_hidden_sizes():
    """Four layers of 320, 25,000 steps, as somebody printed them with cuDNN 6; newer versions add 256 bytes."""
    for cell, expected in (("LSTM", 736_000_000), ("GRU", 864_000_000)):
        assert reserve_bytes(Network(cell, 4, 1, 250, 100, 123, 320, 320, 4)) == expected + 256

    def small(cell, hidden, backward=False, **changes):
        shape = {"layers": 1, "directions": 1, "time": 4, "batch": 4, "input": 8, "itemsize": 4}
        return is_small(Network(cell, hidden=hidden, **{"output": hidden, **shape, **changes}), backward, (9, 0))

    assert small("LSTM", 192) and not small("LSTM", 193) and not small("LSTM", 129, backward=True)
    assert small("RNN", 384) and not small("RNN", 257, backward=True)
    assert not small("LSTM", 64, packed=True) and not small("GRU", 64, itemsize=8) and not small("LSTM", 64, output=32)
