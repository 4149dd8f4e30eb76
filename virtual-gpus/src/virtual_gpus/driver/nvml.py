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


class Library:
    """`pynvml.nvmlLib`. look: returns the GPUs as they are now."""

    def __init__(self, look: Callable[[], list[GPUView]]):
        self._look = look

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if not name.startswith("nvml"):
            raise AttributeError(name)
        function = _FUNCTIONS.get(re.sub(r"_v\d+$", "", name))

        def call(*args):  # a function of its own, since pynvml sets `restype`
            return _NOT_SUPPORTED if function is None else function(self._look(), *args)

        return call


def _of_gpu(function: Callable[..., int]) -> Callable[..., int]:
    """A function whose first argument is a GPU's handle."""

    def call(gpus: list[GPUView], handle, *args) -> int:
        slot = (ctypes.cast(handle, ctypes.c_void_p).value or 0) - _FIRST_HANDLE
        return function(gpus[slot], *args) if 0 <= slot < len(gpus) else _INVALID_ARGUMENT

    return call


def _give(pointer, value: int) -> int:
    pointer._obj.value = value
    return _SUCCESS


def _give_text(buffer, text: str, length) -> int:
    if len(text) >= getattr(length, "value", length):
        return _INSUFFICIENT_SIZE
    buffer.value = text.encode()
    return _SUCCESS


def _succeed(gpus, *_) -> int:
    return _SUCCESS


def _driver_version(gpus, buffer, length) -> int:
    return _give_text(buffer, DRIVER, length)


def _handle(pointer, slot: int) -> int:
    ctypes.cast(pointer, ctypes.POINTER(ctypes.c_void_p))[0] = _FIRST_HANDLE + slot
    return _SUCCESS


def _handle_by_index(gpus, index, pointer) -> int:
    slot = getattr(index, "value", index)
    return _handle(pointer, slot) if slot < len(gpus) else _INVALID_ARGUMENT


def _handle_by(attribute: str) -> Callable[..., int]:
    def find(gpus, text, pointer) -> int:
        wanted = getattr(text, "value", text)
        wanted = wanted.decode() if isinstance(wanted, bytes) else wanted
        slots = [gpu.slot for gpu in gpus if getattr(gpu, attribute) == wanted]
        return _handle(pointer, slots[0]) if slots else _NOT_FOUND

    return find


def _memory(gpu: GPUView, pointer) -> int:
    found = pointer._obj
    found.total, found.used, found.free = gpu.memory, gpu.used, gpu.memory - gpu.used
    if hasattr(found, "reserved"):
        found.reserved = 0
    return _SUCCESS


def _utilization(gpu: GPUView, pointer) -> int:
    pointer._obj.gpu = pointer._obj.memory = round(100 * gpu.load)
    return _SUCCESS


def _processes(gpu: GPUView, count, places) -> int:
    room, count._obj.value = count._obj.value, len(gpu.processes)
    if room < len(gpu.processes):
        return _INSUFFICIENT_SIZE
    for place, (process, nbytes) in zip(places or (), gpu.processes, strict=False):
        place.pid, place.usedGpuMemory = process, nbytes
        for name in ("gpuInstanceId", "computeInstanceId"):
            if hasattr(place, name):
                setattr(place, name, 0xFFFFFFFF)
    return _SUCCESS


def _capability(gpu: GPUView, major, minor) -> int:
    return _give(major, gpu.capability[0]) or _give(minor, gpu.capability[1])


def _pci(gpu: GPUView, pointer) -> int:
    found = pointer._obj
    found.domain, found.bus, found.device = 0, gpu.slot + 1, 0
    found.busId, found.busIdLegacy = gpu.bus_id.encode(), gpu.bus_id[4:].encode()
    return _SUCCESS


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "nvmlInit": _succeed,
    "nvmlInitWithFlags": _succeed,
    "nvmlShutdown": _succeed,
    "nvmlErrorString": lambda gpus, code: _ERRORS.get(getattr(code, "value", code), b"Unknown Error"),
    "nvmlSystemGetDriverVersion": _driver_version,
    "nvmlSystemGetNVMLVersion": _driver_version,
    "nvmlDeviceGetCount": lambda gpus, pointer: _give(pointer, len(gpus)),
    "nvmlDeviceGetHandleByIndex": _handle_by_index,
    "nvmlDeviceGetHandleByUUID": _handle_by("uuid"),
    "nvmlDeviceGetHandleByPciBusId": _handle_by("bus_id"),
    "nvmlDeviceGetIndex": _of_gpu(lambda gpu, pointer: _give(pointer, gpu.slot)),
    "nvmlDeviceGetMinorNumber": _of_gpu(lambda gpu, pointer: _give(pointer, gpu.slot)),
    "nvmlDeviceGetName": _of_gpu(lambda gpu, buffer, length: _give_text(buffer, gpu.name, length)),
    "nvmlDeviceGetUUID": _of_gpu(lambda gpu, buffer, length: _give_text(buffer, gpu.uuid, length)),
    "nvmlDeviceGetMemoryInfo": _of_gpu(_memory),
    "nvmlDeviceGetUtilizationRates": _of_gpu(_utilization),
    "nvmlDeviceGetComputeRunningProcesses": _of_gpu(_processes),
    "nvmlDeviceGetGraphicsRunningProcesses": _of_gpu(lambda gpu, count, places: _give(count, 0)),
    "nvmlDeviceGetMPSComputeRunningProcesses": _of_gpu(lambda gpu, count, places: _give(count, 0)),
    "nvmlDeviceGetCudaComputeCapability": _of_gpu(_capability),
    "nvmlDeviceGetPciInfo": _of_gpu(_pci),
}
