"""Which cached segments go back to the GPU before all of them do: oversize blocks, and old ones.

`allocator_options` says what the options are. Rules: c10/cuda/CUDACachingAllocator.cpp. Sizes are bytes. No torch is
imported.
"""

from bisect import bisect_left

from virtual_gpus.memory.expandable import ExpandableBlocks
from virtual_gpus.memory.options import UNLIMITED
from virtual_gpus.memory.stats import Stat


class GivingBack(ExpandableBlocks):
    """Adds max_split_size_mb's and garbage_collection_threshold's part in giving memory back."""

    def __init__(self, room_for, first_address):
        super().__init__(room_for, first_address)
        self._searches = 0  # of the large pool, while garbage is collected: the age of a block is counted in them
        self._oversize = {"oversize_allocations": Stat(), "oversize_segments": Stat()}

    def _put(self, block):
        block.born = self._searches
        super()._put(block)

    def _release(self, block):
        """Give one segment back whose only block is free."""
        pool = block.pool
        del pool.free[bisect_left(pool.free, (block.size, block.address))]
        del self._segments[block.address]
        self._change_reserved(pool.tally, -1, -block.size)
        self._count_oversize_segment(block.size)
        self._tell("segment_free", block.address, block.size)

    def _count_oversize_segment(self, nbytes):
        if nbytes >= self.options.max_split:
            self._oversize["oversize_segments"].change(-1)

    def _release_oversize(self, pool, size):
        """Give back so many free oversize blocks as the request needs, the best fit or the largest ones.

        True if that may be enough.
        """
        limit, free = self.options.max_split, pool.free
        if limit == UNLIMITED:
            return False
        size = max(size, limit)
        i = bisect_left(free, (size,))
        if i < len(free) and free[i][2].arena is None:
            self._release(free[i][2])
            return True
        released = 0
        for nbytes, _, block in reversed(free[:i]):
            if released >= size or nbytes < limit:
                break
            if block.arena is None:
                released += nbytes
                self._release(block)
        return released >= size

    def _collects_garbage(self):
        return self.options.gc_threshold > 0 and self.allowed is not None

    def _collect_garbage(self):
        """Give back cached segments of the large pool, the oldest first, until little enough is reserved."""
        excess = self._reserved() - int(self.options.gc_threshold * self.allowed)
        cached = [b for pool in self._large_pools.values() for *_, b in pool.free if not b.prev and not b.next]
        ages = {block: self._searches - getattr(block, "born", 0) for block in cached}
        reclaimed, freed = 0, True
        while reclaimed < excess and freed and ages:
            average = sum(ages.values()) / len(ages)
            old = [block for block, age in ages.items() if age >= average and block.arena is None]
            for block in old:
                del ages[block]
                reclaimed += block.size
                self._release(block)
            freed = bool(old)
