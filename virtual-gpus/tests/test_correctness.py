"""The same program on the CPU and on virtual GPUs, compared number by number.

The kernels are the same, so most comparisons ask for equal bits. Optimizers are the exception: on a GPU they take the
foreach road, which rounds in another order (see test_optimizers.py).
"""

import copy
import io
import math

import pytest
import torch
import torch.nn.functional as F
from nets import PyramidNet, unfused_transformer
from torch import nn
from torch.nn.utils import parametrizations, parametrize, rnn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset
from torchvision.models import resnet
from virtual_gpus import virtual_gpus

pytestmark = pytest.mark.usefixtures("workspaces_given_back")


@pytest.fixture
def gpus():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with virtual_gpus(3, memory="16 GiB") as devices:
        yield devices


def draw(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def whole(top, *shape, seed=1):
    return torch.randint(0, top, shape, generator=torch.Generator().manual_seed(seed))


def same(one, other):
    """Equal bits, wherever the two are."""
    torch.testing.assert_close(one.detach().cpu(), other.detach().cpu(), atol=0, rtol=0, equal_nan=True)


def gradients_beside_parameters(model):
    found = [p for p in model.parameters() if p.grad is not None]
    return bool(found) and all(p.grad.device == p.device for p in found)


# ---- training steps ------------------------------------------------------------------------------------------------


class GPTBlock(nn.Module):
    def __init__(self, hidden, heads):
        super().__init__()
        self.heads = heads
        self.n1, self.n2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x):
        batch, length, hidden = x.shape
        shape = (batch, length, self.heads, hidden // self.heads)
        q, k, v = (t.view(shape).transpose(1, 2) for t in self.qkv(self.n1(x)).split(hidden, 2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, hidden))
        return x + self.down(F.gelu(self.up(self.n2(x))))


class GPT(nn.Module):
    def __init__(self, words=50, hidden=24, layers=2, heads=3, length=12):
        super().__init__()
        self.token, self.place = nn.Embedding(words, hidden), nn.Embedding(length, hidden)
        self.blocks = nn.Sequential(*(GPTBlock(hidden, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(hidden), nn.Linear(hidden, words, bias=False)

    def forward(self, tokens):
        x = self.token(tokens) + self.place(torch.arange(tokens.size(1), device=tokens.device))
        return self.head(self.norm(self.blocks(x)))


class Words(nn.Module):
    def __init__(self, kind, words=40, hidden=16):
        super().__init__()
        self.words = nn.Embedding(words, hidden)
        self.rnn = kind(hidden, hidden, 2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * hidden, words)

    def forward(self, x):
        return self.head(self.rnn(self.words(x))[0])


def mlp():
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 20), nn.Tanh(), nn.Linear(20, 7))


def norms():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.Conv2d(8, 8, 3, groups=2, stride=2),
        nn.GroupNorm(2, 8),
        nn.ConvTranspose2d(8, 4, 2),
        nn.InstanceNorm2d(4, affine=True),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.LazyLinear(12),
        nn.LayerNorm(12),
        nn.RMSNorm(12),
        nn.GELU(),
        nn.Linear(12, 7),
    )


def encoder():
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.Embedding(40, 16), nn.TransformerEncoder(layer, 2), nn.Linear(16, 40))


def images():
    return draw(4, 3, 16, 16), whole(7, 4)


def tokens():
    return whole(40, 3, 9), whole(40, 3, 9, seed=2)


CASES = {
    "mlp": (mlp, images),
    "norms": (norms, images),
    "resnet18": (lambda: resnet.resnet18(num_classes=7), images),
    "resnet34": (lambda: resnet.resnet34(num_classes=7), images),
    "pyramidnet": (lambda: PyramidNet(14, 12, classes=7), images),
    "unfused attention": (lambda: unfused_transformer(40, 16, 2, 2, 9), tokens),
    "gpt": (GPT, tokens),
    "lstm": (lambda: Words(nn.LSTM), tokens),
    "gru": (lambda: Words(nn.GRU), tokens),
    "rnn": (lambda: Words(nn.RNN), tokens),
    "encoder": (encoder, tokens),
}


def train(case, device, steps=3):
    """Losses of some steps, the gradients of the last one, and the weights and buffers after it."""
    build, data = CASES[case]
    torch.manual_seed(3)
    model = build()
    x, y = data()
    model(x)  # gives lazy layers their shape
    torch.manual_seed(4)
    model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, foreach=False)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        out = model(x.to(device))
        loss = F.cross_entropy(out.flatten(0, -2), y.to(device).flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert gradients_beside_parameters(model)
    return losses, [p.grad for p in model.parameters()], model.state_dict(), out


@pytest.mark.parametrize("case", CASES)
def test_training_equals_the_cpu_s_bit_for_bit(gpus, case):
    expected, found = train(case, "cpu"), train(case, gpus[1])
    assert found[0] == expected[0] and len(set(found[0])) > 1
    assert all(map(math.isfinite, found[0]))
    for one, other in zip(found[1], expected[1], strict=True):
        same(one, other)
    assert {t.device for t in [*found[1], *found[2].values(), found[3]]} == {gpus[1]}
    assert found[2].keys() == expected[2].keys()
    for name, value in found[2].items():
        same(value, expected[2][name])
    assert torch.cuda.memory_allocated(0) == torch.cuda.memory_allocated(2) == 0


def test_evaluation_of_batch_norm(gpus):
    torch.manual_seed(0)
    model = PyramidNet(8, 6, classes=7)
    model(images()[0])
    model.eval()
    with torch.inference_mode():
        expected, found = model(images()[0]), copy.deepcopy(model).to(gpus[2])(images()[0].to(gpus[2]))
    assert found.device == gpus[2] and found.is_inference()
    same(found, expected)


# ---- model parallelism by hand -------------------------------------------------------------------------------------


class TwoGPUs(nn.Module):
    """The first half on one device, the second half and a skip connection on another."""

    def __init__(self, first, second):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = first, second
        self.front = nn.Sequential(nn.Linear(6, 8), nn.Tanh()).to(first)
        self.back = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)).to(second)

    def forward(self, x):
        y = self.front(x.to(self.first))
        return self.back(y.to(self.second)).to(self.first) + y[:, :3]


