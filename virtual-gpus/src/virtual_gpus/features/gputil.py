"""What asks the driver in this process: GPUtil, which runs nvidia-smi, and pynvml, which finds no library."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from virtual_gpus.driver.nvidia_smi import GPUView, query_gpus
from virtual_gpus.machine import VirtualGPU, active
from virtual_gpus.patches.table import Patch


def _view(gpu: VirtualGPU) -> GPUView:
    processes, load = gpu.allocator.device.processes(), gpu.machine.load(gpu)
    return GPUView(gpu.slot, gpu.spec.name, gpu.uuid, gpu.memory, gpu.spec.capability, processes, load)


class _NvidiaSmi:
    """What GPUtil starts in place of the program nvidia-smi. GPUtil itself reads the answer."""

    def __init__(self, command: Sequence[str], **_):
        _, query, form = command
        self._names, self._form = (option.partition("=")[2].split(",") for option in (query, form))

    def communicate(self) -> tuple[bytes, None]:
        gpus = [_view(gpu) for gpu in active().slots]  # hidden ones too
        lines = query_gpus(gpus, self._names, self._form)
        return "".join(line + os.linesep for line in lines).encode(), None


def _of_gputil() -> list[Patch]:
    """No rows without GPUtil."""
    try:
        import GPUtil.GPUtil as module
    except ImportError:  # GPUtil 1.4.0 needs setuptools from Python 3.12 on
        return []
    return [(module, "Popen", _NvidiaSmi)]


def _of_pynvml() -> list[Patch]:
    """NVML would tell of the machine's real GPUs, or of none: programs hear that there is no such library."""
    module = sys.modules.get("pynvml")
    return [(module, "nvmlInitWithFlags", _no_library)] if hasattr(module, "nvmlInitWithFlags") else []


def _no_library(flags: int) -> None:
    nvml = sys.modules["pynvml"]
    raise nvml.NVMLError(nvml.NVML_ERROR_LIBRARY_NOT_FOUND)


def patches() -> list[Patch]:
    return _of_gputil() + _of_pynvml()
