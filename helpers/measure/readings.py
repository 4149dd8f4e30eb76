"""The memory of GPUs at one moment, displayed as a table."""

from collections import Counter, UserList
from collections.abc import Iterable
from dataclasses import dataclass
from textwrap import fill

from helpers.measure.refusal import Refusal
from helpers.sizes import MiB, digits

NO_READINGS = "No readings yet."
LINE = 110  # characters of text that a notebook shows without a scroll bar
_COLUMNS = {  # by source: the headings, and the fields of a reading
    "PyTorch (torch.cuda)": {
        "allocated": "allocated",
        "peak allocated": "peak_allocated",
        "reserved": "reserved",
        "peak reserved": "peak_reserved",
        "capacity": "capacity",
    },
    "driver (GPUtil)": {"used": "driver_used", "total": "driver_total"},
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
    """A list of `Reading` that is displayed as a table. note: sentences about what the figures do not show,
    which a slice does not have."""

    def __init__(self, readings: Iterable[Reading] = (), note: str = ""):
        super().__init__(readings)
        self.note = note

    def __repr__(self) -> str:
        if not self:
            return NO_READINGS
        groups = [_with_heading("", [["GPU", *(str(reading.index) for reading in self)]])]
        groups += [_with_heading(source, self._columns(source)) for source in _COLUMNS]
        rows = ["  ".join(row).rstrip() for row in zip(*groups, strict=True)]
        kinds = Counter(reading.name for reading in self)
        caption = "Memory in MiB: " + ", ".join(f"{count} x {name}" for name, count in kinds.items())
        return "\n".join([fill(caption, LINE), *rows, *([fill(self.note, LINE)] if self.note else [])])

    __str__ = __repr__

    def _columns(self, source: str) -> list[list[str]]:
        """For each figure of `source`, a column of strings that begins with its heading."""
        columns = []
        for heading, field in _COLUMNS[source].items():
            sizes = [getattr(reading, field) for reading in self]
            largest = max((size or 0 for size in sizes), default=0) / MiB
            decimals = 0 if largest >= 1000 else 1 if largest >= 100 else 2  # equal in one column, so that digits align
            columns.append([heading, *("-" if size is None else digits(size / MiB, decimals) for size in sizes)])
        return columns


def _with_heading(heading: str, columns: list[list[str]]) -> list[str]:
    """Join columns side by side, below a rule with a heading. Returns lines of equal width."""
    columns = [[cell.rjust(max(map(len, column))) for cell in column] for column in columns]
    rows = ["  ".join(row) for row in zip(*columns, strict=True)]
    width = max(len(rows[0]), len(heading) + 4 if heading else 0)
    return [f" {heading} ".center(width, "-" if heading else " "), *(row.rjust(width) for row in rows)]
