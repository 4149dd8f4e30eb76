"""Memory per GPU, seen from two sides: what PyTorch knows and what the driver sees.

PyTorch's caching allocator keeps freed memory for the next tensor, so three figures differ:

    allocated     bytes that live tensors hold now                    torch.cuda.memory_allocated
    reserved      bytes that PyTorch took from the driver and keeps   torch.cuda.memory_reserved
    driver used   bytes that are taken on the card: reserved, the CUDA context, other programs (GPUtil)

Usage:  print(read_memory())                 a table of now
        peak_memory(step)                    run step(), a table of its peaks
        peak_memory(step, catch=True)        the same for a step that may run out of memory
        with measure_memory() as readings:   the same for a block
        largest_batch(step, multiple_of=4)   the largest batch for which step(batch) fits
"""

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from math import isfinite
from numbers import Integral

import torch

from helpers.measure.memory.driver import driver_view
from helpers.measure.memory.peaks import Block, set_back
from helpers.measure.memory.readings import GiB, MiB, Reading, Readings, Refusal, format_bytes
from helpers.measure.memory.refusals import read_refusal

__all__ = [
    "GiB",
    "MiB",
    "Reading",
    "Readings",
    "Refusal",
    "format_bytes",
    "largest_batch",
    "measure_memory",
    "peak_memory",
    "read_memory",
    "reset_peaks",
]

NO_GPU = (
    "There is no GPU to read, neither a real nor a virtual one. "
    "Call use_gpus first: `from helpers import use_gpus; gpus = use_gpus(4)`."
)


def read_memory(devices=None) -> Readings:
    """Read the memory of `devices` (a device, an index, or a list of them; all visible GPUs if None).

    Raises RuntimeError without any GPU, ValueError for a device that is no GPU or does not exist, and for an empty
    list, TypeError for what is no device.
    """
    indices = gpu_indices(devices)
    drivers, note = driver_view(indices)
    return Readings([_read_one(index, driver) for index, driver in zip(indices, drivers, strict=True)], note)


def reset_peaks(devices=None) -> None:
    """Let the peaks of `devices` (all if None) start again from what is held now. Errors: `read_memory`."""
    indices = gpu_indices(devices)
    torch.cuda.init()  # before CUDA has started PyTorch refuses to reset anything
    set_back(indices)


@contextmanager
def measure_memory(devices=None, catch: bool = False) -> Iterator[Readings]:
    """Reset the peaks, run the block, read at its end, also when it fails: the yielded list is filled then.

    Where the block runs out of memory, the reading of that GPU says in `refused` what was asked for and what was
    held then; the other GPUs' peaks are of what ran until then. The error passes through, as any other does, but not
    with `catch=True`: then the program goes on after the block.

    Blocks may lie in each other, or run in several threads: each has its own peaks. Memory that PyTorch had cached
    before counts as reserved: call `torch.cuda.empty_cache()` first for a fresh start.
    """
    gc.collect()  # cycles left by earlier cells would otherwise count, or not, as chance has it
    indices = gpu_indices(devices)
    torch.cuda.init()
    block = Block(indices)
    readings, refusal, said = Readings(), None, ""
    try:
        yield readings
    except torch.OutOfMemoryError as error:  # its figures only: the error would keep the block's tensors alive
        refusal = read_refusal(error)
        said = f"{refusal}." if refusal else f"Memory ran out; PyTorch does not say where: {_first_line(error)}"
        if not catch:
            raise
        # Its frames refer to each other in a circle (this one, and contextlib's that holds the error): cut it.
        error.__traceback__ = None
    finally:
        block.end()
        found = _with_refusal(block.peaks_of(read_memory(indices)), refusal, said)
        readings.extend(found)
        readings.note = found.note


def peak_memory(fn: Callable[[], object], devices=None, catch: bool = False) -> Readings:
    """Run `fn()` and return the readings after it; the peaks are this run's. Errors of `fn` pass through.

    `catch=True`: a run that ends with torch.OutOfMemoryError gives readings too, see `measure_memory`.
    """
    with measure_memory(devices, catch) as readings:
        fn()
    return readings


