"""Reads the memory of GPUs from two sides: what PyTorch knows and what the driver sees.

PyTorch's caching allocator keeps freed memory for the next tensor, so three figures differ:

    allocated     bytes that live tensors hold now                      torch.cuda.memory_allocated
    reserved      bytes that PyTorch took from the driver and keeps     torch.cuda.memory_reserved
    driver used   bytes that are taken on the GPU: reserved memory, the CUDA context, other programs (GPUtil)

Usage:  print(read_memory())                 a table of now
        peak_memory(step)                    run step(), a table of its peaks
        peak_memory(step, catch=True)        the same for a step that may run out of memory
        with measure_memory() as readings:   the same for a block
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from math import isnan

import torch

from helpers.measure.readings import Reading, Readings
from helpers.measure.refusals import read_refusal
from helpers.measure.sizes import MiB

_open: list[dict[int, tuple[int, int]]] = []  # per block of `measure_memory`: peaks that others have reset meanwhile


def read_memory(devices=None) -> Readings:
    """Read the memory of `devices` (a device, an index, or a list of them; all visible GPUs if None).

    Raises RuntimeError without any GPU, ValueError for a device that is not a GPU or does not exist.
    """
    indices = gpu_indices(devices)
    driver, note = _driver_view(indices)
    return Readings((_read_one(index, driver[index]) for index in indices), note)


def reset_peaks(devices=None) -> None:
    """Let the peaks of `devices` (all if None) start again from what is held now. Errors: `read_memory`."""
    indices = gpu_indices(devices)
    torch.cuda.init()  # before CUDA has started PyTorch refuses to reset anything
    for before in _open:
        for index in before.keys() & indices:
            before[index] = _highest(before, index)
    for index in indices:
        torch.cuda.reset_peak_memory_stats(index)


@contextmanager
def measure_memory(devices=None, catch: bool = False) -> Iterator[Readings]:
    """Reset the peaks, run the block, read at its end, also when it fails: the yielded list is filled then.

    Where the block runs out of memory, the reading of that GPU says in `refused` what was asked for and what was
    held then. The peaks of the other GPUs cover what ran until then. The error passes through, as any other does, but
    with `catch=True` the program goes on after the block.

    Blocks may be nested: each has its own peaks. Memory that PyTorch had cached before counts as reserved: call
    `torch.cuda.empty_cache()` first for a fresh start.
    """
    gc.collect()  # cycles left by earlier cells would otherwise be freed in the block, or not, by chance
    indices = gpu_indices(devices)
    reset_peaks(indices)
    before = dict.fromkeys(indices, (0, 0))
    _open.append(before)
    readings, refusal, said = Readings(), None, ""
    try:
        yield readings
    except torch.OutOfMemoryError as error:  # keep its figures only: the error would keep the block's tensors alive
        refusal = read_refusal(error)
        first_line, *_ = str(error).splitlines() or [""]
        said = f"{refusal}." if refusal else f"Memory ran out; PyTorch does not say where: {first_line}"
        if not catch:
            raise
        error.__traceback__ = None  # its frames refer to each other in a cycle, which would wait for gc
    finally:
        _open[:] = [each for each in _open if each is not before]
        found = read_memory(indices)
        for reading in found:
            allocated, reserved = _highest(before, reading.index)
            refused = refusal if refusal and refusal.gpu == reading.index else None
            readings.append(replace(reading, peak_allocated=allocated, peak_reserved=reserved, refused=refused))
        readings.note = " ".join(filter(None, [said, found.note]))


def peak_memory(fn: Callable[[], object], devices=None, catch: bool = False) -> Readings:
    """Run `fn()` and return the readings after it; the peaks are this run's. Errors of `fn` pass through.

    `catch=True`: a run that ends with torch.OutOfMemoryError gives readings too, see `measure_memory`.
    """
    with measure_memory(devices, catch) as readings:
        fn()
    return readings


def gpu_indices(devices=None) -> list[int]:
    """The numbers of GPUs given as numbers, "cuda:1" or torch.device; None: of all. Errors: `read_memory`."""
    count = torch.cuda.device_count()
    if count == 0:
        raise RuntimeError(
            "There is no GPU to read, neither a real nor a virtual one. "
            "Call use_gpus first: `from helpers import use_gpus; gpus = use_gpus(4)`."
        )
    if devices is None:
        return list(range(count))
    single = isinstance(devices, (int, str, torch.device))
    found = [_index(device, count) for device in ([devices] if single else devices)]
    if not found:
        raise ValueError("No device was given: give some, such as ['cuda:0'], or None for all GPUs.")
    return list(dict.fromkeys(found))


def _index(device: int | str | torch.device, count: int) -> int:
    if not isinstance(device, int):
        device = torch.device(device)
        if device.type != "cuda":
            raise ValueError(f"{device} is not a GPU: give devices like 'cuda:0', or None for all of them.")
        device = torch.cuda.current_device() if device.index is None else device.index
    if not 0 <= device < count:
        raise ValueError(f"There is no cuda:{device}: PyTorch sees cuda:0 to cuda:{count - 1}.")
    return device


def _read_one(index: int, gpu) -> Reading:
    """gpu: GPUtil's, or None."""
    properties = torch.cuda.get_device_properties(index)
    return Reading(
        index=index,
        name=properties.name,
        capacity=properties.total_memory,
        allocated=torch.cuda.memory_allocated(index),
        peak_allocated=torch.cuda.max_memory_allocated(index),
        reserved=torch.cuda.memory_reserved(index),
        peak_reserved=torch.cuda.max_memory_reserved(index),
        driver_used=_bytes(gpu and gpu.memoryUsed),
        driver_total=_bytes(gpu and gpu.memoryTotal),
    )


