"""Freed blocks that wait for other streams than their own.

A block that `record_stream` named stays out of reach after it was freed ("active_pending_free") until the other streams
have come so far. Their clock says whether they have. It is asked at the next allocation, as CUDA's events are.

Rules: c10/cuda/CUDACachingAllocator.cpp. No torch is imported.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from typing import Any

from virtual_gpus.memory.blocks import WAITING, Block

Stream = tuple[int, int]  # (GPU, stream)


class NoClock:
    """Streams without a clock: all work is done as soon as it was given."""

    def mark(self, stream: Stream) -> Any:
        """A mark behind the work given to `stream` so far."""

    def has_passed(self, mark: Any) -> bool:
        """True if the work before the mark is done."""
        return True

    def wait_for(self, mark: Any) -> None:
        """Make the host wait for the mark."""


class StreamWaits:
    """Which streams use a block besides its own, and which freed blocks wait for them. Clocks: see `NoClock`."""

    def __init__(self):
        self.recorded: dict[int, dict[Stream, None]] = {}  # address of a used block -> the other streams that use it
        self.waiting: dict[int, list] = {}  # address -> [block, marks that are left]
        self._queues: dict[Stream, deque] = {}  # stream -> (mark, address)

    def record(self, block: Block, stream: Stream) -> None:
        """Note that `stream` uses the block too."""
        self.recorded.setdefault(block.address, {})[stream] = None

    def add(self, block: Block, clock: NoClock) -> None:
        """Let a block that was freed wait for the streams that were recorded."""
        streams = self.recorded.pop(block.address)
        block.state = WAITING
        tally = block.pool.tally
        tally.waiting += 1
        tally.waiting_bytes += block.size
        for stream in streams:
            self._queues.setdefault(stream, deque()).append((clock.mark(stream), block.address))
        self.waiting[block.address] = [block, len(streams)]

    def passed(self, clock: NoClock, wait: bool = False) -> Iterator[Block]:
        """The blocks that no stream uses any more, which wait no longer; with `wait`, all of them."""
        for stream, queue in list(self._queues.items()):
            while queue and (wait or clock.has_passed(queue[0][0])):
                mark, address = queue.popleft()
                if wait:
                    clock.wait_for(mark)
                entry = self.waiting[address]
                entry[1] -= 1
                if not entry[1]:
                    block, tally = entry[0], entry[0].pool.tally
                    del self.waiting[address]
                    tally.waiting -= 1
                    tally.waiting_bytes -= block.size
                    yield block
            if not queue:
                del self._queues[stream]

    def correct(self, live: dict[int, Block]) -> None:
        """Put the books in order after something was cut short; `live` has the used blocks."""
        self.recorded = {address: streams for address, streams in self.recorded.items() if address in live}
        left = Counter(address for queue in self._queues.values() for _, address in queue)
        self.waiting = {address: [entry[0], left[address]] for address, entry in self.waiting.items() if left[address]}
        self._queues = {
            stream: deque(entry for entry in queue if entry[1] in self.waiting)
            for stream, queue in self._queues.items()
        }