def largest_batch(
    fits: Callable[[int], object],
    start: int = 1,
    limit: int = 2**16,
    multiple_of: int = 1,
    report: Callable[[int, bool], None] | None = None,
    steps: int = 2,
    jump: int | None = None,
) -> int:
    """The largest batch up to `limit` for which `fits(batch)` runs, by doubling and then halving the gap.

    `fits` runs one training step; torch.OutOfMemoryError (or a returned False) means that the batch is too
    large, any other error passes through. It is called `steps` times per try: the first step finds an empty cache, the
    second one as the first has cut it up, and only then is it known that training goes on. (BERT of lesson 02 on one
    card: 120 run once, 100 run for ever.) Only multiples of `multiple_of` are tried (4 for four GPUs).
    `report(batch, fitted)` is called after every try; between two tries memory is given back. Returns 0 when
    not even the smallest batch fits. `jump`: `start` is a good guess, so go on from it by this many multiples, up or
    down, then by twice as many, and so on. Raises ValueError for arguments that leave nothing to try, TypeError for
    numbers that are not whole.
    """
    for name, value in {
        "start": start,
        "limit": limit,
        "multiple_of": multiple_of,
        "steps": steps,
        "jump": jump,
    }.items():
        if value is not None and not isinstance(value, Integral):
            raise TypeError(f"{name}={value!r}: give a whole number.")
    if multiple_of < 1 or start < 1 or limit < multiple_of or steps < 1 or (jump is not None and jump < 1):
        raise ValueError(
            f"Nothing to try: start={start}, limit={limit}, multiple_of={multiple_of}, steps={steps}, jump={jump}. "
            "Give start, multiple_of, steps and jump of at least 1 and a limit of at least multiple_of."
        )
    last = limit // multiple_of  # from here on in units of multiple_of
    good, bad, step = 0, None, min(-(-start // multiple_of), last)
    while good < last and (bad is None or bad - good > 1):
        if _fits(fits, step * multiple_of, steps, report):
            good = step
        else:
            bad = step
        step = _next(good, bad, jump)
        step, jump = min(step, last), jump and 2 * jump
    return good * multiple_of


def _next(good: int, bad: int | None, jump: int | None) -> int:
    """What to try next, between the largest that fits so far (0: none) and the smallest that does not (None: none)."""
    if bad is None:
        return good + jump if jump else good * 2
    return max(1, bad - jump) if jump and not good else (good + bad) // 2


def _fits(fits: Callable[[int], object], batch: int, steps: int, report) -> bool:
    """One try. Clean-up comes after `except`, since the error's traceback keeps the step's tensors alive."""
    try:
        fitted = not any(_is_false(fits(batch)) for _ in range(steps))
    except torch.OutOfMemoryError:
        fitted = False
    gc.collect()
    torch.cuda.empty_cache()
    if report is not None:
        report(batch, fitted)
    return fitted


def _is_false(result: object) -> bool:
    """NumPy's and PyTorch's False too; None, and a loss of 0, are none."""
    return result is False or (str(getattr(result, "dtype", "")) in ("bool", "torch.bool") and not result)


def gpu_indices(devices=None) -> list[int]:
    """The numbers of GPUs given as numbers, "cuda:1" or torch.device; None: of all.

    Each once. Raises RuntimeError without GPUs, ValueError for one that is not there and for none, TypeError for what
    is no device.
    """
    count = torch.cuda.device_count()
    if count == 0:
        raise RuntimeError(NO_GPU)
    if devices is None:
        return list(range(count))
    single = isinstance(devices, (int, str, torch.device)) or not isinstance(devices, Iterable)
    found = [_index(device, count) for device in ([devices] if single else devices)]
    if not found:
        raise ValueError("No device was given: give some, such as ['cuda:0'], or None for all GPUs.")
    return list(dict.fromkeys(found))  # each once


def _index(device, count: int) -> int:
    if isinstance(device, bool) or not isinstance(device, (int, str, torch.device)):
        raise TypeError(f"{device!r} is no device: give a number, a name like 'cuda:0', a torch.device, or a list.")
    if not isinstance(device, int):
        try:
            device = torch.device(device)
        except RuntimeError:
            raise ValueError(f"{device!r} is not a GPU: give devices like 'cuda:0', or None for all of them.") from None
        if device.type != "cuda":
            raise ValueError(f"{device} is not a GPU: give devices like 'cuda:0', or None for all of them.")
        device = torch.cuda.current_device() if device.index is None else device.index
    if not 0 <= device < count:
        raise ValueError(f"There is no cuda:{device}: PyTorch sees cuda:0 to cuda:{count - 1}.")
    return device


def _with_refusal(readings: Readings, refusal: Refusal | None, said: str) -> Readings:
    """The readings with `refusal` in its GPU's place, and `said` before what their note says."""
    changed = (replace(each, refused=refusal) if refusal and each.index == refusal.gpu else each for each in readings)
    return Readings(changed, " ".join(filter(None, [said, readings.note])))


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _read_one(index: int, driver) -> Reading:
    properties = torch.cuda.get_device_properties(index)
    return Reading(
        index=index,
        name=properties.name,
        capacity=properties.total_memory,
        allocated=torch.cuda.memory_allocated(index),
        peak_allocated=torch.cuda.max_memory_allocated(index),
        reserved=torch.cuda.memory_reserved(index),
        peak_reserved=torch.cuda.max_memory_reserved(index),
        driver_used=_from_mib(driver and driver.memoryUsed),
        driver_total=_from_mib(driver and driver.memoryTotal),
        driver_load=_load(driver),
        driver_index=driver and driver.id,
    )


def _load(driver) -> float | None:
    # A virtual GPU's load is modelled and falls to 0 a second after its last work: no two runs would print the same.
    unknown = driver is None or driver.driver == "virtual" or not isfinite(driver.load)
    return None if unknown else driver.load


def _from_mib(mib: float | None) -> int | None:
    return None if mib is None or not isfinite(mib) else round(mib * MiB)
