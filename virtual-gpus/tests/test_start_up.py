"""What switching GPUs on imports, and what PyTorch's modules hold that are imported while they are on."""

from __future__ import annotations

import functools
import gc
import importlib
import os
import subprocess
import sys
import types

import pytest
import torch
from virtual_gpus import NotModelled, virtual_gpus
from virtual_gpus.patches import table

SLOW = ("sympy", "torch._dynamo.eval_frame", "torch._inductor", "torch.distributed.tensor")

TRAINING = f"""
import sys, threading, time
import torch, torch.distributed as dist, torch.utils.checkpoint
from torch.nn.parallel import DistributedDataParallel
from virtual_gpus import virtual_gpus

before = set(sys.modules)
gpus = virtual_gpus(4)
gpus.start()
torch.cuda.memory._record_memory_history()
x = torch.ones(2, 2, device="cuda:1") @ torch.ones(2, 2, device="cuda:1")
net = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1)).to("cuda:1")
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
ddp = DistributedDataParallel(net)
for optimizer in torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9), torch.optim.AdamW(net.parameters()):
    optimizer.zero_grad()
    ddp(x).sum().backward()
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
dist.destroy_process_group()
torch.utils.checkpoint.checkpoint(net, x, use_reentrant=False).sum().backward()
assert torch._dynamo.config.error_on_nested_fx_trace is True
assert torch.cuda.memory._snapshot()["segments"][0]["blocks"][0]["frames"]  # names of files and functions
torch.cuda.memory._record_memory_history(enabled=None)
from torch._dynamo.utils import is_compile_supported  # as torchvision does when it is imported

assert net[0].weight.grad.device == torch.device("cuda:1")
slow = [name for name in {SLOW!r} if name in sys.modules and name not in before]
assert not slow, slow

# While one thread imports torch._dynamo, another one uses its GPU.
stop, wrong = threading.Event(), []

def work():
    while not stop.is_set():
        if torch.ones(2, device="cuda:3").device.index != 3 or not torch.cuda.is_available():
            wrong.append("not on a GPU")
        time.sleep(0.001)

thread = threading.Thread(target=work)
thread.start()
import torch._dynamo.config

stop.set()
thread.join()
assert not wrong, wrong
assert is_compile_supported("cpu") == torch._dynamo.utils.is_compile_supported("cpu")
assert torch._dynamo.config.error_on_nested_fx_trace is True
assert torch._dynamo is sys.modules["torch._dynamo"] and torch._dynamo.utils.config is torch._dynamo.config
optimizer.step()
optimizer.zero_grad()
assert optimizer.zero_grad.__wrapped__.__dynamo_disable._torchdynamo_disable
gpus.stop()

interface = torch._dynamo.device_interface.CudaInterface
assert interface.current_device is torch.cuda.current_device and interface.Stream is torch.cuda.Stream
assert torch._dynamo.variables.tensor.all_tensor_attrs["device"] is torch._C.TensorBase.device
assert torch.cuda.is_available in torch._dynamo.variables.torch.constant_fold_functions
"""


