"""What a learner's function takes on a GPU and leaves there, for checks with a target in MiB."""

import gc
from collections.abc import Callable

import torch

from helpers.exercises.core import require
from helpers.exercises.gpus import keeps_values
from helpers.measure import MiB

SLACK = 1.0 * MiB  # for losses, counters and the rounding of the allocator


def gpu_with_values() -> torch.device:
    """The current GPU, free of what earlier cells left in cycles; "not yet" without one or where it keeps no values."""
    gpu = current_gpu()
    why = "this exercise needs some: gpu = use_gpus(1, memory='1 GiB')[0]"
    require(keeps_values(gpu), "this GPU keeps no values", why)
    gc.collect()
    return gpu


def current_gpu() -> torch.device:
    """The current GPU; "not yet" without one."""
    require(torch.cuda.is_available(), "there is no GPU", "call use_gpus(1, memory='1 GiB') before")
    return torch.device("cuda", torch.cuda.current_device())


class Measured:
    """What one call of a function took on a GPU above what was there (`peak`) and left there (`left`), in bytes.

    `result` is what it returned, and counts as left.
    """

    def __init__(self, gpu: torch.device, run: Callable[[], object]):
        before = torch.cuda.memory_allocated(gpu)
        torch.cuda.reset_peak_memory_stats(gpu)
        self.result = run()
        self.peak = torch.cuda.max_memory_allocated(gpu) - before
        self.left = torch.cuda.memory_allocated(gpu) - before


def require_peak(found: Measured, target: float, because: str) -> None:
    """The peak must not be more than `target` bytes."""
    require_small("the results are right, but the peak is", found.peak, target, because)


def require_left(found: Measured, target: float, because: str) -> None:
    """No more than `target` bytes may stay."""
    require_small("the results are right, but your function leaves behind", found.left, target, because)


def require_small(what: str, found: float, target: float, because: str) -> None:
    """`found` bytes must not be more than `target`."""
    require(found <= target, f"{what} {found / MiB:,.1f} MiB, and {target / MiB:,.1f} MiB are the target", because)
