"""The largest batch that fits, found by trying."""

import copy
import gc
from collections.abc import Callable, Iterable

import torch
from torch.utils._pytree import tree_map_only


def largest_batch(
    step: Callable[[int], object],
    start: int = 1,
    limit: int = 2**16,
    multiple_of: int = 1,
    report: Callable[[int, bool], None] | None = None,
    keep: Iterable = (),
    steps: int = 2,
) -> int:
    """The largest batch up to `limit` for which `step(batch)` runs, by doubling and then halving the gap; 0 if none.

    `step` runs one training step. torch.OutOfMemoryError means that the batch is too large; any other error passes
    through. Each try runs `steps` steps: the optimizer makes its state in the first, and the second finds the cache as
    the first has cut it up. Between two tries memory is given back.

    start: the first batch to try.
    multiple_of: only multiples are tried, for example of 4 for four GPUs.
    report: `report(batch, fitted)` is called after every try.
    keep: networks and optimizers whose state after each try is what it was before the search. Their gradients are
    cleared. The copies lie in host memory. The random numbers are put back in any case.
    """
    last = limit // multiple_of  # from here on in units of multiple_of
    if min(start, multiple_of, last, steps) < 1:
        raise ValueError("There is nothing to try: start, multiple_of and steps are at least 1, limit a multiple.")
    saved = [(each, _on_host(each.state_dict())) for each in keep]
    good, bad, size = 0, None, min(-(-start // multiple_of), last)
    with torch.random.fork_rng(range(torch.cuda.device_count())):
        while good < last and (bad is None or bad - good > 1):
            fitted = _runs(step, size * multiple_of, steps)
            _put_back(saved)
            if report is not None:
                report(size * multiple_of, fitted)
            good, bad = (size, bad) if fitted else (good, size)
            size = min(2 * good, last) if bad is None else (good + bad) // 2
    return good * multiple_of


def _runs(step: Callable[[int], object], batch: int, steps: int) -> bool:
    try:
        for _ in range(steps):
            step(batch)
    except torch.OutOfMemoryError:
        return False
    return True


def _put_back(saved: list[tuple]) -> None:
    """Called outside of `except`, where the error's traceback would keep the step's tensors alive."""
    for each, state in saved:
        each.load_state_dict(copy.deepcopy(state))  # a copy: an optimizer counts its own steps on
        each.zero_grad()
    gc.collect()
    torch.cuda.empty_cache()


def _on_host(state: dict) -> dict:
    return tree_map_only(torch.Tensor, lambda tensor: tensor.detach().to("cpu", copy=True), state)