def test_training_imports_no_compiler_and_a_later_import_of_it_is_as_without_gpus():
    done = subprocess.run([sys.executable, "-c", TRAINING], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_what_a_module_of_pytorch_captured_while_gpus_were_on_becomes_pytorch_s(monkeypatch):
    module = types.ModuleType("torch._captured")
    source = """
import functools, torch

functions = {torch.cuda.is_available: 1, torch.cuda.device_count: torch.cuda.is_available, torch.ones_like: None}
names = {torch.Tensor.device.__get__, torch.cuda.is_available}
listed = [(torch.cuda.is_available, 2), torch.add]
bound = functools.partial(torch.cuda.is_available, key=torch.cuda.device_count)
bound.__setstate__ = None  # as torch.utils.data has them, with the names of a class

class Interface:
    available = staticmethod(torch.cuda.is_available)
    device = torch.Tensor.device

def decorated(function):
    return lambda default=torch.cuda.device_count: function()

checked = decorated(torch.cuda.is_available)
"""
    before = "torch._dynamo" in sys.modules, list(sys.meta_path)
    with virtual_gpus(1):
        torch._dynamo.graph_break()
        exec(source, vars(module))
        module.checked.__module__ = module.__name__
        module.Interface.__module__ = module.__name__
        monkeypatch.setitem(sys.modules, module.__name__, module)
    assert ("torch._dynamo" in sys.modules, list(sys.meta_path)) == before  # no stand-in stays
    is_available, device_count = torch.cuda.is_available, torch.cuda.device_count
    assert module.functions == {is_available: 1, device_count: is_available, torch.ones_like: None}
    assert type(list(module.functions)[-1]) is type(torch.ones_like)  # what stood for it was its equal
    assert module.names == {torch.Tensor.device.__get__, is_available}
    assert module.listed == [(is_available, 2), torch.add]
    assert isinstance(module.bound, functools.partial) and module.bound.func is is_available
    assert module.bound.keywords == {"key": device_count}
    assert module.Interface.available is is_available and module.Interface.device is torch.Tensor.device
    assert module.checked.__closure__[0].cell_contents is is_available
    assert module.checked.__defaults__ == (device_count,)


def test_triton_is_refused_though_it_comes_later(tmp_path, monkeypatch):
    own_kernels = pytest.importorskip("virtual_gpus.features.compile.own_kernels")
    (tmp_path / "driver.py").write_text("def _create_driver():\n    return 3\n")
    monkeypatch.delitem(sys.modules, own_kernels._TRITON, raising=False)
    with virtual_gpus(1):
        driver = importlib._bootstrap._load(sys.meta_path[0].find_spec(own_kernels._TRITON, [str(tmp_path)]))
        with pytest.raises(NotModelled, match="kernels of Triton.*TRITON_INTERPRET=1"):
            driver._create_driver()
    assert sys.modules.pop(own_kernels._TRITON)._create_driver() == 3


@pytest.mark.parametrize("later", [False, True])
def test_kernels_in_cuda_are_refused_before_a_compiler_runs(monkeypatch, tmp_path, later):
    name = "torch.utils.cpp_extension"
    importlib.import_module(name)
    if later:
        monkeypatch.delitem(sys.modules, name)
    with virtual_gpus(1):
        extension = importlib.import_module(name)
        with pytest.raises(NotModelled, match="kernels in CUDA .those of the extension mine"):
            extension.load("mine", ["frontend.cpp", "kernel.cu"], build_directory=str(tmp_path))
        with pytest.raises(FileNotFoundError):  # C++ alone is compiled
            extension.load("mine", "frontend.cpp", build_directory=str(tmp_path))
    assert not hasattr(extension._jit_compile, "__wrapped__")


def test_a_finalizer_may_import_while_gpus_go_on_and_change_what_a_module_holds_while_they_go_off(monkeypatch):
    def work(phase, info):  # the garbage collector comes at any line
        module.table[len(module.table)] = None
        monkeypatch.setitem(sys.modules, f"imported_late_{len(sys.modules)}", types.ModuleType("imported_late"))

    module, thresholds = types.ModuleType("torch._captured"), gc.get_threshold()
    module.table = dict.fromkeys(range(100), torch.add)
    table.modules_of.cache_clear()
    gc.callbacks.append(work)
    try:
        gc.set_threshold(1, 1, 1)
        assert torch.cuda in table.modules_of("torch.cuda")
        gc.set_threshold(*thresholds)
        with virtual_gpus(1):
            monkeypatch.setitem(sys.modules, module.__name__, module)
            gc.set_threshold(50, 1, 1)
    finally:
        gc.callbacks.remove(work)
        gc.set_threshold(*thresholds)
    assert len(module.table) > 100


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
@pytest.mark.parametrize("uses_dtensors", [False, True])
def test_forked_ranks_that_need_it_have_it_from_their_parent(uses_dtensors, monkeypatch):
    imported, dynamo = [], pytest.importorskip("virtual_gpus.features.compile.dynamo")
    monkeypatch.setattr(dynamo, "_real", imported.append)
    monkeypatch.setitem(sys.modules, "torch._dynamo", dynamo._stand_in)
    monkeypatch.delitem(sys.modules, "torch.distributed.tensor", raising=False)
    if uses_dtensors:
        monkeypatch.setitem(sys.modules, "torch.distributed.tensor", types.ModuleType("torch.distributed.tensor"))
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)
    assert imported == ["torch._dynamo"] * uses_dtensors
