"""PyTorch's caching allocator (c10/cuda/CUDACachingAllocator.cpp), modelled for one GPU.

    gpu = CachingAllocator(capacity=16 << 30, context=500 << 20)
    block = gpu.malloc(1000)      # gpu.allocated == 1024, gpu.reserved == 2097152
    gpu.free(block)               # gpu.allocated == 0, gpu.reserved still 2097152: the cache
    gpu.empty_cache()             # gpu.reserved == 0

Memory is taken from the GPU in segments and handed out in blocks. Sizes round up to 512 bytes. Up to 1 MiB
comes from segments of 2 MiB (the small pool), less than 10 MiB from segments of 20 MiB, more from a segment
of its own, rounded up to 2 MiB (the large pool). The smallest free block that fits is taken, then the
lowest address. What remains of it is split off when it is 512 bytes or more (small pool) or more than 1 MiB
(large pool). Freed neighbours merge. When memory runs out, unused segments go back to the GPU before a last try.

Blocks belong to the stream that they were allocated on. What options change: `options`. Sizes are bytes. No torch.
"""

import threading
import weakref
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

from virtual_gpus.memory import blocks, expandable
from virtual_gpus.memory.blocks import FREE, FREEING, USED, Block, BlockPool, Segment, Stream, StreamWaits
from virtual_gpus.memory.device import DeviceMemory, Observer
from virtual_gpus.memory.options import LARGE_SEGMENT, SMALL_REQUEST, UNLIMITED, Options
from virtual_gpus.memory.report import OutOfMemory, oom_message, segment_entries
from virtual_gpus.memory.stats import METRICS, AllocatorStats, format_size

__all__ = ["Block", "CachingAllocator", "OutOfMemory", "format_size", "oom_message"]

FIRST_ADDRESS = 0x7F0000000000
_NESTED = (
    "A finalizer or an observer used this GPU's allocator in the middle of an allocation. It may only call `free` and "
    "read properties there."
)
_NO_POOL = BlockPool(True, 0, AllocatorStats(), 0)  # of blocks of no bytes


class Owner(weakref.ref[object]):
    """A weak reference that knows the `address` of the block that goes with what it refers to."""

    __slots__ = ("address",)
    address: int


