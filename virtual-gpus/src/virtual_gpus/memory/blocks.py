"""Blocks of GPU memory, the segments that they are cut from, and where they are while they are not used.

Free blocks are in pools. A block that `record_stream` named stays out of reach after it was freed
("active_pending_free") until the other streams have come so far. Rules: c10/cuda/CUDACachingAllocator.cpp.

Sizes are bytes. Nothing here locks: every method is called by a thread that has the allocator to itself.
"""

from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Iterator
from itertools import pairwise
from typing import Protocol, TypeAlias
from weakref import ref

from virtual_gpus.memory.stats import AllocatorStats, Tally, format_size

Stream = tuple[int, int]  # (GPU, stream)
Beside: TypeAlias = "Block | None"

# A block's state. FREEING: given back, but not yet seen by the thread that has the lock. WAITING: for other streams.
# UNMAPPED: addresses of an expandable segment that have no memory.
FREE, USED, FREEING, WAITING, UNMAPPED = range(5)


class Block:
    """A piece of a segment: `address`, `size` (rounded up) and `requested` in bytes. arena: its expandable segment."""

    __slots__ = ("address", "arena", "born", "next", "owner", "pool", "prev", "requested", "size", "state")
    born: int  # the searches of its pool's tally when it came to the pool
    owner: ref[object] | None  # the `Owner` that watches what it belongs to

    def __init__(self, address: int, size: int, pool: "BlockPool", prev: Beside, next: Beside, arena: "Segment | None"):
        self.address, self.size, self.requested = address, size, 0
        self.pool, self.prev, self.next = pool, prev, next
        self.arena, self.owner, self.state = arena, None, FREE

    def __repr__(self) -> str:
        state = ("free", "used", "being freed", "waiting for a stream", "without memory")[self.state]
        return f"Block({self.address:#x}, {format_size(self.size)}, {state})"


class BlockPool:
    """The free blocks of one size class on one stream: a sorted list of (size, address, block).

    unmapped: the same of what has no memory in the pool's expandable segments. split_from: the least remainder that is
    split off. tally: the counters of the size class, in `stats`.
    """

    __slots__ = ("_stats", "free", "small", "split_from", "stream", "tally", "unmapped")

    def __init__(self, small: bool, stream: int, stats: AllocatorStats, split_from: int):
        self.small, self.stream, self.split_from = small, stream, split_from
        self._stats, self.tally = stats, stats.small if small else stats.large
        self.free: list[tuple[int, int, Block]] = []
        self.unmapped: list[tuple[int, int, Block]] = []

    def put(self, block: Block) -> None:
        """Take a free block in, or addresses without memory."""
        block.born = self.tally.searches
        insort(self.unmapped if block.state == UNMAPPED else self.free, (block.size, block.address, block))

    def remove(self, block: Block) -> None:
        """The reverse of `put`."""
        entries = self.unmapped if block.state == UNMAPPED else self.free
        del entries[bisect_left(entries, (block.size, block.address))]

    def whole_segments(self) -> list[Block]:
        """The free blocks that are whole segments of fixed size."""
        return [block for _, _, block in self.free if not block.prev and not block.next and block.arena is None]

    def reclaim(self, block: Block) -> None:
        """`put` a block that is not in use any more, as one with its neighbours in the same state, and count it.

        Written out, without `put` and `remove`: this runs for every tensor, and each call costs.
        """
        tally, state, size, before, after = self.tally, block.state, block.size, block.prev, block.next
        entries, merged = self.unmapped if state == UNMAPPED else self.free, 0
        tally.requested_bytes -= block.requested
        if before is not None and before.state == state:
            del entries[bisect_left(entries, (before.size, before.address))]
            merged = 1
            size += before.size
            block.address = before.address
            block.prev = before = before.prev
            if before is not None:
                before.next = block
        if after is not None and after.state == state:
            del entries[bisect_left(entries, (after.size, after.address))]
            merged += 1
            size += after.size
            block.next = after = after.next
            if after is not None:
                after.prev = block
        insort(entries, (size, block.address, block))
        if block.arena is None:
            if before is not None or after is not None:
                self._stats.change_splits(tally, 1 - merged, block.size)
            elif merged:
                self._stats.change_splits(tally, -merged, block.size - size)
        block.size, block.requested, block.born = size, 0, tally.searches


def cut_off(block: Block, size: int) -> Block:
    """Cut a block down to `size` bytes. Returns the rest, a block of the same state that is in no pool."""
    after = block.next
    rest = Block(block.address + size, block.size - size, block.pool, block, after, block.arena)
    rest.state = block.state
    if after is not None:
        after.prev = rest
    block.next, block.size = rest, size
    return rest


