"""A GPU's memory as its driver sees it: how much there is, who has it, and what this process may still take.

Sizes are bytes. No torch is imported.
"""

import os
from collections.abc import Callable
from typing import Literal

from virtual_gpus.memory.blocks import Block, BlockPool, Segment
from virtual_gpus.memory.stats import AllocatorStats

Event = Literal["alloc", "free", "free_requested", "free_completed", "segment_alloc", "segment_free", "segment_map",
                "segment_unmap", "oom"]  # fmt: skip
Observer = Callable[[Event, int, int], None]


def no_others(used: int, most: int | None = None, more: int = 0) -> tuple[int, dict[int, int]]:
    """What `exchange` returns where no other process shares the GPU."""
    return used, {}


class DeviceMemory:
    """`capacity` bytes, of which this process's CUDA context takes `context`, and others take `other`.

    exchange: `SharedMemoryRegistry.exchange` for this GPU, which tells of other processes. fraction: the part of the
    capacity that may be reserved. segments: what was taken and not given back, by address; expandable segments stay
    for good, so that their addresses are used again, as the driver does. observers: see `CachingAllocator`.
    """

    def __init__(self, capacity: int, context: int, address: int, stats: AllocatorStats, observers: list[Observer]):
        if capacity <= 0 or not 0 <= context < capacity:
            raise ValueError(f"A GPU of {capacity} bytes cannot hold a context of {context} bytes.")
        self.capacity, self.context, self.other, self.fraction = capacity, context, 0, 1.0
        self.exchange: Callable[..., tuple[int, dict[int, int]]] = no_others
        self.segments: dict[int, Segment] = {}
        self._next_address, self._stats, self._observers = address, stats, observers

    # ---- how much there is

    def set_fraction(self, fraction: float) -> None:
        """Limit reserved memory to `fraction` (0 to 1) of the capacity: set_per_process_memory_fraction."""
        if not 0 <= fraction <= 1:
            raise ValueError(f"Invalid fraction value: {fraction}. Allowed range: 0~1")
        self.fraction = float(fraction)

    @property
    def allowed(self) -> int | None:
        """The bytes that may be reserved, or None when no fraction below 1 was set."""
        return None if self.fraction == 1 else int(self.fraction * self.capacity)

    @property
    def used_bytes(self) -> int:
        """What nvidia-smi shows for this process: reserved memory and the context."""
        return self.context + self._stats.reserved

    @property
    def free_bytes(self) -> int:
        """What the GPU has left for all processes: the first figure of torch.cuda.mem_get_info."""
        own, others = self.exchange(self.used_bytes)
        return self.capacity - self.other - own - sum(others.values())

    def has_room(self, nbytes: int) -> bool:
        """True if the GPU has `nbytes` left; other processes cannot have them then."""
        most = self.capacity - self.other
        own, others = self.exchange(self.used_bytes, most, nbytes)
        return own + nbytes + sum(others.values()) <= most

    def others(self) -> list[tuple[int, int]]:
        """(process id, bytes) of each other process on the GPU."""
        return sorted(self.exchange(self.used_bytes)[1].items())

    def processes(self) -> list[tuple[int, int]]:
        """(process id, bytes) of each process on the GPU, this one among them if it uses any."""
        own = [(os.getpid(), self.used_bytes)] if self.used_bytes else []
        return sorted(own + self.others())

    # ---- taking and giving back

    def tell(self, event: Event, address: int, size: int) -> None:
        for observer in self._observers:
            observer(event, address, size)

    def add_segment(self, size: int, pool: BlockPool, page: int = 0) -> Segment:
        """New addresses; with a `page` size they have no memory yet."""
        segment = Segment(self._next_address, size, pool, page)
        self._next_address += size
        self.segments[segment.address] = segment
        return segment

    def malloc(self, nbytes: int, pool: BlockPool) -> Block | None:
        """The only block of a new segment, which is in no pool; None when the GPU is full."""
        if not self.has_room(nbytes):
            return None
        segment = self.add_segment(nbytes, pool)
        self._stats.change_reserved(pool.tally, 1, nbytes)
        self.tell("segment_alloc", segment.address, nbytes)
        return Block(segment.address, nbytes, pool, None, None, None)

    def free(self, block: Block) -> None:
        """Give a segment back whose only block is free."""
        block.pool.remove(block)
        del self.segments[block.address]
        self._stats.change_reserved(block.pool.tally, -1, -block.size)
        self.tell("segment_free", block.address, block.size)

    def map(self, segment: Segment, pages: range) -> bool:
        """Give pages of an expandable segment memory; False when the GPU is full."""
        nbytes = len(pages) * segment.page
        if not self.has_room(nbytes):
            return False
        segment.mapped.update(pages)
        self._stats.change_reserved(segment.pool.tally, 0, nbytes)
        self.tell("segment_map", segment.address + pages.start * segment.page, nbytes)
        return True

    def unmap(self, segment: Segment, pages: range) -> None:
        """Give the memory of pages back to the GPU."""
        nbytes = len(pages) * segment.page
        segment.mapped.difference_update(pages)
        self._stats.change_reserved(segment.pool.tally, 0, -nbytes)
        self.tell("segment_unmap", segment.address + pages.start * segment.page, nbytes)
