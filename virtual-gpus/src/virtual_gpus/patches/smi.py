"""What asks the driver in this process: GPUtil, which runs nvidia-smi, and pynvml, which gpustat and nvitop use."""

from __future__ import annotations

import os
import sys

from virtual_gpus.driver.nvml import Library
from virtual_gpus.driver.view import DRIVER, GPUView
from virtual_gpus.machine import VirtualGPU, active

_MIB = 1 << 20


def look() -> list[GPUView]:
    """All GPUs of the machine, hidden ones too, as the driver shows them."""
    machine = active()
    return [] if machine is None else [_view(gpu) for gpu in machine.slots]


def _view(gpu: VirtualGPU) -> GPUView:
    device = gpu.allocator.device
    processes = device.shared.others() if device.shared is not None else []
    if device.used_bytes:
        processes = sorted([*processes, (os.getpid(), device.used_bytes)])
    return GPUView(gpu.slot, gpu.spec.name, gpu.uuid, gpu.memory, gpu.spec.capability, processes, gpu.machine.load(gpu))


def getGPUs():
    """One GPUtil.GPU per GPU of the machine. Memory in MiB."""
    return [_as_gputil(gpu) for gpu in look()]


def _as_gputil(gpu: GPUView):
    from GPUtil import GPU

    total, used = gpu.memory / _MIB, gpu.used / _MIB
    return GPU(
        ID=gpu.slot,
        uuid=gpu.uuid,
        load=gpu.load,
        memoryTotal=total,
        memoryUsed=used,
        memoryFree=total - used,
        driver=DRIVER,
        gpu_name=gpu.name,
        serial="0",
        display_mode="Disabled",
        display_active="Disabled",
        temp_gpu=float("nan"),
    )


def _of_gputil():
    """Both names: `GPUtil.getGPUs`, and the one that GPUtil's own functions call. No rows without GPUtil."""
    try:
        import GPUtil
        import GPUtil.GPUtil as inner
    except ImportError:  # GPUtil 1.4.0 needs setuptools from Python 3.12 on
        return []
    return [(GPUtil, "getGPUs", getGPUs), (inner, "getGPUs", getGPUs)]


def _of_pynvml():
    """pynvml keeps the library that it loaded, and its functions by name. torch.cuda imports pynvml if it can."""
    modules = (sys.modules.get(name) for name in ("pynvml", "py3nvml.py3nvml"))
    return [
        row
        for module in modules
        if module is not None and hasattr(module, "_nvmlGetFunctionPointer_cache")
        for row in ((module, "nvmlLib", Library(look)), (module, "_nvmlGetFunctionPointer_cache", {}))
    ]


def patches():
    """See `patches`."""
    return _of_gputil() + _of_pynvml()
