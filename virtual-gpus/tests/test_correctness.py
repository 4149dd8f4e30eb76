"""The same program on the CPU and on virtual GPUs, compared number by number. The kernels are the same, so most
comparisons ask for equal bits. Optimizers are the exception: on a GPU they take the foreach road, which rounds in
another order (see test_foreach.py)."""

import copy
import io
import math
import re
from functools import partial
from operator import ne

import pytest
import torch
import torch.nn.functional as F
from benchmarks.reference.networks import GPT, Recurrent, TokenEncoder
from measuring import draw, function, rows_of_features, same
from torch import nn
from torch.nn.utils import rnn
from virtual_gpus import virtual_gpus
from virtual_gpus.dispatch import half_precision, operators

pytestmark = pytest.mark.usefixtures("workspaces_given_back")
GPUS = {"count": 3, "memory": "16 GiB"}
GRADIENTS = []  # where those of `seen` were
MAPS = {
    "as saved": (None, "cuda:1"),
    "text cuda": ("cuda", "cuda:2"),  # the current GPU
    "device": (torch.device("cuda", 2), "cuda:2"),
    "dict": ({"cuda:1": "cuda:0"}, "cuda:0"),
    "function to a GPU": (lambda storage, place: storage.cuda(2), "cuda:2"),
}


def whole(top, *shape, seed=1):
    return torch.randint(0, top, shape, generator=torch.Generator().manual_seed(seed))


def gradients_of(*models):
    """The gradients of all parameters, each of them beside its parameter."""
    parameters = [parameter for model in models for parameter in model.parameters()]
    assert parameters and all(p.grad.device == p.device for p in parameters)
    return [parameter.grad for parameter in parameters]


def check_equal(found, expected, device):
    for one, other in zip(found, expected, strict=True):
        assert one.device == device
        same(one, other)


def norms():
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True)),
        *(nn.Conv2d(8, 8, 3, groups=2, stride=2), nn.GroupNorm(2, 8)),
        *(nn.ConvTranspose2d(8, 4, 2), nn.InstanceNorm2d(4, affine=True), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.LazyLinear(12), nn.LayerNorm(12), nn.RMSNorm(12), nn.GELU(), nn.Linear(12, 7)),
    )


def images():
    return draw(3, 3, 16, 16), whole(7, 3)


def tokens():
    return whole(40, 3, 9), whole(40, 3, 9, seed=2)


CASES = {
    "norms": (norms, images),
    "gpt": (lambda: GPT(0.0, words=40, hidden=24, layers=2, heads=3, length=12), tokens),
    "lstm": (lambda: Recurrent(nn.LSTM, 40, 16, 16), tokens),
    "encoder": (lambda: TokenEncoder(0.0, 40, 16, 2, 2, 9), tokens),
}


def train(case, device):
    """Losses of two steps, the gradients of the last one, the weights and buffers after it, and an evaluation."""
    build, data = CASES[case]
    torch.manual_seed(3)
    model = build()
    x, y = data()
    model(x)  # gives lazy layers their shape
    model.to(device)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, foreach=False), []
    for _ in range(2):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x.to(device)).flatten(0, -2), y.to(device).flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    with torch.inference_mode():
        out = model.eval()(x.to(device))
    return losses, [*gradients_of(model), *model.state_dict().values(), out]


@pytest.mark.parametrize("case", CASES)
def test_training_equals_the_cpu_s_bit_for_bit(gpus, case):
    expected, found = train(case, "cpu"), train(case, gpus[1])
    assert found[0] == expected[0] and len(set(found[0])) == 2 and all(map(math.isfinite, found[0]))
    check_equal(found[1], expected[1], gpus[1])
    assert torch.cuda.memory_allocated(0) == torch.cuda.memory_allocated(2) == 0


def an_encoder_in_evaluation(device):
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    net = nn.TransformerEncoder(layer, 2).eval().to(device)
    mask = torch.tensor([[0, 0, 0, 0, 1], [0, 0, 1, 1, 1], [0, 0, 0, 0, 0]]).bool()
    with torch.no_grad():
        found = net(draw(3, 5, 8).to(device), src_key_padding_mask=mask.to(device))
    return [found[~mask]]