@pytest.mark.parametrize("double", [False, True])
def test_model_parallelism_by_hand(gpus, double):
    def run(first, second):
        model, x = TwoGPUs(first, second), draw(5, 6).requires_grad_()
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            if double:  # a gradient penalty: the graph of the backward pass crosses the GPUs as well
                (slope,) = torch.autograd.grad(loss, x, create_graph=True)
                assert slope.device.type == "cpu"
                loss = loss + slope.square().sum().to(loss.device)
            loss.backward()
            optimizer.step()
        return model, loss, x.grad

    (one, loss_one, grad_one), (other, loss_other, grad_other) = run("cpu", "cpu"), run(*gpus[1:])
    same(loss_one, loss_other)
    same(grad_one, grad_other)
    assert grad_other.device.type == "cpu" and gradients_beside_parameters(other)
    assert {p.device for p in other.back.parameters()} == {gpus[2]}
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        same(a, b)
        same(a.grad, b.grad)


def test_every_gradient_comes_back_to_where_its_tensor_is(gpus):
    leaves = [draw(3, seed=i).to(device).requires_grad_() for i, device in enumerate(["cpu", *gpus])]
    seen = {}
    for number, leaf in enumerate(leaves):
        leaf.register_hook(lambda g, number=number: seen.update({number: g.device}))
        leaf.register_post_accumulate_grad_hook(lambda p, n=number: seen.update({(n, "grad"): p.grad.device}))
    total = sum((leaf.to(gpus[1]) * (i + 1)).to(gpus[0]) for i, leaf in enumerate(leaves))
    total.double().sum().cpu().backward()
    for number, leaf in enumerate(leaves):
        assert leaf.grad.device == leaf.device == seen[number] == seen[number, "grad"]
        assert leaf.grad.dtype == torch.float32
        same(leaf.grad, torch.full((3,), number + 1.0))


# ---- autograd ------------------------------------------------------------------------------------------------------


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        assert gradient.device == x.device
        return 3 * x**2 * gradient + torch.zeros(x.shape, device=x.device)


def test_custom_autograd_function_and_its_second_derivative(gpus):
    def run(device):
        x = draw(4).to(device).requires_grad_()
        (first,) = torch.autograd.grad(Cube.apply(x).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x)
        return first, second

    for one, other in zip(run(gpus[2]), run("cpu"), strict=True):
        assert one.device == gpus[2]
        same(one, other)


class Halves(torch.autograd.Function):
    """Two results, of which a program may use only one."""

    @staticmethod
    def forward(ctx, x):
        return x[:2] * 1, x[2:] * 1

    @staticmethod
    def backward(ctx, first, second):
        return torch.cat([first, second]) + torch.zeros(1, device=second.device)


@pytest.mark.parametrize("used", [0, 1])
def test_a_result_that_nobody_uses_has_a_gradient_of_zeros_on_the_gpu(gpus, used):
    x = draw(4).to(gpus[2]).requires_grad_()
    (Halves.apply(x)[used] * 3).sum().backward()
    assert x.grad.device == gpus[2] and x.grad.tolist() == ([3, 3, 0, 0], [0, 0, 3, 3])[used]


