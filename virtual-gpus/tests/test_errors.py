"""Mistakes raise what they raise on a real GPU, in its words; what CUDA refuses, waits for or can do unlike a CPU."""

import re
import warnings

import pytest
import torch
import torch.nn.functional as F
from measuring import table
from torch import nn
from virtual_gpus import NotModelled, active_machine, errors, virtual_gpus

MISSING = [lambda: one(device="cuda:2"), lambda: one().to("cuda:7"), lambda: torch.tensor([1], device="cuda:2"),
           lambda: torch.cuda.set_device(2), lambda: torch.cuda.device(3).__enter__()]  # fmt: skip
ELSEWHERE = "indices should be either on cpu or on the same device as the indexed tensor ({})"
WRONG = table("wrong_settings")["virtual_gpus"]
TYPES = "Input type (torch.cuda.FloatTensor) and {} type (torch.FloatTensor) should be the same"


@pytest.fixture(autouse=True)
def gpus():
    with virtual_gpus(2, memory="1 GiB"):
        yield
        torch.use_deterministic_algorithms(False)


def found(device):
    return f"Expected all tensors to be on the same device, but found at least two devices, {device}!"


def got(argument, device, others, operator):
    return (
        f"Expected all tensors to be on the same device, but got {argument} is on {device}, different from other "
        f"tensors on {others} (when checking argument in method wrapper_CUDA_{operator})"
    )


def one(*sizes, **options):
    return torch.ones(*(sizes or (1,)), **options)


MIXTURES = {
    "two GPUs": (lambda: one(device=0) + one(device=1), found("cuda:0 and cuda:1")),
    "GPU and CPU": (lambda: one(device=0) + one(), found("cuda:0 and cpu")),
    "in place into a number on the CPU": (lambda: one()[0].add_(one(device=0)[0]), found("cuda:0 and cpu")),
    "matrix product": (lambda: one(2, 3, device=0) @ one(3, 2), got("mat2", "cpu", "cuda:0", "mm")),
    "net on the CPU": (lambda: nn.Linear(3, 3)(one(2, 3, device=0)), got("mat1", "cuda:0", "cpu", "addmm")),
    "batch on the CPU": (lambda: nn.Linear(3, 3).to(0)(one(2, 3)), got("mat1", "cpu", "cuda:0", "addmm")),
    "targets on the CPU": (
        lambda: F.cross_entropy(one(2, 3, device=0), torch.tensor([0, 1])),
        got("target", "cpu", "cuda:0", "nll_loss_forward"),
    ),
    "concatenation": (lambda: torch.cat([one(device=0), one()]), got("tensors", "cpu", "cuda:0", "cat")),
    "made of others": (lambda: torch.stack([one(device=0)[0], one()[0]]), got("tensors", "cpu", "cuda:0", "cat")),
    "result": (lambda: torch.mm(*[one(1, 1, device=0)] * 2, out=one()), got("self", "cuda:0", "cpu", "mm_out_out")),
    "convolution": (lambda: nn.Conv2d(1, 1, 1)(one(1, 1, 2, 2, device=0)), TYPES.format("weight")),
    "convolution on another GPU": (
        lambda: nn.Conv2d(1, 1, 1).to(1)(one(1, 1, 2, 2, device=0)),
        got("weight", "cuda:1", "cuda:0", "_cudnn_convolution"),
    ),
    "bias": (lambda: F.conv1d(*[one(1, 1, 1, device=0)] * 2, one()), TYPES.format("bias")),
    "bias on another GPU": (lambda: F.conv1d(*[one(1, 1, 1, device=0)] * 2, one(device=1)), found("cuda:0 and cuda:1")),
    "transposed convolution on another GPU": (
        lambda: nn.ConvTranspose1d(1, 1, 1).to(1)(one(1, 1, 2, device=0)),
        got("weight", "cuda:1", "cuda:0", "_cudnn_convolution_transpose"),
    ),
    "RMS norm": (lambda: F.rms_norm(one(device=1), (1,), one()), got("weight", "cpu", "cuda:1", "__fused_rms_norm")),
    "index on another GPU": (lambda: one(device=0)[torch.tensor([0], device=1)], ELSEWHERE.format("cuda:0")),
    "CPU tensor, GPU index": (lambda: one()[torch.tensor([0], device=1)], ELSEWHERE.format("cpu")),
    "mask": (
        lambda: one(device=0).masked_fill(one(dtype=torch.bool), 0),
        "expected self and mask to be on the same device, but got mask on cpu and self on cuda:0",
    ),
}


