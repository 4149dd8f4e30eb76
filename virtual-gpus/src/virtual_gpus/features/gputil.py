"""What asks the driver in this process: GPUtil, which runs nvidia-smi, and pynvml, which finds no library."""

import os
import sys
from collections.abc import Sequence

from virtual_gpus.driver.nvidia_smi import GPUView, query_gpus
from virtual_gpus.machine import VirtualGPU, get_machine
from virtual_gpus.patches.table import Patch


def _view(gpu: VirtualGPU) -> GPUView:
    processes, load = gpu.allocator.device.processes(), gpu.machine.load(gpu)
    return GPUView(gpu.slot, gpu.spec.name, gpu.uuid, gpu.memory, gpu.spec.capability, processes, load)


class _NvidiaSmi:
    """What GPUtil starts in place of the program nvidia-smi. GPUtil itself reads the answer."""

    def __init__(self, command: Sequence[str], **others: object):
        _, query, form = command
        self._names, self._form = (option.partition("=")[2].split(",") for option in (query, form))

    def communicate(self) -> tuple[bytes, None]:
        lines = query_gpus([_view(gpu) for gpu in get_machine().slots], self._names, self._form)  # hidden ones too
        return "".join(line + os.linesep for line in lines).encode(), None


def _no_library(flags: int) -> None:
    """NVML would tell of the machine's real GPUs, or of none: programs hear that there is no such library."""
    nvml = sys.modules["pynvml"]
    raise nvml.NVMLError(nvml.NVML_ERROR_LIBRARY_NOT_FOUND)


def patches() -> list[Patch]:
    nvml = sys.modules.get("pynvml")
    rows: list[Patch] = [(nvml, "nvmlInitWithFlags", _no_library)] if hasattr(nvml, "nvmlInitWithFlags") else []
    try:
        import GPUtil.GPUtil as gputil
    except ImportError:  # GPUtil 1.4.0 needs setuptools from Python 3.12 on
        return rows
    return [*rows, (gputil, "Popen", _NvidiaSmi)]
