"""What the caching allocator counts: the dictionary behind `torch.cuda.memory_stats`.

Nothing here decides where memory goes; that is `allocator.py`. Sizes are bytes. No torch is imported.
"""

# ruff: noqa: PLR1730 (a call of max costs more than an if, and this runs for every tensor)

from collections.abc import Iterable
from operator import attrgetter
from typing import Any

METRICS = ("allocation", "allocated_bytes", "requested_bytes", "segment", "reserved_bytes", "inactive_split",
           "inactive_split_bytes")  # fmt: skip
EVENTS = ("num_alloc_retries", "num_ooms", "num_sync_all_streams", "num_device_alloc", "num_device_free")

# By metric: that of blocks which are used or wait for another stream, and the counter of those that wait.
_ACTIVE = {"allocation": ("active", "waiting"), "allocated_bytes": ("active_bytes", "waiting_bytes")}
_nows, _peaks, _ups = (attrgetter(*(name + kind for name in METRICS)) for kind in ("", "_peak", "_up"))


class Tally:
    """Counters of one pool, small or large: each metric now, its highest value, and all that was ever added.

    What was ever taken away is the difference of what was added and what is there, so it needs no counter.
    """

    def __init__(self):
        self.searches = 0  # for free blocks, counted while garbage is collected: the age of a block is counted in them
        self.waiting = self.waiting_bytes = 0  # freed, but another stream still uses them
        self.active_peak = self.active_bytes_peak = 0  # looked at only while something waits
        self.allocation = self.allocation_up = self.allocation_peak = 0
        self.allocated_bytes = self.allocated_bytes_up = self.allocated_bytes_peak = 0
        self.requested_bytes = self.requested_bytes_up = self.requested_bytes_peak = 0
        self.segment = self.segment_up = self.segment_peak = 0
        self.reserved_bytes = self.reserved_bytes_up = self.reserved_bytes_peak = 0
        self.inactive_split = self.inactive_split_up = self.inactive_split_peak = 0
        self.inactive_split_bytes = self.inactive_split_bytes_up = self.inactive_split_bytes_peak = 0

    def correct(self, present: dict[str, int]) -> None:
        """Set the metrics to what is there, keeping current = added - taken away."""
        for name, figure in present.items():
            setattr(self, name + "_up", getattr(self, name + "_up") - getattr(self, name) + figure)
            setattr(self, name, figure)


class Stat:
    """One counter with its peak, for figures that are not kept by pool."""

    def __init__(self):
        self.current = self.peak = self.up = 0

    def change(self, by: int) -> None:
        self.current += by
        self.up += max(by, 0)
        self.peak = max(self.peak, self.current)

    def entry(self) -> dict[str, int]:
        """As torch.cuda.memory_stats_as_nested_dict lists it."""
        return {"current": self.current, "peak": self.peak, "allocated": self.up, "freed": self.up - self.current}


def _figures(tally: Tally) -> Iterable[tuple[int, int, int]]:
    """Of every metric: now, peak, and all that was added."""
    return zip(_nows(tally), _peaks(tally), _ups(tally), strict=True)


def _entry(small: tuple[int, int, int], large: tuple[int, int, int], peak: int) -> dict[str, dict[str, int]]:
    """One metric of both pools, out of `_figures`. They need not have had their peaks at the same time."""
    (now, own, up), (other_now, other_own, other_up) = small, large
    return {
        "all": {"current": now + other_now, "peak": peak, "allocated": up + other_up,
                "freed": up - now + other_up - other_now},
        "small_pool": {"current": now, "peak": own, "allocated": up, "freed": up - now},
        "large_pool": {"current": other_now, "peak": other_own, "allocated": other_up, "freed": other_up - other_now},
    }  # fmt: skip


def _active(tally: Tally, like: str) -> int:
    """The blocks of a tally that are used or wait ("allocation"), or their bytes."""
    return getattr(tally, like) + getattr(tally, _ACTIVE[like][1])


def _active_entry(like: str, small: Tally, large: Tally, both: Tally) -> dict[str, dict[str, int]]:
    """`active` goes up as `allocation` does and comes down later, where a block waits for another stream."""
    name = _ACTIVE[like][0]

    def figures(tally: Tally) -> tuple[int, int, int]:
        peak = max(getattr(tally, like + "_peak"), getattr(tally, name + "_peak"))
        return _active(tally, like), peak, getattr(tally, like + "_up")

    return _entry(figures(small), figures(large), max(getattr(both, like + "_peak"), getattr(both, name + "_peak")))


