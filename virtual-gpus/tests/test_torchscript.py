"""TorchScript on GPU tensors: `torch.jit.trace`, `script` and `freeze` give what the module gives, on its GPU."""

import io

import pytest
import torch
from torch import nn
from virtual_gpus import NotModelled, virtual_gpus

IGNORED = ("ignore:`torch.jit:FutureWarning", "ignore::torch.jit.TracerWarning", "ignore:RNN module weights")
pytestmark = pytest.mark.filterwarnings(*IGNORED)


@pytest.fixture(scope="module", autouse=True)
def two_gpus():
    with virtual_gpus(2):
        yield


def convolutions():
    layers = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.5), nn.Flatten(), nn.Linear(144, 5)
    return nn.Sequential(*layers).cuda().eval(), torch.randn(2, 3, 8, 8, device="cuda")


class Attention(nn.Module):
    """Sizes that are read from tensors, a normalization with a stand-in and an attention with one."""

    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(8)

    def forward(self, x):
        parts = self.norm(x).view(x.shape[0], x.shape[1] * 1, 2, 4).transpose(1, 2)
        return nn.functional.scaled_dot_product_attention(parts, parts, parts).reshape(x.shape)


NETS = {
    "convolutions": convolutions,
    "channels_last": lambda: (convolutions()[0].to(memory_format=torch.channels_last), convolutions()[1]),
    "recurrent": lambda: (nn.LSTM(4, 5).cuda(), torch.randn(3, 2, 4, device="cuda")),
    "attention": lambda: (Attention().cuda(), torch.randn(2, 3, 8, device="cuda")),
}


def first(result):
    return result[0] if isinstance(result, tuple) else result


@pytest.mark.parametrize(("name", "inference"), [*((name, False) for name in NETS), ("convolutions", True)])
def test_a_traced_module_gives_what_the_module_gives(name, inference):
    net, x = NETS[name]()
    with torch.inference_mode(inference):
        traced = torch.jit.trace(net, x)
        found = first(traced(x + 1))
        torch.testing.assert_close(found, first(net(x + 1)))
    assert "Function" not in str(traced.inlined_graph)  # every operator is PyTorch's own
    assert str(found.device) == "cuda:0"
    assert all(type(number) in (int, float) for number in torch.cuda.memory_stats().values())
    assert "CUDA memory summary" in torch.cuda.memory_summary()


def test_traces_without_values():
    with virtual_gpus(1, shapes_only=True):
        layer, y = nn.Linear(3, 4).cuda(), torch.ones(2, 3, device="cuda")
        assert torch.jit.trace(layer, y, check_trace=False)(y).shape == (2, 4)
        with pytest.raises(NotModelled, match="convolution with shapes_only"):
            torch.jit.trace(*convolutions())


def test_scripted_frozen_and_optimized_modules():
    net, x = convolutions()
    scripted = torch.jit.script(net)
    for made in (scripted, torch.jit.freeze(scripted), torch.jit.optimize_for_inference(torch.jit.script(net))):
        torch.testing.assert_close(made(x), net(x))
        assert made(x).is_cuda
    net.cpu()
    torch.testing.assert_close(torch.jit.optimize_for_inference(torch.jit.script(net))(x.cpu()), net(x.cpu()))


def test_a_traced_module_trains():
    net, x = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5), nn.Linear(3, 1)).cuda(), torch.ones(5, 4, device="cuda")
    torch.jit.trace(net, x, check_trace=False)(x).sum().backward()
    assert str(net[0].weight.grad.device) == "cuda:0"


def test_copies_between_devices_while_tracing():
    def copies(x, y):
        return x.to("cuda:1") + y.to(1, torch.float64).cuda(1).float() + torch.ones(3, device="cuda:1")

    traced = torch.jit.trace(copies, (torch.ones(3, device="cuda"), torch.ones(3)))
    found = traced(torch.full((3,), 2.0, device="cuda"), torch.ones(3))
    assert (str(found.device), found.tolist()) == ("cuda:1", [4.0] * 3)
    for to_host in (torch.Tensor.cpu, lambda x: x.to("cpu")):
        with pytest.raises(NotModelled, match="CPU inside torch.jit.trace"):
            torch.jit.trace(to_host, found)


def test_a_saved_module_is_loaded_to_a_gpu():
    net, x = nn.Linear(3, 2).cuda(), torch.ones(3, device="cuda:1")
    file = io.BytesIO()
    torch.jit.save(torch.jit.script(net), file)
    for map_location, device in ((None, "cpu"), ("cuda:1", "cuda:1"), (torch.device("cpu"), "cpu")):
        file.seek(0)
        loaded = torch.jit.load(file, map_location)
        assert {str(parameter.device) for parameter in loaded.parameters()} == {device}
    file.seek(0)
    torch.testing.assert_close(torch.jit.load(file, "cuda:1")(x), net.cuda(1)(x))
    file.seek(0)
    with pytest.raises(torch.AcceleratorError, match="invalid device ordinal"):
        torch.jit.load(file, "cuda:2")


def test_graphs_with_sizes_are_printed_and_compared():
    """They hold sizes as tensors that PyTorch shows to a dispatch mode as numbers, for CPU tensors too."""
    traced = torch.jit.trace(lambda x: x.view(x.shape[0] * 2, -1), torch.zeros(2, 8))
    assert "aten::view" in str(traced.graph)
    assert traced(torch.zeros(4, 6)).shape == (8, 3)
