"""Workspaces of cuBLAS and cublasLt (aten/src/ATen/cuda/CublasHandlePool.cpp, CUDABlas.cpp, native/cuda/Blas.cpp).

Every thread that multiplies matrices on a GPU has a cuBLAS handle there; autograd's backward runs in a thread of its
own, so a training step uses two. Handles of threads that ended are used again by others. A workspace belongs to a
handle and a stream. Products with a bias vector go through cublasLt. `memory_model.blas_workspaces` says how large
workspaces are and how long they stay. cuSOLVER has no workspace of PyTorch's that stays; what its routines take on the
way is not modelled.
"""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from weakref import WeakKeyDictionary

import torch

from virtual_gpus.dispatch.call import Call, Held
from virtual_gpus.machine import VirtualGPU, VirtualMachine
from virtual_gpus.memory_model import BlasWorkspaces, blas_workspaces
from virtual_gpus.ops.matrices import copies
from virtual_gpus.placement.storages import local

_LT_TYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
# What torch.backends.cuda.cublas_workspace_size and cublaslt_workspace_size set: machine -> {"cublas" or "cublaslt":
# bytes}.
chosen: WeakKeyDictionary[VirtualMachine, dict[str, int]] = WeakKeyDictionary()


class Handles:
    """The cuBLAS handles of one GPU and what they keep. Who holds one: a thread, by its number or "autograd".

    The environment is read when the first product runs on the GPU, as PyTorch reads it once.
    """

    def __init__(self, gpu: VirtualGPU):
        self.gpu = gpu
        self._defaults = blas_workspaces(gpu.spec, gpu.machine.settings.version)
        self._of = {}  # holder -> handle number
        self._spare: list[int] = []
        self.kept = {}  # (handle, stream, library) -> what is held

    @property
    def workspaces(self) -> BlasWorkspaces:
        """The rules for this GPU, with the sizes that the program chose."""
        sizes = chosen.get(self.gpu.machine)
        return replace(self._defaults, **sizes) if sizes else self._defaults

    def handle(self) -> int:
        """The running thread's handle: its own, one that a finished thread left, or a new one."""
        holder = "autograd" if getattr(local, "backward", False) else getattr(local, "worker", threading.get_ident())
        if holder not in self._of:
            self._collect()
            self._of[holder] = self._spare.pop() if self._spare else len(self._of)
        return self._of[holder]

    def leave(self, holder) -> None:
        """`holder` has ended; its handle is free for the next thread."""
        if holder in self._of:
            self._spare.append(self._of.pop(holder))

    def _collect(self) -> None:
        alive = {thread.ident for thread in threading.enumerate()}
        for holder in [h for h in self._of if isinstance(h, int) and h not in alive]:
            self.leave(holder)

    def work(self, lt: bool) -> None:
        """Have the workspaces of one product: keep them, or take and return them."""
        workspaces = self.workspaces
        for library in workspaces.libraries(lt):
            if workspaces.kept:
                self._keep(library, workspaces.size(library))
            else:
                Held(self.gpu, workspaces.size(library))

    def _keep(self, library: str, size: int) -> None:
        """Make sure of a workspace for this thread's handle and stream that is large enough."""
        key = self.handle(), self.gpu.stream, library
        had = self.kept.get(key)
        if had is None or had[1] < size:
            self.kept[key] = Held(self.gpu, size), size


def handles_of(gpu: VirtualGPU) -> Handles:
    """The GPU's handles, made at the first use."""
    if gpu.blas is None:
        gpu.blas = Handles(gpu)
    return gpu.blas


def clear_workspaces(gpu: VirtualGPU) -> None:
    """Give all kept workspaces back: torch._C._cuda_clearCublasWorkspaces()."""
    if gpu.blas is not None:
        gpu.blas.kept.clear()


# ---- operators ------------------------------------------------------------------------------------------------------


def with_workspace(call: Call, lt: bool = False):
    """Have the result first, then copies of matrices that cuBLAS cannot read, then its workspace.

    Empty products never get that far.
    """
    result = call.run()
    if not any(isinstance(a, torch.Tensor) and a.numel() == 0 for a in call.args):
        with call.scratches(copies(call)):
            handles_of(call.gpu).work(lt)
    return result


def product(call: Call):
    """A product without a bias: through cublasLt if the program prefers it (preferred_blas_library)."""
    return with_workspace(call, preferred() == torch._C._BlasBackend.Cublaslt)


def through_lt(call: Call):
    """Products that only cublasLt has: of bytes and of 8-bit floats."""
    return with_workspace(call, True)


def addmm(call: Call):
    """With a bias vector the product goes through cublasLt."""
    return with_workspace(call, _has_lt_bias(call)) if _lt_is_on() else product(call)


def _has_lt_bias(call: Call, activation: bool = False) -> bool:
    """isInputCompliesAddmmCudaLt. Else the bias is copied into the result first, and cuBLAS adds to that.

    A matrix as bias goes through cublasLt before an activation, and from 2.15 on in half precision.
    """
    bias, mat2 = call["self"], call["mat2"]
    if call["beta"] != 1 or bias.dtype not in _LT_TYPES or min(mat2.shape) < 2:
        return preferred() == torch._C._BlasBackend.Cublaslt
    if bias.is_contiguous() and 1 <= bias.dim() <= 2 and bias.numel() == bias.shape[-1] == mat2.shape[1]:
        return True
    half = bias.dtype in _LT_TYPES[2:] and bias.is_contiguous() and bias.shape[0] > 1
    half = half and call.gpu.machine.settings.version >= (2, 15)
    return (bias.dim() == 2 and (activation or half)) or preferred() == torch._C._BlasBackend.Cublaslt


def addmm_activation(call: Call):
    """addmm followed by ReLU or GELU."""
    return with_workspace(call, _lt_is_on() and _has_lt_bias(call, True))


def _lt_is_on() -> bool:
    return os.environ.get("DISABLE_ADDMM_CUDA_LT") != "1"


def preferred():
    """The library that the program prefers: see torch.backends.cuda.preferred_blas_library."""
    return torch._C._get_blas_preferred_backend()


RECIPES = {
    **dict.fromkeys(("mm", "bmm", "baddbmm", "baddbmm_", "addmm_", "addbmm", "addbmm_"), product),
    **dict.fromkeys(("addmv", "addmv_", "mv", "dot", "vdot", "linalg_solve_triangular", "triangular_solve"),
                    with_workspace),
    **dict.fromkeys(("_int_mm", "_scaled_mm"), through_lt),
    "addmm": addmm,
    "_addmm_activation": addmm_activation,
}  # fmt: skip
