"""torch.cuda.memory: the allocator's figures. PyTorch's own code turns them into memory_stats and memory_summary."""

from typing import Any

from torch.types import Device

from virtual_gpus.features.cuda.devices import gpu_at
from virtual_gpus.machine import get_machine
from virtual_gpus.patches.table import Patch, in_package


def memory_stats_as_nested_dict(device: Device = None) -> dict[str, Any]:
    """Every counter of the allocator, as `torch._C._cuda_memoryStats` gives it."""
    return gpu_at(device, initialize=False).allocator.stats()


def reset_peak_memory_stats(device: Device = None) -> None:
    """Peaks start again from the current figures."""
    gpu_at(device).allocator.reset_peak_stats()


def reset_accumulated_memory_stats(device: Device = None) -> None:
    """Totals of allocated and freed bytes start again from 0."""
    gpu_at(device).allocator.reset_accumulated_stats()


def empty_cache() -> None:
    """Give every wholly free segment of every GPU back, so that nvidia-smi sees it free."""
    for gpu in get_machine().gpus:
        gpu.allocator.empty_cache()


def set_per_process_memory_fraction(fraction: float, device: Device = None) -> None:
    """Let this process reserve at most `fraction` (0 to 1) of a GPU."""
    if not isinstance(fraction, float):
        raise TypeError("Invalid type for fraction argument, must be `float`")
    gpu = gpu_at(device)
    gpu.machine.start_cuda()
    gpu.allocator.device.set_fraction(fraction)


def get_per_process_memory_fraction(device: Device = None) -> float:
    """What `set_per_process_memory_fraction` set; 1.0 at first."""
    gpu = gpu_at(device)
    gpu.machine.start_cuda()
    return gpu.allocator.device.fraction


def mem_get_info(device: Device = None) -> tuple[int, int]:
    """(free, total) bytes as the driver sees them. The question itself makes a CUDA context, as on a real GPU."""
    gpu = gpu_at(device)
    gpu.start_context()
    return gpu.allocator.device.free_bytes, gpu.memory


def list_gpu_processes(device: Device = None) -> str:
    """The processes on a GPU, as far as they share these virtual ones."""
    gpu = gpu_at(device)
    processes = gpu.allocator.device.processes()
    lines = [f"process {pid:>10d} uses {used / (1 << 20):>12.3f} MB GPU memory" for pid, used in processes]
    return "\n".join([f"GPU:{gpu.index}", *(lines or ["no processes are running"])])


def patches() -> list[Patch]:
    return in_package("torch.cuda", memory_stats_as_nested_dict, reset_peak_memory_stats, empty_cache, mem_get_info,
                       reset_accumulated_memory_stats, set_per_process_memory_fraction,
                       get_per_process_memory_fraction, list_gpu_processes,
                       get_allocator_backend=lambda: "native")  # PyTorch's own  # fmt: skip
