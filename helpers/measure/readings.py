"""What is read from GPUs: their memory, the request that failed, and bytes as text.

In the whole course, 1 GiB is 2^30 bytes and 1 MiB is 2^20 bytes.
"""

import re
from collections import Counter, UserList
from collections.abc import Iterable
from dataclasses import dataclass
from textwrap import fill

MiB = 2**20
GiB = 2**30


def unit_of(count: float) -> tuple[int, str]:
    """Return the unit for `count` bytes, as its size in bytes and its name: GiB from 1 GiB on, otherwise MiB."""
    return (GiB, "GiB") if abs(count) >= GiB else (MiB, "MiB")


def format_bytes(count: float | None, unit: str | None = None) -> str:
    """Format `count` bytes with at least three digits, in `unit` or that of `unit_of`: "16.3 GiB". None: "unknown"."""
    if count is None:
        return "unknown"
    unit = unit or unit_of(count)[1]
    value = count / {"GiB": GiB, "MiB": MiB}[unit]
    return f"{digits(value, 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2)} {unit}"


def digits(value: float, decimals: int) -> str:
    """Format `value` with this number of decimals. A positive value that would be rounded to zero becomes "<0.01"."""
    smallest = 10**-decimals
    return f"<{smallest:g}" if 0 < value < smallest / 2 else f"{value:,.{decimals}f}"


# ---- the request that failed -----------------------------------------------------------------------------------------

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
        room = self.free if self.allowed is None else min(self.free, max(0, self.allowed - self.reserved))
        return max(0, self.requested - room)

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
    sizes = {name: round(float(each[1]) * _UNITS[each[2]]) for name, each in matches.items() if each}
    allowed = sizes.pop("allowed", None)
    if not found or gpu is None or len(sizes) < len(_FIGURES) - 1:
        return None
    reserved = sizes["allocated"] + sizes.pop("unallocated")
    return Refusal(int(gpu[1]), **sizes, reserved=reserved, allowed=allowed)


def describe_oom(error: BaseException) -> str:
    """Describe an out-of-memory error in one line, with PyTorch's own words if they have no figures."""
    first_line, *_ = str(error).splitlines() or [""]
    refusal = read_refusal(error)
    return f"{refusal}." if refusal else f"Memory ran out; PyTorch does not say where: {first_line}"


# ---- readings --------------------------------------------------------------------------------------------------------

LINE = 110  # characters of text that a notebook shows without a scroll bar
_COLUMNS = {
    "PyTorch (torch.cuda)": ("allocated", "peak allocated", "reserved", "peak reserved", "capacity"),
    "driver (GPUtil)": ("used", "total"),
}


@dataclass(frozen=True)
class Reading:
    """The memory of one GPU at one moment. Every size is in bytes.

    driver_used, driver_total: None if GPUtil does not list this GPU. refused: the request that ended the measured run.
    """

    index: int
    name: str
    capacity: int
    allocated: int
    peak_allocated: int
    reserved: int
    peak_reserved: int
    driver_used: int | None = None
    driver_total: int | None = None
    refused: Refusal | None = None


class Readings(UserList[Reading]):
    """A list of `Reading` that is displayed as a table. note: sentences about what the figures do not show."""

    def __init__(self, readings: Iterable[Reading] = (), note: str = ""):
        super().__init__(readings)
        self.note = note

    def __repr__(self) -> str:
        if not self:
            return "No readings yet."
        groups = [_with_heading("", [["GPU", *(str(reading.index) for reading in self)]])]
        groups += [_with_heading(source, self._columns(source)) for source in _COLUMNS]
        rows = ["  ".join(row).rstrip() for row in zip(*groups, strict=True)]
        kinds = Counter(reading.name for reading in self)
        caption = "Memory in MiB: " + ", ".join(f"{count} x {name}" for name, count in kinds.items())
        return "\n".join([fill(caption, LINE), *rows, *([fill(self.note, LINE)] if self.note else [])])

    __str__ = __repr__

    def _columns(self, source: str) -> list[list[str]]:
        """For each figure of `source`, a column of strings that begins with its heading."""
        before = "driver_" if source.startswith("driver") else ""
        found = []
        for heading in _COLUMNS[source]:
            sizes = [getattr(reading, before + heading.replace(" ", "_")) for reading in self]
            largest = max((size or 0 for size in sizes), default=0) / MiB
            decimals = 0 if largest >= 1000 else 1 if largest >= 100 else 2  # equal in one column, so that digits align
            found.append([heading, *("-" if size is None else digits(size / MiB, decimals) for size in sizes)])
        return found


def _with_heading(heading: str, columns: list[list[str]]) -> list[str]:
    """Join columns side by side, below a rule with a heading. Returns lines of equal width."""
    columns = [[cell.rjust(max(map(len, column))) for cell in column] for column in columns]
    rows = ["  ".join(row) for row in zip(*columns, strict=True)]
    width = max(len(rows[0]), len(heading) + 4 if heading else 0)
    return [f" {heading} ".center(width, "-" if heading else " "), *(row.rjust(width) for row in rows)]
