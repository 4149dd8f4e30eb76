"""What the caching allocator counts: the dictionary behind `torch.cuda.memory_stats`, and an out-of-memory error.

Nothing here decides where memory goes; that is `allocator.py`. Sizes are bytes. No torch is imported.
"""

from operator import attrgetter

METRICS = (
    "allocation",
    "allocated_bytes",
    "requested_bytes",
    "segment",
    "reserved_bytes",
    "inactive_split",
    "inactive_split_bytes",
)
EVENTS = ("num_alloc_retries", "num_ooms", "num_sync_all_streams", "num_device_alloc", "num_device_free")

_KINDS = ("", "_up", "_peak")  # what is there, all that was ever added, the most that was ever there
_KIB, _MIB, _GIB = 1 << 10, 1 << 20, 1 << 30


class Tally:
    """Counters of one pool, small or large: each metric now, its highest value, and all that was ever added.

    What was ever taken away is the difference of what was added and what is there, so it needs no counter.
    """

    __slots__ = (*(name + kind for name in METRICS for kind in _KINDS), "active_bytes_peak", "active_peak",
                 "base_down", "base_up", "waiting", "waiting_bytes")  # fmt: skip

    def __init__(self):
        self.waiting = self.waiting_bytes = 0  # freed, but another stream still uses them
        self.active_peak = self.active_bytes_peak = 0  # looked at only while something waits
        for name in METRICS:
            for kind in _KINDS:
                setattr(self, name + kind, 0)
        self.forget_history()

    @property
    def active(self):
        """Blocks that are used or wait."""
        return self.allocation + self.waiting

    @property
    def active_bytes(self):
        """Bytes in blocks that are used or wait."""
        return self.allocated_bytes + self.waiting_bytes

    def raise_active_peaks(self, blocks, nbytes):
        """Lift the peaks of `active` and `active_bytes` to these figures."""
        self.active_peak = max(self.active_peak, blocks)
        self.active_bytes_peak = max(self.active_bytes_peak, nbytes)

    def down(self, name):
        """All that was ever taken away from the metric `name`."""
        return getattr(self, name + "_up") - getattr(self, name)

    def forget_history(self):
        """Count `allocated` and `freed` from here on."""
        self.base_up = {name: getattr(self, name + "_up") for name in METRICS}
        self.base_down = {name: self.down(name) for name in METRICS}
        self.base_down["active"] = self.allocation_up - self.active
        self.base_down["active_bytes"] = self.allocated_bytes_up - self.active_bytes

    def correct(self, name, current):
        """Set a metric to what is really there, keeping current = added - taken away."""
        setattr(self, name + "_up", getattr(self, name + "_up") - getattr(self, name) + current)
        setattr(self, name, current)


class Stat:
    """One counter with its peak, for figures that are not kept by pool."""

    def __init__(self):
        self.current = self.peak = self.up = self.base_up = self.base_down = 0

    def change(self, by):
        """Count up or down."""
        self.current += by
        self.up += max(by, 0)
        self.peak = max(self.peak, self.current)

    def drop_peak(self):
        """Let the peak start again from the present value."""
        self.peak = self.current

    def forget_history(self):
        """Count `allocated` and `freed` from here on."""
        self.base_up, self.base_down = self.up, self.up - self.current

    def entry(self):
        """As torch.cuda.memory_stats_as_nested_dict lists it."""
        allocated, freed = self.up - self.base_up, self.up - self.current - self.base_down
        return {"current": self.current, "peak": self.peak, "allocated": allocated, "freed": freed}


def raise_peak(name, tally, small, large, both):
    """Lift the peak of metric `name` of one tally, and of the two together (`both`), to the present value."""
    total = getattr(small, name) + getattr(large, name)
    setattr(tally, name + "_peak", max(getattr(tally, name), getattr(tally, name + "_peak")))
    setattr(both, name + "_peak", max(total, getattr(both, name + "_peak")))


def drop_peaks(small, large, both):
    """Let every peak start again from the present value."""
    for name in METRICS:
        for tally in (small, large):
            setattr(tally, name + "_peak", getattr(tally, name))
        setattr(both, name + "_peak", getattr(small, name) + getattr(large, name))
    for tally in (small, large, both):
        tally.active_peak = tally.active_bytes_peak = 0
    small.raise_active_peaks(small.active, small.active_bytes)
    large.raise_active_peaks(large.active, large.active_bytes)
    both.raise_active_peaks(small.active + large.active, small.active_bytes + large.active_bytes)


_nows, _peaks, _ups = (attrgetter(*(name + kind for name in METRICS)) for kind in ("", "_peak", "_up"))


def _figures(tally):
    """Of every metric: now, peak, all that was added, and what of that and of what was taken away does not count."""
    return zip(_nows(tally), _peaks(tally), _ups(tally), tally.base_up.values(), tally.base_down.values(), strict=False)


def _entry(small, large, peak):
    """One metric of both pools, out of `_figures`. They need not have had their peaks at the same time."""
    now, small_peak, up, base_up, base_down = small
    first = {"current": now, "peak": small_peak, "allocated": up - base_up, "freed": up - now - base_down}
    now, large_peak, up, base_up, base_down = large
    second = {"current": now, "peak": large_peak, "allocated": up - base_up, "freed": up - now - base_down}
    total = {
        "current": first["current"] + now,
        "peak": peak,
        "allocated": first["allocated"] + second["allocated"],
        "freed": first["freed"] + second["freed"],
    }
    return {"all": total, "small_pool": first, "large_pool": second}


def _active_entry(name, like, small, large, both):
    """`active` goes up as `allocation` does and comes down later, where a block waits for another stream."""

    def figures(tally):
        peak = max(getattr(tally, like + "_peak"), getattr(tally, name + "_peak"))
        return getattr(tally, name), peak, getattr(tally, like + "_up"), tally.base_up[like], tally.base_down[name]

    return _entry(figures(small), figures(large), max(getattr(both, like + "_peak"), getattr(both, name + "_peak")))


def nested_stats(small, large, both, events, oversize, max_split):
    """The dictionary of `torch.cuda.memory_stats_as_nested_dict` (torch/cuda/memory.py names its keys).

    oversize: the entries of blocks and segments of at least `max_split` bytes, which is -1 without a limit.
    """
    stats = dict(zip(METRICS, map(_entry, _figures(small), _figures(large), _peaks(both)), strict=False))
    stats["active"] = _active_entry("active", "allocation", small, large, both)
    stats["active_bytes"] = _active_entry("active_bytes", "allocated_bytes", small, large, both)
    stats.update(oversize)
    stats["max_split_size"] = max_split
    stats["num_oom_rejections"] = 0
    stats.update(events)
    return stats


def format_size(nbytes):
    """Bytes as PyTorch's errors print them: 1024 -> "1024 bytes", 1536 -> "1.50 KiB" (c10's format_size)."""
    if nbytes <= _KIB:
        return f"{nbytes} bytes"
    if nbytes <= _MIB:
        return f"{nbytes / _KIB:.2f} KiB"
    if nbytes <= _GIB:
        return f"{nbytes / _MIB:.2f} MiB"
    return f"{nbytes / _GIB:.2f} GiB"