class NoGradient(torch.autograd.Function):
    """A function whose gradient is not defined, so that C++ makes zeros for the node before it."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return None


def test_zeros_for_a_function_are_where_its_result_was(gpus):
    seen = []

    class Pass(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            seen.append(gradient)
            return gradient

    x, on_cpu = draw(3).to(gpus[2]).requires_grad_(), draw(3).requires_grad_()
    for source in (x, on_cpu):
        NoGradient.apply(Pass.apply(source)).sum().backward()
    assert [gradient.device for gradient in (*seen, x.grad, on_cpu.grad)] == [gpus[2], on_cpu.device] * 2
    assert not x.grad.any() and not on_cpu.grad.any()


class Seen(torch.autograd.Function):
    """Notes where its backward pass runs."""

    places = []

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        device = torch.ones(1, device="cuda").device
        Seen.places.append((device, torch.cuda.current_stream(device)))
        return gradient


def test_a_backward_pass_runs_on_the_streams_and_the_gpu_of_the_forward_pass(gpus):
    Seen.places.clear()
    first, second, side = (torch.cuda.Stream(2) for _ in range(3))
    default = torch.cuda.default_stream(2)
    x = draw(3).to(gpus[2]).requires_grad_()
    Seen.apply(x).sum().backward()
    assert Seen.places == [(gpus[2], default)]
    with torch.cuda.stream(first):
        one = Seen.apply(x)
    with torch.cuda.stream(second):
        two = Seen.apply(x * 2)
    with torch.cuda.stream(side):
        torch.autograd.grad((Seen.apply(one) + two).sum(), x, retain_graph=True)
        Seen.apply(one.detach())
        assert torch.cuda.current_stream(2) == side
    assert [stream for _, stream in Seen.places[1:]] == [side, second, first]
    with torch.cuda.stream(first):
        Seen.apply(x) * 2
    loss = (Seen.apply(one) + two).sum()
    with torch.cuda.stream(side):
        loss.backward()
        assert side._mark() >= first._mark() and side._mark() >= default._mark()
    assert [stream for _, stream in Seen.places[4:]] == [default, second, first]
    assert torch.cuda.current_stream(2) == default and torch.cuda.current_device() == 0
    torch.cuda.set_stream(first)
    assert torch.cuda.current_device() == 2
    torch.cuda.set_stream(torch.cuda.default_stream(0))


def test_gradients_of_zeros_are_on_the_gpu_as_well(gpus):
    """PyTorch makes them in C++, where a virtual GPU's tensor looks like the CPU's."""
    x, on_cpu = draw(3).to(gpus[2]).requires_grad_(), draw(3).requires_grad_()

    for _ in range(2):  # the second pass adds to the first one's
        torch.copysign(x.detach(), x).sum().backward()
        torch.copysign(on_cpu.detach(), on_cpu).sum().backward()
    (other,) = torch.autograd.grad(torch.copysign(x.detach(), x).sum(), x)
    assert x.grad.device == other.device == gpus[2] and on_cpu.grad.device.type == "cpu"
    same(other, torch.zeros(3))
    torch.optim.SGD([x], lr=0.1).step()
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        on_cpu.grad + x


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(gpus, reentrant):
    def run(device, keep):
        torch.manual_seed(0)
        layers = [nn.Linear(5, 5).to(device) for _ in range(3)]
        x = draw(2, 5).to(device).requires_grad_()
        y = x
        for layer in layers:
            y = layer(y).tanh() if keep else checkpoint(lambda v, m=layer: m(v).tanh(), y, use_reentrant=reentrant)
        y.sum().backward()
        return [x.grad, *(p.grad for layer in layers for p in layer.parameters())]

    for one, other in zip(run(gpus[1], False), run("cpu", True), strict=True):
        assert one.device == gpus[1]
        same(one, other)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_draws_the_same_dropout_again(gpus, reentrant):
    x = torch.ones(1000, device=gpus[1], requires_grad=True)
    y = checkpoint(lambda v: F.dropout(v, 0.5), x, use_reentrant=reentrant)
    y.sum().backward()
    same(x.grad, y)  # both are twice the mask: of the forward pass, and of its second run in the backward pass


def test_saved_tensors_on_cpu(gpus):
    def run(device, offload):
        x = draw(6).to(device).requires_grad_()
        with torch.autograd.graph.save_on_cpu() if offload else torch.enable_grad():
            y = (x.exp() * x.sin()).sum()
        y.backward()
        return x.grad

    same(run(gpus[1], True), run("cpu", False))


def test_module_hooks_see_gpu_tensors(gpus):
    model, seen = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1)).to(gpus[1]), []
    model[0].register_forward_pre_hook(lambda m, args: seen.append(args[0].device))
    model[0].register_forward_hook(lambda m, args, out: out * 2)
    model[1].register_full_backward_hook(lambda m, into, out: seen.extend([into[0].device, out[0].device]))
    model(draw(2, 3).to(gpus[1])).sum().backward()
    assert seen == [gpus[1]] * 3


def test_in_place_operators_and_views_share_memory_on_the_gpu(gpus):
    def run(device):
        x = draw(4, 5).to(device).requires_grad_()
        y = x * 1
        y[:, 1:3].mul_(2)
        y.t()[0].add_(1)
        y[y > 0] = 0.5
        y[[0, 2]] -= 1
        z = y.unfold(1, 2, 2).permute(1, 0, 2).reshape(-1)
        (z.square().sum() + y.as_strided((3,), (2,)).sum()).backward()
        return y, x.grad

    for one, other in zip(run(gpus[1]), run("cpu"), strict=True):
        same(one, other)
    x = torch.zeros(4, device=gpus[1])
    assert x[1:].data_ptr() == x.data_ptr() + 4 and x.view(2, 2).device == gpus[1]
    before = torch.cuda.memory_allocated(1)
    views = [x[1:], x.view(2, 2), x.expand(3, 4), x.detach(), x.data]
    assert torch.cuda.memory_allocated(1) == before and {v.device for v in views} == {gpus[1]}


def test_gradients_of_another_device_are_refused_as_pytorch_does(gpus):
    parameter = nn.Parameter(torch.ones(3, device=gpus[1]))
    for elsewhere in ("cpu", gpus[0]):
        with pytest.raises(RuntimeError, match="assigned grad has data located on a different device"):
            parameter.grad = torch.ones(3, device=elsewhere)
    parameter.grad = torch.ones(3, device=gpus[1])
    assert parameter.grad.device == gpus[1]
    parameter.grad = None
    on_cpu = nn.Parameter(torch.ones(3))
    with pytest.raises(RuntimeError, match="assigned grad has data located on a different device"):
        on_cpu.grad = torch.ones(3, device=gpus[1])


def test_a_start_gradient_of_another_device_is_refused(gpus):
    y = torch.ones(3, device=gpus[1], requires_grad=True) * 2
    message = "invalid gradient at index 0 - expected device cuda:1 but got cpu"
    with pytest.raises(RuntimeError, match=message):
        y.backward(torch.ones(3))
    with pytest.raises(RuntimeError, match=message):
        torch.autograd.grad([y], [y], [torch.ones(3)])
    y.sum().backward(torch.tensor(3.0))  # a number may come from the CPU


# ---- torch.func ----------------------------------------------------------------------------------------------------


def per_sample_gradients(device):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)).to(device)
    weights = {name: p.detach() for name, p in net.named_parameters()}

    def loss(weights, x):
        return torch.func.functional_call(net, weights, (x,)).square().sum()

    return torch.func.vmap(torch.func.grad(loss), (None, 0))(weights, draw(5, 4).to(device))


def test_per_sample_gradients(gpus):
    expected, found = per_sample_gradients("cpu"), per_sample_gradients(gpus[2])
    assert {g.device for g in found.values()} == {gpus[2]}
    for name, gradient in found.items():
        same(gradient, expected[name])


def device_inside(x):
    return x + torch.ones(3, device=x.device) * x.device.index if x.is_cuda else x + 2 * torch.ones(3)


FUNCTIONAL = {
    "vmap": lambda x, d: torch.vmap(lambda row: (row.to(d) * 2).sum())(x),
    "vmap asks for the device": lambda x, d: torch.vmap(device_inside)(x.to(d)),
    "vmap, another dimension": lambda x, d: torch.vmap(lambda c: c.to(d).cumsum(0), in_dims=1, out_dims=1)(x),
    "grad": lambda x, d: torch.func.grad(lambda v: (v.to(d) ** 3).sum())(x),
    "grad of grad": lambda x, d: torch.func.grad(
        lambda v: torch.func.grad(lambda w: (w.to(d) ** 3).sum())(v).square().sum()
    )(x),
    "vmap of grad": lambda x, d: torch.vmap(torch.func.grad(lambda v: (v.to(d) ** 3).sum()))(x),
    "jacrev": lambda x, d: torch.func.jacrev(lambda v: v.to(d).exp())(x[0]),
    "jacfwd": lambda x, d: torch.func.jacfwd(lambda v: v.to(d).exp())(x[0]),
    "hessian": lambda x, d: torch.func.hessian(lambda v: v.to(d).exp().sum())(x[0]),
    "jvp": lambda x, d: torch.func.jvp(lambda v: v.to(d) ** 2, (x,), (torch.ones_like(x),))[1],
    "vmap of a loss": lambda x, d: torch.vmap(
        lambda row: nn.functional.cross_entropy(row.to(d), torch.ones((), device=d).long())
    )(x),
    "vmap of a cast": lambda x, d: torch.vmap(lambda row: row.to(d).to(torch.float64))(x),
    "hessian of a loss": lambda x, d: torch.func.hessian(
        lambda v: nn.functional.cross_entropy(v.to(d), torch.ones((), device=d).long(), label_smoothing=0.1)
    )(x[0]),
    "vjp": lambda x, d: torch.func.vjp(lambda v: v.to(d) ** 2, x)[1](torch.ones_like(x).to(d))[0],
    "autograd.functional": lambda x, d: torch.autograd.functional.jacobian(lambda v: v.to(d) ** 2, x[0]),
}
STAYS_ON_THE_CPU = ("grad", "grad of grad", "vmap of grad", "vjp")


@pytest.mark.parametrize("name", FUNCTIONAL)
def test_function_transforms(gpus, name):
    x = draw(4, 3)
    expected, found = FUNCTIONAL[name](x, "cpu"), FUNCTIONAL[name](x, gpus[2])
    if name in STAYS_ON_THE_CPU:
        assert found.device.type == "cpu"
    elif name.startswith(("vmap", "jvp", "jacfwd")):
        assert found.device == gpus[2]
    same(found, expected)


def test_transformer_encoder_packs_what_is_padded(gpus):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    net, x = nn.TransformerEncoder(layer, 2).eval(), draw(3, 5, 8)
    mask = torch.tensor([[0, 0, 0, 0, 1], [0, 0, 1, 1, 1], [0, 0, 0, 0, 0]]).bool()
    with torch.no_grad():
        expected = net(x, src_key_padding_mask=mask)
        net.to(gpus[1])
        before = torch.cuda.memory_allocated(1)
        found = net(x.to(gpus[1]), src_key_padding_mask=mask.to(gpus[1]))
    assert found.device == gpus[1] and not found[1, 2:].any()
    same(found, expected)
    del found
    assert torch.cuda.memory_allocated(1) == before


def test_forward_mode_across_devices(gpus):
    from torch.autograd import forward_ad

    with forward_ad.dual_level():
        x = forward_ad.make_dual(draw(3), torch.ones(3)).to(gpus[1])
        value, tangent = forward_ad.unpack_dual(x**2)
        assert value.device == tangent.device == gpus[1]
        same(tangent, 2 * draw(3))


# ---- dtypes and layouts --------------------------------------------------------------------------------------------

DTYPES = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
          torch.float64, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.uint16]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes_go_there_and_back(gpus, dtype):
    x = (draw(3, 4) * 5).abs().to(dtype)
    there = x.to(gpus[1])
    assert there.dtype == dtype and there.device == gpus[1]
    same(there.to(gpus[0]), x)
    assert there.to("cpu", torch.float32).dtype == torch.float32 or dtype.is_complex
    assert torch.zeros(2, dtype=dtype, device=gpus[2]).element_size() == dtype.itemsize


def test_integer_operators(gpus):
    def run(device):
        x = whole(100, 40).to(device)
        values, counts = x.unique(return_counts=True)
        return [values, counts, x.bincount(), x.sort().indices, x // 3, x % 7, x << 1, x.cumsum(0), x.nonzero(),
                F.one_hot(x % 5), x.topk(3).values, torch.searchsorted(values, x)]  # fmt: skip

    for one, other in zip(run(gpus[1]), run("cpu"), strict=True):
        assert one.device == gpus[1]
        same(one, other)


def test_complex_numbers(gpus):
    def run(device):
        z = torch.complex(draw(8), draw(8, seed=2)).to(device).requires_grad_()
        spectrum = torch.fft.ifft(torch.fft.fft(z) * z.conj())
        loss = spectrum.abs().square().sum() + torch.view_as_real(z).sum() + z.imag.prod()
        loss.backward()
        return loss, z.grad, z.grad.conj(), z.grad.imag, z.conj().imag

    for one, other in zip(run(gpus[1]), run("cpu"), strict=True):
        assert one.device == gpus[1]
        same(one, other)
    z = torch.complex(draw(3), draw(3, seed=2))
    for view in (z.conj(), z.conj().imag, z.imag, z.real):
        same(view.to(gpus[0]), view)
        same(view.to(gpus[0]).to(gpus[1]).to("cpu"), view)


def test_linear_algebra(gpus):
    def run(device):
        a = draw(4, 4).to(device).requires_grad_()
        b = a @ a.mT + torch.eye(4, device=device)
        results = [torch.linalg.inv(b), torch.linalg.cholesky(b), torch.linalg.det(b), torch.linalg.svdvals(b),
                   torch.linalg.solve(b, a), torch.einsum("ij,kj->ik", a, b), torch.linalg.eigvalsh(b)]  # fmt: skip
        sum(r.sum() for r in results).backward()
        return [*results, a.grad]

    for one, other in zip(run(gpus[1]), run("cpu"), strict=True):
        assert one.device == gpus[1]
        same(one, other)


def test_memory_formats(gpus):
    x = draw(2, 3, 4, 5).to(memory_format=torch.channels_last)
    there = x.to(gpus[1])
    assert there.is_contiguous(memory_format=torch.channels_last) and there.stride() == x.stride()
    assert there.contiguous().is_contiguous()
    back = there.contiguous().to("cpu", memory_format=torch.channels_last)
    assert back.is_contiguous(memory_format=torch.channels_last)
    model = nn.Conv2d(3, 2, 3).to(gpus[1], memory_format=torch.channels_last)
    assert model.weight.is_contiguous(memory_format=torch.channels_last) and model.weight.device == gpus[1]
    assert draw(3, 4).t().to(gpus[1]).stride() == draw(3, 4).t().stride()
    same(draw(3, 4).t()[1:].to(gpus[1]), draw(3, 4).t()[1:])


def test_tensor_subclasses_stay_what_they_are(gpus):
    class Labelled(torch.Tensor):
        pass

    x = draw(3).as_subclass(Labelled)
    there = x.to(gpus[1])
    assert type(there) is Labelled and there.device == gpus[1]
    assert type(x.cuda()) is type(there.cpu()) is type(there * 2) is Labelled
    assert type(nn.Parameter(draw(3)).to(gpus[1])) is torch.Tensor


# ---- sparse --------------------------------------------------------------------------------------------------------


def test_sparse_tensors(gpus):
    x = torch.sparse_coo_tensor(torch.tensor([[0, 1, 1], [2, 0, 2]]), torch.tensor([3.0, 4.0, 5.0]), (2, 3))
    there = x.to(gpus[1])
    assert there.device == there._values().device == there._indices().device == gpus[1] and there.is_sparse
    pairs = [
        (there.to_dense(), x.to_dense()),
        (torch.sparse.mm(there, draw(3, 2).to(gpus[1])), torch.sparse.mm(x, draw(3, 2))),
        (there.coalesce().values(), x.coalesce().values()),
    ]
    for one, other in pairs:
        assert one.device == gpus[1]
        same(one, other)
    made = torch.sparse_coo_tensor([[0], [1]], [2.0], (2, 2), device=gpus[2])
    assert made.device == gpus[2] and made.to(gpus[0]).device == gpus[0]
    rows = x.to_dense().to_sparse_csr()
    assert rows.to(gpus[1]).device == rows.to(gpus[1]).values().device == gpus[1]
    same((rows.to(gpus[1]) @ draw(3, 2).to(gpus[1])), rows @ draw(3, 2))
    with pytest.raises(RuntimeError):
        there @ draw(3, 2)


def sparse_embedding(device, make):
    torch.manual_seed(0)
    table = nn.Embedding(20, 4, sparse=True).to(device)
    optimizer = make(table.parameters())
    for seed in range(3):
        optimizer.zero_grad()
        table(whole(20, 6, seed=seed).to(device)).square().sum().backward()
        assert table.weight.grad.is_sparse and table.weight.grad.device == table.weight.device
        optimizer.step()
    return table.weight


SPARSE_OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD with momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "SparseAdam": lambda p: torch.optim.SparseAdam(list(p), lr=0.1),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
}


@pytest.mark.parametrize("name", SPARSE_OPTIMIZERS)
def test_sparse_embeddings(gpus, name):
    make = SPARSE_OPTIMIZERS[name]
    same(sparse_embedding(gpus[1], make), sparse_embedding("cpu", make))


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_embedding_bags(gpus, mode):
    def run(device):
        torch.manual_seed(0)
        bag = nn.EmbeddingBag(20, 4, mode=mode).to(device)
        out = bag(whole(20, 7).to(device), torch.tensor([0, 3, 3], device=device))
        out.square().sum().backward()
        return out, bag.weight.grad

    for one, other in zip(run(gpus[1]), run("cpu"), strict=True):
        assert one.device == gpus[1]
        same(one, other)


# ---- recurrent nets ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("sorted_by_length", [True, False])
def test_packed_sequences(gpus, kind, sorted_by_length):
    lengths = torch.tensor([5, 3, 1] if sorted_by_length else [3, 5, 1])

    def run(device):
        torch.manual_seed(0)
        net, x = kind(4, 6, 2, batch_first=True).to(device), draw(3, 5, 4).to(device).requires_grad_()
        packed = rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=sorted_by_length)
        assert packed.data.device == x.device and packed.batch_sizes.device.type == "cpu"
        assert packed.is_cuda == x.is_cuda
        out, lengths_again = rnn.pad_packed_sequence(net(packed)[0], batch_first=True)
        assert lengths_again.tolist() == lengths.tolist()
        out.square().sum().backward()
        return [out, x.grad, *(p.grad for p in net.parameters())]

    for one, other in zip(run(gpus[1]), run("cpu"), strict=True):
        assert one.device == gpus[1]
        same(one, other)


def test_packed_sequences_move_as_a_whole(gpus):
    packed = rnn.pack_sequence([draw(3, 2), draw(1, 2)])
    there = packed.to(gpus[1])
    assert there.data.device == gpus[1] and there.batch_sizes.device.type == "cpu"
    assert packed.cuda(2).data.device == gpus[2] and there.cpu().data.device.type == "cpu"
    with pytest.raises(RuntimeError, match="should be a 1D CPU int64 tensor, but got 1D cuda:1 Long tensor"):
        rnn.pack_padded_sequence(draw(1, 2, 2).to(gpus[1]), torch.tensor([2], device=gpus[1]), batch_first=True)


@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_cells(gpus, kind):
    def run(device):
        torch.manual_seed(0)
        cell, x, state = kind(3, 4).to(device), draw(5, 2, 3).to(device), None
        for step in x:
            state = cell(step, state)
        state = state if isinstance(state, torch.Tensor) else state[0]
        state.sum().backward()
        return [state, *(p.grad for p in cell.parameters())]

    for one, other in zip(run(gpus[2]), run("cpu"), strict=True):
        assert one.device == gpus[2]
        same(one, other)


# ---- copies, saving, loading ---------------------------------------------------------------------------------------


def test_deepcopy(gpus):
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).to(gpus[1])
    model(draw(4, 3).to(gpus[1])).sum().backward()
    before = torch.cuda.memory_allocated(1)
    twin = copy.deepcopy(model)
    assert torch.cuda.memory_allocated(1) > before
    for one, other in zip(twin.state_dict().values(), model.state_dict().values(), strict=True):
        assert one.device == gpus[1] and one.data_ptr() != other.data_ptr()
        same(one, other)
    with torch.no_grad():
        twin[0].weight.zero_()
    assert model[0].weight.abs().sum() > 0
    shared = torch.zeros(4, device=gpus[1])
    one, other = copy.deepcopy([shared, shared[1:]])
    one.fill_(3)
    assert other.tolist() == [3.0, 3.0, 3.0] and shared.sum() == 0 and other.device == gpus[1]


def test_state_dicts_cross_devices(gpus):
    source, target = nn.BatchNorm1d(3).to(gpus[1]), nn.BatchNorm1d(3).to(gpus[2])
    source(draw(8, 3).to(gpus[1]))
    target.load_state_dict(source.state_dict())
    assert {t.device for t in target.state_dict().values()} == {gpus[2]}
    same(target.running_mean, source.running_mean)
    replaced = nn.BatchNorm1d(3)
    replaced.load_state_dict(source.state_dict(), assign=True)
    assert replaced.running_mean.device == gpus[1]
    on_cpu = nn.BatchNorm1d(3)
    on_cpu.load_state_dict(source.state_dict())
    assert on_cpu.running_mean.device.type == "cpu"


def test_optimizer_states_cross_devices(gpus):
    def make(device):
        torch.manual_seed(0)
        net = nn.Linear(3, 2).to(device)
        return net, torch.optim.Adam(net.parameters())

    (net, one), (_, other), (_, third) = make(gpus[1]), make(gpus[2]), make("cpu")
    net(draw(4, 3).to(gpus[1])).sum().backward()
    one.step()
    for optimizer, device in ((other, gpus[2]), (third, torch.device("cpu"))):
        optimizer.load_state_dict(one.state_dict())
        states = list(optimizer.state.values())
        assert len(states) == 2 and {s["exp_avg"].device for s in states} == {device}
        assert {s["step"].device.type for s in states} == {"cpu"}
        for here, there in zip(states, one.state.values(), strict=True):
            same(here["exp_avg"], there["exp_avg"])


def saved(thing):
    file = io.BytesIO()
    torch.save(thing, file)
    return file


def load(file, **options):
    file.seek(0)
    return torch.load(file, **options)


MAPS = {
    "as saved": (None, "cuda:1"),
    "text cpu": ("cpu", "cpu"),
    "text cuda:0": ("cuda:0", "cuda:0"),
    "text cuda": ("cuda", "cuda:2"),  # the current GPU
    "device": (torch.device("cuda", 2), "cuda:2"),
    "device cpu": (torch.device("cpu"), "cpu"),
    "dict": ({"cuda:1": "cuda:0"}, "cuda:0"),
    "dict to cpu": ({"cuda:1": "cpu"}, "cpu"),
    "dict of others": ({"cuda:0": "cpu"}, "cuda:1"),
    "function to cpu": (lambda storage, place: storage, "cpu"),
    "function to a GPU": (lambda storage, place: storage.cuda(2), "cuda:2"),
    "function that leaves it": (lambda storage, place: None, "cuda:1"),
}


@pytest.mark.parametrize("weights_only", [True, False])
@pytest.mark.parametrize("name", MAPS)
def test_load_with_every_kind_of_map_location(gpus, name, weights_only):
    where, expected = MAPS[name]
    x = draw(4).to(gpus[1])
    file = saved({"x": x, "view": x[1:], "p": nn.Parameter(x * 2), "n": 3})
    torch.cuda.set_device(2)
    before = [torch.cuda.memory_allocated(gpu) for gpu in gpus]
    back = load(file, map_location=where, weights_only=weights_only)
    torch.cuda.set_device(0)
    assert str(back["x"].device) == str(back["view"].device) == str(back["p"].device) == expected
    assert isinstance(back["p"], nn.Parameter) and back["n"] == 3
    same(back["x"], x)
    same(back["p"], x * 2)
    back["x"].zero_()
    assert back["view"].tolist() == [0, 0, 0]  # still one storage
    grown = [torch.cuda.memory_allocated(gpu) - start for gpu, start in zip(gpus, before, strict=True)]
    assert grown == [1024 if str(gpu) == expected else 0 for gpu in gpus]


def test_load_what_was_saved_on_the_cpu(gpus):
    file = saved(draw(3))
    assert load(file).device.type == "cpu"
    there = load(file, map_location="cuda:1")
    assert there.device == gpus[1]
    same(there, draw(3))


def test_load_of_a_gpu_that_is_not_there(gpus):
    file = saved(torch.ones(2, device=gpus[2]))
    with virtual_gpus(1):
        message = "Attempting to deserialize object on CUDA device 2 but torch.cuda.device_count\\(\\) is 1"
        with pytest.raises(RuntimeError, match=message):
            load(file)
        assert load(file, map_location="cuda").device == torch.device("cuda", 0)


def test_files_outlive_the_virtual_gpus(tmp_path):
    path, x = tmp_path / "net.pt", draw(4)
    with virtual_gpus(2):
        torch.save({"x": x.to("cuda:1"), "there": nn.Parameter(x.to("cuda:0"))}, path)
    back = torch.load(path, map_location="cpu", weights_only=True)
    same(back["x"], x)
    assert back["x"].device.type == back["there"].device.type == "cpu"
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match="Attempting to deserialize object on a CUDA device"):
            torch.load(path)
    with virtual_gpus(2):
        assert str(torch.load(path)["x"].device) == "cuda:1"


def test_inference_mode_counts_the_memory_of_every_part(gpus):
    """Inference mode hands composite operators over whole; peaks must be those of their parts all the same."""

    def run(context):
        x, weight = torch.ones(256, 256, device=gpus[1]), torch.ones(256, 256, device=gpus[1])
        torch.cuda.reset_peak_memory_stats(1)
        start = torch.cuda.memory_allocated(1)
        with context():
            y = F.linear(F.gelu(F.linear(x, weight)), weight)
            y = F.layer_norm(y, (256,)).type_as(weight).reshape(16, -1).contiguous().flatten().square().std()
        return y, torch.cuda.max_memory_allocated(1) - start

    (one, peak), (other, peak_without_gradients) = run(torch.inference_mode), run(torch.no_grad)
    same(one, other)
    assert one.is_inference() and one.device == gpus[1] and peak == peak_without_gradients > 0


def test_type_as_moves(gpus):
    x = draw(3)
    assert x.type_as(torch.ones(1, device=gpus[1])).device == gpus[1]
    back = x.to(gpus[1]).type_as(torch.ones(1, dtype=torch.float64))
    assert back.device.type == "cpu" and back.dtype == torch.float64


def test_lists_of_tensors_must_match_place_by_place(gpus):
    here, there = ([torch.ones(2, device=gpu), torch.ones(3, device=gpu)] for gpu in gpus[:2])
    for other in (there, [torch.ones(2), torch.ones(3)]):
        with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
            torch._foreach_add_(here, other)
    mixed = [here[0], there[1]]
    assert [t.device for t in torch._foreach_mul(mixed, [there[0].to(gpus[0]), there[1]])] == gpus[:2]
    torch._foreach_copy_(here, there)
    assert [t.device for t in here] == [gpus[0]] * 2


def test_old_format_and_memory_mapped_files(gpus, tmp_path):
    path = tmp_path / "x.pt"
    x = draw(5).to(gpus[1])
    torch.save({"x": x, "view": x[2:]}, path, _use_new_zipfile_serialization=False)
    back = torch.load(path, map_location="cuda:2")
    assert back["x"].device == back["view"].device == gpus[2]
    same(back["view"], x[2:])
    torch.save({"x": x}, path)
    back = torch.load(path, map_location="cpu", mmap=True)
    assert back["x"].device.type == "cpu"
    same(back["x"], x)


def test_sparse_and_complex_tensors_are_saved(gpus):
    x = draw(3, 3).relu().to_sparse().to(gpus[1])
    back = load(saved({"s": x, "c": torch.complex(draw(2), draw(2)).to(gpus[1]).conj()}), map_location="cuda:2")
    assert back["s"].device == back["c"].device == gpus[2]
    same(back["s"].to_dense(), x.to_dense())
    same(back["c"], torch.complex(draw(2), draw(2)).conj())


# ---- data ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
def test_data_loader_with_workers_and_pinned_memory(gpus, workers):
    x, y = draw(10, 3), whole(5, 10)
    loader = DataLoader(TensorDataset(x, y), 4, num_workers=workers, pin_memory=True)
    seen = []
    for a, b in loader:
        assert a.is_pinned() and b.is_pinned() and a.device.type == "cpu"
        there = a.to(gpus[1], non_blocking=True)
        assert there.device == gpus[1] and not there.is_pinned()
        seen.append(there)
    assert [len(part) for part in seen] == [4, 4, 2]
    same(torch.cat(seen), x)


# ---- torch.nn.utils ------------------------------------------------------------------------------------------------


def with_gradients(places):
    parameters = [nn.Parameter(draw(3, 4, seed=i).to(place)) for i, place in enumerate(places)]
    for number, parameter in enumerate(parameters):
        parameter.grad = draw(3, 4, seed=number + 10).to(parameter.device) * 5
    return parameters


PLACES = {"one GPU": ["cuda:1"] * 4, "two GPUs": ["cuda:1", "cuda:2", "cuda:1", "cuda:2"],
          "a GPU and the CPU": ["cuda:1", "cpu", "cuda:1", "cpu"]}  # fmt: skip


@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("places", PLACES)
def test_clipping(gpus, places, foreach):
    expected, found = with_gradients(["cpu"] * 4), with_gradients(PLACES[places])
    norms = [nn.utils.clip_grad_norm_(p, 1.5, foreach=foreach if p is found else False) for p in (expected, found)]
    assert norms[1].device == gpus[1]
    torch.testing.assert_close(norms[1].cpu(), norms[0])
    for one, other in zip(found, expected, strict=True):
        assert one.grad.device == one.device
        torch.testing.assert_close(one.grad.cpu(), other.grad)
    for parameters in (expected, found):
        nn.utils.clip_grad_value_(parameters, 0.1, foreach=foreach if parameters is found else False)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.grad.cpu(), other.grad)
        assert one.grad.abs().max() <= 0.1


def test_parameters_to_vector_and_back(gpus):
    one, two = with_gradients(PLACES["one GPU"]), with_gradients(PLACES["two GPUs"])
    vector = nn.utils.parameters_to_vector(one)
    assert vector.device == gpus[1]
    nn.utils.vector_to_parameters(vector * 2, one)
    same(one[0], draw(3, 4, seed=0) * 2)
    with pytest.raises(TypeError, match="Found two parameters on different devices"):
        nn.utils.parameters_to_vector(two)


@pytest.mark.parametrize("name", ["weight_norm", "spectral_norm", "orthogonal"])
def test_parametrizations(gpus, name):
    def run(device):
        torch.manual_seed(0)
        net = getattr(parametrizations, name)(nn.Linear(4, 4)).to(device)
        out = net(draw(2, 4).to(device))
        out.sum().backward()
        assert gradients_beside_parameters(net)
        gradients = [p.grad for p in net.parameters()]
        parametrize.remove_parametrizations(net, "weight")
        return [out, net.weight, *gradients]

    for one, other in zip(run(gpus[1]), run("cpu"), strict=True):
        assert one.device == gpus[1]
        same(one, other)


# ---- random numbers ------------------------------------------------------------------------------------------------


def test_dropout_drops_what_it_should(gpus):
    torch.manual_seed(0)
    x = torch.ones(100, 1000, device=gpus[1], requires_grad=True)
    y = F.dropout(x, 0.3)
    kept = (y != 0).float().mean().item()
    assert abs(kept - 0.7) < 5 * math.sqrt(0.21 / 1e5)
    assert sorted(y.unique().tolist()) == pytest.approx([0, 1 / 0.7])
    y.sum().backward()
    same(x.grad, y)
    channels = F.dropout2d(torch.ones(50, 20, 3, 3, device=gpus[1]), 0.5).flatten(2)
    assert bool((channels.amax(2) == channels.amin(2)).all()) and 0.3 < (channels > 0).float().mean() < 0.7


DRAWS = {
    "rand": lambda d: torch.rand(5, device=d),
    "randn": lambda d: torch.randn(5, device=d),
    "randint": lambda d: torch.randint(0, 1000, (5,), device=d),
    "randperm": lambda d: torch.randperm(50, device=d),
    "rand_like": lambda d: torch.rand_like(torch.ones(5, device=d)),
    "normal": lambda d: torch.normal(torch.zeros(5, device=d), 1.0),
    "bernoulli": lambda d: torch.bernoulli(torch.full((50,), 0.5, device=d)),
    "uniform_": lambda d: torch.empty(5, device=d).uniform_(),
    "exponential_": lambda d: torch.empty(5, device=d).exponential_(),
    "multinomial": lambda d: torch.multinomial(torch.ones(50, device=d), 20),
    "poisson": lambda d: torch.poisson(torch.full((20,), 5.0, device=d)),
    "dropout": lambda d: F.dropout(torch.ones(50, device=d), 0.5),
    "alpha_dropout": lambda d: F.alpha_dropout(torch.ones(50, device=d), 0.5, True),
    "rrelu": lambda d: F.rrelu(-torch.ones(50, device=d), training=True),
    "gumbel_softmax": lambda d: F.gumbel_softmax(torch.zeros(5, device=d)),
    "fractional_max_pool2d": lambda d: F.fractional_max_pool2d(
        torch.arange(400.0, device=d).view(1, 1, 20, 20), 2, output_size=5
    ),
    "normal distribution": lambda d: torch.distributions.Normal(torch.zeros(5, device=d), 1).sample(),
    "categorical": lambda d: torch.distributions.Categorical(torch.ones(50, device=d)).sample((9,)),
    "gamma": lambda d: torch.distributions.Gamma(torch.ones(5, device=d), 1).sample(),
    "init": lambda d: nn.init.xavier_uniform_(torch.empty(3, 3, device=d)),
    "lstm dropout": lambda d: nn.LSTM(4, 4, 2, dropout=0.5, device=d)(torch.ones(2, 2, 4, device=d))[0],
    "attention": lambda d: F.scaled_dot_product_attention(*torch.ones(3, 1, 2, 8, 4, device=d), dropout_p=0.5),
}


@pytest.mark.parametrize("name", DRAWS)
def test_every_draw_follows_the_gpu_s_own_seed(gpus, name):
    make = DRAWS[name]
    torch.manual_seed(5)
    host = torch.get_rng_state()
    first, other = make(gpus[1]), make(gpus[2])
    assert torch.equal(torch.get_rng_state(), host), "a draw on a GPU must leave the CPU's generator alone"
    assert first.device == gpus[1]
    second = make(gpus[1])
    assert not torch.equal(first, second)
    same(first, other)  # torch.manual_seed gives every GPU the same seed, and each draws for itself
    torch.manual_seed(5)
    torch.rand(100)
    same(make(gpus[1]), first)
    with torch.cuda.device(1):
        torch.cuda.manual_seed(5)
    same(make(gpus[1]), first)
    torch.manual_seed(6)
    assert not torch.equal(make(gpus[1]), first)


def test_states_of_the_generators(gpus):
    state = torch.cuda.get_rng_state(1)
    first, other = torch.rand(4, device=gpus[1]), torch.rand(4, device=gpus[2])
    torch.cuda.set_rng_state(state, 1)
    same(torch.rand(4, device=gpus[1]), first)
    assert not torch.equal(torch.rand(4, device=gpus[2]), other)
    states = torch.cuda.get_rng_state_all()
    before = [torch.rand(2, device=gpu) for gpu in gpus]
    torch.cuda.set_rng_state_all(states)
    for gpu, value in zip(gpus, before, strict=True):
        same(torch.rand(2, device=gpu), value)
    torch.cuda.manual_seed_all(9)
    assert torch.cuda.initial_seed() == 9
    assert len(states) == 3 and {s.device.type for s in states} == {"cpu"}


def test_the_state_of_a_generator_is_a_seed_and_an_offset(gpus, tmp_path):
    """16 bytes, as of CUDA's Philox generator. A saved one goes on exactly; another offset gives other numbers."""
    torch.cuda.manual_seed_all(7)
    start = torch.cuda.get_rng_state(1)
    assert start.shape == (16,) and start.dtype == torch.uint8 and start.tolist() == [7, *[0] * 15]
    torch.rand(1000, device=gpus[1])
    later = torch.cuda.get_rng_state(1)
    assert later[:8].tolist() == start[:8].tolist() and later[8:].view(torch.int64).item() == 4
    torch.save(later, tmp_path / "state")
    wanted = torch.randn(50, device=gpus[1])
    for state in (torch.load(tmp_path / "state"), later.clone()):
        torch.cuda.set_rng_state(state, 1)
        same(torch.randn(50, device=gpus[1]), wanted)
    twin = torch.Generator(device="cuda").manual_seed(7)
    twin.set_state(torch.load(tmp_path / "state"))
    same(torch.randn(50, device=gpus[0], generator=twin), wanted.to(gpus[0]))
    assert twin.get_offset() == 8 and twin.initial_seed() == 7
    drawn = []
    for offset in (40, 44, 40):
        twin.set_offset(offset)
        drawn.append(torch.randn(4, device=gpus[0], generator=twin).tolist())
    assert drawn[0] == drawn[2] != drawn[1]
    for wrong, error in ((later[:5], RuntimeError), (later.float(), TypeError), (later.to(gpus[1]), TypeError)):
        with pytest.raises(error, match="RNG state"):
            torch.cuda.set_rng_state(wrong)