def complex_numbers(device):
    z = torch.complex(draw(8), draw(8, seed=2)).to(device).requires_grad_()
    spectrum = torch.fft.ifft(torch.fft.fft(z) * z.conj())
    loss = spectrum.abs().square().sum() + torch.view_as_real(z).sum() + z.imag.prod()
    loss.backward()
    return [loss, z.grad, z.grad.conj(), z.grad.imag, z.conj().imag]


def sparse_matrices(device):
    x = torch.sparse_coo_tensor(torch.tensor([[0, 1, 1], [2, 0, 2]]), torch.tensor([3.0, 4.0, 5.0]), (2, 3))
    rows, dense = x.to_dense().to_sparse_csr().to(device), draw(3, 2).to(device)
    x = x.to(device)
    assert x.is_sparse
    products = [torch.sparse.mm(x, dense), rows @ dense]
    return [x._values(), x._indices(), x.coalesce().values(), x.to_dense(), rows.values(), *products]


def device_inside(x):
    return x + torch.ones(3, device=x.device) * x.device.index if x.is_cuda else x + torch.ones(3)


def hessian_of_a_loss(device):
    def loss(x):
        return F.cross_entropy(x.to(device), torch.ones((), device=device).long(), label_smoothing=0.1)

    found = torch.func.hessian(loss)(draw(3))
    assert found.device.type == "cpu"  # as is what it is taken of
    return [found.to(device)]


