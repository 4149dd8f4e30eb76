"""Reads the memory of GPUs, as PyTorch's allocator counts it and as the driver reports it.

PyTorch's caching allocator keeps freed memory for the next tensor, so three figures differ:

    allocated     bytes that live tensors hold now                      torch.cuda.memory_allocated
    reserved      bytes that PyTorch took from the driver and keeps     torch.cuda.memory_reserved
    driver used   bytes in use on the GPU: reserved memory, the CUDA context, and other programs (GPUtil)
"""

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from math import isnan
from typing import Any

import torch

from helpers.engine import active_machine
from helpers.gpus import Device, gpu_indices, require_gpu, same_gpus
from helpers.measure.readings import Reading, Readings
from helpers.measure.refusal import describe_oom, free_frames, read_refusal
from helpers.sizes import MiB, number_of, require_integer

# The measurements in progress, by the id of their readings: the machine, and what was read when others reset the peaks.
_in_progress: dict[int, tuple[Any, list[Reading]]] = {}


def read_memory(devices: Device | Iterable[Device] | None = None) -> Readings:
    """Read the memory of `devices` (a device, an index, or a list of them; None means all visible GPUs).

    Raises RuntimeError if there is no GPU, and ValueError for a device that is not a GPU or does not exist.
    """
    indices = gpu_indices(devices)
    driver, note = _driver_view(indices)
    return Readings((_read_one(index, driver.get(index)) for index in indices), note)


def reset_peaks(devices: Device | Iterable[Device] | None = None) -> None:
    """Reset the peaks of `devices` to the memory in use now. Takes and raises the same as `read_memory`."""
    indices = gpu_indices(devices)
    torch.cuda.init()  # PyTorch cannot reset peaks before CUDA is initialized
    for machine, earlier in _in_progress.values():
        if machine is active_machine():
            earlier += [_read_one(index, None) for index in indices]
    for index in indices:
        torch.cuda.reset_peak_memory_stats(index)


@contextmanager
def measure_memory(devices: Device | Iterable[Device] | None = None, catch: bool = False) -> Iterator[Readings]:
    """Reset the peaks, run the block, and read the memory when it ends. The yielded list is filled at that time.

    The list is also filled if the block fails. If the block runs out of memory, `refused` of that GPU's reading says
    how much was requested and how much was in use. The peaks of the other GPUs cover what ran until then. The error is
    passed on, as is any other error. With `catch=True`, the program continues after the block instead.

    Memory that PyTorch has already cached counts as reserved. A measurement within the block does not change the peaks
    of this one, but torch.cuda.reset_peak_memory_stats does. Takes and raises the same as `read_memory`, and raises
    RuntimeError if the block switches to other GPUs.
    """
    gc.collect()  # otherwise reference cycles of earlier cells may be freed at any time in the block
    indices = gpu_indices(devices)
    reset_peaks(indices)
    readings, refusal, note = Readings(), None, ""
    _in_progress[id(readings)] = active_machine(), []
    try:
        with same_gpus():
            yield readings
    except torch.OutOfMemoryError as error:
        refusal, note = read_refusal(error), describe_oom(error)
        if not catch:
            raise
        free_frames(error)
    finally:
        machine, earlier = _in_progress.pop(id(readings))
        now = read_memory(indices) if machine is active_machine() else Readings()
        for reading in now:
            every = [reading, *(each for each in earlier if each.index == reading.index)]
            allocated = max(each.peak_allocated for each in every)
            reserved = max(each.peak_reserved for each in every)
            refused = refusal if refusal and refusal.gpu == reading.index else None
            readings.append(replace(reading, peak_allocated=allocated, peak_reserved=reserved, refused=refused))
        readings.note = f"{note} {now.note}".strip()


