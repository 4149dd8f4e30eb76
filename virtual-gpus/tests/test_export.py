"""torch.export, torch.onnx.export and torch.package with modules on GPUs."""

import io

import pytest
import torch
from torch import nn
from virtual_gpus import NotModelled, virtual_gpus


@pytest.fixture(scope="module", autouse=True)
def two_gpus():
    with virtual_gpus(2):
        yield


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x):
        return self.layer(x) + torch.arange(3, device=x.device)


@pytest.mark.outside  # PyTorch imports what it needs for this in 5 seconds
def test_an_exported_program_stays_on_its_gpu():
    net, x = Net().to("cuda:1"), torch.ones(2, 3, device="cuda:1")
    program = torch.export.export(net, (x,))
    torch.testing.assert_close(program.module()(x + 1), net(x + 1))
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    assert str(torch.export.load(file).module()(x).device) == "cuda:1"
    torch.testing.assert_close(torch.export.export(net.cpu(), (x.cpu(),)).module()(x.cpu()), net(x.cpu()))
    assert type(torch.cuda.memory_allocated(1)) is int


@pytest.mark.outside
def test_a_program_on_two_gpus_that_makes_tensors_is_refused():
    net = Net().cuda()
    net.second = nn.Linear(3, 3).to("cuda:1")
    with pytest.raises(NotModelled, match="on several GPUs"):
        torch.export.export(net, (torch.ones(3, device="cuda"),))


@pytest.mark.outside
@pytest.mark.parametrize("dynamo", [True, False])
@pytest.mark.filterwarnings("ignore")
def test_onnx(dynamo, tmp_path):
    *_, onnxruntime = map(pytest.importorskip, ("onnx", "onnxscript", "onnxruntime"))
    layers = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.5), nn.Flatten(), nn.Linear(144, 5)
    net, x = nn.Sequential(*layers).cuda().eval(), torch.randn(2, 3, 8, 8, device="cuda")
    torch.onnx.export(net, (x,), str(tmp_path / "net.onnx"), dynamo=dynamo)
    session = onnxruntime.InferenceSession(str(tmp_path / "net.onnx"), providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {session.get_inputs()[0].name: x.cpu().numpy()})
    torch.testing.assert_close(torch.from_numpy(found), net(x).cpu())
