"""Mistakes raise what they raise on a real GPU: the same types, the same words."""

import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from virtual_gpus import NotModelled, virtual_gpus


@pytest.fixture(autouse=True)
def gpus():
    with virtual_gpus(2, memory="1 GiB"):
        yield


def on(index):
    return torch.device("cuda", index)


def found(device):
    return f"Expected all tensors to be on the same device, but found at least two devices, {device}!"


def got(argument, device, others, operator):
    return (
        f"Expected all tensors to be on the same device, but got {argument} is on {device}, different from other "
        f"tensors on {others} (when checking argument in method wrapper_CUDA_{operator})"
    )


def elsewhere(device):
    return f"indices should be either on cpu or on the same device as the indexed tensor ({device})"


def one(*sizes, **options):
    return torch.ones(*(sizes or (1,)), **options)


MIXTURES = {
    "two GPUs": (lambda: one(device=on(0)) + one(device=on(1)), found("cuda:0 and cuda:1")),
    "GPU and CPU": (lambda: one(device=on(0)) + one(), found("cuda:0 and cpu")),
    "CPU and GPU": (lambda: one() * one(device=on(1)), found("cuda:1 and cpu")),
    "in place into a number on the CPU": (lambda: one()[0].add_(one(device=on(0))[0]), found("cuda:0 and cpu")),
    "matrix product": (lambda: one(2, 3, device=on(0)) @ one(3, 2), got("mat2", "cpu", "cuda:0", "mm")),
    "net on the CPU": (lambda: nn.Linear(3, 3)(one(2, 3, device=on(0))), got("mat1", "cuda:0", "cpu", "addmm")),
    "batch on the CPU": (lambda: nn.Linear(3, 3).to(on(0))(one(2, 3)), got("mat1", "cpu", "cuda:0", "addmm")),
    "targets on the CPU": (
        lambda: F.cross_entropy(one(2, 3, device=on(0)), torch.tensor([0, 1])),
        got("target", "cpu", "cuda:0", "nll_loss_forward"),
    ),
    "words on the CPU": (
        lambda: nn.Embedding(3, 3).to(on(1))(torch.tensor([1])),
        got("index", "cpu", "cuda:1", "_index_select"),
    ),
    "concatenation": (lambda: torch.cat([one(device=on(0)), one()]), got("tensors", "cpu", "cuda:0", "cat")),
    "convolution": (
        lambda: nn.Conv2d(1, 1, 1)(one(1, 1, 2, 2, device=on(0))),
        "Input type (torch.cuda.FloatTensor) and weight type (torch.FloatTensor) should be the same",
    ),
    "convolution on another GPU": (
        lambda: nn.Conv2d(1, 1, 1).to(on(1))(one(1, 1, 2, 2, device=on(0))),
        got("weight", "cuda:1", "cuda:0", "_cudnn_convolution"),
    ),
    "transposed convolution on another GPU": (
        lambda: nn.ConvTranspose1d(1, 1, 1).to(on(1))(one(1, 1, 2, device=on(0))),
        got("weight", "cuda:1", "cuda:0", "_cudnn_convolution_transpose"),
    ),
    "index on another GPU": (lambda: one(device=on(0))[torch.tensor([0], device=on(1))], elsewhere("cuda:0")),
    "CPU tensor, GPU index": (lambda: one()[torch.tensor([0], device=on(1))], elsewhere("cpu")),
    "mask": (
        lambda: one(device=on(0)).masked_fill(one(dtype=torch.bool), 0),
        "expected self and mask to be on the same device, but got mask on cpu and self on cuda:0",
    ),
}


@pytest.mark.parametrize("name", MIXTURES)
def test_mixed_devices(name):
    act, text = MIXTURES[name]
    with pytest.raises(RuntimeError, match=f"^{re.escape(text)}") as raised:
        act()
    assert "virtual_gpus" not in str(raised.traceback[-1].path)  # it ends at the line that made it


