"""Finds the largest batch that fits by running training steps."""

import gc
from collections.abc import Callable

import torch


def largest_batch(
    step: Callable[[int], object], start: int = 1, limit: int = 2**16, multiple_of: int = 1, steps: int = 2
) -> int:
    """Return the largest batch size, in samples and up to `limit`, for which `step(batch)` runs, or 0 if none does.

    Each try runs `steps` steps, because the optimizer creates its state in the first one, and the second runs beside
    it. A torch.OutOfMemoryError means that the batch is too large; any other error is passed on. The search tries the
    smallest batch, so that the answer does not depend on `start`, then `start`, doubles until a try fails, and bisects.
    The random number generators are afterwards as before. Raises ValueError for an empty search range.

    step: best a function that builds model and optimizer and then trains two steps (with `steps=1`), because that is
    what a fresh program does. Where the state of an optimizer lies that lives on from try to try, more may fit.
    multiple_of: try only multiples of this number, for example 4 for four GPUs.
    """
    last = limit // multiple_of  # from here on, sizes are in units of multiple_of
    if min(start, multiple_of, last, steps) < 1:
        raise ValueError("start, multiple_of and steps must be at least 1, and limit must be at least multiple_of.")
    good, bad, size = 0, last + 1, 1
    with torch.random.fork_rng(range(torch.cuda.device_count())):
        while bad - good > 1:
            good, bad = (size, bad) if all(fits(step, size * multiple_of) for _ in range(steps)) else (good, size)
            gc.collect()  # an error's traceback keeps the step's tensors alive, in reference cycles
            torch.cuda.empty_cache()
            size = min(max(2 * good, -(-start // multiple_of)), last) if bad > last else (good + bad) // 2
    return good * multiple_of


def fits(step: Callable, *args) -> bool:
    """Return whether `step(*args)` runs without a torch.OutOfMemoryError. Other errors are passed on."""
    try:
        step(*args)
    except torch.OutOfMemoryError:
        return False
    return True
