"""Fixtures for the tests."""

import gc
import importlib
import signal
import sys
from unittest import mock

import pytest


@pytest.fixture
def workspaces_given_back(monkeypatch):
    """cuBLAS returns its workspaces after each operator, as from PyTorch 2.15 on; before, they would stay."""
    from virtual_gpus import memory_model

    monkeypatch.delenv("TORCH_CUBLAS_WORKSPACE_CACHE", raising=False)
    monkeypatch.setattr(memory_model, "keeps_workspaces", lambda version, environment: False)


@pytest.fixture(scope="module", autouse=True)
def small_program():
    """gc forgets PyTorch's and pytest's half million objects for a module: to go through them takes half a second."""
    gc.freeze()
    on = sys.modules["virtual_gpus.machine"].active() if "virtual_gpus.machine" in sys.modules else None
    with mock.patch("torch.compile", importlib.import_module("torch").compile):  # Lightning changes it on import
        yield
    gc.unfreeze()
    machine = sys.modules.get("virtual_gpus.machine")
    assert machine is None or machine.active() is on, "a test of this module has left virtual GPUs on"


@pytest.fixture
def ctrl_c_interrupts():
    """SIGINT raises KeyboardInterrupt, also in a process of the background of a shell without job control."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def four():
    from virtual_gpus import virtual_gpus

    with virtual_gpus(4) as gpus:
        yield gpus


@pytest.fixture
def four_of_16_gib():
    """As the lessons with exact figures ask for."""
    from virtual_gpus import virtual_gpus

    with virtual_gpus(4, memory="16 GiB"):
        yield


@pytest.fixture
def two():
    from virtual_gpus import virtual_gpus

    with virtual_gpus(2):
        yield
