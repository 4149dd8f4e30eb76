"""Reads the figures of PyTorch's out-of-memory error, in bytes.

torch.OutOfMemoryError contains its figures only as text, which is the same on real and on virtual GPUs
(c10/cuda/CUDACachingAllocator.cpp of PyTorch 2.11 to 2.15). They are rounded to two decimals of PyTorch's unit:

    CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total capacity of 11.91 GiB of which 1.25 GiB is
    free. [...] Of the allocated memory 9.20 GiB is allocated by PyTorch, and 900.00 MiB is reserved by PyTorch but
    unallocated.
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

    requested: the segment that PyTorch requested from the driver, which is a tensor's size rounded up to 2 or 20 MiB.
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
    def room(self) -> int:
        """The bytes that PyTorch could still have reserved."""
        return max(0, self.allowed - self.reserved) if self.limited else self.free

    @property
    def over(self) -> int:
        """The bytes by which `requested` exceeds `room`. The requests that would have followed are not known."""
        return max(0, self.requested - self.room)

    def __str__(self) -> str:
        limit = f"the {format_bytes(self.allowed)} that this process may reserve" if self.limited else ""
        return (
            f"GPU {self.gpu} ran out of {limit or f'its {format_bytes(self.capacity)}'}: with "
            f"{format_bytes(self.allocated)} allocated and {format_bytes(self.reserved)} reserved it was asked for "
            f"{format_bytes(self.requested)} more"
            + (f", which is {format_bytes(self.over)} too much" if self.over else "")
        )


def read_refusal(error: BaseException) -> Refusal | None:
    """Return the figures in the text of `error`, or None if the text is not from PyTorch's caching allocator.

    DataParallel puts a replica's error and its traceback into the text of another error, so the last match counts.
    """
    _, found, text = str(error).rpartition(_BEGINNING)
    text = found + text
    gpu = re.search(r"GPU (\d+) has a total capacity", text)
    sizes = {}
    for name, pattern in _FIGURES.items():
        match = re.search(pattern, text)
        sizes[name] = round(float(match[1]) * _UNITS[match[2]]) if match else None
    unallocated, allowed = sizes.pop("unallocated"), sizes.pop("allowed")
    if not found or gpu is None or unallocated is None or None in sizes.values():
        return None
    return Refusal(int(gpu[1]), **sizes, reserved=sizes["allocated"] + unallocated, allowed=allowed)