PROGRAMS = {
    "an encoder packs what is padded": an_encoder_in_evaluation,
    "complex numbers": complex_numbers,
    "sparse matrices": sparse_matrices,
    "vmap asks for the device": lambda d: [torch.vmap(device_inside)(draw(4, 3).to(d))],
    "jacfwd": lambda d: [torch.func.jacfwd(lambda v: v.to(d).exp())(draw(3))],
    "vmap of a cast": lambda d: [torch.vmap(lambda row: row.to(d).to(torch.float64))(draw(4, 3))],
    "hessian of a loss": hessian_of_a_loss,
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_s_results_are_the_cpu_s_bits(gpus, name):
    torch.manual_seed(0)
    found = PROGRAMS[name](gpus[1])
    torch.manual_seed(0)
    check_equal(found, PROGRAMS[name]("cpu"), gpus[1])


def note_the_place(ctx, gradient):
    GRADIENTS.append(gradient.device)
    return gradient


# Two results, of which a program may use only one.
halves = function(
    lambda ctx, x: (x[:2] * 1, x[2:] * 1), lambda ctx, *two: torch.cat(two) + torch.zeros(1, device=two[1].device)
)
seen = function(lambda ctx, x: x.clone(), note_the_place)
# A function whose gradient is not defined, so that C++ makes zeros for the node before it.
no_gradient = function(lambda ctx, x: x.clone(), lambda ctx, gradient: None)
ZEROS = {
    "an unused first result": (lambda x: halves(x)[1] * 3, [0, 0, 3, 3]),
    "an unused second result": (lambda x: halves(x)[0] * 3, [3, 3, 0, 0]),
    "no gradient": (lambda x: no_gradient(seen(x)), [0] * 4),
    "a function of signs": (lambda x: torch.copysign(x.detach(), x), [0] * 4),
}


@pytest.mark.parametrize("name", ZEROS)
def test_zeros_that_cpp_makes_as_gradients_are_where_their_tensor_is(gpus, name):
    function, expected = ZEROS[name]
    GRADIENTS.clear()
    for device in (gpus[2], torch.device("cpu")):
        x = draw(4).to(device).requires_grad_()
        (first,) = torch.autograd.grad(function(x).sum(), x)
        for _ in range(2):  # the second pass adds to the first one's
            function(x).sum().backward()
        assert first.device == x.grad.device == device and first.tolist() == expected
        assert x.grad.tolist() == [2 * number for number in expected]
        torch.optim.SGD([x], lr=0.1).step()
    assert GRADIENTS in ([], [gpus[2]] * 3 + [torch.device("cpu")] * 3)


def test_gradients_of_another_device_are_refused_as_pytorch_does(gpus):
    parameter, on_cpu = nn.Parameter(torch.ones(3, device=gpus[1])), nn.Parameter(torch.ones(3))
    types, numbers = "with device type '{}'", "located on device with index '{}'"
    wrong = [(parameter, "cpu", types, "cpu", "cuda"), (on_cpu, gpus[1], types, "cuda", "cpu"),
             (parameter, gpus[0], numbers, 0, 1)]  # fmt: skip
    for target, place, what, given, own in wrong:
        text = f"attempting to assign a gradient {what.format(given)} to a tensor {what.format(own)}."
        with pytest.raises(RuntimeError, match=re.escape(text)):
            target.grad = torch.ones(3, device=place)
    parameter.grad = torch.ones(3, device=gpus[1])
    assert parameter.grad.device == gpus[1]
    parameter.grad = None
    y = parameter * 2
    for start in (lambda g: y.backward(g), lambda g: torch.autograd.grad([y], [y], [g])):
        with pytest.raises(RuntimeError, match="invalid gradient at index 0 - expected device cuda:1 but got cpu"):
            start(torch.ones(3))
    y.sum().backward(torch.tensor(3.0))  # a number may come from the CPU


def test_views_keep_their_strides_and_share_memory_and_so_do_copies_of_both(gpus):
    last = {"memory_format": torch.channels_last}
    x = draw(2, 3, 4, 5).to(**last)
    there = x.to(gpus[1])
    assert there.stride() == x.stride() and there.contiguous().is_contiguous()
    assert there.contiguous().to("cpu", **last).is_contiguous(**last)
    assert nn.Conv2d(3, 2, 3).to(gpus[1], **last).weight.is_contiguous(**last)
    z = torch.complex(draw(3), draw(3, seed=2))
    for view in (draw(3, 4).t()[1:], z.conj(), z.conj().imag, z.imag, z.real):
        same(view.to(gpus[0]).to(gpus[1]), view)
    before = torch.cuda.memory_allocated(1)
    views = [there[1:], there.permute(0, 2, 3, 1), there.expand(2, 2, 3, 4, 5), there.detach(), there.data]
    assert torch.cuda.memory_allocated(1) == before and {v.device for v in views} == {gpus[1]}
    assert [v.data_ptr() - there.data_ptr() for v in views] == [4 * 60, 0, 0, 0, 0]
    shared, before = torch.zeros(4, device=gpus[1]), torch.cuda.memory_allocated(1)
    one, other = copy.deepcopy([shared, shared[1:]])
    assert torch.cuda.memory_allocated(1) == before + 512
    one.fill_(3)
    assert other.tolist() == [3.0, 3.0, 3.0] and shared.sum() == 0 and one.device == other.device == gpus[1]
    assert copy.deepcopy(torch.zeros(2)).device.type == "cpu"


def test_subclasses_packed_sequences_and_sparse_tensors_move_as_a_whole(gpus):
    class Labelled(torch.Tensor):
        pass

    x = draw(3).as_subclass(Labelled)
    there = x.to(gpus[1])
    assert type(there) is Labelled and there.device == gpus[1]
    assert type(x.cuda()) is type(there.cpu()) is type(there * 2) is Labelled
    assert type(nn.Parameter(draw(3)).to(gpus[1])) is torch.Tensor
    packed = rnn.pack_sequence([draw(3, 2), draw(1, 2)])
    there = packed.to(gpus[1])
    assert there.data.device == gpus[1] and there.batch_sizes.device.type == "cpu"
    assert packed.cuda(2).data.device == gpus[2] and there.cpu().data.device.type == "cpu"
    with pytest.raises(RuntimeError, match="should be a 1D CPU int64 tensor, but got 1D cuda:1 Long tensor"):
        rnn.pack_padded_sequence(draw(1, 2, 2).to(gpus[1]), torch.tensor([2], device=gpus[1]), batch_first=True)
    with pytest.raises(RuntimeError):
        torch.sparse_coo_tensor([[0], [1]], [2.0], (2, 3), device=gpus[2]).to(gpus[0]) @ draw(3, 2)


def saved(thing):
    file = io.BytesIO()
    torch.save(thing, file)
    return file


def load(file, **options):
    file.seek(0)
    return torch.load(file, **options)


@pytest.mark.parametrize("name", MAPS)
def test_load_with_every_kind_of_map_location(gpus, name):
    where, expected = MAPS[name]
    x = draw(4).to(gpus[1])
    file = saved({"x": x, "view": x[1:], "p": nn.Parameter(x * 2)})
    torch.cuda.set_device(2)
    for weights_only in (True, False):
        before = [torch.cuda.memory_allocated(gpu) for gpu in gpus]
        back = load(file, map_location=where, weights_only=weights_only)
        assert {str(part.device) for part in back.values()} == {expected} and isinstance(back["p"], nn.Parameter)
        same(back["x"], x)
        same(back["p"], x * 2)
        back["x"].zero_()
        assert back["view"].tolist() == [0, 0, 0]  # still one storage
        grown = [torch.cuda.memory_allocated(gpu) - start for gpu, start in zip(gpus, before, strict=True)]
        assert grown == [1024 if str(gpu) == expected else 0 for gpu in gpus]
        del back


def test_files_outlive_the_virtual_gpus(tmp_path):
    path, x = tmp_path / "net.pt", draw(4)
    with virtual_gpus(2):
        torch.save(x.to("cuda:1"), path)
    back = torch.load(path, map_location="cpu", weights_only=True)
    same(back, x)
    assert back.device.type == "cpu"
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match="Attempting to deserialize object on a CUDA device"):
            torch.load(path)
    with virtual_gpus(1):
        message = "Attempting to deserialize object on CUDA device 1 but torch.cuda.device_count\\(\\) is 1"
        with pytest.raises(RuntimeError, match=message):
            torch.load(path)
        assert torch.load(path, map_location="cuda").device == torch.device("cuda", 0)


