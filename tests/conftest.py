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
