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

from helpers.virtual.allocator_blocks import FREEING, USED, Block
from helpers.virtual.allocator_options import UNLIMITED, Options
from helpers.virtual.allocator_report import OutOfMemory, is_head, oom_message, segment_entry
from helpers.virtual.allocator_rules import Rules
from helpers.virtual.allocator_stats import drop_peaks, format_size, nested_stats

__all__ = ["Block", "CachingAllocator", "OutOfMemory", "format_size", "oom_message"]

FIRST_ADDRESS = 0x7F0000000000


class Owner(weakref.ref):
    """A weak reference that knows the `address` of the block that goes with what it refers to."""

    __slots__ = ("address",)

    def __init__(self, thing, callback):
        super().__init__(thing, callback)
        self.address = None  # no block yet


class CachingAllocator(Rules):
    """The memory of one GPU with `capacity` bytes, `context` of them taken by this process's CUDA context.

    `other` may be set to what others hold, `shared` to a `card_sharing.Share`, which tells of other processes. GPUs
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
                elif self.observers:
                    self._tell("alloc", block.address, block.size)
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
        return Owner(thing, self._pending.append)

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
            if size and self.observers:
                self._tell(event, address, size)

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

    # ---- limits

    def set_options(self, options: Options, first=False):
        """Behave as `options` say from now on. `first`: nothing was allocated yet, so `fraction` counts as well."""
        with self._exclusive():
            self._set_options(options)
        if first:
            self.set_fraction(options.fraction)
            self._max_split = -1 if options.max_split == UNLIMITED else options.max_split

    def set_fraction(self, fraction):
        """Limit reserved memory to `fraction` (0 to 1) of the capacity: set_per_process_memory_fraction."""
        if not 0 <= fraction <= 1:
            raise ValueError(f"Invalid fraction value: {fraction}. Allowed range: 0~1")
        self._fraction = float(fraction) if fraction < 1 else None

    @property
    def fraction(self):
        """The part of the capacity that may be reserved: 1.0 unless `set_fraction` said otherwise."""
        return 1.0 if self._fraction is None else self._fraction

    @property
    def allowed(self):
        """The bytes that may be reserved, or None when no fraction below 1 was set."""
        return None if self._fraction is None else int(self._fraction * self.capacity)

    def _room_for_segment(self, nbytes):
        return self._within_limit(nbytes) and self._room_on_card(nbytes)

    def _within_limit(self, nbytes):
        return self._fraction is None or self._reserved() + nbytes <= self.allowed

    def _room_on_card(self, nbytes):
        if self.shared is None:
            return nbytes <= self._free_now()
        return self.shared.claim(self.used_bytes, nbytes, self.capacity - self.other)

    def publish(self):
        """Tell other processes what this one holds."""
        if self.shared is not None:
            self.shared.publish(self.used_bytes)

    def _total(self):
        return self.capacity

    def _out_of_memory(self, nbytes):
        self._events["num_ooms"] += 1
        size = self.options.rounded(nbytes)
        self._tell("oom", 0, size)
        self.publish()
        others = () if self.shared is None else sorted(self.shared.others())
        free, allocated, reserved = self._free_now(), self._allocated(), self._reserved()
        return OutOfMemory(self.options.segment_size(size), self.capacity, free, self.context + reserved, self.allowed,
                           allocated, reserved, others, self.options.expandable)  # fmt: skip

    # ---- figures

    def _allocated(self):
        return self._small.allocated_bytes + self._large.allocated_bytes

    def _reserved(self):
        return self._small.reserved_bytes + self._large.reserved_bytes

    def _free_now(self):
        if self.shared is not None:
            return self.shared.free(self.used_bytes, self.capacity - self.other)
        return self.capacity - self.context - self.other - self._reserved()

    @property
    def allocated(self):
        """Bytes in used blocks: torch.cuda.memory_allocated."""
        self._drain()
        return self._allocated()

    @property
    def reserved(self):
        """Bytes in segments, used or cached: torch.cuda.memory_reserved."""
        return self._reserved()

    @property
    def peak_allocated(self):
        """The most that was ever allocated since `reset_peak_stats`: torch.cuda.max_memory_allocated."""
        self._drain()
        return max(self._both.allocated_bytes_peak, self._allocated())

    @property
    def peak_reserved(self):
        """The most that was ever reserved since `reset_peak_stats`: torch.cuda.max_memory_reserved."""
        return self._both.reserved_bytes_peak

    @property
    def used_bytes(self):
        """What nvidia-smi shows for this process: reserved memory and the context."""
        return self.context + self._reserved()

    @property
    def used_by_all(self):
        """What nvidia-smi shows for the card: `used_bytes`, and those of other processes."""
        return self.capacity - self._free_now()

    @property
    def free_bytes(self):
        """What the GPU has left for anybody: the first figure of torch.cuda.mem_get_info."""
        return self._free_now()

    def stats(self):
        """The nested dictionary that torch.cuda.memory_stats flattens."""
        with self._exclusive():
            self._note_peaks()
            oversize = {name: stat.entry() for name, stat in self._oversize.items()}
            return nested_stats(self._small, self._large, self._both, self._events, oversize, self._max_split)

    def reset_peak_stats(self):
        """Let every peak start again from the present value."""
        with self._exclusive():
            drop_peaks(self._small, self._large, self._both)
            for stat in self._oversize.values():
                stat.drop_peak()
            self._rising = False

    def reset_accumulated_stats(self):
        """Count `allocated` and `freed`, the retries and the out-of-memory errors from zero again."""
        with self._exclusive():
            self._small.forget_history()
            self._large.forget_history()
            for stat in self._oversize.values():
                stat.forget_history()
            self._events.update(dict.fromkeys(self._events, 0))

    def snapshot(self, device=0):
        """All segments, by address, as torch.cuda.memory_snapshot lists them; `device` is the GPU's index."""
        with self._exclusive():
            blocks = self._used_blocks()
            for pool in (*self._small_pools.values(), *self._large_pools.values()):
                blocks += [entry[2] for entry in pool.free]
            heads = sorted((block for block in blocks if is_head(block)), key=lambda block: block.address)
            return [segment_entry(head, device) for head in heads]


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
