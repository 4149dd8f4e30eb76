"""How much a GPU's caching allocator may have, and how much it has: limits, figures, snapshots.

`CachingAllocator` (in `allocator`) adds the lock and what allocates. Sizes are bytes. No torch is imported.
"""

from virtual_gpus.memory.options import UNLIMITED, Options
from virtual_gpus.memory.report import OutOfMemory, is_head, segment_entry
from virtual_gpus.memory.rules import Rules
from virtual_gpus.memory.stats import drop_peaks, nested_stats


class Figures(Rules):
    """Needs `capacity`, `context`, `other`, `shared`, and the methods `_exclusive` and `_drain`."""

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

    def take_context(self, nbytes):
        """Let a CUDA context have `nbytes` bytes; False if others left too little."""
        room = self._room_on_card(nbytes)
        if room:
            self.context = nbytes
        return room

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
