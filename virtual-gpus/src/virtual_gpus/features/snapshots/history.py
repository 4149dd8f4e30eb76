"""The history of a GPU's memory, for PyTorch's memory viewer: every allocation and free, with the line that made it.

    torch.cuda.memory._record_memory_history()            # from here on, on all GPUs
    train()
    torch.cuda.memory._dump_snapshot("snapshot.pickle")   # python -m torch.cuda._memory_viz trace_plot snapshot.pickle

`Recorder` listens to one GPU's allocator and keeps what c10/cuda/CUDACachingAllocator.cpp keeps, in its words. `calls`
turns it into a snapshot. Sizes are bytes, as requested; times are nanoseconds of time.perf_counter_ns. Nothing is
attached to an allocator unless a history is recorded.
"""

import functools
import sys
import time
from collections import deque
from typing import NamedTuple
from weakref import ref

from virtual_gpus.features.snapshots import stacks
from virtual_gpus.memory.allocator import CachingAllocator
from virtual_gpus.memory.device import Event

NEVER, STATE, ALLOC, ALL = range(4)  # which events get a stack: none, live blocks, allocations too, frees too


class Entry(NamedTuple):
    """One event. `value`: an address, or the free bytes of an "oom". `stack`: None if not taken."""

    action: str
    value: int
    size: int
    stream: int
    time: int
    stack: object = None


class Live(NamedTuple):
    """A used block: what was requested, its stream, what it belongs to (see `Owner`), and where it was made."""

    requested: int
    stream: int
    owner: ref[object] | None
    stack: object = None


class Recorder:
    """What happened on one GPU since recording began. It is told everything by the allocator, which is locked then.

    context: which events get a stack; None while nothing is recorded.
    """

    def __init__(self, allocator: CachingAllocator):
        self._allocator, self._live_blocks = allocator, allocator.live_blocks
        self._deaths: stacks.Deaths | None = None
        self.entries: deque[Entry] = deque()
        self._blocks: dict[int, Live] = {}
        self._waiting: dict[int, Live] = {}  # freed, but another stream still uses them
        self._segments: dict[int, tuple[int, object]] = {}  # address, never used twice -> (stream, stack)
        self.context: int | None = None

    def start(self, max_entries: int, context: int, clear: bool) -> None:
        """Record from now on, or go on with other settings. Blocks that are in use already have no stack."""
        with self._allocator.exclusive():
            self.context = context
            self.entries = deque(() if clear else self.entries, min(max_entries, sys.maxsize))
            self._deaths = stacks.Deaths() if context == ALL else None
            if self.hear not in self._allocator.observers:
                self._allocator.observers.append(self.hear)
            used = self._live_blocks.items()
            self._blocks = {at: self._recorded(at) or Live(b.requested, b.pool.stream, b.owner) for at, b in used}
            for address, block in self._blocks.items():
                self._watch(address, block.owner)
            for address, segment in self._allocator.device.segments.items():
                if not segment.expandable:
                    self._segments.setdefault(address, (segment.pool.stream, None))

    def stop(self) -> None:
        """Record no more and forget the history. Blocks and segments keep their stacks, as in PyTorch."""
        with self._allocator.exclusive():
            if self.hear in self._allocator.observers:
                self._allocator.observers.remove(self.hear)
            self.context = self._deaths = None
            self.entries.clear()
            # From here on no event says when a block is given back; its owner tells whether it still is the same one.
            self._blocks = {address: block for address, block in self._blocks.items() if block.owner is not None}

    # ---- the allocator's events

    def hear(self, event: Event, address: int, size: int) -> None:
        """Listen to the allocator: one of its `observers`."""
        getattr(self, f"_{event}")(address, size)

    def _alloc(self, address: int, size: int) -> None:
        if address in self._blocks:  # Ctrl-C cut short what would have told of its end
            self._free(address, size)
        block, stack = self._live_blocks[address], self._stack()
        self._blocks[address] = Live(block.requested, block.pool.stream, block.owner, stack)
        self._watch(address, block.owner)
        self._add("alloc", address, block.requested, block.pool.stream, stack)

    def _watch(self, address: int, owner: ref[object] | None) -> None:
        holder = None if owner is None else owner()
        if holder is not None and self._deaths is not None:
            self._deaths.watch(holder, address)

    def _free(self, address: int, size: int) -> None:
        self._free_requested(address, size, ("free_requested", "free_completed"))

    def _free_requested(self, address: int, size: int, actions: tuple[str, ...] = ("free_requested",)) -> None:
        block = self._blocks.pop(address, None)
        if block is None:  # Ctrl-C cut short what would have told of its beginning
            return
        now, stack = 0, block.stack
        if self._deaths is not None:
            now, stack = self._deaths.of(address) or (0, stacks.take())
        for action in actions:
            self._add(action, address, block.requested, block.stream, stack, now)
        if "free_completed" not in actions:
            self._waiting[address] = block

    def _free_completed(self, address: int, size: int) -> None:
        block = self._waiting.pop(address, None)
        if block is not None:
            self._add("free_completed", address, block.requested, block.stream, self._stack())

    def _segment_free(self, address: int, size: int) -> None:
        stream, stack = self._segments.pop(address, (0, None))
        self._add("segment_free", address, size, stream, self._stack() or stack)

    def _segment_map(self, address: int, size: int, action: str = "segment_map") -> None:
        segment, stack = self._allocator.segment_at(address), self._stack()
        if address == segment.address:
            self._segments.setdefault(address, (segment.pool.stream, stack))
        self._add(action, address, size, segment.pool.stream, stack)

    _segment_alloc = functools.partialmethod(_segment_map, action="segment_alloc")

    def _segment_unmap(self, address: int, size: int) -> None:
        self._add("segment_unmap", address, size, self._allocator.segment_at(address).pool.stream, self._stack())

    def _oom(self, _: int, size: int) -> None:
        self._add("oom", self._allocator.device.free_bytes, size, 0, self._stack())

    def _stack(self) -> object:
        return stacks.take() if (self.context or NEVER) >= STATE else None

    def snapshot_taken(self, active: int) -> None:
        """Note that a snapshot was taken, which found `active` bytes in use."""
        if self.context is not None:
            self._add("snapshot", 0, active, 0)

    def _add(self, action: str, value: int, size: int, stream: int, stack: object = None, now: int = 0) -> None:
        stack = stack if (self.context or NEVER) >= ALLOC else None
        self.entries.append(Entry(action, value, size, stream, now or time.perf_counter_ns(), stack))

    # ---- what is known of what is in use

    def _recorded(self, address: int) -> Live | None:
        """What is known of the block in use at `address`, unless another has taken its place since recording ended."""
        live, block = self._blocks.get(address), self._live_blocks.get(address)
        return live if live is not None and block is not None and live.owner is block.owner else None

    def origin(self, address: int) -> object:
        """The stack of the allocation of the block in use at `address`, or None."""
        live = self._recorded(address)
        return None if live is None else live.stack

    def segment_origin(self, address: int) -> object:
        """The stack of the allocation that took the segment at `address` from the GPU, or None."""
        return self._segments.get(address, (0, None))[1]
