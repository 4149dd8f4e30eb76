"""The largest batch of a method, found by running steps: part of `helpers.lesson07.methods`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from helpers.measure import largest_batch

__all__ = ["largest_that_fits", "one_card"]


_PARTS = 25


def largest_that_fits(new_step: Callable, room: int, gpus: Sequence, guess: int) -> int:
    """The largest batch of which two steps run where each of `gpus` has `room` bytes: it fits, and `grain(guess, gpus)`
    samples more do not; both were run.

    new_step() gives a `TrainStep`. guess: where the search begins.
    """

    def twice(batch: int) -> None:
        step = new_step()
        step.clear()
        torch.cuda.empty_cache()  # what the last try has left must not lie in the way
        step(batch)
        step(batch)  # the second one finds the cache as the first has cut it up

    multiple = grain(guess, len(gpus))
    with one_card(room, gpus):
        return largest_batch(twice, start=max(guess, 1), multiple_of=multiple, steps=1, jump=1)


def grain(guess: int, gpus: int) -> int:
    """How finely to search: 1, 2, 4, ... samples per GPU, so that it is some 4 % of the batch."""
    return gpus * 2 ** max(0, int(math.log2(max(1, guess // gpus // _PARTS))))


@contextmanager
def one_card(room: int, gpus: Sequence) -> Iterator[None]:
    """PyTorch may take `room` bytes on each GPU and no more, as if that were all a card had."""
    for gpu in gpus:
        torch.cuda.set_per_process_memory_fraction(room / torch.cuda.get_device_properties(gpu).total_memory, gpu)
    try:
        yield
    finally:
        for gpu in gpus:
            torch.cuda.set_per_process_memory_fraction(1.0, gpu)
