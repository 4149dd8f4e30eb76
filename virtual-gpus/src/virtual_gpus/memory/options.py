"""The options of the caching allocator, as in PYTORCH_ALLOC_CONF and `_set_allocator_settings`.

    parse("max_split_size_mb:128,garbage_collection_threshold:0.8").max_split == 128 << 20

max_split_size_mb
    A free block of this size or more serves only requests of this size or more, and is not split.
garbage_collection_threshold
    If more than this fraction of the allowed memory is used, cached blocks that have long been unused go back to the
    GPU before a new segment is taken. This has an effect only after `set_per_process_memory_fraction`.
expandable_segments
    Each stream and pool has one segment, which grows by pages of 2 MiB (small) or 20 MiB (large), instead of many
    segments of fixed size.
roundup_power2_divisions
    Sizes are rounded up to this number of steps between two powers of 2.

The keys and their limits are those of c10/core/AllocatorConfig.cpp and c10/cuda/CUDAAllocatorConfig.cpp. All sizes are
in bytes. This module does not import torch.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

MIB = 1 << 20
UNLIMITED = (1 << 64) - 1
SMALL_REQUEST = MIB  # the small pool serves requests up to this size
SMALL_SEGMENT = 2 * MIB
OWN_SEGMENT_FROM = 10 * MIB  # requests of this size or more get a segment of their own
INTERVALS = 16  # of roundup_power2_divisions: 1 MiB, 2 MiB, 4 MiB ... 32 GiB and more
_NO_STEPS = (0,) * INTERVALS


@dataclass(frozen=True)
class Options:
    """The options of an allocator. The defaults are PyTorch's.

    fraction: per_process_memory_fraction, which takes effect when the allocator of a GPU is created.
    unknown: the settings of a text that are not modelled. The code that applies the options must refuse them.
    """

    max_split: int = UNLIMITED
    max_non_split_rounding: int = 20 * MIB
    gc_threshold: float = 0.0
    expandable: bool = False
    large_segment: int = 20 * MIB
    divisions: tuple[int, ...] = _NO_STEPS
    fraction: float = 1.0
    unknown: tuple[str, ...] = ()

    @property
    def plain(self) -> bool:
        """True if the allocator behaves as with PyTorch's defaults."""
        return replace(self, fraction=1.0) == Options()

    def rounded(self, nbytes: int) -> int:
        """The size of a block for `nbytes` bytes."""
        divisions = 0  # looking it up takes time, and this runs for every tensor
        if self.divisions is not _NO_STEPS:
            divisions = self.divisions[min(max(nbytes.bit_length() - 21, 0), INTERVALS - 1)]
        if divisions <= 1 or nbytes <= 512 * divisions:
            return (nbytes + 511) & -512
        step = (1 << (nbytes.bit_length() - 1)) // divisions
        return (nbytes + step - 1) // step * step

    def segment_size(self, size: int) -> int:
        """The segment that is taken from the GPU for a block of `size` bytes, also in an out-of-memory error."""
        if size <= SMALL_REQUEST:
            return SMALL_SEGMENT
        return self.large_segment if size < OWN_SEGMENT_FROM else (size + 2 * MIB - 1) & -(2 * MIB)

    def split_from(self, small: bool) -> int:
        """The least remainder that is split off a block of the small or the large pool."""
        return 512 if small or self.expandable else SMALL_REQUEST + 1

    def page_size(self, small: bool) -> int:
        """The bytes of an expandable segment that get memory at once."""
        return SMALL_SEGMENT if small else self.large_segment


# ---- options as text: "key:value,key:value"

VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")  # the first that is set counts

_SETTING = re.compile(r"(\w+):(\[[^\[\]]*\]|[^,:\[\]]+)(,|$)")
# What changes no figure of GPU memory: how host memory is pinned, when a lock is held, what a graph capture does.
_WITHOUT_EFFECT = {
    "pinned_use_background_threads", "pinned_use_cuda_host_register", "pinned_use_hip_host_register",
    "pinned_num_register_threads", "pinned_reserve_segment_size_mb", "pinned_max_round_threshold_mb",
    "pinned_max_cached_size_mb", "pinned_free_catch_all", "release_lock_on_cudamalloc", "release_lock_on_hipmalloc",
    "graph_capture_record_stream_reuse",
}  # fmt: skip
# What is not modelled, with the value that asks for nothing.
_NOT_MODELLED = {"backend": "native", "throw_on_cudamalloc_oom": "False", "expandable_segments_reserve": None,
                 "expandable_segments_reserve_by_class": None}  # fmt: skip