class CachingAllocator:
    """The memory of one GPU with `capacity` bytes, of which this process's CUDA context takes `context` bytes.

    To give several GPUs different addresses, choose values of `first_address` that differ by more than they reserve.

    device: the GPU's memory as its driver sees it.
    clock: gives what says how far streams have come, for `record_stream`. None: no block waits for a stream.
    live_blocks: the used blocks by address.
    observers: functions that are called as f(event, address, size). They may only read properties and free blocks.
        "alloc", "free": a block. If it waited for a stream, "free_requested" and "free_completed" replace "free".
        "segment_alloc", "segment_free": a segment. "segment_map", "segment_unmap": pages of an expandable segment.
        "oom": the address is 0, and the size is that of the block that did not fit.
    oom_observers: functions that are called as f(error) before an OutOfMemory is raised, when the allocator is free
        again. An error that they raise replaces the OutOfMemory.

    Any thread may call any method. `free` never waits. It may be called at any time, even by a finalizer that
    interrupts `malloc`. An exception in the middle, for example Ctrl-C, leaves a consistent state, because everything
    else is an index of `_live`, the waiting blocks and the device's segments. `_rebuild` creates this index again.
    """

    def __init__(self, capacity: int, context: int = 0, first_address: int = FIRST_ADDRESS):
        self.observers: list[Observer] = []
        self.oom_observers: list[Callable[[OutOfMemory], None]] = []
        self.clock: Callable[[], blocks.StreamClock] | None = None
        self.options = Options()
        self._always_default = True  # no options that change which free block serves a request were ever set
        self._max_split = -1  # as the statistics show it: what held when CUDA started
        self._stats = AllocatorStats()
        self.device = DeviceMemory(capacity, context, first_address, self._stats, self.observers)
        self._large_pools: dict[int, BlockPool] = {}
        self._small_pools: dict[int, BlockPool] = {}  # by stream, as the large ones
        self._pools = self._large_pools, self._small_pools
        self._waits = StreamWaits()
        self._live: dict[int, Block] = {}
        self.live_blocks: Mapping[int, Block] = MappingProxyType(self._live)
        self._pending: deque[Block | Owner] = deque()  # what was freed and is not yet back
        self._note_death = self._pending.append
        self._busy, self._lock = False, threading.RLock()

    # ---- allocate and free

    def malloc(self, nbytes: int, stream: int = 0, owner: object = None) -> Block:
        """A block of at least `nbytes` bytes for work on `stream`; 0 bytes give a block that counts nothing.

        `owner`: an object that the block belongs to, or None. When it dies, its block is freed before anything looks
        again. No line of Python runs at that moment, so Ctrl-C cannot hit it and be lost, and no block is either.
        Raises OutOfMemory; ValueError for a negative size; RuntimeError inside another malloc (by a finalizer).
        """
        if nbytes <= 0:
            return _empty_block(nbytes)
        error: OutOfMemory | None = None
        with self._lock:
            if self._busy:
                raise RuntimeError(_NESTED)
            self._busy = True
            try:
                if self._pending:
                    self._free_pending()
                block = self._allocate(nbytes, stream, owner)
                if block is None:
                    error = self._out_of_memory(nbytes)
                else:
                    for observer in self.observers:  # `tell`, without its call
                        observer("alloc", block.address, block.size)
            except BaseException:
                self._rebuild()
                raise
            finally:
                self._busy = False
        if self._pending:
            self._drain()
        if block is None:
            assert error is not None
            for observer in self.oom_observers:
                observer(error)
            raise error
        return block

    def free(self, block: Block) -> None:
        """Give a block back to the cache. Raises ValueError when it was given back before."""
        if block.state != USED:
            raise ValueError(f"The block {block!r} has already been freed. Free each block only once.")
        block.state = FREEING
        if block.size:
            self._pending.append(block)
            if not self._busy:  # else the thread that is busy looks at _pending once more when done
                self._drain()

    def record_stream(self, block: Block, stream: Stream) -> None:
        """Note that `stream` uses the block too: freed, it is not used again before that stream has come so far.

        `stream` is a (GPU, stream) that the clock knows; the block's own stream needs no note.
        """
        with self.exclusive():
            if block.size and block.state == USED and stream[1] != block.pool.stream:
                self._waits.recorded.setdefault(block.address, {})[stream] = None

    def empty_cache(self) -> None:
        """Give all segments without a used block, and all free pages of expandable ones, back to the GPU."""
        with self.exclusive():
            self._release_cached()
            self.device.exchange(self.device.used_bytes)

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Have the allocator to oneself, with nothing pending: for all that is not malloc or free."""
        with self._lock:
            if self._busy:
                raise RuntimeError(_NESTED)
            self._busy = True
            try:
                self._free_pending()
                yield
            except BaseException:
                self._rebuild()
                raise
            finally:
                self._busy = False
        self._drain()

    def _drain(self) -> None:
        """Free what is pending, unless another thread is at work: it will do so when it is done."""
        while self._pending and not self._busy and self._lock.acquire(False):
            self._busy = True
            try:
                self._free_pending()
            except BaseException:
                self._rebuild()
                raise
            finally:
                self._busy = False
                self._lock.release()

    # ---- where blocks come from and go. Callers of these have the lock. _allocate and _free_pending run for
    # every tensor: written out rather than cut up, since each call costs.

    def _allocate(self, nbytes: int, stream: int, owner: object) -> Block | None:
        """A used block, or None when memory ran out. The last step, entering it in _live, makes it so."""
        if self._waits.waiting:
            self._complete_waits()
        default = self._always_default
        size = (nbytes + 511) & -512 if default else self.options.rounded(nbytes)
        small = size <= SMALL_REQUEST
        pool = (self._small_pools if small else self._large_pools).get(stream) or self._new_pool(small, stream)
        free, tally = pool.free, pool.tally
        i = bisect_left(free, (size,))
        if not default:
            i = self._search(pool, size, i)
        block = free.pop(i)[2] if i < len(free) else self._obtain(pool, size)
        if block is None:
            return None
        remaining, was_split = block.size - size, block.next is not None or block.prev is not None
        if remaining >= pool.split_from and (default or size < self.options.max_split or self.options.expandable):
            rest = Block(block.address + size, remaining, pool, block, block.next, block.arena)  # as `cut_off` does
            rest.born = tally.searches  # as `put` does
            if rest.next is not None:
                rest.next.prev = rest
            block.next, block.size = rest, size
            insort(free, (remaining, rest.address, rest))
            if block.arena is not None:
                pass  # free memory of expandable segments can always go back
            elif was_split:
                tally.inactive_split_bytes -= size
            else:
                self._stats.change_splits(tally, 1, remaining)
        else:
            size = block.size
            if was_split and block.arena is None:
                tally.inactive_split -= 1
                tally.inactive_split_bytes -= size
        block.state, block.requested = USED, nbytes
        tally.allocation += 1
        tally.allocation_up += 1
        tally.allocated_bytes += size
        tally.allocated_bytes_up += size
        tally.requested_bytes += nbytes
        tally.requested_bytes_up += nbytes
        self._stats.rising = True
        if not default and size >= self.options.max_split:
            self._stats.oversize_allocations.change(1)
        address = block.address
        if owner is not None:
            block.owner = watch = Owner(owner, self._note_death)
            watch.address = address
        self._live[address] = block
        return block

    def _new_pool(self, small: bool, stream: int) -> BlockPool:
        pool = BlockPool(small, stream, self._stats, self.options.split_from(small))
        return (self._small_pools if small else self._large_pools).setdefault(stream, pool)

    def _search(self, pool: BlockPool, size: int, i: int) -> int:
        """Which free block serves `size` bytes under the options, if without them it is number `i`."""
        free, options = pool.free, self.options
        if not pool.small and self._collects_garbage():
            pool.tally.searches += 1
        if options.expandable and i < len(free):
            i = expandable.best_to_expand(free, i)
        while not options.expandable and i < len(free) and free[i][2].arena is not None:
            i += 1  # as long as new segments are of fixed size, those of expandable ones are of no use
        if i < len(free):
            limit = size + LARGE_SEGMENT if size >= options.max_split else options.max_split  # of an oversize request
            if free[i][0] >= limit:
                return len(free)
        return i

    def _obtain(self, pool: BlockPool, size: int) -> Block | None:
        """A block of new memory, after giving back what has to go; None when the GPU is full."""
        if self._collects_garbage():
            self._collect_garbage()
        block = self._new_block(pool, size)
        if block is None and self._release_oversize(pool, size):
            block = self._new_block(pool, size)
        if block is None:
            self._release_cached()
            self._stats.events["num_alloc_retries"] += 1
            block = self._new_block(pool, size)
        return block

    def _new_block(self, pool: BlockPool, size: int) -> Block | None:
        options, allowed = self.options, self.device.allowed
        nbytes = options.segment_size(size)
        if allowed is not None and self._stats.reserved + nbytes > allowed:
            return None
        if options.expandable:
            return expandable.expand(self.device, pool, size)
        block = self.device.malloc(nbytes, pool)
        if block is not None and nbytes >= options.max_split:
            self._stats.oversize_segments.change(1)
        return block

    def _out_of_memory(self, nbytes: int) -> OutOfMemory:
        device, options, stats = self.device, self.options, self._stats
        stats.events["num_ooms"] += 1
        size = options.rounded(nbytes)
        device.tell("oom", 0, size)
        return OutOfMemory(
            requested=options.segment_size(size),
            capacity=device.capacity,
            free=device.free_bytes,
            used=device.used_bytes,
            allowed=device.allowed,
            allocated=stats.allocated,
            reserved=stats.reserved,
            others=tuple(device.others()),
        )

    def _free_pending(self) -> None:
        pending, live, stats, observers = self._pending, self._live, self._stats, self.observers
        recorded, default = self._waits.recorded, self._always_default
        while pending:
            address = pending[0].address
            block = live.pop(address, None)
            if block is None:  # it has no bytes, or was freed and its owner died afterwards
                pending.popleft()
                continue
            if stats.rising:
                stats.note_peaks()
            tally, size, event = block.pool.tally, block.size, "free"
            tally.allocation -= 1
            tally.allocated_bytes -= size
            block.owner = None
            if not default and size >= self.options.max_split:
                stats.oversize_allocations.change(-1)
            if address in recorded and (clock := self.clock) is not None:
                event = "free_requested"
                self._waits.add(block, clock())
            else:
                block.state = FREE
                block.pool.reclaim(block)
            pending.popleft()
            for observer in observers:
                observer(event, address, size)

    def _complete_waits(self, wait: bool = False) -> None:
        """Take back the blocks that no other stream uses any more; with `wait`, all of them."""
        self._stats.note_peaks()
        for block in self._waits.passed(self.clock(), wait) if self.clock is not None else ():
            address, size, block.state = block.address, block.size, FREE
            block.pool.reclaim(block)
            self.device.tell("free_completed", address, size)

    # ---- which cached memory goes back to the GPU

    def _release_cached(self) -> None:
        """Give back every segment without a used block, and all free pages of expandable ones."""
        self._complete_waits(wait=True)
        self._stats.events["num_sync_all_streams"] += 1
        for pools in self._pools:
            for pool in pools.values():
                for block in pool.whole_segments():
                    self._release(block)
                expandable.unmap_free_pages(self.device, pool)

    def _release_oversize(self, pool: BlockPool, size: int) -> bool:
        """Give back the free oversize blocks that the request needs, best fit or largest. True if it may be enough."""
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

    def _collects_garbage(self) -> bool:
        """True if old blocks go back before a new segment is taken."""
        return self.options.gc_threshold > 0 and self.device.allowed is not None

    def _collect_garbage(self) -> None:
        """Give back cached segments of the large pool, the oldest first, until little enough is reserved."""
        excess = self._stats.reserved - int(self.options.gc_threshold * (self.device.allowed or 0))
        cached = [block for pool in self._large_pools.values() for block in pool.whole_segments()]
        ages = {block: block.pool.tally.searches - block.born for block in cached}
        while excess > 0 and ages:
            average = sum(ages.values()) / len(ages)
            for block in [block for block, age in ages.items() if age >= average]:  # the oldest one at least
                del ages[block]
                excess -= block.size
                self._release(block)

    def _release(self, block: Block) -> None:
        self.device.free(block)
        if block.size >= self.options.max_split:
            self._stats.oversize_segments.change(-1)

    def _rebuild(self) -> None:
        """Make links, free lists and counters anew from what is true: something was cut short."""
        while self._pending:  # blocks that were being freed are out of _live already, or come out here
            self._live.pop(self._pending[0].address, None)
            self._pending.popleft()
        self._waits.correct(self._live)
        segments = list(self.device.segments.values())
        pools = [pool for by_stream in self._pools for pool in by_stream.values()]
        for pool in pools:
            pool.free.clear()
            pool.unmapped.clear()
        taken = sorted(self._taken_blocks(), key=lambda block: block.address)
        addresses = [block.address for block in taken]
        for segment in segments:
            first, end = (bisect_left(addresses, a) for a in (segment.address, segment.address + segment.size))
            segment.relink(taken[first:end])
        waiting = [block for block, _ in self._waits.waiting.values()]
        free = [entry[2] for pool in pools for entry in pool.free]
        for tally in (self._stats.small, self._stats.large):
            blocks.recount(tally, list(self._live.values()), waiting, free, segments)
        for tally in (self._stats.small, self._stats.large):
            self._stats.raise_peaks(METRICS, tally)

    def _taken_blocks(self) -> list[Block]:
        """The blocks that no other owner may have."""
        return [*self._live.values(), *(block for block, _ in self._waits.waiting.values())]

    # ---- settings and figures

    def set_options(self, options: Options, first: bool = False) -> None:
        """Behave as `options` say from now on. `first`: nothing was allocated yet, so `fraction` counts as well."""
        with self.exclusive():
            self.options = options
            self._always_default = self._always_default and options.is_default
            for pools in self._pools:
                for pool in pools.values():
                    pool.split_from = options.split_from(pool.small)
        if first:
            self.device.set_fraction(options.fraction)
            self._max_split = -1 if options.max_split == UNLIMITED else options.max_split

    @property
    def allocated(self) -> int:
        """Bytes in used blocks: torch.cuda.memory_allocated."""
        self._drain()
        return self._stats.allocated

    @property
    def reserved(self) -> int:
        """Bytes in segments, used or cached: torch.cuda.memory_reserved."""
        return self._stats.reserved

    @property
    def peak_allocated(self) -> int:
        """The most that was ever allocated since `reset_peak_stats`: torch.cuda.max_memory_allocated."""
        self._drain()
        return max(self._stats.both.allocated_bytes_peak, self._stats.allocated)

    @property
    def peak_reserved(self) -> int:
        """The most that was ever reserved since `reset_peak_stats`: torch.cuda.max_memory_reserved."""
        return self._stats.both.reserved_bytes_peak

    def stats(self) -> dict[str, Any]:
        """The nested dictionary that torch.cuda.memory_stats flattens."""
        with self.exclusive():
            return self._stats.nested(self._max_split)

    def reset_peak_stats(self) -> None:
        """Let every peak start again from the present value."""
        with self.exclusive():
            self._stats.reset_peaks()

    def reset_accumulated_stats(self) -> None:
        """Count `allocated` and `freed`, the retries and the out-of-memory errors from zero again."""
        with self.exclusive():
            self._stats.reset_accumulated()

    def snapshot(self, device: int = 0) -> list[dict[str, Any]]:
        """All segments, by address, as torch.cuda.memory_snapshot lists them; `device` is the GPU's index."""
        with self.exclusive():
            free = [entry[2] for pools in self._pools for pool in pools.values() for entry in pool.free]
            return segment_entries([*self._taken_blocks(), *free], device)

    def segment_at(self, address: int) -> Segment:
        """The segment that an address is in."""
        return next(s for s in self.device.segments.values() if s.address <= address < s.address + s.size)


def _empty_block(nbytes: int) -> Block:
    if nbytes < 0:
        raise ValueError(f"Cannot allocate {nbytes} bytes. Ask for zero bytes or more.")
    block = Block(0, 0, _NO_POOL, None, None, None)
    block.state = USED
    return block
