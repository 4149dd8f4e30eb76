"""PyTorch's caching allocator (c10/cuda/CUDACachingAllocator.cpp), modelled for one GPU.

    gpu = CachingAllocator(capacity=16 << 30, context=500 << 20)
    block = gpu.malloc(1000)      # gpu.allocated == 1024, gpu.reserved == 2097152
    gpu.free(block)               # gpu.allocated == 0, gpu.reserved still 2097152: the cache
    gpu.empty_cache()             # gpu.reserved == 0

Memory is taken from the GPU in segments and handed out in blocks. Sizes round up to 512 bytes. Up to 1 MiB
comes from segments of 2 MiB (the small pool), less than 10 MiB from segments of 20 MiB, more from a segment
of its own, rounded up to 2 MiB (the large pool). The smallest free block that fits is taken, then the
lowest address. What remains of it is split off when it is 512 bytes or more (small pool) or more than 1 MiB
(large pool). Freed neighbours merge. When memory runs out, segments without any used block go back to the
GPU, and the allocation is tried once more.

Blocks belong to the stream that they were allocated on. What options change stands in `allocator_options`, what
other streams change in `allocator_rules`. Sizes are bytes. No torch is imported.
"""

import threading
import weakref
from collections import deque
from contextlib import contextmanager

from virtual_gpus.memory.blocks import FREEING, USED, Block
from virtual_gpus.memory.figures import Figures
from virtual_gpus.memory.report import OutOfMemory, oom_message
from virtual_gpus.memory.stats import format_size

__all__ = ["Block", "CachingAllocator", "OutOfMemory", "format_size", "oom_message"]

FIRST_ADDRESS = 0x7F0000000000


class Owner(weakref.ref):
    """A weak reference that knows the `address` of the block that goes with what it refers to."""

    __slots__ = ("address",)


class CachingAllocator(Figures):
    """The memory of one GPU with `capacity` bytes, `context` of them taken by this process's CUDA context.

    `other` may be set to what others hold, `shared` to a `shared_memory.Share`, which tells of other processes. GPUs
    that differ in `first_address` by more than they ever reserve give different addresses. `observers` are called as
    f(event, address, size) for "alloc" and "free" (size: the block's; "free_requested" and "free_completed" where it
    waited for a stream in between), "segment_alloc", "segment_free" (the segment's), "segment_map", "segment_unmap"
    (pages of an expandable one) and "oom" (address 0, size: the block's that found no place); they may read the
    properties and free blocks, no more. `oom_observers` are called as f(error) before an OutOfMemory is raised, when
    the allocator is free again; what they raise is raised instead.

    Any thread may call any method. `free` never waits and may be called at any moment, also by a finalizer
    that interrupts `malloc`. An exception in the middle (Ctrl-C) leaves the books in order.
    """

    def __init__(self, capacity, context=0, first_address=FIRST_ADDRESS):
        if capacity <= 0 or not 0 <= context < capacity:
            raise ValueError(f"a GPU of {capacity} bytes cannot hold a context of {context} bytes")
        super().__init__(self._room_for_segment, first_address)
        self.capacity, self.context, self.other, self.shared = capacity, context, 0, None
        self._fraction, self._max_split = None, -1
        self._pending, self._busy, self._lock = deque(), False, threading.RLock()
        self.oom_observers = []

    # ---- allocate and free

    def malloc(self, nbytes, stream=0, owner=None):
        """A block of at least `nbytes` bytes for work on `stream`; 0 bytes give a block that counts nothing.

        `owner`: what `owner_of` made of the object that the block belongs to; it is freed when that dies.
        Raises OutOfMemory; ValueError for a negative size; RuntimeError when a finalizer or an observer
        allocates in the middle of another malloc.
        """
        if nbytes <= 0:
            return _empty_block(nbytes)
        error = None
        with self._lock:
            if self._busy:
                raise RuntimeError(_NESTED)
            self._busy = True
            try:
                if self._pending:
                    self._free_pending()
                if self._by_rules:
                    block = self._allocate_by_rules(nbytes, self.options.rounded(nbytes), stream, owner)
                else:
                    block = self._allocate(nbytes, (nbytes + 511) & -512, stream, owner)
                if block is None:
                    error = self._out_of_memory(nbytes)
                else:
                    for observer in self.observers:  # `_tell`, without its call
                        observer("alloc", block.address, block.size)
            except BaseException:
                self._rebuild()
                raise
            finally:
                self._busy = False
        if self._pending:
            self._drain()
        if error is not None:
            for observer in self.oom_observers:
                observer(error)
            raise error
        return block

    def free(self, block):
        """Give a block back to the cache. Raises ValueError when it was given back before."""
        if block.state != USED:
            raise ValueError(f"{block!r} was freed before: free each block once")
        block.state = FREEING
        if block.size:
            self._pending.append(block)
            if not self._busy:  # else whoever is busy looks at _pending once more when done
                self._drain()

    def owner_of(self, thing):
        """A watch on `thing` to give to `malloc`: when `thing` dies, its block is freed before anybody looks again.

        No line of Python runs at that moment, so Ctrl-C cannot hit it and be lost, and no block is either.
        """
        owner = Owner(thing, self._pending.append)
        owner.address = None  # no block yet
        return owner

    def record_stream(self, block, stream):
        """Note that `stream` uses the block too: freed, it is not used again before that stream has come so far.

        `stream` is a (GPU, stream) that `clock` knows; the block's own stream needs no note.
        """
        with self._exclusive():
            if block.size and block.state == USED and stream[1] != block.pool.stream:
                self._record(block, stream)

    def empty_cache(self):
        """Give all segments without a used block, and all free pages of expandable ones, back to the GPU."""
        with self._exclusive():
            self._release_cached()
            self.publish()

    def _drain(self):
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

    def _free_pending(self):
        pending, live = self._pending, self._live
        while pending:
            address = pending[0].address
            block = live.pop(address, None)
            size, event = 0 if block is None else block.size, "free"
            if size:
                if self._by_rules:
                    event = "free_requested" if self._reclaim_by_rules(block) else "free"
                else:
                    self._reclaim(block)
            pending.popleft()
            if size:
                for observer in self.observers:
                    observer(event, address, size)

    def _rebuild(self):
        while self._pending:  # blocks that were being freed are out of _live already, or come out here
            self._live.pop(self._pending[0].address, None)
            self._pending.popleft()
        super()._rebuild()

    @contextmanager
    def _exclusive(self):
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


_NESTED = (
    "a finalizer or an observer used this GPU's allocator in the middle of an allocation: only `free` and the"
    " properties can be used there"
)


def _empty_block(nbytes):
    if nbytes < 0:
        raise ValueError(f"cannot allocate {nbytes} bytes")
    block = Block(0, 0, None, None, None)
    block.state = USED
    return block
