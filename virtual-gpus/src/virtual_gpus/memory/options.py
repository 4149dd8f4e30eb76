"""The caching allocator's options (c10/core/AllocatorConfig.h), which `allocator_conf` reads from a text.

max_split_size_mb
    A free block of this size or more serves only requests of this size or more, and is not split.
garbage_collection_threshold
    Above this part of the allowed memory (see `set_per_process_memory_fraction`: without it, nothing happens) cached
    blocks that were not used for long go back to the GPU before a new segment is taken.
expandable_segments
    One segment per stream and pool grows by pages of 2 MiB (small) or 20 MiB (large), instead of many of fixed size.
roundup_power2_divisions
    Sizes round up to one of so many steps between two powers of 2.

Sizes are bytes. No torch is imported.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

MIB = 1 << 20
UNLIMITED = (1 << 64) - 1
MIN_BLOCK = 512  # sizes round up to it
SMALL_REQUEST = MIB  # the small pool serves requests up to this size
SMALL_SEGMENT = 2 * MIB
OWN_SEGMENT_FROM = 10 * MIB  # requests of this size or more get a segment of their own
INTERVALS = 16  # 1 MiB, 2 MiB, 4 MiB ... 32 GiB and more


@dataclass(frozen=True)
class Options:
    """How the allocator behaves. The defaults are PyTorch's.

    `fraction` is per_process_memory_fraction, which counts when a GPU's allocator is made. `unknown` names what a text
    asked for that the model does not have: whoever applies the options has to refuse it.
    """

    max_split: int = UNLIMITED
    max_non_split_rounding: int = 20 * MIB
    gc_threshold: float = 0.0
    expandable: bool = False
    large_segment: int = 20 * MIB
    divisions: tuple[int, ...] = (0,) * INTERVALS
    fraction: float = 1.0
    unknown: tuple[str, ...] = ()

    @property
    def plain(self) -> bool:
        """True if the allocator behaves as with PyTorch's defaults."""
        return replace(self, fraction=1.0) == Options()

    def rounded(self, nbytes: int) -> int:
        """The size of a block for `nbytes` bytes."""
        divisions = self.divisions[min(max(nbytes.bit_length() - 21, 0), INTERVALS - 1)]
        if divisions <= 1 or nbytes <= MIN_BLOCK * divisions:
            return (nbytes + MIN_BLOCK - 1) & -MIN_BLOCK
        step = (1 << (nbytes.bit_length() - 1)) // divisions
        return (nbytes + step - 1) // step * step

    def segment_size(self, size: int) -> int:
        """The segment that is taken from the GPU for a block of `size` bytes, also in an out-of-memory error."""
        if size <= SMALL_REQUEST:
            return SMALL_SEGMENT
        return self.large_segment if size < OWN_SEGMENT_FROM else (size + 2 * MIB - 1) & -(2 * MIB)

    def split_from(self, small: bool) -> int:
        """The least remainder that is split off a block of the small or the large pool."""
        return MIN_BLOCK if small or self.expandable else SMALL_REQUEST + 1
