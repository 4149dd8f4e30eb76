"""Where the caching allocator puts things: segments, blocks, best fit, split, merge, give back.

The rules are in the docstring of `allocator.py`, which adds the lock and the figures. Nothing here locks:
every method is called by a thread that has the allocator to itself. Sizes are bytes. No torch is imported.
"""

# ruff: noqa: PLR1730 (a call of max costs more than an if, and this runs for every tensor)

from bisect import bisect_left, insort

from virtual_gpus.memory.stats import EVENTS, METRICS, Tally, format_size, raise_peak

SMALL_REQUEST = 1 << 20
SMALL_SEGMENT = 2 << 20
LARGE_SEGMENT = 20 << 20
OWN_SEGMENT_FROM = 10 << 20

# A block's state. FREEING: given back, but not yet seen by the thread that has the lock. WAITING: for other streams.
# UNMAPPED: addresses of an expandable segment that have no memory.
FREE, USED, FREEING, WAITING, UNMAPPED = range(5)


class Block:
    """A piece of a segment: `address`, `size` (rounded up) and `requested` (as asked for), in bytes."""

    __slots__ = ("address", "born", "next", "owner", "pool", "prev", "requested", "size", "state")
    arena = None  # the expandable segment that it is in (see `allocator_expandable`)

    def __init__(self, address, size, pool, prev, next):
        self.address, self.size, self.requested, self.owner = address, size, 0, None
        self.pool, self.prev, self.next, self.state = pool, prev, next, FREE

    def __repr__(self):
        state = ("free", "used", "being freed", "waiting for a stream", "without memory")[self.state]
        return f"Block({self.address:#x}, {format_size(self.size)}, {state})"


class Pool:
    """The free blocks of one size class on one stream: a sorted list of (size, address, block).

    `unmapped`: what of its expandable segments has no memory, as a sorted list of (address, block).
    """

    __slots__ = ("free", "small", "split_from", "stream", "tally", "unmapped")

    def __init__(self, small, stream, tally):
        self.small, self.stream, self.tally, self.free, self.unmapped = small, stream, tally, [], []
        self.split_from = 512 if small else SMALL_REQUEST + 1  # the least remainder that is split off