class Segment:
    """Addresses of a GPU: a segment of fixed size, or an expandable one, pages of which get memory when needed.

    page: bytes that get memory at once. mapped: the numbers of the pages that have memory, which is the truth about
    them. A segment of fixed size is one page, which has memory.
    """

    __slots__ = ("address", "expandable", "mapped", "page", "pool", "size")

    def __init__(self, address: int, size: int, pool: BlockPool, page: int = 0):
        self.address, self.size, self.pool, self.expandable = address, size, pool, page > 0
        self.page, self.mapped = (page, set()) if page else (size, {0})

    @property
    def reserved(self) -> int:
        """Bytes that have memory."""
        return len(self.mapped) * self.page

    def relink(self, used: list[Block]) -> None:
        """Chain the `used` blocks anew, which are sorted, and fill the addresses between them with free ones.

        Free blocks, and addresses without memory, go to the pool, which must have none of this segment's.
        """
        chain: list[Block] = []
        start = self.address
        for block in used:
            chain += [*self._unused(start, block.address), block]
            start = block.address + block.size
        chain += self._unused(start, self.address + self.size)
        for block, before, after in zip(chain, [None, *chain], [*chain[1:], None], strict=False):
            block.prev, block.next = before, after
            if block.state in (FREE, UNMAPPED):
                self.pool.put(block)

    def _unused(self, start: int, end: int) -> Iterator[Block]:
        """New blocks for a range of addresses, cut where memory begins and ends."""
        edges = self.mapped ^ {page + 1 for page in self.mapped}
        cuts = (self.address + edge * self.page for edge in edges)
        for begin, stop in pairwise([start, *sorted(cut for cut in cuts if start < cut < end), end]):
            if begin < stop:
                block = Block(begin, stop - begin, self.pool, None, None, self if self.expandable else None)
                if (begin - self.address) // self.page not in self.mapped:
                    block.state = UNMAPPED
                yield block


def recount(tally: Tally, used: list[Block], waiting: list[Block], free: list[Block], segments: list[Segment]) -> None:
    """Set the counters of a size class to what is there of it."""
    used, waiting, free = ([block for block in blocks if block.pool.tally is tally] for blocks in (used, waiting, free))
    splits = [block.size for block in free if block.arena is None and (block.prev or block.next)]
    segments = [segment for segment in segments if segment.pool.tally is tally]
    present = {
        "allocation": len(used),
        "allocated_bytes": sum(block.size for block in used),
        "requested_bytes": sum(block.requested for block in used + waiting),
        "segment": sum(not segment.expandable for segment in segments),
        "reserved_bytes": sum(segment.reserved for segment in segments),
        "inactive_split": len(splits),
        "inactive_split_bytes": sum(splits),
    }
    tally.correct(present)
    tally.waiting, tally.waiting_bytes = len(waiting), sum(block.size for block in waiting)


class StreamClock(Protocol):
    """How far streams have come: a mark is the time at which one has done what it was given so far. now: the host's."""

    now: float

    def mark(self, gpu: int, stream: int, /) -> float: ...
    def wait(self, until: float, /) -> None: ...


class StreamWaits:
    """Which streams use a block besides its own, and which freed blocks wait for them. `clock`: the allocator's."""

    def __init__(self):
        self.recorded: dict[int, dict[Stream, None]] = {}  # address of a used block -> the other streams that use it
        self.waiting: dict[int, tuple[Block, int]] = {}  # address -> (block, marks that are left)
        self._queues: dict[Stream, deque[tuple[float, int]]] = {}  # stream -> (mark, address)

    def add(self, block: Block, clock: StreamClock) -> None:
        """Let a block that was freed wait for the streams that were recorded."""
        streams = self.recorded.pop(block.address)
        block.state = WAITING
        tally = block.pool.tally
        tally.waiting += 1
        tally.waiting_bytes += block.size
        for stream in streams:
            self._queues.setdefault(stream, deque()).append((clock.mark(*stream), block.address))
        self.waiting[block.address] = block, len(streams)

    def passed(self, clock: StreamClock, wait: bool = False) -> Iterator[Block]:
        """The blocks that no stream uses any more, which wait no longer; with `wait`, all of them."""
        for stream, queue in list(self._queues.items()):
            while queue and (wait or queue[0][0] <= clock.now):
                mark, address = queue.popleft()
                if wait:
                    clock.wait(mark)
                block, marks = self.waiting[address]
                self.waiting[address] = block, marks - 1
                if marks == 1:
                    del self.waiting[address]
                    block.pool.tally.waiting -= 1
                    block.pool.tally.waiting_bytes -= block.size
                    yield block
            if not queue:
                del self._queues[stream]

    def correct(self, live: dict[int, Block]) -> None:
        """Put the books in order after something was cut short; `live` has the used blocks."""
        self.recorded = {address: streams for address, streams in self.recorded.items() if address in live}
        due = Counter(address for queue in self._queues.values() for _, address in queue)
        self.waiting = {address: (block, due[address]) for address, (block, _) in self.waiting.items() if due[address]}
        for stream, queue in self._queues.items():
            self._queues[stream] = deque(entry for entry in queue if entry[1] in self.waiting)