def _highest(before: dict[int, tuple[int, int]], index: int) -> tuple[int, int]:
    """The most allocated and the most reserved on a GPU: since the last reset, or before it."""
    allocated, reserved = before[index]
    now = torch.cuda.max_memory_allocated(index), torch.cuda.max_memory_reserved(index)
    return max(allocated, now[0]), max(reserved, now[1])


def _driver_view(indices: list[int]) -> tuple[dict, str]:
    """GPUtil's GPU for each of PyTorch's (None where it lists none), and a note, which is empty where both count alike.

    nvidia-smi, and therefore GPUtil, lists every GPU of the machine. PyTorch sees only those that CUDA_VISIBLE_DEVICES
    leaves, in the order given there. So they are matched by UUID.
    """
    missing = dict.fromkeys(indices)
    try:
        import GPUtil  # here, since GPUtil 1.4.0 does not even import from Python 3.12 on without setuptools

        listed = {_uuid(gpu.uuid): gpu for gpu in GPUtil.getGPUs()}
    except Exception as error:  # GPUtil parses nvidia-smi's text; PyTorch's figures do not depend on it
        return missing, f"The driver's figures are missing: GPUtil failed ({str(error) or type(error).__name__})."
    if not listed:
        return missing, "The driver's figures are missing: GPUtil found no nvidia-smi."
    found = {index: listed.get(_uuid(torch.cuda.get_device_properties(index).uuid)) for index in indices}
    seen = torch.cuda.device_count()
    if len(listed) == seen and all(gpu and gpu.id == index for index, gpu in found.items()):
        return found, ""
    theirs = {
        index: f"the driver's GPU {gpu.id}" if gpu else "not in the driver's list" for index, gpu in found.items()
    }
    names = ", ".join(f"cuda:{index} is {name}" for index, name in theirs.items())
    return found, f"The driver lists {len(listed)} GPU(s), PyTorch sees {seen}: {names} (matched by UUID)."


def _uuid(uuid) -> str:
    return str(uuid).lower().removeprefix("gpu-")  # nvidia-smi writes the prefix, PyTorch does not


def _bytes(mib: float | None) -> int | None:
    return None if mib is None or isnan(mib) else round(mib * MiB)  # nan: nvidia-smi does not know it
