"""What `MemoryMonitor` reads: the allocator's counters, and what the driver says, which a thread samples."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from helpers.measure.monitor.trace import Count


def driver_used(index: int) -> int:
    """Bytes that are taken on a GPU, by the driver's count: by other programs and libraries too."""
    free, total = torch.cuda.mem_get_info(index)
    return total - free


def count(index: int) -> Count:
    """The allocator's own counters of one GPU, now."""
    stats = torch.cuda.memory_stats_as_nested_dict(index)
    events = stats["allocation"]["all"]
    bytes_now, reserved = stats["allocated_bytes"]["all"]["current"], stats["reserved_bytes"]["all"]["current"]
    return Count(events["allocated"] + events["freed"], bytes_now, reserved)


class _History:
    """PyTorch's memory history, of which there is one: how many monitors need it, and whether they switched it on."""

    def __init__(self):
        self.lock, self.monitors, self.ours = threading.Lock(), 0, False


_history = _History()


@contextmanager
def memory_history(most_events: int) -> Iterator[None]:
    """PyTorch's memory history is on until the last of all such blocks ends; who records already keeps theirs."""
    with _history.lock:
        if not _history.monitors:
            _history.ours = not torch._C._cuda_isHistoryEnabled()
            if _history.ours:
                torch.cuda.memory._record_memory_history("all", context=None, stacks="python", max_entries=most_events)
        _history.monitors += 1
    try:
        yield
    finally:
        with _history.lock:
            _history.monitors -= 1
            if _history.ours and not _history.monitors:
                torch.cuda.memory._record_memory_history(None)


class Sampler(threading.Thread):
    """Reads what the driver says is taken on each card, every `every` seconds, and keeps the highest in `most`."""

    def __init__(self, indices: Sequence[int], every: float):
        super().__init__(name="MemoryMonitor", daemon=True)
        self._every, self._ended = every, threading.Event()
        self.most = dict.fromkeys(indices, 0)

    def run(self) -> None:
        while not self._ended.wait(self._every):
            for index in self.most:
                self.most[index] = max(self.most[index], driver_used(index))

    def stop(self) -> None:
        """Returns when the thread has ended."""
        self._ended.set()
        self.join()