def test_other_formats_of_files(gpus, tmp_path):
    path, x = tmp_path / "x.pt", draw(5).to(gpus[1])
    torch.save([x, x[2:]], path, _use_new_zipfile_serialization=False)
    back = torch.load(path, map_location="cuda:2")
    assert back[0].device == back[1].device == gpus[2]
    same(back[1], x[2:])
    torch.save(x, path)
    back = torch.load(path, map_location="cpu", mmap=True)
    assert back.device.type == "cpu"
    same(back, x)
    sparse, turned = draw(3, 3).relu().to_sparse().to(gpus[1]), torch.complex(draw(2), draw(2)).conj().to(gpus[1])
    back = load(saved([sparse, turned]), map_location="cuda:2")
    assert back[0].device == back[1].device == gpus[2]
    same(back[0].to_dense(), sparse.to_dense())
    same(back[1], turned)


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


@pytest.mark.parametrize(("name", "code"), rows_of_features("draws"))
def test_every_draw_follows_the_gpu_s_own_seed(gpus, name, code):
    def make(d):
        return eval(code)

    torch.manual_seed(5)
    host = torch.get_rng_state()
    first, other = make(gpus[1]), make(gpus[2])
    assert torch.equal(torch.get_rng_state(), host), "a draw on a GPU must leave the CPU's generator alone"
    assert first.device == gpus[1]
    assert not torch.equal(first, make(gpus[1]))
    same(first, other)  # torch.manual_seed gives every GPU the same seed, and each draws for itself
    for gpu in (1, 2):
        with torch.cuda.device(1):
            torch.cuda.manual_seed(5)
        assert torch.equal(make(gpus[gpu]).cpu(), first.cpu()) == (gpu == 1)