def test_fork_rng(gpus):
    torch.manual_seed(1)
    with torch.random.fork_rng(devices=[1]):
        inside = torch.rand(3, device=gpus[1]), torch.rand(3, device=gpus[2]), torch.rand(3)
    again = torch.rand(3, device=gpus[1]), torch.rand(3, device=gpus[2]), torch.rand(3)
    same(inside[0], again[0])
    assert not torch.equal(inside[1], again[1])
    same(inside[2], again[2])
    with (
        pytest.warns(UserWarning, match="CUDA reports that you have 3 available devices"),
        torch.random.fork_rng(),
    ):
        everywhere = [torch.rand(3, device=gpu) for gpu in gpus]
    for gpu, value in zip(gpus, everywhere, strict=True):
        same(torch.rand(3, device=gpu), value)


def test_generators_of_one_s_own(gpus):
    make = torch.Generator(device="cuda:1").manual_seed(3)
    assert make.device == gpus[1] and isinstance(make, torch.Generator)
    default = torch.cuda.get_rng_state(1)
    one = (
        torch.rand(4, device=gpus[1], generator=make),
        torch.empty(4, device=gpus[1]).normal_(generator=make),
    )
    assert torch.equal(torch.cuda.get_rng_state(1), default)
    make.manual_seed(3)
    same(torch.rand(4, device=gpus[1], generator=make), one[0])
    same(torch.empty(4, device=gpus[1]).normal_(generator=make), one[1])
    with pytest.raises(RuntimeError, match="Expected a 'cuda' device type for generator but found 'cpu'"):
        torch.rand(4, device=gpus[1], generator=torch.Generator())
    with pytest.raises(RuntimeError, match="Expected a 'cuda' device type for generator but found 'cpu'"):
        torch.empty(4, device=gpus[1]).normal_(generator=torch.Generator())
    with pytest.raises(RuntimeError, match="Expected a 'cpu' device type for generator but found 'cuda'"):
        torch.rand(4, generator=make)
    with pytest.raises(RuntimeError, match="Expected a 'cpu' device type for generator but found 'cuda'"):
        torch.empty(4).normal_(generator=make)
    assert torch.Generator("cuda").device == gpus[0] and torch.Generator().device.type == "cpu"
