"""The history of a GPU's memory, for PyTorch's memory viewer: every allocation and free, with the line that made it.

    torch.cuda.memory._record_memory_history()            # from here on, on all GPUs
    train()
    torch.cuda.memory._dump_snapshot("snapshot.pickle")   # python -m torch.cuda._memory_viz trace_plot snapshot.pickle

`Recorder` listens to one GPU's allocator and keeps what c10/cuda/CUDACachingAllocator.cpp keeps, in its words.
`History` is a machine's recorders and their settings; `calls` turns it into a snapshot. Sizes are bytes, as requested;
times are nanoseconds of time.perf_counter_ns. Nothing is attached to an allocator unless a history is recorded.
Recording costs half a microsecond per event without stacks, 1 to 4 with them: a step of many tiny operators takes up
to 1.25 times as long then.

What differs from a real GPU: stacks have no C++ frames, and in a backward pass they show the line that called
`backward()`, since the engine runs in the calling thread here. (A real GPU's engine has a thread of its own.) Blocks of
`record_function` leave no mark ("external_annotations").
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from virtual_gpus.features.snapshots import stacks
from virtual_gpus.memory.allocator import CachingAllocator
from virtual_gpus.memory.options import environment_text

_now, _new = time.perf_counter_ns, tuple.__new__

NEVER, STATE, ALLOC, ALL = range(4)  # which events get a stack: none, live blocks, allocations too, frees too


@dataclass(frozen=True)
class HistorySettings:
    """What _record_memory_history was told."""

    max_entries: int
    context: int


class Entry(NamedTuple):
    """One event. `value`: an address, or the free bytes of an "oom". `stack` and `forward`: None if not taken.

    They are kept as their fields in a row, which is faster, and which leaves the garbage collector nothing to look at.
    There "free" stands for "free_requested" and "free_completed" at one moment.
    """

    action: str
    value: int
    size: int
    stream: int
    time: int
    stack: object = None
    forward: list | None = None


class Live(NamedTuple):
    """A used block: what was requested, its stream, what it belongs to (see `Owner`), and where it was made."""

    requested: int
    stream: int
    owner: object
    stack: object = None
    forward: list | None = None


class Recorder:
    """What happened on one GPU since recording began. It is told everything by the allocator, which is locked then."""

    def __init__(self, allocator: CachingAllocator):
        self._allocator, self._live_blocks, self._deaths = allocator, allocator.live_blocks, None
        self.entries: deque = deque()  # the fields of one `Entry` after the other, see `events`
        self._blocks: dict[int, Live] = {}
        self._waiting: dict[int, Live] = {}  # freed, but another stream still uses them
        self._segments: dict[int, tuple] = {}  # address -> (stream, stack); no address is used for a second segment
        self.settings: HistorySettings | None = None
        self._is_plain = False  # no stacks
        self._told = {
            "alloc": self._alloc,
            "free": self._free,
            "free_requested": self._free_requested,
            "free_completed": self._free_completed,
            "oom": self._oom,
            "segment_alloc": self._segment_alloc,
            "segment_free": self._segment_free,
            "segment_map": self._segment_map,
            "segment_unmap": self._segment_unmap,
        }

    def start(self, settings: HistorySettings, clear: bool) -> None:
        """Record from now on, or go on with other settings. Blocks that are in use already have no stack."""
        with self._allocator.exclusive():
            fields = () if clear else [value for entry in self.events() for value in entry]
            self.settings = settings
            self.entries = deque(fields, min(len(Entry._fields) * settings.max_entries, sys.maxsize))
            self._is_plain = settings.context == NEVER
            self._deaths = stacks.Deaths() if settings.context == ALL else None
            if self.hear not in self._allocator.observers:
                self._allocator.observers.append(self.hear)
            self._adopt()

    def _adopt(self):
        self._blocks = {
            address: self._made(address) or Live(block.requested, block.pool.stream, block.owner)
            for address, block in self._live_blocks.items()
        }
        for address, segment in self._allocator.device.segments.items():
            if not segment.expandable:
                self._segments.setdefault(address, (segment.pool.stream, None))
        if self._deaths is not None:
            for address, block in self._blocks.items():
                self._watch(address, block.owner)

    def stop(self) -> None:
        """Record no more and forget the history. Blocks and segments keep their stacks, as in PyTorch."""
        with self._allocator.exclusive():
            if self.hear in self._allocator.observers:
                self._allocator.observers.remove(self.hear)
            self.settings = self._deaths = None
            self.entries.clear()
            # From here on no event says when a block is given back; its owner tells whether it still is the same one.
            self._blocks = {address: block for address, block in self._blocks.items() if block.owner is not None}

    # ---- the allocator's events

    def hear(self, event: str, address: int, size: int) -> None:
        """Listen to the allocator: one of its `observers`. Without stacks, allocations and frees are noted right here,
        since this runs for every tensor, and each call costs."""
        if self._is_plain:
            if event == "free":
                block = self._blocks.pop(address, None)
                if block is not None:
                    self.entries.extend((event, address, block[0], block[1], _now(), None, None))
                return
            if event == "alloc" and address not in self._blocks:
                block = self._live_blocks[address]
                requested, stream = block.requested, block.pool.stream
                self._blocks[address] = _new(Live, (requested, stream, block.owner, None, None))
                self.entries.extend((event, address, requested, stream, _now(), None, None))
                return
        self._told[event](address, size)

    def _alloc(self, address, size):
        if address in self._blocks:  # Ctrl-C cut short what would have told of its end
            self._free(address, size)
        block, stack, forward = self._live_blocks[address], None, None
        if self.settings.context >= STATE:
            stack, forward = stacks.take(), stacks.forward_lines()
        self._blocks[address] = Live(block.requested, block.pool.stream, block.owner, stack, forward)
        if self._deaths is not None:
            self._watch(address, block.owner)
        self._add("alloc", address, block.requested, block.pool.stream, None, stack, forward)

    def _watch(self, address, owner):
        thing = None if owner is None else owner()
        if thing is not None:
            self._deaths.watch(thing, address)

    def _free(self, address, size):
        self._free_requested(address, size, ("free_requested", "free_completed"))

    def _free_requested(self, address, size, actions=("free_requested",)):
        block = self._blocks.pop(address, None)
        if block is None:  # Ctrl-C cut short what would have told of its beginning
            return
        now, stack, forward = None, block.stack, block.forward
        if self._deaths is not None:
            now, stack = self._deaths.of(address) or (None, stacks.take())
            forward = None
        for action in actions:
            self._add(action, address, block.requested, block.stream, now, stack, forward)
        if "free_completed" not in actions:
            self._waiting[address] = block

    def _free_completed(self, address, size):
        block = self._waiting.pop(address, None)
        if block is not None:
            self._add("free_completed", address, block.requested, block.stream, stack=self._stack())

    def _segment_alloc(self, address, size):
        stream = self._allocator.device.segments[address].pool.stream
        self._segments[address] = stream, self._stack()
        self._add("segment_alloc", address, size, stream, stack=self._segments[address][1])

    def _segment_free(self, address, size):
        stream, stack = self._segments.pop(address, (0, None))
        self._add("segment_free", address, size, stream, stack=self._stack() or stack)

    def _segment_map(self, address, size):
        arena, stack = self._allocator.segment_at(address), self._stack()
        if address == arena.address:
            self._segments.setdefault(address, (arena.pool.stream, stack))
        self._add("segment_map", address, size, arena.pool.stream, stack=stack)

    def _segment_unmap(self, address, size):
        stream = self._allocator.segment_at(address).pool.stream
        self._add("segment_unmap", address, size, stream, stack=self._stack())

    def _oom(self, _, size):
        self._add("oom", self._allocator.device.free_bytes, size, 0, stack=self._stack())

    def _stack(self) -> object:
        return stacks.take() if self.settings.context >= STATE else None

    def snapshot_taken(self, active: int) -> None:
        """Note that a snapshot was taken, which found `active` bytes in use."""
        if self.settings is not None:
            self._add("snapshot", 0, active, 0)

    def _add(self, action, value, size, stream, now=None, stack=None, forward=None):
        if self.settings.context < ALLOC:
            stack = forward = None
        now = _now() if now is None else now
        self.entries.extend((action, value, size, stream, now, stack, forward))

    def events(self) -> list[tuple]:
        """What is kept, as plain tuples: Entry(*one)."""
        found, fields = [], iter(self.entries.copy())
        for entry in zip(*[fields] * len(Entry._fields), strict=True):
            if entry[0] == "free":
                found += ("free_requested", *entry[1:]), ("free_completed", *entry[1:])
            else:
                found.append(entry)
        return found if self.settings is None else found[-self.settings.max_entries :]

    # ---- what is known of what is in use

    def _made(self, address) -> Live | None:
        """What is known of the block in use at `address`, unless another has taken its place since recording ended."""
        known, block = self._blocks.get(address), self._live_blocks.get(address)
        return known if known is not None and block is not None and known.owner is block.owner else None

    def origin(self, address: int) -> tuple:
        """(stack, forward lines) of the allocation of the block in use at `address`; None for what is not known."""
        known = self._made(address)
        return (None, None) if known is None else (known.stack, known.forward)

    def segment_origin(self, address: int) -> object:
        """The stack of the allocation that took the segment at `address` from the GPU, or None."""
        return self._segments.get(address, (0, None))[1]


class History:
    """A machine: the recorders of its GPUs, and the allocator settings that were set."""

    def __init__(self, allocators: Iterable[CachingAllocator]):
        self.recorders = [Recorder(allocator) for allocator in allocators]
        self.settings: HistorySettings | None = None
        self.allocator_settings = environment_text()

    def start(self, settings: HistorySettings, clear: bool = False) -> None:
        """Record, with or without what was recorded before."""
        self.settings = settings
        for recorder in self.recorders:
            recorder.start(settings, clear)

    def stop(self) -> None:
        """Record no more and forget what was recorded."""
        self.settings = None
        for recorder in self.recorders:
            recorder.stop()