def test_the_state_of_a_generator_is_a_seed_and_an_offset_and_there_are_generators_of_one_s_own(gpus):
    """16 bytes, as of CUDA's Philox generator. A saved one goes on exactly; another offset gives other numbers."""
    torch.rand(3, device=gpus[1])
    torch.cuda.manual_seed_all(7)
    start = torch.cuda.get_rng_state(1)
    assert start.dtype == torch.uint8 and start.tolist() == [7, *[0] * 15] and torch.cuda.initial_seed() == 7
    torch.rand(1000, device=gpus[1])
    later = torch.cuda.get_rng_state(1)
    assert later[:8].tolist() == start[:8].tolist() and later[8:].view(torch.int64).item() == 4
    wanted = torch.randn(50, device=gpus[1])
    torch.cuda.set_rng_state(load(saved(later)), 1)
    same(torch.randn(50, device=gpus[1]), wanted)
    twin = torch.Generator(device="cuda").manual_seed(7)
    twin.set_state(load(saved(later)))
    same(torch.randn(50, device=gpus[0], generator=twin), wanted)
    assert twin.get_offset() == 8 and twin.initial_seed() == 7 and torch.Generator("cuda").device == gpus[0]
    drawn = []
    for offset in (40, 44, 40):
        twin.set_offset(offset)
        drawn.append(torch.randn(4, device=gpus[0], generator=twin).tolist())
    assert drawn[0] == drawn[2] != drawn[1]
    for wrong, error in ((later[:5], RuntimeError), (later.float(), TypeError), (later.to(gpus[1]), TypeError)):
        with pytest.raises(error, match="RNG state"):
            torch.cuda.set_rng_state(wrong)
    make, default, drawn = torch.Generator(device="cuda:1"), torch.cuda.get_rng_state(1), []
    assert make.device == gpus[1] and isinstance(make, torch.Generator) and torch.Generator().device.type == "cpu"
    for _ in range(2):
        make.manual_seed(3)
        drawn.append(torch.rand(4, device=gpus[1], generator=make).tolist())
        drawn.append(torch.empty(4, device=gpus[1]).normal_(generator=make).tolist())
    assert drawn[:2] == drawn[2:] and torch.equal(torch.cuda.get_rng_state(1), default)
    for device, wrong, other in ((gpus[1], torch.Generator(), "cpu"), ("cpu", make, "cuda")):
        expected = f"Expected a '{torch.device(device).type}' device type for generator but found '{other}'"
        with pytest.raises(RuntimeError, match=expected):
            torch.rand(4, device=device, generator=wrong)
        with pytest.raises(RuntimeError, match=expected):
            torch.empty(4, device=device).normal_(generator=wrong)
    with virtual_gpus(1, kind="RTX 3090", shapes_only=True):  # 82 multiprocessors with 1,536 threads, 4 numbers each
        assert torch.rand(503_809, device="cuda").is_cuda and torch.cuda.get_rng_state()[8] == 8


def half_and_wide(code, dtype, device):
    """What a program makes of half-precision numbers on a GPU, and of the same in float32 on the CPU; the gradients."""
    half, found = draw(1, 4, 8, 8).to(dtype), []
    for x in (half.to(device).requires_grad_(), half.float().requires_grad_()):
        torch.manual_seed(0)
        result = eval(code, globals() | {"x": x, "dtype": dtype})
        result.sum().backward()
        found.append((result.detach().cpu(), x.grad.cpu()))
    return found


@pytest.mark.parametrize("code", rows_of_features("halves"))
def test_half_precision_that_cuda_has_and_no_cpu_is_computed_in_float32(gpus, code):
    half, wide = half_and_wide(code, torch.float16, gpus[1])
    assert all(map(torch.equal, half, (part.half() for part in wide)))


@pytest.mark.filterwarnings("ignore:RNN module weights are not part of single contiguous chunk")
@pytest.mark.parametrize(("code", "dtype"), [(code, kind) for code, row in rows_of_features("slow") for kind in row])
def test_half_precision_is_computed_in_float32_where_the_cpu_has_no_kernels_for_it(
    gpus, monkeypatch, request, code, dtype
):
    dtype = getattr(torch, dtype)
    for name, kind in (("fp16", torch.float16), ("bf16", torch.bfloat16)):  # whatever this computer's CPU has
        monkeypatch.setattr(torch.ops.mkldnn, f"_is_mkldnn_{name}_supported", partial(ne, kind, dtype))
    request.addfinalizer(half_precision.slow_types.cache_clear)
    half_precision.slow_types.cache_clear()
    monkeypatch.setattr(operators, "OPERATORS_SEEN", {})
    half, wide = half_and_wide(code, dtype, gpus[1])
    assert torch.equal(half[0], wide[0].to(dtype))
    torch.testing.assert_close(half[1], wide[1].to(dtype))  # each operator rounds
