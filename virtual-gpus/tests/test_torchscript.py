"""TorchScript and torch.export: scripts run on a GPU; a trace, and an export of what is on a GPU, are refused."""

import io

import pytest
import torch
from torch import nn
from torch.jit import trace
from virtual_gpus import NotModelled

pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit:FutureWarning"),
    pytest.mark.usefixtures("gpus_of_the_module"),
]
GPUS = {"count": 2}


def network():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5))


def test_scripts_run_on_a_gpu_and_are_saved():
    net, x = network().to("cuda:1").eval(), torch.randn(2, 3, 8, 8, device="cuda:1")
    scripted, file = torch.jit.script(net), io.BytesIO()
    for made in (scripted, torch.jit.freeze(scripted)):
        torch.testing.assert_close(made(x), net(x))
    torch.jit.save(scripted, file)
    for map_location, device in ((None, "cpu"), ("cuda:1", "cuda:1"), (torch.device("cpu"), "cpu")):
        file.seek(0)
        before = torch.cuda.memory_allocated(1)
        loaded = torch.jit.load(file, map_location)
        assert {str(parameter.device) for parameter in loaded.parameters()} == {device}
        assert (torch.cuda.memory_allocated(1) > before) == (device == "cuda:1")
        torch.testing.assert_close(loaded(x.to(device)).to("cuda:1"), net(x))
    on_host = torch.jit.CompilationUnit("def f(x):\n  return x.cpu()\n").f
    assert on_host(x).device.type == "cuda"  # C++ sees a CPU tensor already
    file.seek(0)
    with pytest.raises(RuntimeError, match="CUDA device 2 but .* is 2"):
        torch.jit.load(file, "cuda:2")


def test_traces_and_exports_are_refused():
    net, x = network().eval(), torch.randn(2, 3, 8, 8)
    for call in (torch.jit.trace, trace, torch.jit._get_trace_graph):  # what was imported before, and what ONNX calls
        with pytest.raises(NotModelled, match=r"torch\.jit\.trace"):
            call(net.cuda(), x.cuda())
    with pytest.raises(NotModelled, match=r"torch\.jit\.trace"):
        torch.jit.trace(torch.Tensor.cpu, x.cuda())  # no operator
    for given in ((net, x), (nn.ReLU(), x.cuda())):
        with pytest.raises(NotModelled, match=r"torch\.export of a module on a GPU"):
            torch.export.export(given[0], given[1:])