def _since(base: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """The figures of `now`, of which `allocated` and `freed` count from those in `base` on."""
    return {
        key: _since(base[key], value) if isinstance(value, dict)
        else value - base[key] if key in ("allocated", "freed") else value
        for key, value in now.items()
    }  # fmt: skip


class AllocatorStats:
    """All counters of one GPU's allocator: of the small and the large pool, and the peaks of `both` together."""

    def __init__(self):
        self.small, self.large, self.both = Tally(), Tally(), Tally()
        self.oversize_allocations, self.oversize_segments = Stat(), Stat()
        self.events = dict.fromkeys(EVENTS, 0)
        self.rising = False  # something was allocated since the peaks were last looked at
        self._base: dict[str, Any] | None = None  # what `_all` said when the accumulated figures began anew

    @property
    def allocated(self) -> int:
        """Bytes in used blocks."""
        return self.small.allocated_bytes + self.large.allocated_bytes

    @property
    def reserved(self) -> int:
        """Bytes that were taken from the GPU."""
        return self.small.reserved_bytes + self.large.reserved_bytes

    def note_peaks(self) -> None:
        """Use only rises between two frees: a look before each free, and each reading, finds every peak."""
        self.rising = False
        small, large, both = self.small, self.large, self.both
        in_small, in_large = small.allocated_bytes, large.allocated_bytes
        if in_small > small.allocated_bytes_peak:
            small.allocated_bytes_peak = in_small
        if in_large > large.allocated_bytes_peak:
            large.allocated_bytes_peak = in_large
        if in_small + in_large > both.allocated_bytes_peak:
            both.allocated_bytes_peak = in_small + in_large
        in_small, in_large = small.requested_bytes, large.requested_bytes
        if in_small > small.requested_bytes_peak:
            small.requested_bytes_peak = in_small
        if in_large > large.requested_bytes_peak:
            large.requested_bytes_peak = in_large
        if in_small + in_large > both.requested_bytes_peak:
            both.requested_bytes_peak = in_small + in_large
        in_small, in_large = small.allocation, large.allocation
        if in_small > small.allocation_peak:
            small.allocation_peak = in_small
        if in_large > large.allocation_peak:
            large.allocation_peak = in_large
        if in_small + in_large > both.allocation_peak:
            both.allocation_peak = in_small + in_large
        if small.waiting or large.waiting:
            self._note_active_peaks()

    def _note_active_peaks(self) -> None:
        for like, (name, _) in _ACTIVE.items():
            small, large = _active(self.small, like), _active(self.large, like)
            for tally, now in ((self.small, small), (self.large, large), (self.both, small + large)):
                setattr(tally, name + "_peak", max(getattr(tally, name + "_peak"), now))

    def raise_peaks(self, names: Iterable[str], tally: Tally) -> None:
        """Lift the peaks of metrics of one tally, and of the two together, to the present values."""
        for name in names:
            total = getattr(self.small, name) + getattr(self.large, name)
            setattr(tally, name + "_peak", max(getattr(tally, name), getattr(tally, name + "_peak")))
            setattr(self.both, name + "_peak", max(total, getattr(self.both, name + "_peak")))

    def change_splits(self, tally: Tally, blocks: int, nbytes: int) -> None:
        """Count free blocks that share a segment with used ones ("inactive split"): they cannot go back."""
        tally.inactive_split += blocks
        tally.inactive_split_bytes += nbytes
        if blocks > 0:
            tally.inactive_split_up += blocks
            if tally.inactive_split > tally.inactive_split_peak:
                tally.inactive_split_peak = tally.inactive_split
            if (total := self.small.inactive_split + self.large.inactive_split) > self.both.inactive_split_peak:
                self.both.inactive_split_peak = total
        if nbytes > 0:
            tally.inactive_split_bytes_up += nbytes
            if tally.inactive_split_bytes > tally.inactive_split_bytes_peak:
                tally.inactive_split_bytes_peak = tally.inactive_split_bytes
            total = self.small.inactive_split_bytes + self.large.inactive_split_bytes
            if total > self.both.inactive_split_bytes_peak:
                self.both.inactive_split_bytes_peak = total

    def change_reserved(self, tally: Tally, segments: int, nbytes: int) -> None:
        """Count what was taken from the GPU, or went back to it: whole segments, or (0 of them) pages of one."""
        tally.segment += segments
        tally.reserved_bytes += nbytes
        if nbytes < 0:
            self.events["num_device_free"] += 1
            return
        tally.segment_up += segments
        tally.reserved_bytes_up += nbytes
        self.events["num_device_alloc"] += 1
        self.raise_peaks(("segment", "reserved_bytes"), tally)

    def reset_peaks(self) -> None:
        """Let every peak start again from the present value."""
        for name in METRICS:
            for tally in (self.small, self.large):
                setattr(tally, name + "_peak", getattr(tally, name))
            setattr(self.both, name + "_peak", getattr(self.small, name) + getattr(self.large, name))
        for tally in (self.small, self.large, self.both):
            tally.active_peak = tally.active_bytes_peak = 0
        self._note_active_peaks()
        for stat in (self.oversize_allocations, self.oversize_segments):
            stat.peak = stat.current
        self.rising = False

    def reset_accumulated(self) -> None:
        """Count `allocated` and `freed`, the retries and the out-of-memory errors from zero again."""
        self._base = self._all()
        self.events.update(dict.fromkeys(EVENTS, 0))

    def nested(self, max_split: int) -> dict[str, Any]:
        """The dictionary of `torch.cuda.memory_stats_as_nested_dict` (torch/cuda/memory.py names its keys).

        max_split: the size from which blocks and segments are "oversize", -1 without a limit.
        """
        stats = self._all() if self._base is None else _since(self._base, self._all())
        stats["max_split_size"] = max_split
        stats["num_oom_rejections"] = 0
        stats.update(self.events)
        return stats

    def _all(self) -> dict[str, Any]:
        """What is counted, from the beginning on."""
        self.note_peaks()
        small, large, both = self.small, self.large, self.both
        stats = dict[str, Any](zip(METRICS, map(_entry, _figures(small), _figures(large), _peaks(both)), strict=False))
        stats |= {name: _active_entry(like, small, large, both) for like, (name, _) in _ACTIVE.items()}
        stats["oversize_allocations"] = self.oversize_allocations.entry()
        stats["oversize_segments"] = self.oversize_segments.entry()
        return stats


def format_size(nbytes: int) -> str:
    """Bytes as PyTorch's errors print them: 1024 -> "1024 bytes", 1536 -> "1.50 KiB" (c10's format_size)."""
    if nbytes <= 1 << 10:
        return f"{nbytes} bytes"
    bits, unit = (10, "KiB") if nbytes <= 1 << 20 else (20, "MiB") if nbytes <= 1 << 30 else (30, "GiB")
    return f"{nbytes / (1 << bits):.2f} {unit}"
