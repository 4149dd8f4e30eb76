"""On, off, nested, out of order, by decorator, from several threads: afterwards everything is as it was."""

import concurrent.futures
import importlib
import os
import pkgutil
import types
import weakref

import pytest
import snapshots
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from virtual_gpus import active_machine, virtual_gpus
from virtual_gpus.features.cuda import devices
from virtual_gpus.patches import table
from virtual_gpus.processes.shared_memory import FOLDER


@pytest.fixture(scope="module", autouse=True)
def all_imported():
    """Importing a module switches nothing on. Later, the pictures would show what it imports of PyTorch."""
    package = importlib.import_module("virtual_gpus")
    names = [m.name for m in pkgutil.walk_packages(package.__path__, "virtual_gpus.")]
    assert len(names) > 50
    for name in names:
        if not name.endswith("__main__"):
            importlib.import_module(name)
    assert active_machine() is None and snapshots.stayed() == []
    with virtual_gpus(1):  # once, so that what PyTorch imports on first use is there
        train()


@pytest.fixture(autouse=True)
def all_as_before():
    before = snapshots.picture()
    assert before[1]["machine"] is None and before[1]["dispatch modes"] == 0
    yield
    assert snapshots.differences(before) == []


def train():
    """A little of everything that switches modes: autograd, an optimizer, DataParallel, random numbers."""
    net = torch.nn.DataParallel(torch.nn.Linear(4, 3).to("cuda:0"))
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.randn(8, 4, device="cuda")).sum().backward()
    optimizer.step()
    return torch.cuda.memory_allocated(0)


