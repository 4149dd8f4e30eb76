"""The GPUs as their driver sees them: which there are, and which process uses how much of their memory."""

from __future__ import annotations

from typing import NamedTuple

DRIVER = "virtual"  # the version that tools show


class GPUView(NamedTuple):
    """One GPU, hidden ones too. Sizes are bytes.

    slot: its number in the machine. processes: (process id, bytes) of those that use it. load: the fraction of the last
    modelled second in which it ran kernels; None where that is not known, because another process has the clock.
    """

    slot: int
    name: str
    uuid: str
    memory: int
    capability: tuple[int, int]
    processes: list[tuple[int, int]]
    load: float | None

    @property
    def used(self) -> int:
        """Bytes that all processes use together."""
        return sum(nbytes for _, nbytes in self.processes)

    @property
    def bus_id(self) -> str:
        """Its address on the PCI bus, as NVML writes it."""
        return f"00000000:{self.slot + 1:02X}:00.0"
