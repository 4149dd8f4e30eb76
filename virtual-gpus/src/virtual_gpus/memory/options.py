"""The options of the caching allocator. `features.cuda.allocator_settings` reads them from a text.

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

Sources: c10/core/AllocatorConfig.cpp and c10/cuda/CUDAAllocatorConfig.cpp. Sizes are bytes. No torch is imported.
"""

from dataclasses import dataclass, replace

MIB = 1 << 20
UNLIMITED = (1 << 64) - 1
SMALL_REQUEST = MIB  # the small pool serves requests up to this size
SMALL_SEGMENT = 2 * MIB
LARGE_SEGMENT = 20 * MIB  # also the most that may be left over of an oversize block, which is not split
OWN_SEGMENT_FROM = 10 * MIB  # requests of this size or more get a segment of their own


@dataclass(frozen=True)
class Options:
    """The options of an allocator. The defaults are PyTorch's.

    fraction: per_process_memory_fraction, which takes effect when the allocator of a GPU is created.
    text: the settings as they were given.
    """

    max_split: int = UNLIMITED
    gc_threshold: float = 0.0
    expandable: bool = False
    divisions: int = 0
    fraction: float = 1.0
    text: str = ""

    @property
    def is_default(self) -> bool:
        """True if the allocator behaves as with PyTorch's defaults."""
        return replace(self, fraction=1.0, text="") == Options()

    def rounded(self, nbytes: int) -> int:
        """The size of a block for `nbytes` bytes."""
        if self.divisions <= 1 or nbytes <= 512 * self.divisions:
            return (nbytes + 511) & -512
        step = (1 << (nbytes.bit_length() - 1)) // self.divisions
        return (nbytes + step - 1) // step * step

    def segment_size(self, size: int) -> int:
        """The segment that is taken from the GPU for a block of `size` bytes, also in an out-of-memory error."""
        if size <= SMALL_REQUEST:
            return SMALL_SEGMENT
        return LARGE_SEGMENT if size < OWN_SEGMENT_FROM else (size + 2 * MIB - 1) & -(2 * MIB)

    def split_from(self, small: bool) -> int:
        """The least remainder that is split off a block of the small or the large pool."""
        return 512 if small or self.expandable else SMALL_REQUEST + 1
