"""What torch.cuda asks of CUDA's runtime library by name: cudart, the profiler's switch, _sleep, nccl.version.

No runtime library is loaded for a virtual GPU. Calls that have a plain meaning here answer, all others are refused.
"""

from typing import NoReturn

import torch

from virtual_gpus import errors
from virtual_gpus.features.cuda.devices import _lazy_init, gpu_at
from virtual_gpus.features.cuda.memory_figures import mem_get_info
from virtual_gpus.patches.table import Patch, in_package

_raw_version = torch.cuda.nccl.version
_NCCL_OF_WHEELS = (2, 28, 9)  # of PyTorch 2.11 for Linux


class cudaError(int):
    """An error code of CUDA's runtime library (driver_types.h)."""

    success = 0


class Runtime:
    """torch.cuda.cudart(): the names of torch/csrc/cuda/shared/cudart.cpp. What is not here raises NotModelled."""

    cudaError = cudaError

    @staticmethod
    def cudaGetErrorString(error: int) -> str:
        """What an error code means."""
        return "no error" if error == cudaError.success else "an error of CUDA's runtime library"

    @staticmethod
    def cudaProfilerStart() -> int:
        """No profiler of NVIDIA's is attached, so nothing starts."""
        return cudaError.success

    cudaProfilerStop = cudaProfilerStart

    cudaMemGetInfo = staticmethod(mem_get_info)

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise errors.not_modelled(f"torch.cuda.cudart().{name}")


_runtime = Runtime()


def cudart() -> Runtime:
    """The part of CUDA's runtime library that virtual GPUs have."""
    _lazy_init()
    return _runtime


def _sleep(cycles: int) -> None:
    """A kernel of so many cycles in the current stream, on the modelled clock (ATen/cuda/Sleep.cu)."""
    gpu = gpu_at()
    clock = gpu.machine.clock
    clock.launch(gpu.slot, gpu.stream, cycles / gpu.spec.core_clock, clock.host.kernel, "spin_kernel")


def version() -> tuple[int | str, ...]:
    """torch.cuda.nccl.version(): of the NCCL in this PyTorch. Nothing of it runs (`features.distributed`)."""
    return _raw_version() if hasattr(torch._C, "_nccl_version") else _NCCL_OF_WHEELS


def patches() -> list[Patch]:
    return [*in_package("torch.cuda", cudart, _sleep), (torch.cuda.nccl, "version", version),
            (torch.cuda, "_cudart", _runtime)]  # fmt: skip
