"""The request for memory that failed, read from PyTorch's error."""

import re
from dataclasses import dataclass

from helpers.sizes import GiB, MiB, format_bytes

# torch.OutOfMemoryError contains its figures only as text, which is the same on real and on virtual GPUs
# (c10/cuda/CUDACachingAllocator.cpp of PyTorch 2.11 to 2.15). They are rounded to two decimals of PyTorch's unit.
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
    """The request that failed on GPU number `gpu`, and the memory that was in use at that time. Sizes are in bytes,
    rounded as in PyTorch's text to a hundredth of its unit.

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
    def room(self) -> int:
        """The bytes that PyTorch could still reserve."""
        return self.free if self.allowed is None else min(self.free, max(0, self.allowed - self.reserved))

    @property
    def limited(self) -> bool:
        """True if the request exceeded the limit of the process, not the capacity of the GPU."""
        return self.allowed is not None and self.allowed - self.reserved < self.free

    @property
    def over(self) -> int:
        """The bytes by which `requested` exceeds what PyTorch could still reserve. Further requests are not known."""
        return max(0, self.requested - self.room)

    def described(self) -> str:
        """What happened to the GPU: "ran out of its 16.0 GiB: with ...", to be written after its name."""
        limit = f"its {format_bytes(self.capacity)}"
        if self.allowed is not None and self.limited:
            limit = f"the {format_bytes(self.allowed)} that this process may reserve"
        over = f", which is {format_bytes(self.over)} too much" if self.over else ""
        held = f"{format_bytes(self.allocated)} allocated and {format_bytes(self.reserved)} reserved"
        return f"ran out of {limit}: with {held} it was asked for {format_bytes(self.requested)} more{over}"

    def __str__(self) -> str:
        return f"GPU {self.gpu} {self.described()}"


def read_refusal(error: BaseException) -> Refusal | None:
    """Return the figures in the text of `error`, or None if the text is not from PyTorch's caching allocator.

    DataParallel puts a replica's error and its traceback into the text of another error, so the last match counts.
    """
    text = str(error)
    text = text[max(0, text.rfind(_BEGINNING)) :]
    gpu = re.search(r"GPU (\d+) has a total capacity", text)
    sizes: dict[str, int] = {}
    for name, pattern in _FIGURES.items():
        if match := re.search(pattern, text):
            sizes[name] = round(float(match[1]) * _UNITS[match[2]])
    allowed = sizes.pop("allowed", None)
    if not text.startswith(_BEGINNING) or gpu is None or len(sizes) < len(_FIGURES) - 1:
        return None
    reserved = sizes["allocated"] + sizes.pop("unallocated")
    return Refusal(int(gpu[1]), **sizes, reserved=reserved, allowed=allowed)


def describe_oom(error: BaseException) -> str:
    """Describe an out-of-memory error in one line, with PyTorch's own words if they have no figures."""
    first_line, *_ = str(error).splitlines() or [""]
    refusal = read_refusal(error)
    return f"{refusal}." if refusal else f"Memory ran out; PyTorch does not say where: {first_line}"


def free_frames(error: BaseException | None) -> None:
    """Free the tensors that `error` keeps alive: the variables of the functions that it and the errors before it left.

    A traceback refers to their frames, and a frame often refers to the error again, so that only gc would free them.
    """
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__
