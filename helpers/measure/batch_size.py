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

    Each try runs `steps` steps, because the optimizer creates its state in the first one, and the second runs beside
    it, with the cache that the first one has fragmented. A torch.OutOfMemoryError means that the batch is too large;
    any other error is passed on. The search tries the smallest batch, then `start`, doubles until a try fails, and
    then bisects. Cached memory is released between tries. The random number generators are afterwards as before.
    Raises ValueError for an empty search range.

    step: best a function that builds model and optimizer and then trains two steps (with `steps=1`), because that is
    what a fresh program does. A step whose model lives on from try to try gets its optimizer's state in the first try,
    where it lies better than in a program that begins with a large batch: such a program may fit less. That first try
    has the smallest batch whatever `start` is, so that the answer does not depend on `start`.
    multiple_of: try only multiples of this number, for example 4 for four GPUs.
    report: called as `report(batch, fitted)` after every try.
    """
    last = limit // multiple_of  # from here on, sizes are in units of multiple_of
    if min(start, multiple_of, last, steps) < 1:
        raise ValueError("start, multiple_of and steps must be at least 1, and limit must be at least multiple_of.")
    good, bad, size = 0, None, 1
    begin = min(-(-start // multiple_of), last)
    gc.collect()
    with skipping_what_exists(), torch.random.fork_rng(range(torch.cuda.device_count())):
        while good < last and (bad is None or bad - good > 1):
            fitted = all(fits(step, size * multiple_of) for _ in range(steps))
            gc.collect()  # an error's traceback no longer keeps the step's tensors alive
            torch.cuda.empty_cache()
            if report is not None:
                report(size * multiple_of, fitted)
            good, bad = (size, bad) if fitted else (good, size)
            size = min(max(2 * good, begin), last) if bad is None else (good + bad) // 2
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