def in_thread(function):
    """What `function` returns, or raises, in a thread of its own."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def test_start_and_stop():
    gpus = virtual_gpus(3, memory="1 GiB")
    assert gpus.start() == [torch.device("cuda", i) for i in range(3)]
    with pytest.raises(RuntimeError, match="already on"):
        gpus.start()
    assert torch.cuda.device_count() == 3 and torch.ones(2, device="cuda:2").is_cuda and train() > 0
    gpus.stop()
    gpus.stop()  # does nothing
    assert active_machine() is None
    assert gpus.start() and torch.cuda.memory_allocated() == 0  # and again, as new
    gpus.stop()


def test_decorator_gives_fresh_gpus_to_every_call():
    @virtual_gpus(2)
    def allocate(depth, *, kept):
        """A docstring."""
        assert torch.cuda.memory_allocated(1) == 0
        kept.append(torch.ones(10, device="cuda:1"))
        return [active_machine()] + (allocate(depth - 1, kept=kept) if depth else [])

    kept = []
    assert len({*allocate(1, kept=kept), *allocate(0, kept=kept)}) == 3 and active_machine() is None
    assert allocate.__name__ == "allocate" and allocate.__doc__ == "A docstring."


def test_generators_and_coroutines_are_not_decorated():
    async def work(): ...

    with pytest.raises(TypeError, match="Write `with virtual_gpus"):
        virtual_gpus(2)(work)


def test_inner_gpus_are_other_cards():
    with virtual_gpus(4, memory="2 GiB"):
        torch.cuda.set_device(3)
        outer = torch.ones(1000, device="cuda:1")
        with virtual_gpus(2, memory="1 GiB"):
            assert torch.cuda.device_count() == 2 and torch.cuda.current_device() == 0
            assert torch.cuda.get_device_properties(0).total_memory == 1 << 30
            with pytest.raises(torch.AcceleratorError, match="invalid device ordinal"):
                torch.ones(1, device="cuda:3")
            torch.cuda.set_device(1)
            inner = torch.ones(1000, device="cuda:1")
            with pytest.raises(RuntimeError, match="belongs to a different virtual_gpus.*Nested blocks"):
                outer + inner
            more = outer * 2  # works, over there
            assert torch.cuda.memory_allocated(1) == 4096
            assert (outer.to("cuda:1") + inner).sum().item() == 2000.0
            assert outer.cpu().sum().item() == 1000.0
        assert torch.cuda.device_count() == 4 and torch.cuda.current_device() == 3
        assert more.device == torch.device("cuda:1") and torch.cuda.memory_allocated(1) == 8192
        del more, inner
        assert torch.cuda.memory_allocated(1) == 4096


def test_stopped_out_of_order():
    outer, inner = virtual_gpus(4), virtual_gpus(2)
    outer.start()
    x, folder = torch.ones(10, device="cuda:3"), os.environ[FOLDER]
    inner.start()
    assert os.environ[FOLDER] != folder
    outer.stop()
    assert torch.cuda.device_count() == 2 and x.device.type == "cpu"
    assert torch.ones(2, device="cuda:1").is_cuda
    inner.stop()
    assert FOLDER not in os.environ


def test_stopped_under_a_mode_that_stays():
    class Other(torch.utils._python_dispatch.TorchDispatchMode):
        @classmethod
        def _should_skip_dynamo(cls):
            return False  # else its first call without GPUs imports torch._dynamo, which the picture would show

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    gpus, seen = virtual_gpus(2), []
    gpus.start()
    with Other():
        assert torch.ones(2, device="cuda:1").is_cuda
        gpus.stop()
        seen.clear()
        assert torch.ones(2).device.type == "cpu" and seen


def test_a_failure_while_switching_on(monkeypatch):
    monkeypatch.setattr(devices, "patches", lambda: [(torch.cuda, "device_count", 1), (object(), "x", 1)])
    with pytest.raises((TypeError, AttributeError)):
        virtual_gpus(2).start()


def test_a_failure_before_switching_on():
    """Where no folder can be made for what processes share, nothing is on, and the object can be used later."""
    gpus = virtual_gpus(2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("virtual_gpus.machine.SharedMemoryRegistry", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            gpus.start()
        gpus.stop()
    assert len(gpus.start()) == 2
    gpus.stop()


def test_a_failure_while_switching_off(monkeypatch):
    monkeypatch.setattr(devices, "forget", lambda: 1 / 0, raising=False)
    with pytest.raises(ZeroDivisionError), virtual_gpus(2):
        torch.set_default_device("cuda:1")


def test_default_devices_go_with_the_gpus():
    with virtual_gpus(2):
        torch.set_default_device("cuda:1")
    assert torch.ones(2).device.type == "cpu"
    with torch.device("meta"):
        assert torch.tensor([1.0]).is_meta and torch.zeros(2).is_meta


def test_tensors_that_outlive_their_gpus_are_cpu_tensors():
    weight = torch.ones(3, requires_grad=True)
    with virtual_gpus(4):
        x, loss = torch.ones(3, device="cuda:3"), (weight.to("cuda:2") * 2).to("cuda:1").sum()
        normalized = torch.nn.functional.rms_norm(x, (3,), weight.to("cuda:3")).sum()
    assert not x.is_cuda and (x + torch.ones(3)).sum().item() == 6.0 and x.cpu() is x and x.numpy().sum() == 3.0
    with virtual_gpus(2):  # other GPUs know nothing of them
        assert not x.is_cuda and (x + torch.ones(3)).device.type == "cpu" and x.to("cuda:1").is_cuda
        assert x.clone().untyped_storage().device.type == "cpu"
    loss.backward()
    assert weight.grad.tolist() == [2.0] * 3
    normalized.backward()
    assert weight.grad.tolist() == pytest.approx([3.0] * 3)


def test_functions_that_were_imported_while_gpus_were_on_leave_no_mode_behind():
    with virtual_gpus(1):
        make = [torch.tensor, torch.ones]
    assert in_thread(lambda: [*(f([2]).device.type for f in make), *_get_current_dispatch_mode_stack()]) == ["cpu"] * 2


def test_started_in_one_thread_and_stopped_in_another():
    gpus = virtual_gpus(2)
    gpus.start()
    in_thread(gpus.stop)
    assert active_machine() is None and torch.ones(2).device.type == "cpu"
    with pytest.raises((AssertionError, RuntimeError)):  # not on a GPU any more
        torch.ones(2, device="cuda")
    in_thread(gpus.start)
    assert torch.ones(2, device="cuda:1").is_cuda and train() > 0
    gpus.stop()


def test_many_threads_switch_at_once():
    def work(count):
        for _ in range(5):
            with virtual_gpus(count):
                torch.ones(2, device="cuda:0")

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(1, 5)))
    assert active_machine() is None


def test_public_names_are_frozen():
    public = {"NotModelled", "RaceError", "active_machine", "block_address", "record_timeline", "record_training",
              "renew_inherited", "transformer_flops", "virtual_gpus"}  # fmt: skip
    program = importlib.import_module("virtual_gpus.__main__")
    own = {name for name, value in vars(program).items() if getattr(value, "__module__", None) == program.__name__}
    assert {name for name in own if name[0] != "_"} == {"main", "parse"}
    assert set(importlib.import_module("virtual_gpus").__all__) == public
    assert {name for name in vars(virtual_gpus) if name[0] != "_"} == {"start", "stop"}


def test_cuda_is_initialized_by_its_first_use():
    """init_device_mesh takes the GPU from LOCAL_RANK only if CUDA is not initialized."""
    with virtual_gpus(2):
        torch.manual_seed(0)  # PyTorch puts the GPUs' seeds off
        assert torch.cuda.is_available() and torch.cuda.device_count() == 2 and torch.cuda.memory_allocated() == 0
        assert not torch.cuda.is_initialized()
        for use in (torch.cuda.current_device, lambda: torch.ones(2, device="cuda")):
            use()
            assert torch.cuda.is_initialized() and torch.cuda._initialized
            child = os.fork()
            if child == 0:
                os._exit(int(torch.cuda.is_initialized()))
            assert os.waitpid(child, 0) == (child, 0)
    with virtual_gpus(1):
        assert not torch.cuda.is_initialized()
        torch.cuda.init()
        assert torch.cuda.is_initialized()
    assert not torch.cuda._initialized


def test_no_other_object_is_taken_for_a_patch():
    """What stood in for PyTorch's functions is found by its id, which nothing else may have until all is put back."""
    owner, stand_in = types.SimpleNamespace(double=lambda x: 2 * x), lambda x: x + x
    number, alive = id(stand_in), weakref.ref(stand_in)
    table.put_in([(owner, "double", stand_in)])
    del stand_in
    originals = table.take_out()
    assert alive() is not None and originals[number] == (alive(), owner.double)
