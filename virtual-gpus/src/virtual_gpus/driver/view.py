"""The GPUs as their driver sees them: which there are, and which process uses how much of their memory."""

from __future__ import annotations

import json
import os
from typing import NamedTuple

from virtual_gpus.processes.children import VARIABLE
from virtual_gpus.processes.shared_memory import FOLDER, held_by_processes

DRIVER = "virtual"  # the version that tools show


class GPUView(NamedTuple):
    """One GPU, hidden ones too. Sizes are bytes.

    slot: its number in the machine. processes: (process id, bytes) of those that use it. load: the fraction of the last
    modelled second in which it ran kernels.
    """

    slot: int
    name: str
    uuid: str
    memory: int
    capability: tuple[int, int]
    processes: list[tuple[int, int]]
    load: float

    @property
    def used(self) -> int:
        """Bytes that all processes use together."""
        return sum(nbytes for _, nbytes in self.processes)

    @property
    def free(self) -> int:
        """Bytes that no process uses."""
        return self.memory - self.used

    @property
    def percent(self) -> int:
        """The load in percent."""
        return round(100 * self.load)

    @property
    def bus_id(self) -> str:
        """Its address on the PCI bus, as nvidia-smi writes it."""
        return f"00000000:{self.slot + 1:02X}:00.0"


def from_environment() -> list[GPUView] | None:
    """The GPUs that this process inherits, see `processes.children`. None if there are none.

    The process that has the clock usually waits for this one, so the load is 0.
    """
    try:
        facts = json.loads(os.environ.get(VARIABLE, "null"))
    except ValueError:
        facts = None
    if not isinstance(facts, dict):
        return None
    count = len(facts["gpus"])
    held = held_by_processes(os.environ.get(FOLDER), facts["machine"], count)
    return [
        GPUView(slot, name, uuid, memory, (major, minor), [(p, used[slot]) for p, used in held if used[slot]], 0.0)
        for slot, (name, uuid, memory, (major, minor)) in enumerate(facts["gpus"])
    ]
