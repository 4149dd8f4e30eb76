"""Convolutions on virtual GPUs take the memory that cuDNN took on an H200 (torch 2.11, cuDNN 9.19), and their times."""

from functools import partial

import pytest
import torch
from benchmarks.reference import measure
from measuring import MIB, draw, events_of, peak_of, sizes_of, times_of
from torch import nn
from torch.nn import functional as F
from virtual_gpus import virtual_gpus
from virtual_gpus.clock.work import Operand, Operation
from virtual_gpus.dispatch.operators import ROWS
from virtual_gpus.features.conv import workspaces as workspaces
from virtual_gpus.gpus import spec
from virtual_gpus.memory_model import round_size

TRACED = measure.load("convolution_workspaces.json")
LAYERS = {
    "1d": (lambda: nn.Conv1d(8, 16, 5, padding=2), (4, 8, 64)),
    "2d": (lambda: nn.Conv2d(8, 16, 3, padding=1), (4, 8, 12, 12)),
    "3d": (lambda: nn.Conv3d(4, 8, 3, stride=2), (2, 4, 9, 9, 9)),
    "groups": (lambda: nn.Conv2d(16, 32, 3, groups=4, bias=False), (4, 16, 10, 10)),
    "depthwise": (lambda: nn.Conv2d(16, 32, 3, groups=16), (4, 16, 10, 10)),
    "dilated": (lambda: nn.Conv2d(8, 8, 3, dilation=2), (4, 8, 12, 12)),
    "transposed 2d": (lambda: nn.ConvTranspose2d(8, 4, 3, 2, output_padding=1), (4, 8, 8, 8)),
    "unbatched": (lambda: nn.Conv2d(8, 16, 3), (8, 12, 12)),
}
CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
LAYOUTS = [(name, torch.contiguous_format) for name in LAYERS]
LAYOUTS += [(name, CHANNELS_LAST[len(size)]) for name, (_, size) in LAYERS.items() if len(size) in CHANNELS_LAST]


def shape(channels, filters, side, kernel, stride, **changes):
    """64 square images on an H200, channels first, fp32 as TF32."""
    output = (side + stride - 1) // stride
    sides = [(length, length) for length in (side, kernel, output)]
    facts = workspaces.Shape(64, channels, filters, 1, *sides, stride > 1, 4, False, True, 132)
    return facts._replace(**changes)


@pytest.mark.parametrize("kind", ["explained", "missed"])
def test_workspaces_of_a_traced_step(kind):
    """Where the rules do not know cuDNN's choice, the layers are small, and so is what they miss."""
    for step, *facts, nbytes in TRACED[kind]:
        modelled = getattr(workspaces, step)(shape(*facts))
        near = round_size(modelled) == round_size(nbytes) if kind == "explained" else abs(modelled - nbytes) < 2 * MIB
        assert near, (step, facts, modelled, nbytes)


def test_channels_last_are_not_copied_and_two_byte_types_pad_a_first_layer_to_8_channels():
    facts = shape(64, 64, 32, 3, 1, channels_last=True)
    assert workspaces.forward(facts) == workspaces.data_gradient(facts) == 0
    sums = 14 * 64 * 64 * 9 * 4  # 9 tiles of one filter tap each on 132 SMs
    assert workspaces.weight_gradient(facts) == sums + 128 + 16
    facts = shape(3, 64, 32, 3, 1, channels_last=True)
    assert workspaces.forward(facts) == 0
    for last in (False, True):
        assert workspaces.forward(facts._replace(itemsize=2, channels_last=last)) >= 64 * 8 * 32 * 32 * 2


@pytest.mark.parametrize("kind", ["K80", "V100", "H200"])
def test_layouts_are_converted_for_tensor_cores(kind):
    def converts(dtype, tf32=True):
        layer, x = nn.Conv2d(64, 64, 3, padding=1).to("cuda", dtype), torch.randn(8, 64, 32, 32).to("cuda", dtype)
        with torch.no_grad(), torch.backends.cudnn.flags(enabled=True, allow_tf32=tf32):
            out, peak = peak_of(lambda: layer(x))
        return peak - out.nbytes > MIB

    with virtual_gpus(1, kind=kind, shapes_only=True):
        assert [converts(torch.float32), converts(torch.float16)] == [kind == "H200", kind != "K80"]
        assert not converts(torch.float32, tf32=False)


def step(make, size, device, layout=torch.contiguous_format, expanded=True):
    """One forward and backward. Returns the output and all gradients, on the CPU's side of things."""
    torch.manual_seed(0)
    layer, x = make(), torch.randn(size).to(device).contiguous(memory_format=layout).requires_grad_()
    layer = layer.to(device, memory_format=layout)
    out = layer(x)
    out.sum().backward() if expanded else out.backward(torch.ones_like(out))
    return [out, x.grad, *(p.grad for p in layer.parameters())]


