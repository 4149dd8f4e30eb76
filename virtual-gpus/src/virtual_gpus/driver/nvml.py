"""NVML, the library that pynvml, gpustat and nvitop ask, as far as it can be told of a virtual GPU.

pynvml loads libnvidia-ml.so.1 with ctypes and calls its functions with pointers to what they fill in. `Library` takes
the place of the loaded library. Sensors, clocks, links and everything else that is not modelled answer
NVML_ERROR_NOT_SUPPORTED, as NVML does for what a real GPU lacks. Source: the NVML API reference (nvml.h).
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from typing import Any

from virtual_gpus.driver.view import DRIVER, GPUView

_SUCCESS, _INVALID_ARGUMENT, _NOT_SUPPORTED, _NOT_FOUND, _INSUFFICIENT_SIZE = 0, 2, 3, 6, 7
_ERRORS = {_SUCCESS: b"Success", _INVALID_ARGUMENT: b"Invalid Argument", _NOT_SUPPORTED: b"Not Supported",
           _NOT_FOUND: b"Not Found", _INSUFFICIENT_SIZE: b"Insufficient Size"}  # fmt: skip
_FIRST_HANDLE = 1 << 20  # handles are pointers that only NVML follows: GPU 0 has this one

# What a function answers. Its type says what is filled in: a text, numbers (one for each pointer), the fields of a
# structure, or a list of processes.
_OF_THE_MACHINE: dict[str, Callable[[list[GPUView]], Any]] = {
    "nvmlInit": lambda gpus: (),
    "nvmlInitWithFlags": lambda gpus: (),
    "nvmlShutdown": lambda gpus: (),
    "nvmlSystemGetDriverVersion": lambda gpus: DRIVER,
    "nvmlSystemGetNVMLVersion": lambda gpus: DRIVER,
    "nvmlDeviceGetCount": lambda gpus: (len(gpus),),
}
_OF_A_GPU: dict[str, Callable[[GPUView], Any]] = {
    "nvmlDeviceGetIndex": lambda gpu: (gpu.slot,),
    "nvmlDeviceGetMinorNumber": lambda gpu: (gpu.slot,),
    "nvmlDeviceGetName": lambda gpu: gpu.name,
    "nvmlDeviceGetUUID": lambda gpu: gpu.uuid,
    "nvmlDeviceGetMemoryInfo": lambda gpu: {"total": gpu.memory, "used": gpu.used, "free": gpu.free, "reserved": 0},
    "nvmlDeviceGetUtilizationRates": lambda gpu: {"gpu": gpu.percent, "memory": gpu.percent},
    "nvmlDeviceGetComputeRunningProcesses": lambda gpu: gpu.processes,
    "nvmlDeviceGetGraphicsRunningProcesses": lambda gpu: [],
    "nvmlDeviceGetMPSComputeRunningProcesses": lambda gpu: [],
    "nvmlDeviceGetCudaComputeCapability": lambda gpu: gpu.capability,
    "nvmlDeviceGetPciInfo": lambda gpu: {"domain": 0, "bus": gpu.slot + 1, "device": 0, "busId": gpu.bus_id.encode(),
                                         "busIdLegacy": gpu.bus_id[4:].encode()},
}  # fmt: skip
_HANDLES = {"nvmlDeviceGetHandleByIndex": "slot", "nvmlDeviceGetHandleByUUID": "uuid",
            "nvmlDeviceGetHandleByPciBusId": "bus_id"}  # fmt: skip


class Library:
    """`pynvml.nvmlLib`. look: returns the GPUs as they are now."""

    def __init__(self, look: Callable[[], list[GPUView]]):
        self._look = look

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if not name.startswith("nvml"):
            raise AttributeError(name)

        def call(*args):  # a function of its own, since pynvml sets `restype`
            return _answer(self._look(), re.sub(r"_v\d+$", "", name), *args)

        return call


def _answer(gpus: list[GPUView], name: str, *args) -> int | bytes:
    if name == "nvmlErrorString":
        return _ERRORS.get(getattr(args[0], "value", args[0]), b"Unknown Error")
    if name in _HANDLES:
        return _handle(gpus, _HANDLES[name], *args)
    if name in _OF_THE_MACHINE:
        return _fill(_OF_THE_MACHINE[name](gpus), *args)
    if name not in _OF_A_GPU:
        return _NOT_SUPPORTED
    slot = (ctypes.cast(args[0], ctypes.c_void_p).value or 0) - _FIRST_HANDLE
    return _fill(_OF_A_GPU[name](gpus[slot]), *args[1:]) if 0 <= slot < len(gpus) else _INVALID_ARGUMENT


def _handle(gpus: list[GPUView], attribute: str, wanted, pointer) -> int:
    wanted = getattr(wanted, "value", wanted)
    wanted = wanted.decode() if isinstance(wanted, bytes) else wanted
    for gpu in gpus:
        if getattr(gpu, attribute) == wanted:
            ctypes.cast(pointer, ctypes.POINTER(ctypes.c_void_p))[0] = _FIRST_HANDLE + gpu.slot
            return _SUCCESS
    return _INVALID_ARGUMENT if attribute == "slot" else _NOT_FOUND


def _fill(value, *places) -> int:
    if isinstance(value, str):
        buffer, length = places
        if len(value) >= getattr(length, "value", length):
            return _INSUFFICIENT_SIZE
        buffer.value = value.encode()
    elif isinstance(value, list):
        count, entries = places
        room, count._obj.value = count._obj.value, len(value)
        if room < len(value):
            return _INSUFFICIENT_SIZE
        for entry, (process, nbytes) in zip(entries or (), value, strict=False):
            _set(entry, pid=process, usedGpuMemory=nbytes, gpuInstanceId=0xFFFFFFFF, computeInstanceId=0xFFFFFFFF)
    elif isinstance(value, dict):
        _set(places[0]._obj, **value)
    else:
        for place, number in zip(places, value, strict=False):
            place._obj.value = number
    return _SUCCESS


def _set(structure, **fields) -> None:
    """Versions of a structure have more and fewer fields."""
    for name, value in fields.items():
        if hasattr(structure, name):
            setattr(structure, name, value)
