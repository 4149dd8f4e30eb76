"""Memory figures through torch.cuda, and what tools hear from the driver: through GPUtil, NVML, gpustat and nvitop."""

import ctypes
import math
import os
import sys
import types

import GPUtil
import pytest
import torch
from measuring import empty
from virtual_gpus import active_machine, virtual_gpus

MIB = 2**20
NOT_SUPPORTED, INVALID_ARGUMENT, NOT_FOUND, INSUFFICIENT_SIZE = 3, 2, 6, 7


@virtual_gpus(2, memory="2 GiB")
def test_peaks_stats_summary_and_fraction():
    x, y = empty(100 * MIB, "cuda:1"), empty(50 * MIB, "cuda:1")
    del y
    assert torch.accelerator.memory_allocated(1) == 100 * MIB and torch.accelerator.max_memory_reserved(1) == 150 * MIB
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(1)
    assert torch.cuda.max_memory_reserved(1) == 100 * MIB == torch.cuda.max_memory_allocated(1)
    x = empty(3 * MIB)
    stats = torch.cuda.memory_stats()
    assert stats["allocated_bytes.all.current"] == 3 * MIB and stats["allocation.all.current"] == 1
    assert stats["reserved_bytes.large_pool.current"] == 20 * MIB and stats["segment.all.current"] == 1
    assert stats["inactive_split_bytes.all.current"] == 17 * MIB and stats["max_split_size"] == -1
    documented = {"active.all.peak", "requested_bytes.all.freed", "oversize_allocations.current", "num_alloc_retries"}
    assert stats.keys() > documented | {"num_ooms", "num_sync_all_streams", "num_device_alloc", "num_device_free"}
    summary = torch.cuda.memory_summary()
    assert "Allocated memory" in summary and "3072 KiB" in summary and "CUDA OOMs: 0 " in summary
    torch.cuda.reset_accumulated_memory_stats()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == 0
    del x
    torch.cuda.set_per_process_memory_fraction(0.25, 0)
    assert torch.cuda.get_per_process_memory_fraction(0) == 0.25
    with pytest.raises(torch.OutOfMemoryError, match="512.00 MiB allowed"):
        empty(600 * MIB)
    assert empty(600 * MIB, "cuda:1").is_cuda
    for wrong in (2.0, -1.0):
        with pytest.raises(ValueError):
            torch.cuda.set_per_process_memory_fraction(wrong)


@virtual_gpus(2, memory="2 GiB")
def test_the_driver_sees_reserved_memory_and_the_context(capsys):
    assert GPUtil.getGPUs is GPUtil.GPUtil.getGPUs and [g.memoryUsed for g in GPUtil.getGPUs()] == [0, 0]
    x = empty(1500 * MIB, "cuda:1")
    first, second = GPUtil.getGPUs()
    context = second.memoryUsed - 1500
    assert isinstance(second, GPUtil.GPU) and first.memoryUsed == 0 and 0 < context < 548
    assert second.memoryTotal == 2048 and second.memoryFree == 2048 - second.memoryUsed
    free, total = torch.cuda.mem_get_info(1)
    assert total == 2048 * MIB and total - free == second.memoryUsed * MIB == torch.cuda.device_memory_used(1)
    assert (second.id, second.name, second.driver) == (1, torch.cuda.get_device_name(1), "virtual")
    assert second.uuid == f"GPU-{torch.cuda.get_device_properties(1).uuid}"
    assert second.memoryUtil == second.memoryUsed / second.memoryTotal and 0 <= second.load <= 1
    assert second.memoryUsed == int(second.memoryUsed)  # MiB without decimals
    assert (second.display_mode, second.display_active) == ("Disabled", "Disabled")
    assert second.serial == "[N/A]" and math.isnan(second.temperature)  # as for a real GPU that has no such figure
    assert GPUtil.getAvailable(limit=4) == [0] and GPUtil.getFirstAvailable() == [0]
    GPUtil.showUtilization(all=True)
    assert "NVIDIA H200" in capsys.readouterr().out
    del x
    assert GPUtil.getGPUs()[1].memoryUsed == second.memoryUsed  # del gives back to the cache only
    torch.cuda.empty_cache()
    assert GPUtil.getGPUs()[1].memoryUsed == context


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


def test_pynvml_finds_a_library_that_fills_in_what_is_known_and_says_what_is_not(monkeypatch):
    fake = types.ModuleType("pynvml")  # the two names of pynvml that matter
    fake.nvmlLib, fake._nvmlGetFunctionPointer_cache = None, {}
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")  # hides nothing from the driver
    count, index, celsius = ctypes.c_uint(), ctypes.c_uint(), ctypes.c_uint()
    memory, rates, text = Memory(), Utilization(), ctypes.create_string_buffer(96)
    with virtual_gpus(2, kind="A100", memory="2 GiB"):
        library, device = fake.nvmlLib, active_machine().slots[1].allocator.device
        x = torch.ones(1000, device="cuda")
        torch.cuda._sleep(2_000_000_000)  # for longer than the second of which the load is told
        torch.cuda.synchronize()
        assert library.nvmlInitWithFlags(0) == library.nvmlDeviceGetCount_v2(ctypes.byref(count)) == 0
        assert count.value == 2
        first, second, found = handle(library, 0), handle(library, 1), ctypes.POINTER(Memory)()
        assert library.nvmlDeviceGetName(second, text, 96) == 0 and text.value == b"NVIDIA A100-SXM4-40GB"
        assert library.nvmlDeviceGetName(second, text, 4) == INSUFFICIENT_SIZE
        assert library.nvmlDeviceGetMemoryInfo(second, ctypes.byref(memory)) == 0
        assert memory.used == device.context + (2 << 20) == device.used_bytes and x.is_cuda
        assert memory.total == memory.used + memory.free == 2 << 30
        assert library.nvmlDeviceGetUUID(second, text, 96) == 0
        assert library.nvmlDeviceGetHandleByUUID(ctypes.c_char_p(text.value), ctypes.byref(found)) == 0
        assert library.nvmlDeviceGetIndex(found, ctypes.byref(index)) == 0 and index.value == 1
        assert library.nvmlDeviceGetHandleByUUID(ctypes.c_char_p(b"GPU-7"), ctypes.byref(found)) == NOT_FOUND
        assert library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(2), ctypes.byref(found)) == INVALID_ARGUMENT
        assert library.nvmlDeviceGetMemoryInfo(ctypes.POINTER(Memory)(), ctypes.byref(memory)) == INVALID_ARGUMENT
        assert library.nvmlDeviceGetUtilizationRates(second, ctypes.byref(rates)) == 0
        assert (rates.gpu, rates.memory) == (100, 100) and torch.cuda.utilization() == 100
        assert [gpu.load for gpu in GPUtil.getGPUs()] == [0.0, 1.0]
        assert library.nvmlDeviceGetTemperature(second, 0, ctypes.byref(celsius)) == NOT_SUPPORTED
        assert library.nvmlErrorString(NOT_SUPPORTED) == b"Not Supported" and not hasattr(library, "cuInit")
        processes, count.value = (Process * 4)(), 0
        ask = library.nvmlDeviceGetComputeRunningProcesses_v3
        assert ask(second, ctypes.byref(count), None) == INSUFFICIENT_SIZE and count.value == 1
        count.value = 4
        assert ask(second, ctypes.byref(count), processes) == 0 and count.value == 1
        assert (processes[0].pid, processes[0].usedGpuMemory) == (os.getpid(), memory.used)
        assert ask(first, ctypes.byref(count), processes) == 0 and count.value == 0
    assert fake.nvmlLib is None
