"""A reading of one GPU's memory, and a list of them that shows itself as a table."""

from collections import UserList
from collections.abc import Iterable
from dataclasses import dataclass, replace

from helpers.measure.memory.refusals import Refusal
from helpers.measure.memory.sizes import GiB, MiB, format_bytes, to_bytes
from helpers.measure.memory.table import as_html, as_text

__all__ = ["GiB", "MiB", "Reading", "Readings", "Refusal", "format_bytes", "to_bytes", "with_capacity"]


@dataclass(frozen=True)
class Reading:
    """The memory of one GPU at one moment. Every size is in bytes.

    The driver's figures are None where GPUtil does not list this GPU or does not know the figure.
    `driver_load` runs from 0 to 1; `driver_index` is the GPU's number in nvidia-smi.
    `refused`: what this GPU was asked for when it ran out of memory and so ended the run that was measured, else None.
    A peak may be larger than the capacity: an estimate, or a run on a larger card (`with_capacity`).
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
    refused: Refusal | None = None

    def edge(self, field: str) -> int:
        """The capacity that the figure `field` counts against: the driver's own total for the driver's figures."""
        return self.driver_total if field.startswith("driver") and self.driver_total else self.capacity


class Readings(UserList):
    """A list of `Reading` that shows itself as a table in MiB.

    `note`: sentences on what the figures do not say: that memory ran out, that the driver's are missing or are those
    of other cards than PyTorch's.
    """

    def __init__(self, readings: Iterable[Reading] = (), note: str = ""):
        super().__init__(readings)
        self.note = note

    def __repr__(self) -> str:
        return as_text(self)

    __str__ = __repr__

    def _repr_html_(self) -> str:
        return as_html(self)


def with_capacity(readings: Iterable[Reading], capacity: int | str | None) -> Readings:
    """The same figures on cards of `capacity`, bytes or text such as "12 GiB"; None: as they are.

    Raises ValueError for a run that ran out of memory: what it would have taken on another card is not known.
    """
    if capacity is None:
        return readings
    size = to_bytes(capacity)
    stopped = [reading.index for reading in readings if reading.refused]
    if stopped:
        raise ValueError(
            f"GPU {stopped[0]} ran out of memory, so what this run needs is not known: leave capacity out, or run it "
            f"on GPUs of {format_bytes(size)} to see."
        )
    changed = (replace(each, capacity=size, driver_total=each.driver_total and size) for each in readings)
    return Readings(changed, getattr(readings, "note", ""))