def environment_text() -> str:
    """What the environment asks for; "" if nothing."""
    return next((os.environ[name] for name in VARIABLES if name in os.environ), "")


def parse(text: str, before: Options | None = None) -> Options:
    """The options after `text` was set, where `before` held.

    As in PyTorch max_split_size_mb, garbage_collection_threshold and roundup_power2_divisions fall back to their
    defaults where `text` does not name them, and the others stay. Raises ValueError for a text that is no list of
    settings, for an unknown key, and for a value that PyTorch does not take.
    """
    given, before = dict(_settings(text)), before or Options()
    for key in given:
        if key not in _READERS and key not in _WITHOUT_EFFECT and key not in _NOT_MODELLED:
            raise ValueError(f"Unrecognized key '{key}' in Accelerator allocator config.")
    refused = tuple(f"{key}:{value}" for key, value in given.items() if _NOT_MODELLED.get(key, value) != value)
    found = replace(before, max_split=UNLIMITED, max_non_split_rounding=before.large_segment, gc_threshold=0.0,
                    divisions=_NO_STEPS, unknown=refused)  # fmt: skip
    for key, read in _READERS.items():
        if key in given:
            try:
                found = replace(found, **read(given[key], found))
            except ValueError as error:
                raise ValueError(f"CachingAllocator option {key}:{given[key]} is wrong: {error}") from None
    return found


def _settings(text: str) -> Iterator[tuple[str, str]]:
    """Each key with its value."""
    text, place = "".join(text.split()), 0
    while place < len(text):
        found = _SETTING.match(text, place)
        if found is None:
            raise ValueError(f"The allocator's settings are key:value,key:value. This is not: {text[place:]!r}")
        yield found[1], found[2]
        place = found.end()


def _mib(text: str, least: int) -> int:
    """A number of MiB in bytes. least: the bytes that it must have."""
    size = int(text) * MIB
    if size < least:
        raise ValueError(f"it must be >= {least // MIB}")
    return min(size, UNLIMITED)


def _fraction(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1:
        raise ValueError("it must be in [0.0, 1.0]")
    return value


def _threshold(text: str) -> float:
    value = _fraction(text)
    if value in (0, 1):
        raise ValueError("it must be in (0.0, 1.0)")
    return value


def _truth(text: str) -> bool:
    if text not in ("True", "False"):
        raise ValueError("it must be True or False")
    return text == "True"


def _power_of_2(text: str) -> int:
    value = int(text)
    if value < 1 or value.bit_count() != 1:
        raise ValueError("divisions and intervals must be powers of 2")
    return value


def _divisions(text: str) -> tuple[int, ...]:
    """One number for all sizes, or [MiB where an interval begins:number,...,>:number for all above]. 0: no steps."""
    if text[0] != "[":
        return (_power_of_2(text),) * INTERVALS
    result, last = [0] * INTERVALS, -1
    for entry in filter(None, text[1:-1].split(",")):
        boundary, _, steps = entry.partition(":")
        number = 0 if steps == "0" else _power_of_2(steps)
        if boundary == ">":
            result[last + 1 :] = [number] * (INTERVALS - last - 1)
            continue
        first, last = last < 0, min(_power_of_2(boundary).bit_length() - 1, INTERVALS - 1)
        if first:
            result[:last] = [number] * last
        result[last] = number
    return tuple(result)


# The limits of others depend on large_segment_size_mb: PyTorch reads it first.
_READERS: dict[str, Callable[[str, Options], dict]] = {
    "large_segment_size_mb": lambda text, found: dict.fromkeys(
        ("large_segment", "max_non_split_rounding"), _mib(text, 11 * MIB)
    ),
    "max_split_size_mb": lambda text, found: {"max_split": _mib(text, found.large_segment)},
    "max_non_split_rounding_mb": lambda text, found: {"max_non_split_rounding": _mib(text, found.large_segment)},
    "garbage_collection_threshold": lambda text, found: {"gc_threshold": _threshold(text)},
    "expandable_segments": lambda text, found: {"expandable": _truth(text)},
    "roundup_power2_divisions": lambda text, found: {"divisions": _divisions(text)},
    "per_process_memory_fraction": lambda text, found: {"fraction": _fraction(text)},
}
