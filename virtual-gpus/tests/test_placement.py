"""Every way of making or moving a tensor puts it on the GPU that was named, and says so, as do the memory figures."""

import pickle
import warnings
from functools import partial

import numpy as np
import pytest
import torch
from measuring import MIB, empty
from torch import nn
from torch.testing._internal.logging_tensor import LoggingTensor
from virtual_gpus import virtual_gpus

pytestmark = pytest.mark.usefixtures("gpus")
GPUS = {"count": 3, "memory": "1 GiB"}
ONE = torch.device("cuda", 1)
MAKERS = {
    "to a name": lambda: torch.ones(3).to("cuda:1"),
    "to by keyword": lambda: torch.ones(3).to(device="cuda:1", dtype=torch.int8, non_blocking=True),
    "empty_strided": lambda: torch.empty_strided((3, 2), (1, 3), device=ONE),
    "type_as": lambda: torch.ones(3).type_as(torch.ones(1, device=ONE)),
    "as_tensor": lambda: torch.as_tensor(np.arange(3), device=ONE),
    "sparse_coo_tensor": lambda: torch.sparse_coo_tensor([[0, 2]], [1.0, 2.0], (3,), device=ONE, check_invariants=True),
    "indexed by a CPU index": lambda: torch.ones(3, device=ONE)[torch.tensor([0, 1])],
    "rank of an empty matrix": lambda: torch.linalg.matrix_rank(torch.ones(2, 0, 0, device=ONE)),
    "tensor of a tensor": lambda: torch.tensor(torch.ones(3, device=ONE)),
    "asarray by name": lambda: torch.asarray(obj=[1.0], device=ONE),
    "no indices": lambda: torch.sparse_coo_tensor(size=(3, 4), device=ONE).to_dense(),
    "sparse_csr_tensor": lambda: torch.sparse_csr_tensor([0, 1], [0], [1.0], device=ONE),
    "to_sparse_csr": lambda: torch.eye(3, device=ONE).to_sparse_csr(),
    "module parameter": lambda: nn.Linear(2, 3, device=ONE).weight,
    "a wrapper's part": lambda: (LoggingTensor(torch.ones(3, device=ONE)) * torch.ones(3, device=ONE)).elem,
    "lazy module": lambda: initialized(nn.LazyConv1d(3, 1).cuda(1)).weight,
}


def initialized(lazy):
    """A lazy module after its first call."""
    lazy(torch.ones(2, 4, device=ONE))
    return lazy


@pytest.mark.parametrize("name", MAKERS)
def test_lands_on_the_named_gpu(name):
    before, tensor = torch.cuda.memory_allocated(1), MAKERS[name]()
    assert tensor.device == ONE and tensor.is_cuda and not tensor.is_cpu and tensor.get_device() == 1
    assert torch.cuda.memory_allocated(1) > before
    assert torch.cuda.memory_allocated(0) == torch.cuda.memory_allocated(2) == 0
    del tensor
    assert torch.cuda.memory_allocated(1) == before


def test_lands_on_the_cpu_and_is_the_tensor_itself_when_nothing_changes():
    x = torch.ones(3, device=ONE)
    made = [x.cpu(), x.to("cpu"), x.to(torch.ones(1)), x.new_zeros(3, device="cpu"), torch.zeros_like(x, device="cpu")]
    made += [x.type_as(torch.ones(1, dtype=torch.float64)), torch.as_tensor(x, device="cpu")]
    for tensor in [*made, nn.Linear(2, 2).to(ONE).cpu().weight]:
        assert tensor.device == torch.device("cpu") and not tensor.is_cuda and tensor.get_device() == -1
    x, y = torch.ones(3, device=ONE), torch.ones(3)
    assert x.to(ONE) is x and x.cuda(1) is x and x.to("cuda:1", torch.float32) is x
    assert x.to(ONE, copy=True) is not x and y.to("cpu") is y and y.cpu() is y and y.to(ONE) is not y
    net = nn.Linear(2, 2)
    weight = net.weight
    assert net.to(ONE) is net and net.weight is weight and weight.device == ONE
    assert repr(x) == "tensor([1., 1., 1.], device='cuda:1')"