def largest_batch(
    step: Callable[[int], object], start: int = 1, limit: int = 2**16, steps: int = 2, smallest: int = 1
) -> int:
    """Return the largest batch size, in samples and up to `limit`, for which `step(batch)` runs, or 0 if none does.

    Each try runs `steps` steps, because the optimizer creates its state in the first one, and the second runs beside
    it. A torch.OutOfMemoryError means that the batch is too large; any other error is passed on. The search tries
    `smallest`, so that the answer does not depend on `start`, then `start`, doubles until a try fails, and bisects.
    PyTorch's random number generators are afterwards as before. Raises ValueError if an argument is no integer of at
    least 1, and if `smallest` is above `limit`, and RuntimeError if there is no GPU.

    smallest: the fewest samples that `step` takes. BatchNorm may need 2, and a `Pipeline` one for each micro-batch.

    step: best a function that builds model and optimizer and then trains two steps (with `steps=1`), because that is
    what a fresh program does. If an optimizer lives on from one try to the next, more may fit.
    """
    start, steps = require_integer("start", start), require_integer("steps", steps)
    limit = require_integer("limit", limit)
    smallest = require_integer("smallest", smallest, most=limit)
    with torch.random.fork_rng(range(torch.cuda.device_count())):
        if not fits(_repeat, steps, step, smallest):
            return 0
        good, bad = smallest, limit + 1
        while bad - good > 1:
            no_try_has_failed = bad > limit
            size = min(max(2 * good, start), limit) if no_try_has_failed else (good + bad) // 2
            if fits(_repeat, steps, step, size):
                good = size
            else:
                bad = size
    return good


def fits(step: Callable[..., object], /, *args: Any, **options: Any) -> bool:
    """Return whether `step(*args, **options)` runs without a torch.OutOfMemoryError. Other errors are passed on.

    Before and after that, it frees what an error has left behind, and empties PyTorch's cache. Raises RuntimeError if
    there is no GPU.
    """
    require_gpu()
    _free_leftovers()
    try:
        step(*args, **options)
    except torch.OutOfMemoryError:
        return False
    else:
        return True
    finally:
        _free_leftovers()


def _repeat(times: int, step: Callable[[int], object], batch: int) -> None:
    for _ in range(times):
        step(batch)  # what it returns is let go before the next


def _free_leftovers() -> None:
    gc.collect()  # an error's traceback keeps the step's tensors alive, in reference cycles
    torch.cuda.empty_cache()


def segments_of(gpu: int) -> list[dict[str, Any]]:
    """Return the segments of PyTorch's allocator on GPU number `gpu`, the largest first, each with its blocks.

    Source of their keys: torch.cuda.memory_snapshot. The history of allocations is left out, because it is long.
    """
    segments = [each for each in torch.cuda.memory_snapshot(include_traces=False) if each["device"] == gpu]
    return sorted(segments, key=lambda segment: -segment["total_size"])


def in_use(block: dict[str, Any]) -> bool:
    """Return whether a block of a segment holds a tensor, or did so for a stream that may not have finished yet."""
    return block["state"] != "inactive"


def _read_one(index: int, gpu: Any) -> Reading:
    """Read GPU number `index`. gpu is GPUtil's object for it, or None."""
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


def _driver_view(indices: list[int]) -> tuple[dict[int, Any], str]:
    """Return GPUtil's object for each of PyTorch's GPUs, and a note if the numbering differs or figures are missing.

    nvidia-smi, and therefore GPUtil, lists every GPU of the machine. PyTorch sees only the GPUs in
    CUDA_VISIBLE_DEVICES, in the order given there. The GPUs are therefore matched by UUID.
    """
    try:
        import GPUtil  # here, because GPUtil 1.4.0 needs setuptools to be imported on Python 3.12 and later

        listed = {_uuid(gpu.uuid): gpu for gpu in GPUtil.getGPUs()}
    except Exception as error:  # GPUtil parses nvidia-smi's text, on which PyTorch's figures do not depend
        return {}, f"The driver's figures are missing: GPUtil failed ({str(error) or type(error).__name__})."
    if not listed:
        return {}, "The driver's figures are missing: GPUtil found no nvidia-smi."
    matched = {index: listed.get(_uuid(torch.cuda.get_device_properties(index).uuid)) for index in indices}
    seen = torch.cuda.device_count()
    if len(listed) == seen and all(gpu and gpu.id == index for index, gpu in matched.items()):
        return matched, ""
    names = (f"the driver's GPU {gpu.id}" if gpu else "not in the driver's list" for gpu in matched.values())
    pairs = ", ".join(f"cuda:{index} is {name}" for index, name in zip(matched, names, strict=True))
    both = f"The driver lists {number_of(len(listed), 'GPUs')}, PyTorch sees {seen}"
    return matched, f"{both}: {pairs} (matched by UUID)."


def _uuid(uuid: object) -> str:
    return str(uuid).lower().removeprefix("gpu-")  # nvidia-smi writes the prefix, PyTorch does not


def _bytes(mib: float | None) -> int | None:
    return None if mib is None or isnan(mib) else round(mib * MiB)  # GPUtil gives nan if nvidia-smi has no figure
