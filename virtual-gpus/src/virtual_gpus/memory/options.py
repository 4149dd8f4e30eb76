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

A text is parsed as in c10/core/AllocatorConfig.cpp and c10/cuda/CUDAAllocatorConfig.cpp, with the same errors. All
sizes are in bytes. This module does not import torch.
"""

from __future__ import annotations

import os
import re
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

_SIZE, _DECIMAL = re.compile(r"[+-]?\d+"), re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
# What changes no figure of GPU memory: how host memory is pinned, when a lock is held, what a graph capture does.
_WITHOUT_EFFECT = {
    "pinned_use_background_threads": bool, "pinned_use_cuda_host_register": bool, "pinned_use_hip_host_register": bool,
    "pinned_num_register_threads": int, "pinned_reserve_segment_size_mb": int, "pinned_max_round_threshold_mb": int,
    "pinned_max_cached_size_mb": int, "pinned_free_catch_all": bool, "release_lock_on_cudamalloc": bool,
    "release_lock_on_hipmalloc": bool, "graph_capture_record_stream_reuse": bool,
}  # fmt: skip
_NOT_MODELLED = {"expandable_segments_reserve", "expandable_segments_reserve_by_class"}
# What PyTorch 2.11 does not know yet, with the first version that does (asked of each, 2.12 to 2.15).
_NEWER = {"pinned_max_round_threshold_mb": (2, 13), "pinned_max_cached_size_mb": (2, 13),
          "pinned_free_catch_all": (2, 12), "throw_on_cudamalloc_oom": (2, 12),
          "expandable_segments_reserve": (2, 15), "expandable_segments_reserve_by_class": (2, 15)}  # fmt: skip


def environment_text() -> str:
    """What the environment asks for; "" if nothing."""
    return next((os.environ[name] for name in VARIABLES if name in os.environ), "")


def parse(text: str, before: Options | None = None, version: tuple[int, int] = (2, 15)) -> Options:
    """The options after `text` was set, where `before` held, in the PyTorch of that version.

    As in PyTorch max_split_size_mb, garbage_collection_threshold and roundup_power2_divisions fall back to their
    defaults where `text` does not name them, and the others stay. Raises PyTorch's ValueError for a key or value that
    it refuses, and its RuntimeError for a text that ends too early.
    """
    before = before or Options()
    found = replace(before, max_split=UNLIMITED, gc_threshold=0.0, divisions=_NO_STEPS, unknown=())
    tokens = _Tokens(text)
    for i, token in enumerate(tokens.all):  # the limits of others depend on it: PyTorch looks for it first
        if token == "large_segment_size_mb":
            found = replace(found, large_segment=_large_segment(tokens, i + 2))
    found = replace(found, max_non_split_rounding=found.large_segment)
    i = 0
    while i < len(tokens.all):
        if tokens[i] in _NEWER and version < _NEWER[tokens[i]]:
            raise _unknown(tokens[i])
        changes, i = _option(tokens, i, found)
        found = replace(found, **changes)
        i += 2  # past the last token of the value, and the comma
    return found


class _Tokens:
    """Keys, values and the marks , : [ ] of a text without its white space. Marks are not checked, as in PyTorch."""

    def __init__(self, text: str):
        self.all = re.findall(r"[,:\[\]]|[^,:\[\]]+", "".join(text.split()))

    def __getitem__(self, i: int) -> str:
        if i >= len(self.all):
            raise RuntimeError(
                'i < config_.size() INTERNAL ASSERT FAILED at "c10/core/AllocatorConfig.h", please report a bug to '
                "PyTorch. Index out of bounds in ConfigTokenizer"
            )
        return self.all[i]

    def size(self, i: int) -> int:
        """An integer, read as C++ does: as far as digits go, and a negative one from the top."""
        found = _SIZE.match(self[i])
        if not found:
            raise ValueError("stoull")
        if abs(int(found[0])) > UNLIMITED:
            raise IndexError("stoull")
        return int(found[0]) & UNLIMITED

    def number(self, i: int) -> float:
        """A number with or without a fraction."""
        found = _DECIMAL.match(self[i])
        if not found:
            raise ValueError("stod")
        return float(found[0])

    def truth(self, i: int) -> bool:
        """True or False, written so."""
        if self[i] not in ("True", "False"):
            raise ValueError(f"Expected 'True' or 'False' at index {i} in ConfigTokenizer but got '{self[i]}'")
        return self[i] == "True"

    def end(self, i: int) -> int:
        """Where the value that begins at `i` ends."""
        if self[i] == "[":
            while self[i] != "]":
                i += 1
        return i


def _unknown(key: str) -> ValueError:
    return ValueError(f"Unrecognized key '{key}' in Accelerator allocator config.")


def _option(tokens: _Tokens, i: int, found: Options) -> tuple[dict, int]:
    """What the option at `i` changes, and where its value ends."""
    key, value = tokens[i], i + 2
    if key in _READERS:
        return _READERS[key](tokens, value, found), tokens.end(value)
    if key in _NOT_MODELLED:
        text = "".join(tokens.all[value : tokens.end(value) + 1])
        return {"unknown": (*found.unknown, f"{key}:{text}")}, tokens.end(value)
    if key not in _WITHOUT_EFFECT:
        raise _unknown(key)
    {bool: tokens.truth, int: tokens.size}[_WITHOUT_EFFECT[key]](value)
    if key in _CHECKS:
        _CHECKS[key](tokens.size(value))
    return {}, value


def _reserve_segment(size: int) -> None:
    if not size:
        raise ValueError("Pinned reserve segment size has to be greater than 0")


def _register_threads(count: int) -> None:
    if count.bit_count() != 1:
        raise ValueError(f"Number of register threads has to be power of 2, got {count}")
    if count > 128:
        raise ValueError(f"Number of register threads should be less than or equal to 128, got {count}")


_CHECKS = {"pinned_num_register_threads": _register_threads, "pinned_reserve_segment_size_mb": _reserve_segment}


def _large_segment(tokens: _Tokens, i: int) -> int:
    size = tokens.size(i)
    if size <= 10:
        raise ValueError("CachingAllocator option large_segment_size_mb must be > 10 MB")
    return min(size * MIB, UNLIMITED)


def _at_least_a_segment(name: str):
    def read(tokens, i, found):
        size, least = tokens.size(i), found.large_segment // MIB
        if size < least:
            raise ValueError(f"CachingAllocator option {name}_mb too small, must be >= {least}")
        return min(size, UNLIMITED // MIB) * MIB

    return read


def _max_split(tokens, i, found):
    return {"max_split": _at_least_a_segment("max_split_size")(tokens, i, found)}


def _max_non_split_rounding(tokens, i, found):
    return {"max_non_split_rounding": _at_least_a_segment("max_non_split_rounding")(tokens, i, found)}


def _gc_threshold(tokens, i, found):
    value = tokens.number(i)
    if not 0 < value < 1:
        raise ValueError("garbage_collect_threshold is invalid, set it in (0.0, 1.0)")
    return {"gc_threshold": value}


def _fraction(tokens, i, found):
    value = tokens.number(i)
    if not 0 <= value <= 1:
        raise ValueError("per_process_memory_fraction is invalid, set it in [0.0, 1.0]")
    return {"fraction": value}


def _backend(tokens, i, found):
    if tokens[i] not in ("native", "cudaMallocAsync"):
        raise ValueError("Unknown allocator backend, options are native and cudaMallocAsync")
    return {} if tokens[i] == "native" else {"unknown": (*found.unknown, f"backend:{tokens[i]}")}


def _throw_early(tokens, i, found):
    return {"unknown": (*found.unknown, "throw_on_cudamalloc_oom:True")} if tokens.truth(i) else {}


def _divisions(tokens, i, found):
    if tokens[i] != "[":
        value = tokens.size(i)
        if value.bit_count() != 1:
            raise ValueError("For roundups, the divisions has to be power of 2 ")
        return {"divisions": (value,) * INTERVALS}
    made, last = [], -1
    result = [0] * INTERVALS
    while tokens[i + 1] != "]":
        made.append(_interval(tokens, i + 1))
        i += 4
        if tokens[i] == "]":
            break
    for position, (boundary, value) in enumerate(made):
        if boundary is None:
            result[last + 1 :] = [value] * (INTERVALS - last - 1)
            continue
        last = min(boundary.bit_length() - 1, INTERVALS - 1)
        if not position:
            result[:last] = [value] * last
        result[last] = value
    return {"divisions": tuple(result)}


def _interval(tokens, i):
    """(MiB where an interval begins, or None for all above the last one; its number of divisions)."""
    value = tokens.size(i + 2)
    if value and value.bit_count() != 1:
        raise ValueError("For roundups, the divisions has to be power of 2 or 0 to disable roundup ")
    if tokens[i] == ">":
        return None, value
    boundary = tokens.size(i)
    if boundary.bit_count() != 1:
        raise ValueError("For roundups, the intervals have to be power of 2 ")
    tokens[i + 3]  # the comma or the bracket that has to follow
    return boundary, value


_READERS = {
    "max_split_size_mb": _max_split,
    "max_non_split_rounding_mb": _max_non_split_rounding,
    "garbage_collection_threshold": _gc_threshold,
    "expandable_segments": lambda tokens, i, found: {"expandable": tokens.truth(i)},
    "roundup_power2_divisions": _divisions,
    "large_segment_size_mb": lambda tokens, i, found: {},
    "per_process_memory_fraction": _fraction,
    "backend": _backend,
    "throw_on_cudamalloc_oom": _throw_early,
}
