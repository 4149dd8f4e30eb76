"""What the caching allocator reports: counters, the dictionaries behind `torch.cuda.memory_stats` and
`torch.cuda.memory_snapshot`, and the text of an out-of-memory error.

Nothing here decides where memory goes; that is `allocator.py`. Sizes are bytes. No torch is imported.
"""

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
_FIGURES = ("current", "peak", "allocated", "freed")
_KIB, _MIB, _GIB = 1 << 10, 1 << 20, 1 << 30


class Tally:
    """Counters of one pool, small or large: each metric now, its highest value, and all that was ever added.

    What was ever taken away is the difference of what was added and what is there, so it needs no counter.
    """

    __slots__ = (*(name + kind for name in METRICS for kind in _KINDS), "base_down", "base_up")

    def __init__(self):
        for name in METRICS:
            for kind in _KINDS:
                setattr(self, name + kind, 0)
        self.forget_history()

    def down(self, name):
        """All that was ever taken away from the metric `name`."""
        return getattr(self, name + "_up") - getattr(self, name)

    def forget_history(self):
        """Count `allocated` and `freed` from here on."""
        self.base_up = {name: getattr(self, name + "_up") for name in METRICS}
        self.base_down = {name: self.down(name) for name in METRICS}

    def correct(self, name, current):
        """Set a metric to what is really there, keeping current = added - taken away."""
        setattr(self, name + "_up", getattr(self, name + "_up") - getattr(self, name) + current)
        setattr(self, name, current)


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


def _pool_entry(tally, name):
    return {
        "current": getattr(tally, name),
        "peak": getattr(tally, name + "_peak"),
        "allocated": getattr(tally, name + "_up") - tally.base_up[name],
        "freed": tally.down(name) - tally.base_down[name],
    }


def _entry(name, small, large, both):
    parts = {"small_pool": _pool_entry(small, name), "large_pool": _pool_entry(large, name)}
    total = {key: parts["small_pool"][key] + parts["large_pool"][key] for key in _FIGURES}
    total["peak"] = getattr(both, name + "_peak")  # the pools need not have had their peaks at the same time
    return {"all": total, **parts}


def nested_stats(small, large, both, events):
    """The dictionary of `torch.cuda.memory_stats_as_nested_dict` (torch/cuda/memory.py names its keys).

    `active` equals `allocation`: the model has no blocks that wait for another stream. `max_split_size` is -1
    and the oversize counters are zero, as in PyTorch without the option max_split_size_mb.
    """
    stats = {name: _entry(name, small, large, both) for name in METRICS}
    stats["active"] = _entry("allocation", small, large, both)
    stats["active_bytes"] = _entry("allocated_bytes", small, large, both)
    stats["oversize_allocations"] = dict.fromkeys(_FIGURES, 0)
    stats["oversize_segments"] = dict.fromkeys(_FIGURES, 0)
    stats["max_split_size"] = -1
    stats["num_oom_rejections"] = 0
    stats.update(events)
    return stats


def _block_entry(block):
    return {
        "address": block.address,
        "size": block.size,
        "requested_size": block.requested if block.state else 0,
        "state": "active_allocated" if block.state else "inactive",
        "frames": [],
    }


def segment_entry(head, device):
    """One segment as `torch.cuda.memory_snapshot` describes it; `head` is its first block."""
    blocks, block = [], head
    while block is not None:
        blocks.append(_block_entry(block))
        block = block.next
    active = [entry for entry in blocks if entry["state"] == "active_allocated"]
    used = sum(entry["size"] for entry in active)
    return {
        "device": device,
        "address": head.address,
        "total_size": sum(entry["size"] for entry in blocks),
        "allocated_size": used,
        "active_size": used,
        "requested_size": sum(entry["requested_size"] for entry in active),
        "stream": head.pool.stream,
        "segment_type": "small" if head.pool.small else "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": [],
        "blocks": blocks,
    }


def format_size(nbytes):
    """Bytes as PyTorch's errors print them: 1024 -> "1024 bytes", 1536 -> "1.50 KiB" (c10's format_size)."""
    if nbytes <= _KIB:
        return f"{nbytes} bytes"
    if nbytes <= _MIB:
        return f"{nbytes / _KIB:.2f} KiB"
    if nbytes <= _GIB:
        return f"{nbytes / _MIB:.2f} MiB"
    return f"{nbytes / _GIB:.2f} GiB"


class OutOfMemory(Exception):
    """An allocation found no memory, even after the cache was emptied. All figures in bytes.

    requested: the segment that was asked of the GPU; capacity, free: the GPU's; used: this process, with its
    context; allowed: the limit of `set_fraction`, or None; allocated, reserved: the allocator's.
    """

    def __init__(self, requested, capacity, free, used, allowed, allocated, reserved):
        self.requested, self.capacity, self.free, self.used = requested, capacity, free, used
        self.allowed, self.allocated, self.reserved = allowed, allocated, reserved
        left = f"{format_size(free)} of {format_size(capacity)}"
        super().__init__(f"{format_size(requested)} wanted, {left} free")


def oom_message(error, gpu_index, setting_name="PYTORCH_CUDA_ALLOC_CONF"):
    """PyTorch's own text (2.11 to 2.15, on a real H200) for an `OutOfMemory` on GPU `gpu_index`.

    `setting_name` is the environment variable that the text recommends.
    """
    allowed = "" if error.allowed is None else f"{format_size(error.allowed)} allowed; "
    return (
        f"CUDA out of memory. Tried to allocate {format_size(error.requested)}. GPU {gpu_index} has a total"
        f" capacity of {format_size(error.capacity)} of which {format_size(error.free)} is free."
        f" Including non-PyTorch memory, this process has {format_size(error.used)} memory in use. {allowed}"
        f"Of the allocated memory {format_size(error.allocated)} is allocated by PyTorch, and"
        f" {format_size(error.reserved - error.allocated)} is reserved by PyTorch but unallocated."
        f" If reserved but unallocated memory is large try setting {setting_name}=expandable_segments:True"
        " to avoid fragmentation.  See documentation for Memory Management "
        " (https://docs.pytorch.org/docs/stable/notes/cuda.html"
        "#optimizing-memory-usage-with-pytorch-cuda-alloc-conf)"
    )
