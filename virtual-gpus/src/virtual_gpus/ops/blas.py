"""Workspaces of cuBLAS and cublasLt (aten/src/ATen/cuda/CublasHandlePool.cpp, CUDABlas.cpp, native/cuda/Blas.cpp).

Every thread that multiplies matrices on a GPU has a cuBLAS handle there; autograd's backward runs in a thread of its
own, so a training step uses two. Handles of threads that ended are used again by others. A workspace belongs to a
handle and a stream: 32 MiB on Hopper and later, 8.1 MiB before. Products with a bias vector go through cublasLt, which
asks for 1 MiB. What that means for memory changed with PyTorch:

- 2.11: kept for ever; cublasLt takes cuBLAS's workspace and one more of 1 MiB.
- 2.12 to 2.14: kept for ever; cublasLt works in cuBLAS's ("unified"), unless TORCH_CUBLASLT_UNIFIED_WORKSPACE=0.
- from 2.15: each operator takes its workspace and gives it back, cublasLt its 1 MiB alone. With
  TORCH_CUBLAS_WORKSPACE_CACHE=1 as in 2.12 to 2.14.

The rules of 2.11, 2.13 and 2.15 were read in their libraries; that 2.12 is like 2.13 follows from the dates of the
changes. cuSOLVER has no workspace of PyTorch's that stays; what its routines take on the way is not modelled.
"""

from __future__ import annotations

import os
import re
import threading
from weakref import WeakKeyDictionary

import torch

from virtual_gpus.dispatch.call import Call, Held
from virtual_gpus.machine import VirtualGPU, VirtualMachine
from virtual_gpus.ops.matrices import copies
from virtual_gpus.placement.storages import local
from virtual_gpus.versions import version_of

_KIB = 1 << 10
_LT_TYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
# What torch.backends.cuda.cublas_workspace_size and cublaslt_workspace_size set: machine -> {library: bytes}.
chosen: WeakKeyDictionary[VirtualMachine, dict[str, int]] = WeakKeyDictionary()


def keeps_workspaces(version: tuple[int, int]) -> bool:
    """True if workspaces stay once taken: always before 2.15, since then only when asked to."""
    return version < (2, 15) or os.environ.get("TORCH_CUBLAS_WORKSPACE_CACHE") == "1"


def is_unified(version: tuple[int, int]) -> bool:
    """True if cublasLt works in cuBLAS's workspace."""
    asked = os.environ.get("TORCH_CUBLASLT_UNIFIED_WORKSPACE")
    return keeps_workspaces(version) and (asked == "1" or (version >= (2, 12) and asked != "0"))


def workspace_bytes(gpu: VirtualGPU) -> int:
    """Of cuBLAS. CUBLAS_WORKSPACE_CONFIG=":SIZE:COUNT..." (KiB) as PyTorch reads it, else its default per GPU kind."""
    pairs = re.findall(r":(\d+):(\d+)", os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))
    if pairs:
        return sum(int(size) * int(count) for size, count in pairs) * _KIB
    return 4096 * 8 * _KIB if gpu.spec.capability >= (9, 0) else (4096 * 2 + 16 * 8) * _KIB


def lt_workspace_bytes(gpu: VirtualGPU) -> int:
    """Of cublasLt: CUBLASLT_WORKSPACE_SIZE in KiB, 1 MiB unless set; where it is cuBLAS's, no more than that."""
    text = os.environ.get("CUBLASLT_WORKSPACE_SIZE", "")
    return (int(text) if text.isdigit() else 1024) * _KIB


class Handles:
    """The cuBLAS handles of one GPU and what they keep. Who holds one: a thread, by its number or "autograd".

    The environment is read when the first product runs on the GPU, as PyTorch reads it once.
    """

    def __init__(self, gpu: VirtualGPU):
        self.gpu = gpu
        self.version = version_of(gpu.machine)
        self.keeps, self.unified = keeps_workspaces(self.version), is_unified(self.version)
        self._sizes = {"cublas": workspace_bytes(gpu), "cublasLt": lt_workspace_bytes(gpu)}
        self._of = {}  # holder -> handle number
        self._spare: list[int] = []
        self.kept = {}  # (handle, stream, library) -> what is held

    def size(self, library: str) -> int:
        """Bytes of a library's workspace: what the program chose, or the default."""
        size = chosen.get(self.gpu.machine, {}).get(library, self._sizes[library])
        return min(size, self.size("cublas")) if library == "cublasLt" and self.unified else size

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
        wanted = ["cublasLt"] if lt and not self.unified else ["cublas"]
        if lt and self.version < (2, 12) and not self.unified:
            wanted = ["cublas", "cublasLt"]  # its handle was cuBLAS's, and came with the workspace
        for library in wanted:
            if self.keeps:
                self._keep(library)
            else:
                Held(self.gpu, self.size(library))

    def _keep(self, library: str) -> None:
        """Make sure of a workspace for this thread's handle and stream that is large enough."""
        key, size = (self.handle(), self.gpu.stream, library), self.size(library)
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
    half = half and version_of(call.gpu.machine) >= (2, 15)
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