class Blocks:
    """All segments of one GPU and the blocks in them; `room_for(nbytes)` says whether the GPU has so much.

    `_segments` and `_live` are the truth; the rest is an index of them, and `_rebuild` makes it anew.
    """

    def __init__(self, room_for, first_address):
        self._room_for, self._next_address = room_for, first_address
        self._segments, self._live = {}, {}  # address -> (size, pool); address of a used block -> Block
        self._small_pools, self._large_pools = {}, {}  # stream -> Pool
        self._small, self._large, self._both = Tally(), Tally(), Tally()  # of _both only the peaks are used
        self._events = dict.fromkeys(EVENTS, 0)
        self._rising = False  # something was allocated since the peaks were last looked at
        self.observers = []

    # _allocate and _reclaim run for every tensor: written out rather than cut up, since each call costs.

    def _allocate(self, nbytes, size, stream, owner):
        """A used block, or None when memory ran out. The last step, entering it in _live, makes it so."""
        small = size <= SMALL_REQUEST
        pools = self._small_pools if small else self._large_pools
        pool = pools.get(stream) or self._new_pool(small, stream)
        free = pool.free
        i = bisect_left(free, (size,))
        block = free.pop(i)[2] if i < len(free) else self._new_segment(pool, size)
        if block is None:
            return None
        tally, after, remaining = pool.tally, block.next, block.size - size
        was_split = after is not None or block.prev is not None
        if remaining >= pool.split_from:
            rest = Block(block.address + size, remaining, pool, block, after)
            if after is not None:
                after.prev = rest
            block.next, block.size = rest, size
            insort(free, (remaining, rest.address, rest))
            if was_split:
                tally.inactive_split_bytes -= size
            else:
                self._change_splits(tally, 1, remaining)
        elif was_split:
            tally.inactive_split -= 1
            tally.inactive_split_bytes -= block.size
        size, block.state, block.requested = block.size, USED, nbytes
        tally.allocation += 1
        tally.allocation_up += 1
        tally.allocated_bytes += size
        tally.allocated_bytes_up += size
        tally.requested_bytes += nbytes
        tally.requested_bytes_up += nbytes
        self._rising = True
        if owner is not None:
            owner.address, block.owner = block.address, owner
        self._live[block.address] = block
        return block

    def _reclaim(self, block):
        """Return a block that is out of _live to its pool, merged with its free neighbours."""
        if self._rising:
            self._note_peaks()
        pool, size, blocks, nbytes = block.pool, block.size, 0, 0
        tally, free, before, after = pool.tally, pool.free, block.prev, block.next
        tally.allocation -= 1
        tally.allocated_bytes -= size
        tally.requested_bytes -= block.requested
        block.owner = None
        if before is not None and not before.state:
            del free[bisect_left(free, (before.size, before.address))]
            blocks, nbytes = -1, -before.size
            block.address, block.prev = before.address, before.prev
            size += before.size
            if block.prev is not None:
                block.prev.next = block
        if after is not None and not after.state:
            del free[bisect_left(free, (after.size, after.address))]
            blocks, nbytes = blocks - 1, nbytes - after.size
            block.next = after.next
            size += after.size
            if block.next is not None:
                block.next.prev = block
        block.size, block.state = size, FREE
        insort(free, (size, block.address, block))
        if block.prev is not None or block.next is not None:
            blocks, nbytes = blocks + 1, nbytes + size
        if nbytes:
            self._change_splits(tally, blocks, nbytes)

    def _note_peaks(self):
        """Use only rises between two frees: a look before each free, and each reading, finds every peak."""
        self._rising = False
        small, large, both = self._small, self._large, self._both
        for tally in (small, large):
            if tally.allocated_bytes > tally.allocated_bytes_peak:
                tally.allocated_bytes_peak = tally.allocated_bytes
            if tally.requested_bytes > tally.requested_bytes_peak:
                tally.requested_bytes_peak = tally.requested_bytes
            if tally.allocation > tally.allocation_peak:
                tally.allocation_peak = tally.allocation
        if small.allocated_bytes + large.allocated_bytes > both.allocated_bytes_peak:
            both.allocated_bytes_peak = small.allocated_bytes + large.allocated_bytes
        if small.requested_bytes + large.requested_bytes > both.requested_bytes_peak:
            both.requested_bytes_peak = small.requested_bytes + large.requested_bytes
        if small.allocation + large.allocation > both.allocation_peak:
            both.allocation_peak = small.allocation + large.allocation

    def _change_splits(self, tally, blocks, nbytes):
        """Count free blocks that share a segment with used ones ("inactive split"): they cannot go back."""
        tally.inactive_split += blocks
        tally.inactive_split_bytes += nbytes
        if blocks > 0:
            tally.inactive_split_up += blocks
            raise_peak("inactive_split", tally, self._small, self._large, self._both)
        if nbytes > 0:
            tally.inactive_split_bytes_up += nbytes
            small, large, both = self._small, self._large, self._both
            if tally.inactive_split_bytes > tally.inactive_split_bytes_peak:
                tally.inactive_split_bytes_peak = tally.inactive_split_bytes
            if small.inactive_split_bytes + large.inactive_split_bytes > both.inactive_split_bytes_peak:
                both.inactive_split_bytes_peak = small.inactive_split_bytes + large.inactive_split_bytes

    def _new_pool(self, small, stream):
        pools, tally = (self._small_pools, self._small) if small else (self._large_pools, self._large)
        return pools.setdefault(stream, Pool(small, stream, tally))

    def _new_segment(self, pool, size):
        """The only block of a new segment, not yet among the free ones; None when the GPU is full."""
        nbytes = segment_size(size)
        if not self._room_for(nbytes):
            self._release_cached()
            self._events["num_alloc_retries"] += 1
            if not self._room_for(nbytes):
                return None
        address = self._next_address
        self._next_address += nbytes
        self._segments[address] = (nbytes, pool)
        self._change_reserved(pool.tally, 1, nbytes)
        self._tell("segment_alloc", address, nbytes)
        return Block(address, nbytes, pool, None, None)

    def _release_cached(self):
        """Give every segment without a used block back to the GPU."""
        self._events["num_sync_all_streams"] += 1
        for pool in (*self._large_pools.values(), *self._small_pools.values()):
            whole = [entry for entry in pool.free if not entry[2].prev and not entry[2].next]
            pool.free[:] = [entry for entry in pool.free if entry[2].prev or entry[2].next]
            for nbytes, address, _ in whole:
                del self._segments[address]
                self._change_reserved(pool.tally, -1, -nbytes)
                self._tell("segment_free", address, nbytes)

    def _change_reserved(self, tally, segments, nbytes):
        tally.segment += segments
        tally.reserved_bytes += nbytes
        if segments < 0:
            self._events["num_device_free"] += 1
            return
        tally.segment_up += segments
        tally.reserved_bytes_up += nbytes
        self._events["num_device_alloc"] += 1
        for name in ("segment", "reserved_bytes"):
            raise_peak(name, tally, self._small, self._large, self._both)

    def _tell(self, event, address, size):
        for observer in self.observers:
            observer(event, address, size)

    def _rebuild(self):
        """Make links, free lists and counters anew from _segments and _live: something was cut short."""
        for pool in (*self._large_pools.values(), *self._small_pools.values()):
            pool.free.clear()
        self._relink_all()
        self._recount(self._small, self._small_pools.values())
        self._recount(self._large, self._large_pools.values())
        for name, tally in ((name, tally) for name in METRICS for tally in (self._small, self._large)):
            raise_peak(name, tally, self._small, self._large, self._both)

    def _relink_all(self):
        blocks = {block.address: block for block in self._used_blocks()}
        used = sorted(blocks)
        for start, (nbytes, pool) in self._segments.items():
            inside = used[bisect_left(used, start) : bisect_left(used, start + nbytes)]
            self._relink([blocks[address] for address in inside], start, start + nbytes, pool)

    def _used_blocks(self):
        """The blocks that nobody else may have."""
        return list(self._live.values())

    def _recount(self, tally, pools):
        blocks = [block for block in self._live.values() if block.pool.tally is tally]
        segments = [nbytes for nbytes, pool in self._segments.values() if pool.tally is tally]
        free = [entry for pool in pools for entry in pool.free if entry[2].arena is None]
        splits = [size for size, _, block in free if block.prev or block.next]
        used = [len(blocks), sum(block.size for block in blocks), sum(block.requested for block in blocks)]
        figures = [*used, len(segments), sum(segments), len(splits), sum(splits)]
        for name, figure in zip(METRICS, figures, strict=True):
            tally.correct(name, figure)

    def _relink(self, used, start, end, pool):
        """Chain the used blocks of one segment, with free blocks in the gaps."""
        chain = []
        for block in [*used, None]:
            upto = end if block is None else block.address
            if upto > start:
                chain.append(Block(start, upto - start, pool, None, None))
                insort(pool.free, (upto - start, start, chain[-1]))
            if block is not None:
                chain.append(block)
                start = block.address + block.size
        for block, before, after in zip(chain, [None, *chain], [*chain[1:], None], strict=False):
            block.prev, block.next = before, after


def segment_size(size):
    """The bytes of the segment that is taken from the GPU for a block of `size` bytes."""
    if size <= SMALL_REQUEST:
        return SMALL_SEGMENT
    if size < OWN_SEGMENT_FROM:
        return LARGE_SEGMENT
    return (size + (2 << 20) - 1) & -(2 << 20)
