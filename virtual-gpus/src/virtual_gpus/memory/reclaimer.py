"""Which cached memory goes back to the GPU, and when: all of it, oversize blocks, or what was not used for long.

`Options` says what the options are. Rules: c10/cuda/CUDACachingAllocator.cpp. Sizes are bytes. No torch is imported.
"""

from __future__ import annotations

from bisect import bisect_left

from virtual_gpus.memory import expandable
from virtual_gpus.memory.blocks import Block, BlockPool
from virtual_gpus.memory.device import DeviceMemory
from virtual_gpus.memory.options import UNLIMITED, Options
from virtual_gpus.memory.stats import AllocatorStats


class Reclaimer:
    """Gives free memory of `pools` (of the large pool and the small one: stream -> BlockPool) back to the `device`."""

    def __init__(self, device: DeviceMemory, stats: AllocatorStats, pools: tuple[dict[int, BlockPool], ...]):
        self._device, self._stats, self._pools = device, stats, pools

    def release_cached(self, options: Options) -> None:
        """Give back every segment without a used block, and all free pages of expandable ones."""
        self._stats.events["num_sync_all_streams"] += 1
        for pools in self._pools:
            for pool in pools.values():
                for block in _whole_segments(pool):
                    self._release(block, options)
                expandable.unmap_free_pages(self._device, pool)

    def release_oversize(self, pool: BlockPool, size: int, options: Options) -> bool:
        """Give back so many free oversize blocks as the request needs, the best fit or the largest ones.

        True if that may be enough.
        """
        limit, free = options.max_split, pool.free
        if limit == UNLIMITED:
            return False
        size = max(size, limit)
        i = bisect_left(free, (size,))
        if i < len(free) and free[i][2].arena is None:
            self._release(free[i][2], options)
            return True
        released = 0
        for nbytes, _, block in reversed(free[:i]):
            if released >= size or nbytes < limit:
                break
            if block.arena is None:
                released += nbytes
                self._release(block, options)
        return released >= size

    def collects_garbage(self, options: Options) -> bool:
        """True if old blocks go back before a new segment is taken."""
        return options.gc_threshold > 0 and self._device.allowed is not None

    def collect_garbage(self, options: Options) -> None:
        """Give back cached segments of the large pool, the oldest first, until little enough is reserved."""
        if not self.collects_garbage(options):
            return
        excess = self._stats.reserved - int(options.gc_threshold * self._device.allowed)
        cached = [block for pool in self._pools[0].values() for block in _whole_segments(pool)]
        ages = {block: block.pool.tally.searches - block.born for block in cached}
        reclaimed, freed = 0, True
        while reclaimed < excess and freed and ages:
            average = sum(ages.values()) / len(ages)
            old = [block for block, age in ages.items() if age >= average]
            for block in old:
                del ages[block]
                reclaimed += block.size
                self._release(block, options)
            freed = bool(old)

    def _release(self, block: Block, options: Options) -> None:
        self._device.free(block)
        if block.size >= options.max_split:
            self._stats.oversize_segments.change(-1)


def _whole_segments(pool: BlockPool) -> list[Block]:
    """The free blocks that are whole segments of fixed size."""
    return [block for _, _, block in pool.free if not block.prev and not block.next and block.arena is None]
