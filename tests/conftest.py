"""Fixtures for the tests."""

import gc
import signal
import sys

import pytest


@pytest.fixture
def workspaces_given_back(monkeypatch):
    """cuBLAS returns its workspaces after each operator, as from PyTorch 2.15 on; before, they would stay for ever.

    For tests that count what a training leaves behind, under every PyTorch from 2.11 on.
    """
    from virtual_gpus import memory_model

    monkeypatch.delenv("TORCH_CUBLAS_WORKSPACE_CACHE", raising=False)
    monkeypatch.setattr(memory_model, "keeps_workspaces", lambda version, environment: False)


@pytest.fixture(scope="module", autouse=True)
def small_program():
    """gc forgets the half million objects of PyTorch and pytest until the module's tests have ended.

    Many tests ask gc to collect, which takes half a second when it goes through all of them. It sees what tests make.
    """
    gc.freeze()
    yield
    gc.unfreeze()
    machine = sys.modules.get("virtual_gpus.machine")
    assert machine is None or machine.active() is None, "a test of this module has left virtual GPUs on"


@pytest.fixture
def ctrl_c_interrupts():
    """SIGINT raises KeyboardInterrupt, also where a shell without job control started pytest in the background.

    Such a program ignores SIGINT, and so does everything that it starts.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def four():
    """Four virtual GPUs."""
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
