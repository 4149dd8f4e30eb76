"""Expandable segments: one range of addresses per stream and pool, pages of which get memory as they are needed.

    PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True

The range is as long as the GPU's memory and an eighth more. A page has 2 MiB in the small pool and 20 MiB in the
large one. A request that finds no free block gets pages behind the last free block of the range, at the lowest
address where it fits, so that free memory at the end of one request serves the next, larger one: this is what cures
fragmentation. When memory runs out, whole free pages go back to the GPU, from the middle of the range too.

Rules: c10/cuda/CUDACachingAllocator.cpp. Sizes are bytes. No torch is imported.
"""

from bisect import bisect_left, insort

from virtual_gpus.memory.blocks import FREE, SMALL_SEGMENT, UNMAPPED, Block, Blocks
from virtual_gpus.memory.options import Options
from virtual_gpus.memory.stats import raise_peak


class Arena:
    """One expandable segment. `mapped`: the numbers of the pages that have memory, which is the truth about them."""

    __slots__ = ("address", "mapped", "page", "pool", "size")

    def __init__(self, address, size, page, pool):
        self.address, self.size, self.page, self.pool, self.mapped = address, size, page, pool, set()

    def pages(self, address, nbytes):
        """(first, end) of the pages that lie wholly in a range of addresses."""
        start = address - self.address
        return -(-start // self.page), (start + nbytes) // self.page


class ArenaBlock(Block):
    """A piece of an expandable segment: used, free, or (UNMAPPED) addresses without memory."""

    __slots__ = ("arena",)

    def __init__(self, address, size, pool, prev, next, arena):
        super().__init__(address, size, pool, prev, next)
        self.arena = arena


class ExpandableBlocks(Blocks):
    """Adds expandable segments. An arena stays for good, so its addresses are used again, as the driver does."""

    def __init__(self, room_for, first_address):
        super().__init__(room_for, first_address)
        self._arenas = []
        self.options = Options()

    def _expand(self, pool, size):
        """A free block of at least `size` bytes, out of the free list; None when the GPU is full."""
        block = self._stretch_of_addresses(pool, size)
        if block.state == UNMAPPED and not self._map(block, min(block.size, size)):
            return None
        while block.size < size:
            gap = block.next
            if not self._map(gap, min(size - block.size, gap.size)):
                return None
            block = gap  # it took the free blocks beside it in
        del pool.free[bisect_left(pool.free, (block.size, block.address))]
        return block

    def _stretch_of_addresses(self, pool, size):
        """Where the lowest free addresses for `size` bytes begin: a free block, or one without memory."""
        for _, gap in pool.unmapped:
            before = gap.prev
            start = before if before is not None and before.state == FREE else gap
            if _free_addresses(start, size) >= size:
                return start
        page = SMALL_SEGMENT if pool.small else self.options.large_segment
        arena = Arena(self._next_address, -(-(self._total() + self._total() // 8) // page) * page, page, pool)
        self._next_address += arena.size
        self._arenas.append(arena)
        block = ArenaBlock(arena.address, arena.size, pool, None, None, arena)
        block.state = UNMAPPED
        pool.unmapped.append((block.address, block))
        return block

    def _map(self, gap, nbytes):
        """Give the first `nbytes` bytes of a gap memory, in whole pages; the gap becomes a free block of the pool."""
        arena, pool, address = gap.arena, gap.pool, gap.address
        first = (address - arena.address) // arena.page
        count = -(-nbytes // arena.page)
        nbytes = count * arena.page
        if not self._room_on_card(nbytes):
            return False
        arena.mapped.update(range(first, first + count))
        pool.unmapped.remove((address, gap))
        if nbytes < gap.size:
            rest = ArenaBlock(address + nbytes, gap.size - nbytes, pool, gap, gap.next, arena)
            rest.state = UNMAPPED
            _put_between(gap, rest, gap.next)
            insort(pool.unmapped, (rest.address, rest))
            gap.size = nbytes
        gap.state = FREE
        self._merge(gap)
        self._put(gap)
        self._change_mapped(pool.tally, nbytes)
        self._tell("segment_map", address, nbytes)
        return True

    def _unmap_free_pages(self, pool):
        """Give the memory of all wholly free pages of a pool back to the GPU."""
        for _, _, block in [entry for entry in pool.free if entry[2].arena is not None]:
            self._unmap(block)

    def _unmap(self, block):
        arena, pool = block.arena, block.pool
        first, end = arena.pages(block.address, block.size)
        if first >= end:
            return
        start, stop, page_end = block.address, block.address + block.size, arena.address + end * arena.page
        page_start = arena.address + first * arena.page
        del pool.free[bisect_left(pool.free, (block.size, start))]
        arena.mapped.difference_update(range(first, end))
        if page_start > start:
            piece = ArenaBlock(start, page_start - start, pool, block.prev, block, arena)
            _put_between(block.prev, piece, block)
            self._put(piece)
        if stop > page_end:
            piece = ArenaBlock(page_end, stop - page_end, pool, block, block.next, arena)
            _put_between(block, piece, block.next)
            self._put(piece)
        block.address, block.size, block.state = page_start, page_end - page_start, UNMAPPED
        self._merge(block)
        insort(pool.unmapped, (block.address, block))
        self._change_mapped(pool.tally, page_start - page_end)
        self._tell("segment_unmap", page_start, page_end - page_start)

    def _merge(self, block):
        """Take in the neighbours in the same state. Returns (how many, their bytes)."""
        blocks = nbytes = 0
        for other in (block.prev, block.next):
            if other is None or other.state != block.state:
                continue
            blocks, nbytes = blocks + 1, nbytes + other.size
            if other is block.prev:
                before, after, block.address = other.prev, block.next, other.address
            else:
                before, after = block.prev, other.next
            self._take_off_its_list(other)
            block.size += other.size
            _put_between(before, block, after)
        return blocks, nbytes

    def _take_off_its_list(self, block):
        # `_merge` may have moved the other one's neighbour, never its own place
        if block.state == UNMAPPED:
            block.pool.unmapped.remove((block.address, block))
        else:
            free = block.pool.free
            del free[bisect_left(free, (block.size, block.address))]

    def _put(self, block):
        """Into the free list of its pool."""
        insort(block.pool.free, (block.size, block.address, block))

    def _change_mapped(self, tally, nbytes):
        tally.reserved_bytes += nbytes
        if nbytes < 0:
            self._events["num_device_free"] += 1
            return
        tally.reserved_bytes_up += nbytes
        self._events["num_device_alloc"] += 1
        raise_peak("reserved_bytes", tally, self._small, self._large, self._both)

    def arena_at(self, address):
        """The expandable segment that an address is in, or None."""
        return next((a for a in self._arenas if a.address <= address < a.address + a.size), None)

    # ---- after something was cut short

    def _rebuild_arenas(self, used):
        """Chains of blocks and lists of gaps anew, from the pages that have memory and the `used` blocks."""
        for pool in (*self._large_pools.values(), *self._small_pools.values()):
            pool.unmapped.clear()
        for arena in self._arenas:
            inside = sorted(
                (b for b in used if arena.address <= b.address < arena.address + arena.size), key=lambda b: b.address
            )
            chain = [piece for piece in _pieces(arena, inside) if piece.size]
            for block, before, after in zip(chain, [None, *chain], [*chain[1:], None], strict=False):
                block.prev, block.next = before, after
                if block.state == UNMAPPED:
                    arena.pool.unmapped.append((block.address, block))
                elif block.state == FREE:
                    self._put(block)

    def _mapped_bytes(self, tally):
        return sum(len(arena.mapped) * arena.page for arena in self._arenas if arena.pool.tally is tally)


def _free_addresses(block, enough):
    """Bytes of the free blocks and gaps from `block` on; it stops counting at `enough`."""
    nbytes = 0
    while nbytes < enough and block is not None and block.state in (FREE, UNMAPPED):
        nbytes += block.size
        block = block.next
    return nbytes


def _put_between(before, block, after):
    block.prev, block.next = before, after
    if before is not None:
        before.next = block
    if after is not None:
        after.prev = block


def _pieces(arena, used):
    """The used blocks of an arena, with free ones and gaps between them."""
    place = arena.address
    for block in [*used, None]:
        yield from _spans(arena, place, arena.address + arena.size if block is None else block.address)
        if block is not None:
            yield block
            place = block.address + block.size


def _spans(arena, start, end):
    """Addresses that nobody uses, cut where memory begins and ends."""
    while start < end:
        page = (start - arena.address) // arena.page
        mapped, stop = page in arena.mapped, page + 1
        pages = (end - arena.address + arena.page - 1) // arena.page
        if not arena.mapped or (not mapped and page > max(arena.mapped)):
            stop = pages
        while stop < pages and (stop in arena.mapped) == mapped:
            stop += 1
        upto = min(end, arena.address + stop * arena.page)
        piece = ArenaBlock(start, upto - start, arena.pool, None, None, arena)
        piece.state = FREE if mapped else UNMAPPED
        yield piece
        start = upto
