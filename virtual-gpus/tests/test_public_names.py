"""The public names of torch.cuda: each works, or refuses by its name; classes stay types either way."""

import pickle

import pytest
import torch
from virtual_gpus import NotModelled, virtual_gpus


@pytest.fixture(scope="module", autouse=True)
def gpus():
    with virtual_gpus(2, memory="1 GiB") as devices:
        yield devices


CLASSES = ["CUDAGraph", "graph", "MemPool", "ExternalStream", "Stream", "Event"]


@pytest.mark.parametrize("name", CLASSES)
def test_a_class_stays_a_type(name):
    kind = getattr(torch.cuda, name)

    def annotated(argument: kind | None = None):
        return argument

    class Own(kind):
        pass

    assert annotated.__annotations__["argument"] == kind | None
    assert not isinstance(1, kind) and not isinstance("", kind | None)
    assert issubclass(Own, kind) and issubclass(torch.cuda.ExternalStream, torch.cuda.Stream)
    assert pickle.loads(pickle.dumps(kind)) is kind


REFUSED = {
    "torch.cuda.GreenContext": lambda: torch.cuda.GreenContext,
    "torch.cuda.CUDAPluggableAllocator": lambda: torch.cuda.memory.CUDAPluggableAllocator,
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_class_names_itself_when_one_is_made(name):
    kind = REFUSED[name]()
    with pytest.raises(NotModelled, match=name):
        kind()
    with pytest.raises(NotModelled, match=name):
        type("Own", (kind,), {})("an argument")


def test_a_stream_by_its_handle_is_that_stream():
    side = torch.cuda.Stream()
    with torch.cuda.stream(torch.cuda.ExternalStream(side.cuda_stream)):
        assert torch.cuda.current_stream() == side
    with pytest.raises(NotModelled, match=r"torch\.cuda\.ExternalStream"):
        torch.cuda.ExternalStream(0x7F00_0000_1234)


# ---- the typed names ------------------------------------------------------------------------------------------------


def test_legacy_types_make_tensors_on_the_gpu():
    cuda = torch.cuda
    before = cuda.memory_allocated()
    x = cuda.FloatTensor(2, 3)
    assert (x.shape, x.dtype, x.device) == (torch.Size([2, 3]), torch.float32, torch.device("cuda", 0))
    assert cuda.memory_allocated() == before + 512
    assert cuda.LongTensor([1, 2]).tolist() == [1, 2] and cuda.HalfTensor().shape == (0,)
    assert cuda.ByteTensor(torch.Size([2]), device="cuda:1").device.index == 1
    assert cuda.FloatTensor(x).data_ptr() == x.data_ptr()
    with pytest.raises(TypeError, match=r"expected torch\.cuda\.FloatTensor \(got torch\.FloatTensor\)"):
        cuda.FloatTensor(torch.ones(2))
    assert isinstance(x, cuda.FloatTensor) and not isinstance(x, cuda.HalfTensor)
    sparse = cuda.sparse.DoubleTensor(torch.tensor([[1]]), torch.tensor([2.0]), torch.Size([3]))
    assert sparse.is_cuda and sparse.to_dense().tolist() == [0, 2, 0]


@pytest.mark.parametrize("name", ["torch.cuda.HalfTensor", "torch.HalfTensor"])
def test_type_moves_as_it_is_told(name):
    for start, kind in (("cpu", name), ("cuda:1", name), ("cuda:1", eval(name))):
        moved = torch.ones(2, device=start).type(kind)
        assert moved.type() == name and moved.tolist() == [1, 1]
        if start != "cpu" and "cuda" in name:
            assert moved.device.index == 1
    with pytest.raises(ValueError, match="invalid type"):
        torch.ones(2, device="cuda").type("torch.NoTensor")


def test_a_cuda_type_as_the_default():
    torch.set_default_tensor_type("torch.cuda.DoubleTensor")
    try:
        for made in (torch.zeros(2), torch.Tensor(2, 3), torch.Tensor([1, 2]), torch.nn.Linear(2, 2).weight):
            assert made.type() == "torch.cuda.DoubleTensor"
        assert not torch.FloatTensor(2).is_cuda
    finally:
        torch.set_default_tensor_type(torch.FloatTensor)
    assert torch.Tensor(2).type() == torch.zeros(2).type() == "torch.FloatTensor"
    assert torch.Tensor.__new__ is torch._C.TensorBase.__new__


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_storages_are_made_on_the_gpu():
    before = torch.cuda.memory_allocated(1)
    made = torch.UntypedStorage([1, 2, 3], device="cuda:1")
    assert made.device == torch.device("cuda", 1) and made.tolist() == [1, 2, 3]
    assert torch.cuda.memory_allocated(1) == before + 512
    assert made.new().device == made[1:].device == made.device and made[1:].data_ptr() == made.data_ptr() + 1
    assert torch.UntypedStorage(4, device="cuda").nbytes() == 4 and torch.UntypedStorage(device="cuda").is_cuda
    typed = torch.cuda.FloatStorage([1, 2])
    assert typed.device.type == "cuda" and torch.cuda.FloatTensor(typed).tolist() == [1, 2]
    assert torch.TypedStorage(3, dtype=torch.half, device="cuda").nbytes() == 6
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        torch.UntypedStorage(1 << 40, device="cuda")


# ---- the runtime library --------------------------------------------------------------------------------------------


def test_sleep_takes_modelled_time_by_cycles():
    start, end = (torch.cuda.Event(enable_timing=True) for _ in "ab")
    start.record()
    torch.cuda._sleep(1_980_000)
    end.record()
    end.synchronize()
    assert start.elapsed_time(end) == pytest.approx(1.0, rel=0.02)  # milliseconds: an H200 has 1.98 GHz


def test_the_sync_debug_mode_tells_of_reads():
    x, other = torch.ones(3, device="cuda"), torch.ones(3)
    assert torch.cuda.get_sync_debug_mode() == 0
    try:
        torch.cuda.set_sync_debug_mode("warn")
        for wait in (lambda: x.sum().item(), lambda: x.nonzero(), lambda: x.cpu(), lambda: x.copy_(other)):
            with pytest.warns(UserWarning, match="called a synchronizing CUDA operation"):
                wait()
        torch.cuda.set_sync_debug_mode(2)
        with pytest.raises(RuntimeError, match="called a synchronizing CUDA operation"):
            x[0].item()
        (x + 1).to("cpu", non_blocking=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_profiler_s_switch_and_what_cudart_refuses():
    with torch.cuda.profiler.profile():
        torch.cuda.check_error(torch.cuda.cudart().cudaProfilerStart())
    assert torch.cuda.cudart().cudaMemGetInfo(0)[1] == 1 << 30
    with pytest.raises(NotModelled, match=r"torch\.cuda\.cudart\(\)\.cudaHostRegister"):
        torch.cuda.cudart().cudaHostRegister(0, 1, 0)
    assert torch.cuda.nccl.version() >= (2, 20)