def test_new_has_the_dtype_and_a_storage_stays_on_its_gpu():
    x = torch.ones(3, dtype=torch.float64, device=ONE)
    assert x.new().shape == (0,) and x.new().device == ONE
    assert x.new().dtype == x.new([1, 2]).dtype == x.new_tensor([1]).dtype == torch.float64
    assert x.new([1, 2]).tolist() == x.new((1, 2)).tolist() == [1.0, 2.0] and x.new(2, 3).shape == (2, 3)
    assert x.new(x).data_ptr() == x.data_ptr() and x.new(2, device="cuda:2").get_device() == 2
    with pytest.raises(TypeError, match="got torch.DoubleTensor"):
        x.new(torch.ones(3, dtype=torch.float64))
    assert torch.ones(2).new([1.0]).device.type == "cpu"
    there, x = torch.ones(3, device="cuda:2"), torch.ones(3, device=ONE)
    for source in (there, there.untyped_storage(), torch.ones(3)):
        with pytest.raises(RuntimeError, match='on device "cuda:1" to a storage on different device'):
            x.set_(source)
    assert x.set_(torch.zeros(2, device=ONE)).tolist() == [0.0, 0.0] and x.device == ONE
    with warnings.catch_warnings(action="error"):  # DataLoader's workers hand over typed storages, which PyTorch allows
        assert x.set_(x._typed_storage()).device == ONE


class Box:  # has functions of PyTorch in a table of what it does
    DOES = {torch.zeros_like: "while the GPUs were off"}

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        return cls.DOES.get(function, NotImplemented)


def test_a_class_with_functions_in_a_table_is_told_those():
    Box.DOES[torch.ones_like] = "on"
    assert torch.zeros_like(Box()) == "while the GPUs were off" and torch.ones_like(input=Box()) == "on"
    assert pickle.loads(pickle.dumps(torch.ones_like)) is torch.ones_like and "ones_like" in repr(torch.ones_like)