def test_what_cuda_allows_to_mix():
    x = torch.ones(4, device=on(0))
    assert (x + torch.tensor(1.0)).sum().item() == 8 and (torch.tensor(2.0) * x).device == on(0)
    assert torch.where(x > 0, x, torch.tensor(0.0)).device == on(0)
    x[torch.tensor([0, 1])] = 5.0
    assert x.index_put((torch.tensor([3]),), torch.tensor(7.0)).tolist() == [5, 5, 1, 7]
    x.copy_(torch.arange(4.0))
    y = torch.zeros(4, device=on(1)).copy_(x)
    assert y.device == on(1) and y.tolist() == [0, 1, 2, 3]
    packed = nn.utils.rnn.pack_padded_sequence(one(3, 2, 4, device=on(0)), torch.tensor([3, 2]))
    assert nn.LSTM(4, 5).to(on(0))(packed)[0].data.device == on(0)


def test_numpy_of_a_gpu_tensor():
    x = torch.ones(2, device=on(1))
    text = "can't convert cuda:1 device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host memory first."
    for act in (x.numpy, x.__array__):
        with pytest.raises(TypeError, match=f"^{re.escape(text)}$"):
            act()
    assert x.numpy(force=True).tolist() == [1, 1] and x.cpu().numpy().tolist() == [1, 1]
    for act in (lambda: x.apply_(lambda v: v), lambda: x.map_(x, lambda a, b: a)):
        with pytest.raises(TypeError, match="only implemented on CPU tensors"):
            act()


MISSING = [lambda: one(device="cuda:2"), lambda: one().to("cuda:7"), lambda: one().cuda(2),
           lambda: nn.Linear(1, 1).to(on(5)), lambda: torch.tensor([1], device="cuda:2"),
           lambda: torch.cuda.set_device(2), lambda: torch.cuda.device(3).__enter__()]  # fmt: skip


@pytest.mark.parametrize("act", MISSING)
def test_a_gpu_that_does_not_exist(act):
    with pytest.raises(torch.AcceleratorError, match="^CUDA error: invalid device ordinal\nGPU device may be out of"):
        act()


def test_no_gpu_at_all(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with virtual_gpus(2), pytest.raises(RuntimeError, match="No CUDA GPUs are available"):
        one(device="cuda")


def test_out_of_memory_text_has_the_right_figures():
    keep = torch.empty(100 * 2**20, dtype=torch.uint8, device=on(1))
    with pytest.raises(torch.OutOfMemoryError) as error:
        torch.empty(2**30, device=on(1))
    text = str(error.value)
    free, total = torch.cuda.mem_get_info(1)
    assert text.startswith(
        "CUDA out of memory. Tried to allocate 4.00 GiB. GPU 1 has a total capacity of 1024.00 MiB of which "
        f"{free / 2**20:.2f} MiB is free. Including non-PyTorch memory, this process has "
        f"{(total - free) / 2**20:.2f} MiB memory in use. Of the allocated memory 100.00 MiB is allocated by PyTorch, "
        "and 0 bytes is reserved by PyTorch but unallocated."
    )
    assert isinstance(error.value, torch.cuda.OutOfMemoryError) and isinstance(error.value, RuntimeError)
    assert torch.cuda.memory_allocated(1) == keep.numel() and torch.cuda.memory_stats(1)["num_ooms"] == 1


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
        REFUSED[name](one(2, device=on(0)))


@pytest.mark.skipif(torch.version.cuda is None, reason="only a CUDA build of PyTorch knows which kernels CUDA has")
def test_an_operator_without_a_cuda_kernel():
    with pytest.raises(NotImplementedError, match="Could not run 'aten::to_mkldnn' with .* from the 'CUDA' backend"):
        torch.ones(2, device=on(0)).to_mkldnn()


BAD = [({"count": 0}, "at least 1"), ({"count": 1.5}, "integer"), ({"memory": "16"}, "unit"),
       ({"memory": "-1 GiB"}, "-1"), ({"kind": "RTX 9090"}, "H200")]  # fmt: skip


@pytest.mark.parametrize(("arguments", "text"), BAD)
def test_bad_arguments_say_what_to_do(arguments, text):
    with pytest.raises(ValueError, match=text):
        virtual_gpus(**arguments)


def test_a_linear_layer_whose_weight_is_no_matrix():
    """As the sharded weight of FSDP is outside of a forward pass."""
    for weight in (torch.ones(4), torch.ones(())):
        with pytest.raises(RuntimeError) as refused:
            F.linear(torch.ones(2, 4), weight, torch.ones(1))
        with pytest.raises(RuntimeError, match=re.escape(str(refused.value))):
            F.linear(torch.ones(2, 4).cuda(), weight.cuda(), torch.ones(1).cuda())
