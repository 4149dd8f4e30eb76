"""Finds the largest batch that fits by running training steps."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


def largest_batch(
    step: Callable[[int], object],
    start: int = 1,
    limit: int = 2**16,
    multiple_of: int = 1,
    report: Callable[[int, bool], None] | None = None,
    steps: int = 2,
) -> int:
    """Return the largest batch size, in samples and up to `limit`, for which `step(batch)` runs, or 0 if none does.

    The search doubles the batch until it fails, and then bisects. `step` runs one training step. A
    torch.OutOfMemoryError means that the batch is too large, and any other error is passed on. Each try runs `steps`
    steps, because the optimizer creates its state in the first step, and the second step runs with the cache that the
    first one has fragmented. Cached memory is released between tries. The random number generators are afterwards as
    before. Raises ValueError for an empty search range.

    start: the first batch size to try.
    multiple_of: try only multiples of this number, for example 4 for four GPUs.
    report: called as `report(batch, fitted)` after every try.
    """
    last = limit // multiple_of  # from here on, sizes are in units of multiple_of
    if min(start, multiple_of, last, steps) < 1:
        raise ValueError("start, multiple_of and steps must be at least 1, and limit must be at least multiple_of.")
    good, bad, size = 0, None, min(-(-start // multiple_of), last)
    gc.collect()
    with skipping_what_exists(), torch.random.fork_rng(range(torch.cuda.device_count())):
        while good < last and (bad is None or bad - good > 1):
            fitted = all(fits(step, size * multiple_of) for _ in range(steps))
            gc.collect()  # an error's traceback no longer keeps the step's tensors alive
            torch.cuda.empty_cache()
            if report is not None:
                report(size * multiple_of, fitted)
            good, bad = (size, bad) if fitted else (good, size)
            size = min(2 * good, last) if bad is None else (good + bad) // 2
    return good * multiple_of


@contextmanager
def skipping_what_exists() -> Iterator[None]:
    """Let every garbage collection in the block skip all objects that exist already.

    Does nothing if the program has frozen objects itself: `gc.unfreeze` would release those too.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def fits(step: Callable, *args) -> bool:
    """Return whether `step(*args)` runs without a torch.OutOfMemoryError. Other errors are passed on."""
    try:
        step(*args)
    except torch.OutOfMemoryError:
        return False
    return True
