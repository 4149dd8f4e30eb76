"""What tools hear from the driver: through GPUtil and pynvml."""

import math
import sys
import types

import GPUtil
import pytest
import torch
from measuring import MIB, empty
from virtual_gpus import virtual_gpus


@virtual_gpus(2, memory="2 GiB")
def test_the_driver_sees_reserved_memory_the_context_and_the_load(capsys):
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
    torch.cuda._sleep(4_000_000_000)  # for longer than the second of which the load is told
    torch.cuda.synchronize()
    assert torch.cuda.utilization() == 100 and [gpu.load for gpu in GPUtil.getGPUs()] == [1.0, 0.0]


def test_pynvml_finds_no_library(monkeypatch):
    fake = types.ModuleType("pynvml")  # the names of pynvml that matter
    fake.NVMLError, fake.NVML_ERROR_LIBRARY_NOT_FOUND = OSError, 12
    fake.nvmlInitWithFlags = before = lambda flags: None
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    with virtual_gpus(2), pytest.raises(OSError, match="12"):
        fake.nvmlInitWithFlags(0)
    assert fake.nvmlInitWithFlags is before
