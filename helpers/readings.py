"""A reading of one GPU's memory, a list of them that shows itself as a table, and bytes in words."""

from collections import UserList
from dataclasses import dataclass
from html import escape

MiB = 2**20
GiB = 2**30


@dataclass(frozen=True)
class Reading:
    """The memory of one GPU at one moment. Every size is in bytes.

    The driver's figures are None where GPUtil does not list this GPU or does not know the figure.
    `driver_load` runs from 0 to 1; `driver_index` is the GPU's number in nvidia-smi.
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
    driver_load: float | None = None
    driver_index: int | None = None


class Readings(UserList):
    """A list of `Reading` that shows itself as a table in MiB.

    `note` is a sentence on the driver's figures where they need one: missing, or other cards than PyTorch's.
    """

    def __init__(self, readings=(), note: str = ""):
        super().__init__(readings)
        self.note = note

    def __repr__(self) -> str:
        return _as_text(self)

    __str__ = __repr__

    def _repr_html_(self) -> str:
        return _as_html(self)


def format_bytes(count: float | None, unit: str | None = None) -> str:
    """`count` bytes with three digits or more and a unit: "1.25 MiB", "16.3 GiB"; in `unit` if given."""
    if count is None:
        return "unknown"
    unit = unit or ("GiB" if abs(count) >= GiB else "MiB")
    value = count / {"GiB": GiB, "MiB": MiB}[unit]
    decimals = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return f"{_digits(value, decimals)} {unit}"


_COLUMNS = (  # heading, field of Reading, in MiB or as it is
    ("allocated", "allocated"),
    ("peak allocated", "peak_allocated"),
    ("reserved", "reserved"),
    ("peak reserved", "peak_reserved"),
    ("driver used", "driver_used"),
    ("capacity", "capacity"),
)


def _digits(value: float, decimals: int) -> str:
    smallest = 10**-decimals
    return f"<{smallest:g}" if 0 < value < smallest / 2 else f"{value:,.{decimals}f}"


def _column(values: list[int | None]) -> list[str]:
    """One column in MiB with the same number of decimals throughout, so that the digits line up."""
    largest = max((value or 0 for value in values), default=0) / MiB
    decimals = 0 if largest >= 1000 else 1 if largest >= 100 else 2
    return ["-" if value is None else _digits(value / MiB, decimals) for value in values]


def _cells(readings: Readings) -> list[list[str]]:
    """The table as text, a list of columns, each with its heading first."""
    columns = [["GPU", *(str(reading.index) for reading in readings)]]
    for heading, field in _COLUMNS:
        columns.append([heading, *_column([getattr(reading, field) for reading in readings])])
    if any(reading.driver_load is not None for reading in readings):
        loads = ["-" if r.driver_load is None else f"{r.driver_load:.0%}" for r in readings]
        columns.insert(-1, ["driver load", *loads])
    return columns


def _caption(readings: Readings) -> str:
    names = [reading.name for reading in readings]
    return "Memory in MiB: " + ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))


def _as_text(readings: Readings) -> str:
    if not readings:
        return "No readings yet."
    columns = [[cell.rjust(max(map(len, column))) for cell in column] for column in _cells(readings)]
    lines = [_caption(readings), *("  ".join(row) for row in zip(*columns, strict=True))]
    return "\n".join([*lines, readings.note] if readings.note else lines)


def _as_html(readings: Readings) -> str:
    if not readings:
        return "<p>No readings yet.</p>"
    heads, *rows = zip(*_cells(readings), strict=True)
    head = "".join(f"<th>{cell}</th>" for cell in heads)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    note = f"<p>{escape(readings.note)}</p>" if readings.note else ""
    caption = f"<caption>{escape(_caption(readings))}</caption>"
    return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{note}"
