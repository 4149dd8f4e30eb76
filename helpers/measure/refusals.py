"""Reads the figures of PyTorch's out-of-memory error, in bytes.

torch.OutOfMemoryError contains its figures only as text, which is the same on real and on virtual GPUs
(c10/cuda/CUDACachingAllocator.cpp of PyTorch 2.11 to 2.15). They are rounded to two decimals of PyTorch's unit.
"""

import re
from dataclasses import dataclass

from helpers.measure.sizes import GiB, MiB, format_bytes

_BEGINNING = "CUDA out of memory. Tried to allocate"
_UNITS = {"bytes": 1, "KiB": 1024, "MiB": MiB, "GiB": GiB}
_SIZE = r"([\d.]+) (bytes|KiB|MiB|GiB)"
_FIGURES = {
    "requested": rf"Tried to allocate {_SIZE}",
    "capacity": rf"has a total capacity of {_SIZE}",
    "free": rf"of which {_SIZE} is free",
    "allowed": rf"{_SIZE} allowed;",
    "allocated": rf"Of the allocated memory {_SIZE} is allocated by PyTorch",
    "unallocated": rf"{_SIZE} is reserved by PyTorch but unallocated",
}


@dataclass(frozen=True)
class Refusal:
    """The request that failed on GPU number `gpu`, and the memory that was in use at that time. Sizes are in bytes.

    allowed: how much torch.cuda.set_per_process_memory_fraction lets this process reserve, or None without a limit.
    """

    gpu: int
    requested: int
    capacity: int
    free: int
    allocated: int
    reserved: int
    allowed: int | None = None

    @property
    def limited(self) -> bool:
        """True if the request exceeded the limit of the process, not the capacity of the GPU."""
        return self.allowed is not None and self.allowed - self.reserved < self.free

    @property
    def over(self) -> int:
        """The bytes by which `requested` exceeds what PyTorch could still reserve. Further requests are not known."""
        return max(0, self.requested - (max(0, self.allowed - self.reserved) if self.limited else self.free))

    def __str__(self) -> str:
        limit = f"its {format_bytes(self.capacity)}"
        limit = f"the {format_bytes(self.allowed)} that this process may reserve" if self.limited else limit
        over = f", which is {format_bytes(self.over)} too much" if self.over else ""
        held = f"{format_bytes(self.allocated)} allocated and {format_bytes(self.reserved)} reserved"
        return (
            f"GPU {self.gpu} ran out of {limit}: with {held} it was asked for {format_bytes(self.requested)} more{over}"
        )


def read_refusal(error: BaseException) -> Refusal | None:
    """Return the figures in the text of `error`, or None if the text is not from PyTorch's caching allocator.

    DataParallel puts a replica's error and its traceback into the text of another error, so the last match counts.
    """
    _, found, text = str(error).rpartition(_BEGINNING)
    text = found + text
    gpu = re.search(r"GPU (\d+) has a total capacity", text)
    matches = {name: re.search(pattern, text) for name, pattern in _FIGURES.items()}
    sizes = {name: round(float(each[1]) * _UNITS[each[2]]) if each else None for name, each in matches.items()}
    unallocated, allowed = sizes.pop("unallocated"), sizes.pop("allowed")
    if not found or gpu is None or unallocated is None or None in sizes.values():
        return None
    return Refusal(int(gpu[1]), **sizes, reserved=sizes["allocated"] + unallocated, allowed=allowed)
