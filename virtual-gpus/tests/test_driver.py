"""What tools hear from the driver: NVML for pynvml, gpustat and nvitop."""

import ctypes
import os
import sys
import types

import pytest
import torch
from virtual_gpus import active_machine, virtual_gpus
from virtual_gpus.driver.nvml import Library
from virtual_gpus.driver.view import GPUView

NOT_SUPPORTED, INVALID_ARGUMENT, NOT_FOUND, INSUFFICIENT_SIZE = 3, 2, 6, 7
GPUS = [GPUView(0, "NVIDIA A", "GPU-0", 1000, (8, 0), [], 0.0),
        GPUView(1, "NVIDIA B", "GPU-1", 2000, (9, 0), [(7, 300), (9, 200)], 0.256)]  # fmt: skip


def structure(**fields):
    return type("Structure", (ctypes.Structure,), {"_fields_": list(fields.items())})


Memory = structure(**dict.fromkeys(("total", "free", "used"), ctypes.c_ulonglong))
Utilization = structure(gpu=ctypes.c_uint, memory=ctypes.c_uint)
Process = structure(pid=ctypes.c_uint, usedGpuMemory=ctypes.c_ulonglong)


def handle(library, slot):
    """As pynvml asks for it: a pointer of the library's own."""
    found = ctypes.POINTER(Memory)()
    assert library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(slot), ctypes.byref(found)) == 0
    return found


library = Library(lambda: GPUS)


def test_nvml_fills_in_what_is_known_and_says_what_is_not():
    count, index, celsius = ctypes.c_uint(), ctypes.c_uint(), ctypes.c_uint()
    memory, rates, text = Memory(), Utilization(), ctypes.create_string_buffer(96)
    assert library.nvmlInitWithFlags(0) == library.nvmlDeviceGetCount_v2(ctypes.byref(count)) == 0
    assert count.value == 2
    second, found = handle(library, 1), ctypes.POINTER(Memory)()
    assert library.nvmlDeviceGetName(second, text, 96) == 0 and text.value == b"NVIDIA B"
    assert library.nvmlDeviceGetName(second, text, 4) == INSUFFICIENT_SIZE
    assert library.nvmlDeviceGetMemoryInfo(second, ctypes.byref(memory)) == 0
    assert (memory.total, memory.used, memory.free) == (2000, 500, 1500)
    assert library.nvmlDeviceGetHandleByUUID(ctypes.c_char_p(b"GPU-1"), ctypes.byref(found)) == 0
    assert library.nvmlDeviceGetIndex(found, ctypes.byref(index)) == 0 and index.value == 1
    assert library.nvmlDeviceGetHandleByUUID(ctypes.c_char_p(b"GPU-7"), ctypes.byref(found)) == NOT_FOUND
    assert library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(2), ctypes.byref(found)) == INVALID_ARGUMENT
    assert library.nvmlDeviceGetMemoryInfo(ctypes.POINTER(Memory)(), ctypes.byref(memory)) == INVALID_ARGUMENT
    assert library.nvmlDeviceGetUtilizationRates(second, ctypes.byref(rates)) == 0
    assert (rates.gpu, rates.memory) == (26, 26)
    assert library.nvmlDeviceGetTemperature(second, 0, ctypes.byref(celsius)) == NOT_SUPPORTED
    assert library.nvmlErrorString(NOT_SUPPORTED) == b"Not Supported"
    assert not hasattr(library, "cuInit")


def test_nvml_lists_processes_in_two_calls():
    count, second, found = ctypes.c_uint(0), handle(library, 1), (Process * 4)()
    ask = library.nvmlDeviceGetComputeRunningProcesses_v3
    assert ask(second, ctypes.byref(count), None) == INSUFFICIENT_SIZE and count.value == 2
    count.value = 4
    assert ask(second, ctypes.byref(count), found) == 0 and count.value == 2
    assert [(process.pid, process.usedGpuMemory) for process in found[:2]] == [(7, 300), (9, 200)]
    count.value = 0
    assert ask(handle(library, 0), ctypes.byref(count), None) == 0 and count.value == 0


def test_pynvml_finds_the_library_while_the_gpus_are_on(monkeypatch):
    fake = types.ModuleType("pynvml")  # the two names of pynvml that matter
    fake.nvmlLib, fake._nvmlGetFunctionPointer_cache = None, {}
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")  # hides nothing from the driver
    with virtual_gpus(2):
        x = torch.ones(1000, device="cuda")
        memory = Memory()
        assert fake.nvmlLib.nvmlDeviceGetMemoryInfo(handle(fake.nvmlLib, 1), ctypes.byref(memory)) == 0
        device = active_machine().slots[1].allocator.device
        assert memory.used == device.context + (2 << 20) == device.used_bytes and x.is_cuda
        found, count = (Process * 4)(), ctypes.c_uint(4)
        ask = fake.nvmlLib.nvmlDeviceGetComputeRunningProcesses
        assert ask(handle(fake.nvmlLib, 1), ctypes.byref(count), found) == 0
        assert (found[0].pid, found[0].usedGpuMemory) == (os.getpid(), memory.used)
    assert fake.nvmlLib is None


@pytest.mark.outside
def test_gpustat_and_nvitop_see_the_gpus(capsys):
    pynvml, gpustat, nvitop = map(pytest.importorskip, ("pynvml", "gpustat", "nvitop"))
    with virtual_gpus(2, kind="A100"):
        x = torch.ones(1000, 1000, device="cuda:1")
        used = active_machine().slots[1].allocator.device.used_bytes
        gpustat.print_gpustat()
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) == 3 and "A100" in lines[1] and f"{used >> 20} /" in lines[2]
        devices = nvitop.Device.all()
        assert [device.memory_used() for device in devices] == [0, used]
        assert list(devices[1].processes()) == [os.getpid()] and devices[0].temperature() == nvitop.NA
        assert x.is_cuda
    with pytest.raises(pynvml.NVMLError):
        pynvml.nvmlInit()