class Seeing(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.seen = function
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("function", [torch.arange, torch.tensor])
def test_a_mode_is_told_a_factory_and_an_attribute_by_its_name(function):
    with Seeing() as mode:
        x = getattr(torch, function.__name__)(3, device="cuda:1")
    assert x.device == ONE and mode.seen is getattr(torch, function.__name__) and mode.seen == function
    with mode:
        assert x.device == ONE and mode.seen == torch.Tensor.device.__get__
        assert x.is_cuda and mode.seen == torch.Tensor.is_cuda.__get__


def test_the_current_gpu_and_a_default_device():
    assert torch.cuda.current_device() == 0
    torch.cuda.set_device(2)
    assert torch.ones(1, device="cuda").device.index == 2 and torch.ones(1).cuda().get_device() == 2
    with torch.cuda.device(1):
        assert torch.ones(1, device="cuda").device == ONE
        with torch.cuda.device_of(torch.ones(1, device="cuda:0")):
            assert torch.cuda.current_device() == 0
    assert torch.cuda.current_device() == 2
    with torch.device("cuda"), torch.cuda.device(1):
        assert torch.ones(1).device == torch.tensor([1.0]).device == torch.get_default_device() == ONE
        assert torch.as_tensor(torch.ones(1, device="cuda:2")).device == ONE
    torch.set_default_device("cuda:1")
    try:
        assert torch.zeros(1).device == torch.tensor(0.0).device == nn.Linear(1, 1).weight.device == ONE
        assert torch.as_tensor([1]).device == ONE
    finally:
        torch.set_default_device(None)
    assert torch.zeros(1).device.type == "cpu"


def test_queries():
    assert torch.cuda.is_available() and torch.cuda.device_count() == 3
    card = torch.cuda.get_device_properties(1)
    assert (card.name, card.total_memory, card.major) == ("NVIDIA H200", 2**30, 9)
    assert card.max_threads_per_multi_processor == 2048 and card.max_threads_per_block == 1024
    assert card.regs_per_multiprocessor == 1 << 16 and card.shared_memory_per_block_optin == 227 << 10
    assert abs(card.clock_rate - 1_980_000) < 1000  # in kHz, as its data sheet says
    assert torch.cuda.get_device_name(2) == "NVIDIA H200" and torch.cuda.get_device_capability() == (9, 0)
    assert torch.cuda.can_device_access_peer(0, 1) and torch.cuda.is_bf16_supported()
    assert torch.cuda.get_arch_list() == ["sm_90"]
    torch.cuda.synchronize(2)


def test_pinned_memory():
    x = torch.ones(3)
    assert not x.is_pinned() and x.pin_memory().is_pinned() and torch.ones(3, pin_memory=True).is_pinned()
    assert torch.tensor([1.0], pin_memory=True).is_pinned() and x.new_tensor([1.0], pin_memory=True).is_pinned()
    assert not torch.tensor([1.0], pin_memory=True, device=ONE).is_pinned()
    assert x.pin_memory().to(ONE, non_blocking=True).device == ONE
    assert x.to(ONE).to("cpu", non_blocking=True).is_pinned() and not x.to(ONE).to("cpu").is_pinned()
    assert not x.to("cpu", torch.float64, non_blocking=True).is_pinned()
    storage = x.to(ONE).untyped_storage()
    assert storage.to(device="cpu", non_blocking=True).is_pinned() and not storage.to(device="cpu").is_pinned()
    with pytest.raises(RuntimeError, match="only dense CPU tensors can be pinned"):
        torch.ones(3, device=ONE).pin_memory()


def test_visible_devices_hide_and_reorder(monkeypatch):
    import GPUtil

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,0")
    with virtual_gpus(4) as devices:
        assert len(devices) == torch.cuda.device_count() == 2
        x, used = torch.ones(1 << 20, device="cuda:0"), [gpu.memoryUsed for gpu in GPUtil.getGPUs()]
        assert len(used) == 4 and used[2] > 0 and used[0] == used[1] == used[3] == 0
        del x
    for text, count in (("", 0), ("1", 1), ("0,9,1", 1), ("0,0", 0), ("-1", 0)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", text)
        with virtual_gpus(4):
            assert torch.cuda.device_count() == count
            assert torch.cuda.is_available() == (count > 0)
            if not count:
                with pytest.raises(RuntimeError, match="No CUDA GPUs are available"):
                    torch.ones(1, device="cuda")


@virtual_gpus(2)
def test_a_module_goes_where_a_tensor_is():
    x, make = torch.ones(2, dtype=torch.float64, device=ONE), partial(nn.Linear, 2, 2)
    for net in (make().to(x), make().to(tensor=x), make().to(x, True)):
        assert (net.weight.device, net.weight.dtype) == (ONE, torch.float64)
    assert make(device=ONE).to(torch.ones(1)).weight.device.type == "cpu"


def test_numbers_name_gpus_in_builds_without_cuda(monkeypatch):
    """A CPU build of PyTorch knows no number as a device; with the patches for it, this one behaves the same."""
    from virtual_gpus.features.tensors import device_numbers

    before = device_numbers._raw_device
    monkeypatch.setattr(device_numbers, "numbers_mean_cuda", lambda: False)
    assert [name for _, name, _ in device_numbers.patches()] == ["_parse_to", "device"]
    for owner, name, replacement in device_numbers.patches():
        monkeypatch.setattr(owner, name, replacement)
    assert torch.device is not before and torch.device(1) == torch.device("cuda", 1) == ONE
    assert isinstance(ONE, torch.device) and isinstance(torch.device("cpu"), before) and not isinstance(1, torch.device)
    assert nn.Linear(2, 2).to(1).weight.device == nn.Linear(2, 2).to(device=1).weight.device == ONE
    assert torch.zeros(2, device=1).device == torch.ones(2).to(1).device == ONE
    assert torch.nn.parallel.scatter(torch.ones(4, 2), [0, 1])[1].device == ONE


@virtual_gpus(2, memory="2 GiB")
def test_peaks_stats_summary_and_fraction():
    x, y = empty(100 * MIB, "cuda:1"), empty(50 * MIB, "cuda:1")
    del y
    assert torch.cuda.memory_allocated(1) == 100 * MIB and torch.cuda.max_memory_reserved(1) == 150 * MIB
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(1)
    assert torch.cuda.max_memory_reserved(1) == 100 * MIB == torch.cuda.max_memory_allocated(1)
    x, stats = empty(3 * MIB), torch.cuda.memory_stats()
    assert stats["allocated_bytes.all.current"] == 3 * MIB and stats["allocation.all.current"] == 1
    assert stats["reserved_bytes.large_pool.current"] == 20 * MIB and stats["segment.all.current"] == 1
    assert stats["inactive_split_bytes.all.current"] == 17 * MIB and stats["max_split_size"] == -1
    documented = {"active.all.peak", "requested_bytes.all.freed", "oversize_allocations.current", "num_alloc_retries"}
    assert stats.keys() > documented | {"num_ooms", "num_sync_all_streams", "num_device_alloc", "num_device_free"}
    summary = torch.cuda.memory_summary()
    assert "Allocated memory" in summary and "3072 KiB" in summary and "CUDA OOMs: 0 " in summary
    torch.cuda.reset_accumulated_memory_stats()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == 0
    del x
    torch.cuda.set_per_process_memory_fraction(0.25, 0)
    assert torch.cuda.get_per_process_memory_fraction(0) == 0.25
    with pytest.raises(torch.OutOfMemoryError, match="512.00 MiB allowed"):
        empty(600 * MIB)
    assert empty(600 * MIB, "cuda:1").is_cuda
    for wrong in (2.0, -1.0):
        with pytest.raises(ValueError):
            torch.cuda.set_per_process_memory_fraction(wrong)
