"""Fixtures for the tests. The package and its benchmarks stand alone: no test imports anything of the course."""

import gc
import importlib
import os
import pkgutil
import signal
from pathlib import Path

# Several test processes on few cores: one thread each, and the same last digits on every machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.pop("VIRTUAL_GPUS_FOLDER", None)  # another program's cards
os.environ.pop("TORCH_CUBLAS_WORKSPACE_CACHE", None)  # fixtures of whole modules set it

import pytest
import virtual_gpus as package  # imports PyTorch when one of its names is first used

SETTINGS = ("CUDA_VISIBLE_DEVICES", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "CUBLAS_WORKSPACE_CONFIG",
            "CUBLASLT_WORKSPACE_SIZE", "TORCH_CUBLASLT_UNIFIED_WORKSPACE", "DISABLE_ADDMM_CUDA_LT")  # fmt: skip

FEATURES = Path(package.__file__).with_name("features")
HERE = {module.name for module in pkgutil.iter_modules([str(FEATURES)])}
TESTS_OF = Path(__file__).with_name("features").iterdir()  # a module or a folder with the name of each feature
collect_ignore = [path for path in TESTS_OF if path.stem.removeprefix("test_") not in HERE]


def pytest_runtest_setup(item):
    """Tests marked `gpu(n)` need n real GPUs, one if no number is given."""
    for marker in item.iter_markers("gpu"):
        import torch

        needed = marker.args[0] if marker.args else 1
        if torch.cuda.device_count() < needed:
            pytest.skip(f"needs {needed} real GPU(s), this machine has {torch.cuda.device_count()}")


@pytest.fixture(autouse=True)
def no_settings(request):
    """Virtual GPUs are as they are by themselves, whatever the machine sets for its real ones."""
    with pytest.MonkeyPatch.context() as patch:  # of its own: a test's is undone while the test's GPUs are on
        for name in SETTINGS if request.node.get_closest_marker("gpu") is None else ():
            patch.delenv(name, raising=False)
        yield


@pytest.fixture
def gpus(request):
    """Virtual GPUs as the module's GPUS says; random numbers start anew."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    with package.virtual_gpus(**request.module.GPUS) as devices:
        yield devices


@pytest.fixture(scope="module")
def gpus_of_the_module(request):
    """The same for all tests of the module together."""
    with package.virtual_gpus(**request.module.GPUS) as devices:
        yield devices


@pytest.fixture(params=[False, True], ids=["numbers", "shapes"])
def gpu(request):
    """One virtual H200; the test runs with numbers and with shapes only, and expects the same."""
    with package.virtual_gpus(1, kind="H200", shapes_only=request.param) as (device,):
        yield device


@pytest.fixture
def workspaces_given_back(monkeypatch):
    """cuBLAS returns its workspaces after each operator, as from PyTorch 2.15 on; before, they would stay for ever. For
    tests that count what a training leaves behind, under every PyTorch from 2.11 on."""
    monkeypatch.setattr("virtual_gpus.memory_model.keeps_workspaces", lambda version, environment: False)


@pytest.fixture
def rules_of_2_11(monkeypatch):
    monkeypatch.setattr("virtual_gpus.settings.INSTALLED", (2, 11))


@pytest.fixture(scope="module", autouse=True)
def small_program():
    """gc forgets the half million objects of PyTorch and pytest until the module's tests have ended. Many tests ask gc
    to collect, which takes half a second where it goes through all of them. What tests make it sees. A module that
    leaves PyTorch changed fails by its own name: else tests of other modules fail that share its process."""
    import snapshots

    gc.freeze()
    yield
    gc.unfreeze()
    assert snapshots.active_machine() is None, "a test of this module has left virtual GPUs on"
    assert snapshots.stayed() == []


@pytest.fixture
def ctrl_c_interrupts():
    """SIGINT raises KeyboardInterrupt, also where a shell without job control started pytest in the background. Such a
    program ignores SIGINT, and so does everything that it starts."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def no_libuv(monkeypatch):
    """Stores in this process are as in PyTorch for Windows, which is built without libuv."""
    import torch.distributed as dist

    class Store(dist.TCPStore):
        def __init__(self, *args, use_libuv=True, **named):
            if use_libuv:
                raise RuntimeError("use_libuv was requested but PyTorch was built without libuv support")
            super().__init__(*args, use_libuv=False, **named)

    monkeypatch.setenv("USE_LIBUV", "0")
    elastic = "elastic.rendezvous."
    for module in ("rendezvous", elastic + "c10d_rendezvous_backend", elastic + "static_tcp_rendezvous"):
        monkeypatch.setattr(importlib.import_module(f"torch.distributed.{module}"), "TCPStore", Store)
    monkeypatch.setattr(dist, "TCPStore", Store)