@pytest.mark.parametrize("name", MIXTURES)
def test_mixed_devices(name):
    act, text = MIXTURES[name]
    with pytest.raises(RuntimeError, match=f"^{re.escape(text)}") as raised:
        act()
    assert "virtual_gpus" not in str(raised.traceback[-1].path)  # it ends at the line that made it


LOSSES = """mse_loss l1_loss smooth_l1_loss huber_loss kl_div soft_margin_loss hinge_embedding_loss poisson_nll_loss
cross_entropy binary_cross_entropy binary_cross_entropy_with_logits multilabel_soft_margin_loss"""
NORMS = [lambda x, y: F.layer_norm(x, (4,), y[0]), lambda x, y: F.rms_norm(x, (4,), y[0]),
         lambda x, y: F.group_norm(x, 2, y[0]), lambda x, y: F.batch_norm(x, y[0], y[1])]  # fmt: skip


@pytest.mark.parametrize("shapes_only", [False, True])
@pytest.mark.parametrize("devices", [(0, "cpu"), ("cpu", 0), (0, 1)])
def test_losses_and_norms_refuse_an_argument_that_is_elsewhere(devices, shapes_only):
    with virtual_gpus(2, shapes_only=shapes_only):
        for act in (*(getattr(F, name) for name in LOSSES.split()), *NORMS):
            with pytest.raises(RuntimeError, match="same device"):
                act(*(one(4, 4, device=device) for device in devices))


@pytest.mark.skipif(not torch.version.cuda, reason="a build for CPUs has no kernels for CUDA")
def test_operators_that_check_each_argument_have_a_kernel_of_their_own():
    for name, entry in errors._yaml_entries().items():
        has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "CUDA")
        assert errors.checks_each_argument(name) == (has_kernel and "device_check: NoCheck" not in entry), name


def test_what_cuda_allows_to_mix():
    x = torch.ones(4, device=0)
    assert (x + torch.tensor(1.0)).sum().item() == 8 and (torch.tensor(2.0) * x).get_device() == 0
    assert torch.where(x > 0, x, torch.tensor(0.0)).get_device() == 0
    x[torch.tensor([0, 1])] = 5.0
    assert x.index_put((torch.tensor([3]),), torch.tensor(7.0)).tolist() == [5, 5, 1, 7]
    x.copy_(torch.arange(4.0))
    y = torch.zeros(4, device=1).copy_(x)
    assert y.get_device() == 1 and y.tolist() == [0, 1, 2, 3]
    packed = nn.utils.rnn.pack_padded_sequence(one(3, 2, 4, device=0), torch.tensor([3, 2]))
    assert nn.LSTM(4, 5).to(0)(packed)[0].data.get_device() == 0


def test_numpy_of_a_gpu_tensor():
    x = torch.ones(2, device=1)
    text = "can't convert cuda:1 device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host memory first."
    for act in (x.numpy, x.__array__):
        with pytest.raises(TypeError, match=f"^{re.escape(text)}$"):
            act()
    assert x.numpy(force=True).tolist() == [1, 1] and x.cpu().numpy().tolist() == [1, 1]
    for act in (lambda: x.apply_(lambda v: v), lambda: x.map_(x, lambda a, b: a)):
        with pytest.raises(TypeError, match="only implemented on CPU tensors"):
            act()


@pytest.mark.parametrize("act", MISSING)
def test_a_gpu_that_does_not_exist(act):
    with pytest.raises(torch.AcceleratorError, match="^CUDA error: invalid device ordinal\nGPU device may be out of"):
        act()


