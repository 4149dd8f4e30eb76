"""Expandable segments: one range of addresses per stream and pool, pages of which get memory as they are needed.

    PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True

The range is as long as the GPU's memory and an eighth more. A page has 2 MiB in the small pool and 20 MiB in the
large one. A request that finds no free block gets pages behind the last free block of the range, at the lowest
address where it fits, so that free memory at the end of one request serves the next, larger one: this is what cures
fragmentation. When memory runs out, whole free pages go back to the GPU, from the middle of the range too.

Rules: c10/cuda/CUDACachingAllocator.cpp. Sizes are bytes. No torch is imported.
"""

from virtual_gpus.arithmetic import ceil_div
from virtual_gpus.memory.blocks import FREE, UNMAPPED, WAITING, Block, BlockPool, cut_off
from virtual_gpus.memory.device import DeviceMemory
from virtual_gpus.memory.options import LARGE_SEGMENT, SMALL_SEGMENT


def expand(device: DeviceMemory, pool: BlockPool, size: int) -> Block | None:
    """A free block of at least `size` bytes, which is in no pool; None when the GPU is full."""
    block = _lowest_addresses(pool, size) or _new_segment(device, pool)
    if block.state == UNMAPPED and not _map(device, block, min(block.size, size)):
        return None
    while block.size < size:
        gap = block.next
        if gap is None or not _map(device, gap, min(size - block.size, gap.size)):
            return None
        block = gap  # it took the free blocks beside it in
    pool.remove(block)
    return block


def _lowest_addresses(pool: BlockPool, size: int) -> Block | None:
    """Where the lowest unused addresses for `size` bytes begin: a free block, or one without memory."""
    for gap in sorted((entry[2] for entry in pool.unmapped), key=lambda gap: gap.address):
        before = gap.prev
        start = before if before is not None and before.state == FREE else gap
        block, nbytes = start, 0
        while nbytes < size and block is not None and block.state in (FREE, UNMAPPED):
            nbytes += block.size
            block = block.next
        if nbytes >= size:
            return start
    return None


def _new_segment(device: DeviceMemory, pool: BlockPool) -> Block:
    """The addresses of a new segment, without memory."""
    page = SMALL_SEGMENT if pool.small else LARGE_SEGMENT
    pages = ceil_div(device.capacity + device.capacity // 8, page)  # 1 1/8 of the memory (CUDACachingAllocator.cpp)
    arena = device.add_segment(pages * page, pool, page)
    block = Block(arena.address, arena.size, pool, None, None, arena)
    block.state = UNMAPPED
    pool.put(block)
    return block


def _map(device: DeviceMemory, gap: Block, nbytes: int) -> bool:
    """Give the first `nbytes` bytes of a gap memory, in whole pages; the gap becomes a free block of its pool."""
    arena, pool = gap.arena, gap.pool
    assert arena is not None  # only such segments have gaps
    first = (gap.address - arena.address) // arena.page
    pages = range(first, first + ceil_div(nbytes, arena.page))
    if not device.map(arena, pages):
        return False
    pool.remove(gap)
    if len(pages) * arena.page < gap.size:
        pool.put(cut_off(gap, len(pages) * arena.page))
    gap.state = FREE
    pool.reclaim(gap)
    return True


def unmap_free_pages(device: DeviceMemory, pool: BlockPool) -> None:
    """Give the memory of all wholly free pages of a pool back to the GPU."""
    for block, arena in [(entry[2], arena) for entry in pool.free if (arena := entry[2].arena) is not None]:
        start = block.address - arena.address
        pages = range(ceil_div(start, arena.page), (start + block.size) // arena.page)
        if not pages:
            continue
        pool.remove(block)
        device.unmap(arena, pages)
        if pages.start * arena.page > start:  # the piece before the first whole page stays
            before, block = block, cut_off(block, pages.start * arena.page - start)
            pool.put(before)
        if block.size > len(pages) * arena.page:
            pool.put(cut_off(block, len(pages) * arena.page))
        block.state = UNMAPPED
        pool.reclaim(block)


def best_to_expand(free: list[tuple[int, int, Block]], i: int) -> int:
    """The best fit at or behind place `i`, where a block at the end of the memory counts as large as it can become."""
    while free[i][2].arena is not None and i + 1 < len(free) and _reach(free[i + 1][2]) < _reach(free[i][2]):
        i += 1
    return i


def _reach(block: Block) -> int:
    after = block.next
    return block.size + (after.size if after is not None and after.state > WAITING else 0)
