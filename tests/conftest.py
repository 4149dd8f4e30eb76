"""Fixtures for the tests."""

import pytest


@pytest.fixture
def workspaces_given_back(monkeypatch):
    """cuBLAS returns its workspaces after each operator, as from PyTorch 2.15 on; before, they would stay for ever.

    For tests that count what a training leaves behind, under every PyTorch from 2.11 on.
    """
    from helpers.virtual.on_cuda import blas

    monkeypatch.delenv("TORCH_CUBLAS_WORKSPACE_CACHE", raising=False)
    monkeypatch.setattr(blas, "keeps_workspaces", lambda version: False)


@pytest.fixture
def four():
    """Four virtual GPUs."""
    from helpers.virtual import virtual_gpus

    with virtual_gpus(4) as gpus:
        yield gpus


@pytest.fixture
def titans():
    """The article's four cards, without values."""
    from helpers.virtual import virtual_gpus

    with virtual_gpus(4, kind="TITAN Xp", shapes_only=True) as gpus:
        yield gpus