REFUSED = {
    "DLPack": lambda x: torch.utils.dlpack.to_dlpack(x),
    "__dlpack__|DLPack": lambda x: torch.from_dlpack(x),
    "__cuda_array_interface__": lambda x: x.__cuda_array_interface__,
    "nested_tensor": lambda x: torch.nested.nested_tensor([one()], device="cuda"),
    "as_nested_tensor|nested": lambda x: torch.nested.as_nested_tensor([x, x]),
    "nested": lambda x: torch.nested.nested_tensor_from_jagged(x, torch.tensor([0, 1, 2])),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_modelled_names_itself(name):
    with pytest.raises(NotModelled, match=f"Virtual GPUs do not model .*({name})"):
        REFUSED[name](one(2, device=0))


@pytest.mark.parametrize(("arguments", "text"), [*WRONG, ({"torch_version": (2, 11)}, "must be text from")])
def test_bad_arguments_say_what_to_do(arguments, text):
    with pytest.raises(TypeError if "both" in text else ValueError, match=text):
        virtual_gpus(**{"count": 2, **arguments})


def test_a_linear_layer_whose_weight_is_no_matrix():
    """As the sharded weight of FSDP is outside of a forward pass."""
    for weight in (torch.ones(4), torch.ones(())):
        with pytest.raises(RuntimeError) as refused:
            F.linear(torch.ones(2, 4), weight, torch.ones(1))
        with pytest.raises(RuntimeError, match=re.escape(str(refused.value))):
            F.linear(torch.ones(2, 4).cuda(), weight.cuda(), torch.ones(1).cuda())


def image(*sizes):
    return torch.rand(*sizes, device="cuda", requires_grad=True)


ROWS = torch.tensor([0, 1])
NOT_DETERMINISTIC = [
    ("avg_pool3d_backward_cuda", lambda: F.avg_pool3d(image(1, 3, 3, 3), 3).sum().backward()),
    ("reflection_pad1d_backward_out_cuda", lambda: F.pad(image(2, 4), (1, 1), "reflect").sum().backward()),
    ("embedding_bag_backward_cuda_max",
     lambda: F.embedding_bag(ROWS[None].cuda(), image(4, 3), mode="max").sum().backward()),
    ("grid_sampler_2d_backward_cuda",
     lambda: F.grid_sample(image(1, 1, 2, 2), image(1, 1, 1, 2), align_corners=False).sum().backward()),
    ("nll_loss2d_forward_out_cuda_template", lambda: F.nll_loss(image(1, 2, 1, 1), ROWS[:1, None, None].cuda())),
    ("_histc_cuda with floating point input", lambda: image(4).detach().histc()),
    ("_bincount_cuda", lambda: ROWS.cuda().bincount(weights=image(2).detach())),
    ("median CUDA with indices output", lambda: image(4).median(0)),
    ("put_", lambda: image(4).detach().put_(ROWS.cuda(), image(2).detach(), accumulate=True)),
    ("scatter_reduce_cuda_prod_", lambda: image(4).scatter_reduce(0, ROWS.cuda(), image(2), "prod")),
]  # fmt: skip


def test_operators_without_a_deterministic_algorithm_are_refused():
    torch.use_deterministic_algorithms(True)
    for name, work in NOT_DETERMINISTIC:
        with pytest.raises(RuntimeError, match=f"^{name} does not have a deterministic implementation"):
            work()
    with warnings.catch_warnings(action="error"):
        image(4).median()
        ROWS.cuda().bincount()
        ROWS.cuda().histc(bins=2, min=0, max=1)
        image(4).scatter_reduce(0, ROWS.cuda(), image(2), "sum")
        F.embedding_bag(ROWS[None].cuda(), image(4, 3), mode="sum").sum().backward()
        F.grid_sample(image(1, 1, 2, 2), image(1, 1, 1, 2), align_corners=True).sum().backward()  # cuDNN's
        F.interpolate(image(1, 1, 4, 4), 8, mode="bilinear").sum().backward()
    torch.use_deterministic_algorithms(True, warn_only=True)
    with pytest.warns(UserWarning, match="^put_ does not have a deterministic implementation"):
        dict(NOT_DETERMINISTIC)["put_"]()


def test_what_cuda_refuses_and_the_cpu_computes_and_the_other_way_round():
    x = torch.ones(2, 2, dtype=torch.int64, device="cuda")
    floats, halves, layer, mean = x[None].float(), x[None].half(), nn.LayerNorm(2).cuda(), nn.GroupNorm(1, 2).cuda()
    assert (x[:0] @ x).shape == (0, 2) and F.avg_pool2d(x[None], 2).item() == 1 and layer(halves[:0]).numel() == 0
    for words, work in {
        "\"addmm_cuda\" not implemented for 'Long'": lambda: x @ x,
        "\"baddbmm_cuda\" not implemented for 'Int'": lambda: x[None].int() @ x[None].int(),
        "\"mse_cuda\" not implemented for 'Long'": lambda: F.mse_loss(x, x),
        "getCudnnDataTypeFromScalarType() not supported for Long": lambda: F.conv1d(x[None], x[None]),
        "GET was unable to find an engine": lambda: F.conv1d(x[None].int(), x[None].int()),
        "Input type (torch.cuda.HalfTensor) and weight type (torch.cuda.FloatTensor)": lambda: F.conv1d(halves, floats),
        "expected mat1 and mat2 to have the same dtype, but got: float != c10::Half": lambda: floats[0] @ halves[0],
        "expected scalar type Half but found": lambda: halves @ floats,
        "expected scalar type Half but found Float": lambda: mean(halves),
        "expected scalar type Float but found Half": lambda: layer.half()(floats),
        "Expected tensor for argument #1 'indices' to have one of the following scalar types: Long, Int; but got "
        "torch.cuda.FloatTensor": lambda: F.embedding(floats, floats[0]),
        "Virtual GPUs do not model aten::cudnn": lambda: torch.cudnn_convolution(x, x, *[(1,)] * 3, 1, *[False] * 3),
        "\"ufunc_add_CUDA\" not implemented for 'UInt16'": lambda: x.to(torch.uint16) + x.to(torch.uint16),
        "\"host_softmax\" not implemented for 'Long'": lambda: F.softmax(x, 1),
        **({"Could not run 'aten::histogram.bin_ct'": lambda: x.float().histogram(2)} if torch.version.cuda else {}),
    }.items():
        with pytest.raises(RuntimeError, match=f"^{re.escape(words)}"):
            work()
    assert ROWS.cuda().histc(bins=2, min=0, max=1).tolist() == [1, 1]


def waits(work):
    clock = active_machine().clock
    torch.cuda._sleep(10**9)
    before = clock.now
    work()
    return clock.now > before + 0.1


def test_the_host_waits_for_a_gpu_where_cuda_s_does():
    x, one, mask = image(4).detach(), image(1)[0].detach(), torch.tensor([True, False, True, False])
    repeats = torch.full((1,), 2, device="cuda")
    gpu_mask, gpu_rows = mask.cuda(), ROWS.cuda()
    pairs = [  # what does not wait, and what does
        (lambda: x.__setitem__(gpu_mask, 1.0), lambda: x.__setitem__(gpu_mask, one)),
        (lambda: x.__setitem__(mask, one), lambda: x.__setitem__(ROWS, one)),
        (lambda: x.__setitem__(gpu_rows, one), lambda: x[ROWS]),
        (lambda: x[mask], lambda: x[gpu_mask]),
        (lambda: F.one_hot(gpu_rows, 2), lambda: F.one_hot(gpu_rows)),
        (lambda: x.repeat_interleave(repeats, output_size=8), lambda: x.repeat_interleave(repeats)),
    ]
    always = (lambda: x.sum().item(), lambda: x.nonzero(), lambda: x.cpu(), lambda: x.copy_(torch.ones(4)))
    assert [waits(quiet) for quiet, _ in pairs] == [False] * len(pairs)
    assert all(map(waits, [waiting for _, waiting in pairs])) and all(map(waits, always))
    assert F.one_hot(gpu_rows, 3).tolist() == [[1, 0, 0], [0, 1, 0]]
