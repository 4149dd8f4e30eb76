"""What the caching allocator does with options set, and with blocks that several streams used.

`Blocks` has the plain rules, written for speed. As soon as an option differs from PyTorch's default, or `record_stream`
was called, the methods here take over; with the defaults they do the same, only slower.

A block that `record_stream` named stays out of reach after it was freed ("active_pending_free") until the other streams
have come so far: `clock` says whether they have. It is asked at the next allocation, as CUDA's events are.

Rules: c10/cuda/CUDACachingAllocator.cpp. Sizes are bytes. No torch is imported.
"""

from bisect import bisect_left
from collections import deque

from virtual_gpus.memory.blocks import FREE, SMALL_REQUEST, USED, WAITING, Block
from virtual_gpus.memory.expandable import ArenaBlock
from virtual_gpus.memory.giving_back import GivingBack
from virtual_gpus.memory.options import UNLIMITED


class NoClock:
    """Streams without a clock: all work is done as soon as it was given."""

    def mark(self, stream):
        """A mark behind the work given to `stream` so far."""

    def has_passed(self, mark) -> bool:
        """True if the work before the mark is done."""
        return True

    def wait_for(self, mark) -> None:
        """Make the host wait for the mark."""


class Rules(GivingBack):
    """Adds the options and the blocks that wait for streams. `clock`: see `NoClock`."""

    def __init__(self, room_for, first_address):
        super().__init__(room_for, first_address)
        self.clock = NoClock()
        self._by_rules = False  # the plain rules are not enough
        self._recorded = {}  # address of a used block -> the other streams that use it
        self._waiting, self._queues = {}, {}  # address -> [block, marks left]; stream -> deque of (mark, address)

    def _set_options(self, options):
        self.options = options
        self._by_rules = self._by_rules or not options.plain

    def _record(self, block, stream):
        self._by_rules = True
        self._recorded.setdefault(block.address, {})[stream] = None

    # ---- allocate

    def _allocate_by_rules(self, nbytes, size, stream, owner):
        """As `_allocate`."""
        if self._waiting:
            self._complete_passed()
        small = size <= SMALL_REQUEST
        pool = (self._small_pools if small else self._large_pools).get(stream) or self._new_pool(small, stream)
        block = self._find(pool, size) or self._obtain(pool, size)
        return None if block is None else self._use(block, nbytes, size, owner)

    def _find(self, pool, size):
        """The free block that serves `size` bytes, out of its list, or None."""
        free, options = pool.free, self.options
        if not pool.small and self._collects_garbage():
            self._searches += 1
        i = bisect_left(free, (size,))
        if i < len(free) and free[i][2].arena is not None:
            i = _best_to_expand(free, i) if options.expandable else _first_outside_arenas(free, i)
        if i == len(free):
            return None
        found = free[i][0]
        if size < options.max_split <= found:
            return None
        if size >= options.max_split and found >= size + options.max_non_split_rounding:
            return None
        return free.pop(i)[2]

    def _obtain(self, pool, size):
        """A block of new memory, after giving back what has to go; None when the GPU is full."""
        if self._collects_garbage():
            self._collect_garbage()
        block = self._new_block(pool, size)
        if block is None and self._release_oversize(pool, size):
            block = self._new_block(pool, size)
        if block is None:
            self._release_cached()
            self._events["num_alloc_retries"] += 1
            block = self._new_block(pool, size)
        return block

    def _new_block(self, pool, size):
        nbytes = self.options.segment_size(size)
        if not self._within_limit(nbytes):
            return None
        if self.options.expandable:
            return self._expand(pool, size)
        if not self._room_on_card(nbytes):
            return None
        address = self._next_address
        self._next_address += nbytes
        self._segments[address] = (nbytes, pool)
        self._change_reserved(pool.tally, 1, nbytes)
        if nbytes >= self.options.max_split:
            self._oversize["oversize_segments"].change(1)
        self._tell("segment_alloc", address, nbytes)
        return Block(address, nbytes, pool, None, None)

    def _use(self, block, nbytes, size, owner):
        """Split a free block that is out of its list, and enter it among the used ones."""
        tally = block.pool.tally
        was_split = block.prev is not None or block.next is not None
        if self._splits(block, size):
            rest = _piece(block, block.address + size, block.size - size)
            if rest.next is not None:
                rest.next.prev = rest
            block.next, block.size = rest, size
            self._put(rest)
            if block.arena is None:
                blocks, left = (0, -size) if was_split else (1, rest.size)
                self._change_splits(tally, blocks, left)
        elif was_split and block.arena is None:
            self._change_splits(tally, -1, -block.size)
        block.state, block.requested = USED, nbytes
        for name, more in (("allocation", 1), ("allocated_bytes", block.size), ("requested_bytes", nbytes)):
            setattr(tally, name, getattr(tally, name) + more)
            setattr(tally, name + "_up", getattr(tally, name + "_up") + more)
        self._rising = True
        if block.size >= self.options.max_split:
            self._oversize["oversize_allocations"].change(1)
        if owner is not None:
            owner.address, block.owner = block.address, owner
        self._live[block.address] = block
        return block

    def _splits(self, block, size):
        rest = block.size - size
        if block.pool.small or self.options.expandable:
            return rest >= 512
        return size < self.options.max_split and rest > SMALL_REQUEST

    # ---- give back

    def _reclaim_by_rules(self, block):
        """Take a block that is out of _live back; True if it has to wait for other streams first."""
        if self._rising:
            self._note_peaks()
        tally = block.pool.tally
        tally.allocation -= 1
        tally.allocated_bytes -= block.size
        block.owner = None
        if block.size >= self.options.max_split:
            self._oversize["oversize_allocations"].change(-1)
        streams = self._recorded.pop(block.address, None)
        if streams is None:
            self._return(block)
            return False
        block.state = WAITING
        tally.waiting += 1
        tally.waiting_bytes += block.size
        for stream in streams:
            self._queues.setdefault(stream, deque()).append((self.clock.mark(stream), block.address))
        self._waiting[block.address] = [block, len(streams)]
        return True

    def _return(self, block):
        """Put a block among the free ones of its pool, merged with its free neighbours."""
        tally, block.state = block.pool.tally, FREE
        tally.requested_bytes -= block.requested
        blocks, nbytes = self._merge(block)
        self._put(block)
        if block.arena is None:
            split = block.prev is not None or block.next is not None
            blocks, nbytes = (1 - blocks, block.size - nbytes) if split else (-blocks, -nbytes)
            if blocks or nbytes:
                self._change_splits(tally, blocks, nbytes)

    def _complete_passed(self, wait=False):
        """Give back the blocks that no stream uses any more; with `wait`, all of them."""
        for stream, queue in list(self._queues.items()):
            while queue and (wait or self.clock.has_passed(queue[0][0])):
                mark, address = queue.popleft()
                if wait:
                    self.clock.wait_for(mark)
                self._passed(address)
            if not queue:
                del self._queues[stream]

    def _passed(self, address):
        entry = self._waiting[address]
        entry[1] -= 1
        if entry[1]:
            return
        self._note_peaks()
        block, tally = entry[0], entry[0].pool.tally
        del self._waiting[address]
        tally.waiting -= 1
        tally.waiting_bytes -= block.size
        size = block.size
        self._return(block)
        self._tell("free_completed", address, size)

    def _release_cached(self):
        if self._waiting:
            self._complete_passed(wait=True)
        before = dict(self._segments) if self.options.max_split < UNLIMITED else {}
        super()._release_cached()
        for nbytes, _ in (before[address] for address in before.keys() - self._segments.keys()):
            self._count_oversize_segment(nbytes)
        if self._arenas:
            for pool in (*self._large_pools.values(), *self._small_pools.values()):
                self._unmap_free_pages(pool)

    # ---- figures, and after something was cut short

    def _note_peaks(self):
        super()._note_peaks()
        if self._waiting:
            for tally in (self._small, self._large):
                tally.raise_active_peaks(tally.active, tally.active_bytes)
            active = self._small.active + self._large.active
            self._both.raise_active_peaks(active, self._small.active_bytes + self._large.active_bytes)

    def _rebuild(self):
        self._recorded = {address: s for address, s in self._recorded.items() if address in self._live}
        left = [address for queue in self._queues.values() for _, address in queue]
        self._waiting = {a: [entry[0], left.count(a)] for a, entry in self._waiting.items() if a in left}
        self._queues = {s: deque(e for e in q if e[1] in self._waiting) for s, q in self._queues.items()}
        super()._rebuild()

    def _used_blocks(self):
        return [*self._live.values(), *(entry[0] for entry in self._waiting.values())]

    def _relink_all(self):
        super()._relink_all()
        self._rebuild_arenas(self._used_blocks())

    def _recount(self, tally, pools):
        super()._recount(tally, pools)
        waiting = [entry[0] for entry in self._waiting.values() if entry[0].pool.tally is tally]
        tally.waiting, tally.waiting_bytes = len(waiting), sum(block.size for block in waiting)
        tally.correct("requested_bytes", tally.requested_bytes + sum(block.requested for block in waiting))
        tally.correct("reserved_bytes", tally.reserved_bytes + self._mapped_bytes(tally))


def _best_to_expand(free, i):
    """Best fit, where a block at the end of a segment counts as large as it can become."""
    while free[i][2].arena is not None and i + 1 < len(free) and _reach(free[i + 1][2]) < _reach(free[i][2]):
        i += 1
    return i


def _reach(block):
    after = block.next
    return block.size + (after.size if after is not None and after.state > WAITING else 0)


def _first_outside_arenas(free, i):
    while i < len(free) and free[i][2].arena is not None:
        i += 1
    return i


def _piece(block, address, size):
    """A new block behind `block` in the same segment."""
    if block.arena is None:
        return Block(address, size, block.pool, block, block.next)
    return ArenaBlock(address, size, block.pool, block, block.next, block.arena)
