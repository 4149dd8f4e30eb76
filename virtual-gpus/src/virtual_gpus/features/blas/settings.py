"""cuBLAS's settings that C++ would ask a GPU for: sizes of workspaces, and giving them back.

`torch.backends.cuda.cublas_workspace_size` and its kin (from PyTorch 2.13 on) call these.
"""

from __future__ import annotations

import torch

from virtual_gpus.features.blas import products as blas
from virtual_gpus.features.cuda.devices import gpu_at
from virtual_gpus.machine import active

_LIBRARIES = {"Cublas": "cublas", "CublasLt": "cublaslt"}
_preferred = []  # in a build without CUDA, what preferred_blas_library chose


def _cuda_clearCublasWorkspaces() -> None:
    """Give the workspaces of all threads on all GPUs back to the caching allocator."""
    for gpu in active().slots:
        blas.clear_workspaces(gpu)


def _functions(name: str, library: str):
    """Ask for, set and reset the bytes of a library's workspace, for all GPUs."""

    def get() -> int:
        return blas.handles_of(gpu_at()).workspaces.size(library)

    def set_(size: int) -> None:
        if size < 0:
            raise RuntimeError(f"workspace size must be non-negative, got {size}")
        blas.choose_size(active(), library, size)

    def reset() -> None:
        blas.choose_size(active(), library, None)

    return {f"_cuda_get{name}WorkspaceSize": get, f"_cuda_set{name}WorkspaceSize": set_,
            f"_cuda_reset{name}WorkspaceSize": reset}  # fmt: skip


def patches():
    """See `features`. A build without CUDA has none of these names, a GPU's owner all of them."""
    rows = [(torch._C, "_cuda_clearCublasWorkspaces", _cuda_clearCublasWorkspaces)]
    if hasattr(torch.backends.cuda, "cublas_workspace_size"):
        for name, library in _LIBRARIES.items():
            rows += [(torch._C, key, function) for key, function in _functions(name, library).items()]
    if torch.version.cuda is None:
        rows += [(torch._C, "_get_blas_preferred_backend", _get_preferred),
                 (torch._C, "_set_blas_preferred_backend", _set_preferred)]  # fmt: skip
    return rows


def _get_preferred():
    return _preferred[-1] if _preferred else torch._C._BlasBackend.Cublas


def _set_preferred(backend) -> None:
    _preferred[:] = [backend]
