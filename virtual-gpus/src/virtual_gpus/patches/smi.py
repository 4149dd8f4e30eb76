"""GPUtil, which asks nvidia-smi: real GPUtil.GPU objects with what the driver of a virtual GPU would report."""

from __future__ import annotations

from virtual_gpus.machine import VirtualGPU, active

_MIB = 1 << 20


def getGPUs():
    """One GPUtil.GPU per GPU of the machine, hidden ones too, as nvidia-smi shows them. Memory in MiB."""
    return [_as_gputil(gpu) for gpu in active().slots]


def _as_gputil(gpu: VirtualGPU):
    from GPUtil import GPU

    total, used = gpu.memory / _MIB, gpu.allocator.device.used_by_all / _MIB
    return GPU(
        ID=gpu.slot,
        uuid=gpu.uuid,
        load=gpu.machine.load(gpu),
        memoryTotal=total,
        memoryUsed=used,
        memoryFree=total - used,
        driver="virtual",
        gpu_name=gpu.spec.name,
        serial="0",
        display_mode="Disabled",
        display_active="Disabled",
        temp_gpu=float("nan"),
    )


def patches():
    """Both names: `GPUtil.getGPUs`, and the one that GPUtil's own functions call. No rows without GPUtil."""
    try:
        import GPUtil
        import GPUtil.GPUtil as inner
    except ImportError:  # GPUtil 1.4.0 needs setuptools from Python 3.12 on
        return []
    return [(GPUtil, "getGPUs", getGPUs), (inner, "getGPUs", getGPUs)]
