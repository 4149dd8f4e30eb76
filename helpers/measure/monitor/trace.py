"""A run's memory, event by event, out of PyTorch's own memory history.

`torch.cuda.memory._record_memory_history` notes every allocation and every free with its address and the bytes that
were asked for. The allocator hands out more: it rounds up to 512 bytes, and gives a whole cached block away where the
rest is too small to split off (CUDACachingAllocator.cpp, should_split). `Blocks` plays that back from the state at the
beginning, so that the sum is `torch.cuda.memory_allocated`, to the byte. Events are counted as the allocator's own
counters count them: 1 for an allocation, 1 for a free.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

ROUND = 512
SMALL_SEGMENT = 2 * 2**20  # a segment of this size is cut into small blocks, a larger one keeps up to 1 MiB unsplit
KEPT_WHOLE = 2**20


class Count(NamedTuple):
    """The allocator's own counters of one GPU: allocations and frees so far, and bytes allocated and reserved now."""

    events: int
    allocated: int
    reserved: int


class Life(NamedTuple):
    """A block of `size` bytes in use from event `born` (0: before the run) until event `died` (after the last: not).

    requested: the bytes that were asked for, 0 for a block from before the run.
    """

    size: int
    born: int
    died: int
    requested: int = 0


@dataclass
class Timeline:
    """One GPU. `allocated[n]`: bytes after event n; 0 is the beginning. `ms`: when, from the first event on.

    ooms: the events after which memory ran out. reserved: bytes that PyTorch kept at the end; its most is
    `peak_reserved`. lost: events at the beginning that PyTorch's history no longer held; the curve starts after them,
    at event `lost`.
    """

    allocated: list[int]
    ms: list[float]
    lives: list[Life]
    ooms: list[int]
    reserved: int
    peak_reserved: int
    lost: int = 0

    @property
    def last(self) -> int:
        """The number of the last event."""
        return self.lost + len(self.allocated) - 1

    def after(self, event: int) -> int:
        """Bytes allocated after `event`."""
        return self.allocated[min(max(0, event - self.lost), len(self.allocated) - 1)]