@pytest.mark.parametrize("name, layout", LAYOUTS)
def test_numbers_are_the_cpus_and_shapes_allocate_as_they_do(name, layout):
    options, memory = {"layout": layout, "expanded": name in ("2d", "3d", "1d")}, []
    for shapes_only in (True, False):
        with virtual_gpus(1, kind="H200", shapes_only=shapes_only):
            made, events = events_of(lambda: step(*LAYERS[name], "cuda", **options))
            memory.append((events, [t.stride() for t in made]))
            found = [t.detach().cpu() for t in made]
    assert memory[0] == memory[1]
    torch.testing.assert_close(found, [t.detach() for t in step(*LAYERS[name], "cpu", **options)])
    assert all(t.is_contiguous(memory_format=layout) for t in found[:2])  # the output, the input's gradient


def test_memory_and_time_know_the_same_kernels_and_the_order_of_channels():
    """Depthwise ones are PyTorch's own channels first, and in both orders without cuDNN."""

    def of(layer, x, last=False, enabled=True):
        layer, x = (it.to(memory_format=torch.channels_last) if last else it for it in (layer.cuda().half(), x.half()))
        with torch.backends.cudnn.flags(enabled=enabled):
            return sizes_of(lambda: layer(x)), times_of(lambda: layer(x))["convolution"]

    with virtual_gpus(1, kind="H200", shapes_only=True), torch.no_grad():
        x, plain = torch.ones(8, 64, 32, 32, device="cuda"), nn.Conv2d(64, 16, 3, bias=False)
        own, without, last, turned = (of(nn.Conv2d(64, 64, 3, groups=64, bias=False), x, *how) for how in
                                      ((False, True), (False, False), (True, True), (True, False)))  # fmt: skip
        assert own == without == (last[0], turned[1]) and turned[0] == [x.nbytes // 2, *own[0]] and last[1] < own[1]
        out, filters = 8 * 16 * 30 * 30 * 2, 16 * 64 * 9 * 2  # which are copied if they have the other order
        assert of(plain, x.to(memory_format=torch.channels_last))[0] == [round_size(out), filters]
        assert of(plain, x, last=True)[0] == [round_size(out)]
        assert of(nn.Conv2d(1, 64, 3), x[:, :1].clone(), last=True)[1] < of(nn.Conv2d(1, 64, 3), x[:, :1].clone())[1]
        far = nn.ConvTranspose2d(64, 16, 3, dilation=2, output_padding=1)  # which reaches the stride
        assert of(far, x, last=True) == of(far, x, last=True, enabled=False)
        wave = x.view(8, 64, 1024)
        assert of(nn.Conv1d(64, 64, 3), wave)[1] == of(nn.Conv1d(64, 64, 3), wave.mT.clone().mT)[1]  # of a copy
        y, masks = torch.ones(8, 16, 30, 30, device="cuda").half(), ((1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 0, 1))
        how = (y, x.half(), plain.weight, [16], [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
        times = [times_of(partial(torch.ops.aten.convolution_backward, *how, tuple(map(bool, mask)))) for mask in masks]
    images, filters, bias, both = (seconds["convolution_backward"] for seconds in times)
    assert both == pytest.approx(images + bias) and images != filters


def test_second_gradients_one_alone_an_empty_batch_and_out_work():
    def second(device):
        x, weight = (draw(*size).to(device).requires_grad_() for size in ((2, 3, 6, 6), (4, 3, 3, 3)))
        (first,) = torch.autograd.grad(F.conv2d(x, weight, padding=1).pow(2).sum(), x, create_graph=True)
        return torch.autograd.grad(first.pow(2).sum(), (x, weight))

    wanted = second("cpu")
    with virtual_gpus(1, shapes_only=True):
        assert [g.shape for g in second("cuda")] == [w.shape for w in wanted]
    with virtual_gpus(1):
        torch.testing.assert_close(second("cuda"), wanted, check_device=False)
        layer = nn.Conv2d(3, 4, 3).to("cuda").requires_grad_(False)
        x = torch.randn(2, 3, 8, 8, device="cuda", requires_grad=True)
        layer(x).sum().backward()
        assert x.grad is not None and layer.weight.grad is None
        layer.requires_grad_()
        layer(torch.randn(0, 3, 8, 8, device="cuda")).sum().backward()
        assert layer.weight.grad.abs().sum().item() == 0
        out, x, weight = torch.empty(1, 4, 6, 6, device="cuda"), x.detach()[:1], layer.weight.detach()
        how = x, weight, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1
        assert torch.ops.aten.convolution.out(*how, out=out) is out
        torch.testing.assert_close(out.cpu(), F.conv2d(x.cpu(), weight.cpu()))


def test_benchmark_tries_large_kernels_once_for_each_shape_and_empties_the_cache():
    """Conv_v8.cpp looks for a plan of this shape first, and asks for the flag only if there is none."""
    with virtual_gpus(1, kind="H200", shapes_only=True), torch.no_grad():
        layer, x = nn.Conv2d(64, 64, 3, padding=1).to("cuda"), torch.randn(32, 64, 32, 32, device="cuda")
        _, before = peak_of(lambda: layer(x))
        with torch.backends.cudnn.flags(True, benchmark=True):
            assert peak_of(lambda: layer(x))[1] == before
            torch.empty(64 * MIB, device="cuda", dtype=torch.uint8)  # leaves its segment in the cache
            first, second = (peak_of(lambda: layer(x[:31]))[1] for _ in range(2))
            assert torch.cuda.memory_reserved() < 64 * MIB
    assert first > before >= second


def test_a_workspace_that_does_not_fit_is_no_error():
    with virtual_gpus(1, memory="64 MiB", kind="H200", shapes_only=True), torch.no_grad():
        layer, x = nn.Conv2d(64, 64, 3, padding=1).to("cuda"), torch.randn(64, 64, 32, 32, device="cuda")
        assert layer(x).shape == x.shape  # 16 MiB in, 16 MiB out, 32 MiB of copies
        assert torch.cuda.memory_stats()["num_ooms"] == 1


def convolution(out, into, kind="H200", bias=False, precision="tf32", groups=1, last=False, backward=False) -> float:
    """Seconds of a 3x3 convolution of 8 images of 128 x 128. last: channels last."""
    images, filters, result = (8, into, 128, 128), (out, into // groups, 3, 3), (8, out, 128, 128)
    size = 4 if precision in ("tf32", "fp32") else 2
    layout = torch.channels_last if last else torch.contiguous_format
    tensors = [torch.empty(shape, device="meta", memory_format=layout) for shape in (images, filters, result)]
    x, w, y = (Operand(tuple(tensor.shape), size, tensor.stride()) for tensor in tensors)
    inputs, outputs = ((y, x, w), (x, w)) if backward else ((x, w, *[Operand((out,), size)] * bias), (y,))
    how = {"stride": (1,), "transposed": False, "output_padding": (0,), "groups": groups, "output_mask": (1, 1, 0)}
    time = ROWS["convolution_backward" if backward else "convolution"].time
    return time.formula(Operation("", inputs, outputs, spec(kind), precision, arguments=how)).seconds


def test_convolutions_on_tensor_cores_where_groups_of_few_channels_do_not_fill_a_tile():
    few, full, more = (convolution(out, 64) for out in (40, 64, 72))
    assert few > 0.9 * full and more > 1.5 * full  # a tile that is not full costs as much as a full one
    assert convolution(40, 64, "V100") < 0.7 * convolution(64, 64, "V100")  # no tensor cores for fp32
    assert 0.2 < convolution(512, 512, precision="bf16") / convolution(512, 512) < 0.5
    written = 2 * 8 * 64 * 128 * 128 * 4 / spec("H200").bandwidth
    assert convolution(64, 64, bias=True) - convolution(64, 64) > written  # a kernel of its own

    def seconds(groups, **how):
        return convolution(1024, 1024, "RTX3090", precision="fp16", groups=groups, last=True, **how)

    assert seconds(4) < 0.3 * seconds(1)  # 256 channels each: a quarter of the work
    assert seconds(64) > 3 * seconds(1) / 64  # 16 channels each fill a quarter of a tile
    assert seconds(16, backward=True) > 5 * seconds(32, backward=True)  # 64 each: no kernel for tensor cores
    one_by_one = seconds(1024)
    assert one_by_one >= 2 * 8 * 1024 * 128 * 128 * 2 / spec("RTX3090").bandwidth  # reads and writes
    assert seconds(1024, backward=True) > 4 * one_by_one


@pytest.mark.parametrize("kind", ["RTX3090", "V100", "A100", "B200"])
@pytest.mark.parametrize("backward", [False, True])
def test_channels_last_need_no_rewriting(kind, backward):
    how = {"precision": "fp16", "backward": backward}
    first, last = (convolution(256, 256, kind, last=last, **how) for last in (False, True))
    nbytes = 2 * 8 * 256 * 128 * 128 * 2  # of images and results
    assert first - last > 2 * (1 + backward) * (nbytes - spec(kind).l2_bytes) / spec(kind).bandwidth
    flops = 2 * 8 * 256 * 256 * 9 * 128 * 128 * (1 + backward)
    assert flops / last < spec(kind).flops.fp16
    assert convolution(64, 64, kind, precision="fp32", last=True) <= convolution(64, 64, kind, precision="fp32")


@virtual_gpus(1, kind="A100", shapes_only=True)
def test_a_transposed_convolution_takes_its_own_time():
    x = torch.empty(64, 64, 64, 64, device="cuda")
    same, more = (times_of(partial(nn.ConvTranspose2d(64, n, 2, 2).cuda(), x))["convolution"] for n in (64, 65))
    assert 1e-4 < same < more
