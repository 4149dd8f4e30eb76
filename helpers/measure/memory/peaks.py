"""Peaks of blocks that may lie in each other, or run in several threads.

PyTorch keeps one peak per GPU, and whoever begins to measure sets it back. So each block notes what it was by then.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import replace

import torch

from helpers.measure.memory.readings import Reading, Readings

_lock = threading.Lock()
_open: list[Block] = []


class Block:
    """Peaks of `indices` from now on, until `end`."""

    def __init__(self, indices: Iterable[int]):
        self._before = dict.fromkeys(indices, (0, 0))  # the most allocated and reserved before others set it back
        set_back(self._before)
        with _lock:
            _open.append(self)

    def note(self, indices: Iterable[int]) -> None:
        """Keep what PyTorch's peaks of `indices` are: they will be set back."""
        for index in self._before.keys() & indices:
            allocated, reserved = self._before[index]
            now = torch.cuda.max_memory_allocated(index), torch.cuda.max_memory_reserved(index)
            self._before[index] = max(allocated, now[0]), max(reserved, now[1])

    def end(self) -> None:
        """No more is noted."""
        with _lock:
            _open.remove(self)

    def peaks_of(self, readings: Readings) -> Readings:
        """The readings with the peaks of this block."""
        return Readings(map(self._peaks, readings), readings.note)

    def _peaks(self, reading: Reading) -> Reading:
        allocated, reserved = self._before[reading.index]
        highest = max(allocated, reading.peak_allocated), max(reserved, reading.peak_reserved)
        return replace(reading, peak_allocated=highest[0], peak_reserved=highest[1])


def set_back(indices: Iterable[int]) -> None:
    """PyTorch's peaks of `indices` start again from what is held now; open blocks keep their own."""
    with _lock:
        for block in _open:
            block.note(indices)
        for index in indices:
            torch.cuda.reset_peak_memory_stats(index)