class Blocks:
    """Which bytes of which segment are free: tells how large a block an allocation got."""

    def __init__(self, segments: Sequence[Mapping]):
        self._free: dict[int, tuple[int, int, bool]] = {}  # address -> (size, segment, small)
        self._ends: dict[int, int] = {}  # end of a free block -> its address
        self.used: dict[int, tuple[int, int, bool]] = {}
        for segment in segments:
            start, small = segment["address"], segment["segment_type"] == "small"
            if segment.get("is_expandable"):  # it splits whatever it can, so rounding is all
                start = 0
            for block in segment["blocks"]:
                place = block["size"], start, small
                if block["state"] != "inactive":
                    self.used[block["address"]] = place
                elif start:
                    self._put(block["address"], place)

    def _put(self, address: int, place: tuple[int, int, bool]) -> None:
        self._free[address] = place
        self._ends[address + place[0]] = address

    def _take(self, address: int | None) -> tuple[int, int, bool] | None:
        place = self._free.pop(address, None)
        if place is not None:
            del self._ends[address + place[0]]
        return place

    def segment(self, address: int, size: int) -> None:
        """A new segment."""
        self._put(address, (size, address, size == SMALL_SEGMENT))

    def give_back(self, address: int) -> None:
        """A segment that went back to the driver."""
        self._take(address)

    def allocate(self, address: int, requested: int) -> int:
        """The bytes that a request at `address` got."""
        size = max(ROUND, -(-requested // ROUND) * ROUND)
        found, segment, small = self._take(address) or (size, 0, False)
        rest = found - size
        if rest >= ROUND if small else rest > KEPT_WHOLE:
            self._put(address + size, (rest, segment, small))
        else:
            size = max(size, found)
        self.used[address] = size, segment, small
        return size

    def free(self, address: int) -> None:
        """A block that may be used again: it merges with free neighbours of its segment."""
        size, segment, small = self.used.pop(address, (0, 0, False))
        if not segment:
            return
        for neighbour in (address + size, self._ends.get(address)):
            place = self._free.get(neighbour)
            if place is not None and place[1] == segment:
                self._take(neighbour)
                address, size = min(address, neighbour), size + place[0]
        self._put(address, (size, segment, small))


@dataclass
class _Player:
    """Plays a trace back."""

    blocks: Blocks
    allocated: list[int]
    reserved: int
    event: int
    ms: list[float] = field(default_factory=list)
    lives: list[Life] = field(default_factory=list)
    ooms: list[int] = field(default_factory=list)
    peak_reserved: int = 0

    def __post_init__(self):
        self.peak_reserved = self.reserved
        self._born = {address: (place[0], 0, 0) for address, place in self.blocks.used.items()}

    def play(self, entries: Iterable[Mapping]) -> None:
        """Play events of the trace back, in their order. Cut up no further: each call costs, per event."""
        blocks, born, now = self.blocks, self._born, self.allocated[-1]
        for entry in entries:
            action = entry["action"]
            if action == "alloc":
                address, requested = entry["addr"], entry["size"]
                size = blocks.allocate(address, requested)
                self.event += 1
                now += size
                born[address] = size, self.event, requested
            elif action == "free_requested":
                size, since, requested = born.pop(entry["addr"], (-(-entry["size"] // ROUND) * ROUND, 0, 0))
                self.event += 1
                now -= size
                self.lives.append(Life(size, since, self.event, requested))
            else:
                self._play_another(action, entry)
                continue
            self.allocated.append(now)
            self.ms.append(entry["time_us"] / 1000)

    def _play_another(self, action: str, entry: Mapping) -> None:
        """An event that does not change how much is allocated."""
        if action == "free_completed":
            self.blocks.free(entry["addr"])
        elif action in ("segment_alloc", "segment_map"):
            self._reserve(entry["size"])
            if action == "segment_alloc":
                self.blocks.segment(entry["addr"], entry["size"])
        elif action in ("segment_free", "segment_unmap"):
            self._reserve(-entry["size"])
            self.blocks.give_back(entry["addr"])
        elif action == "oom":
            self.ooms.append(self.event)

    def _reserve(self, size: int) -> None:
        self.reserved += size
        self.peak_reserved = max(self.peak_reserved, self.reserved)

    def rest(self) -> list[Life]:
        """Blocks that are in use at the end."""
        return [Life(size, born, self.event + 1, requested) for size, born, requested in self._born.values()]


def timeline(segments: Sequence[Mapping], trace: Sequence[Mapping], before: Count, after: Count) -> Timeline:
    """One GPU's run: its `segments` at the beginning, its `trace` at the end, the counters at both.

    The trace may begin earlier (somebody else was recording already) or later (it is a ring): it is aligned at its
    end, by the number of events that the counters saw.
    """
    total = max(0, after.events - before.events)  # less where somebody set the counters to 0; `Run.note` tells
    mine, lost = _last(trace, total)
    player = _Player(Blocks([] if lost else segments), [before.allocated], before.reserved, lost)
    player.play(mine)
    if lost:  # what was there when the history begins is known only from the end
        shift = after.allocated - player.allocated[-1]
        player.allocated = [size + shift for size in player.allocated]
    start = player.ms[0] if player.ms else 0
    ms = [0.0, *(moment - start for moment in player.ms)]
    lives = player.lives + player.rest()
    return Timeline(player.allocated, ms, lives, player.ooms, player.reserved, player.peak_reserved, lost)


def _last(trace: Sequence[Mapping], total: int) -> tuple[Sequence[Mapping], int]:
    """The end of `trace` with `total` events, and what happened to segments on the way to the first of them; and how
    many of these events the trace does not have."""
    places = [place for place, entry in enumerate(trace) if entry["action"] in ("alloc", "free_requested")]
    start = 0 if total > len(places) else places[-total] if total else len(trace)
    while start and trace[start - 1]["action"].startswith(("segment", "oom")):
        start -= 1
    return trace[start:], max(0, total - len(places))
