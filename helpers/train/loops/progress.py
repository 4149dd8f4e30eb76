"""A bar that shows how far a pass over a loader is, and leaves nothing behind."""

from collections.abc import Iterable
from typing import Any

from tqdm.auto import tqdm

__all__ = ["bar"]


class _Bar(tqdm):
    # tqdm's watching thread would outlive the training, and with it whatever was switched on at that time.
    monitor_interval = 0


def bar(batches: Iterable[Any], text: str) -> Iterable[Any]:
    """`batches` under a bar that vanishes at the end; TQDM_DISABLE=1 in the environment hides it.

    No speed and no remaining time in it: wall-clock times must not reach a stored notebook.
    """
    return _Bar(batches, desc=text, leave=False, bar_format="{desc} {bar} {n_fmt}/{total_fmt}")
