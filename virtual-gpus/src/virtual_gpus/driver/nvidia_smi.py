"""The program nvidia-smi for virtual GPUs, which sees them as a driver does: the table, `-L` and `--query-gpu`.

The table says in its first line that the GPUs are virtual. The other forms, which programs read, say it on stderr.
Source: the manual page of nvidia-smi. What a virtual GPU does not have is "[N/A]", as there.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from virtual_gpus.processes.children import VARIABLE
from virtual_gpus.processes.shared_memory import FOLDER, held_by_processes

_NOTICE = "These GPUs are virtual: the package virtual_gpus models them. There may be no GPU in this machine."
_NO_GPUS = "nvidia-smi: No virtual GPUs are on, or their program did not ask for them in its children."
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
    def bus_id(self) -> str:
        """Its address on the PCI bus, as nvidia-smi writes it."""
        return f"00000000:{self.slot + 1:02X}:00.0"


def from_environment() -> list[GPUView] | None:
    """The GPUs that this process inherits, or None. The process with the clock waits for it, so the load is 0."""
    try:
        facts = json.loads(os.environ.get(VARIABLE, "null"))
    except ValueError:
        facts = None
    if not isinstance(facts, dict):
        return None
    held = held_by_processes(os.environ.get(FOLDER), facts["machine"], len(facts["gpus"]))
    return [
        GPUView(slot, name, uuid, memory, (major, minor), [(p, used[slot]) for p, used in held if used[slot]], 0.0)
        for slot, (name, uuid, memory, (major, minor)) in enumerate(facts["gpus"])
    ]


_Field = tuple[Callable[[GPUView], object], str]  # how to read it, and its unit
_FIELDS: dict[str, _Field] = {
    "name": (lambda gpu: gpu.name, ""),
    "uuid": (lambda gpu: gpu.uuid, ""),
    "pci.bus_id": (lambda gpu: gpu.bus_id, ""),
    "utilization.gpu": (lambda gpu: round(100 * gpu.load), "%"),
    "display_mode": (lambda gpu: "Disabled", ""),
    "index": (lambda gpu: gpu.slot, ""),
    "memory.total": (lambda gpu: gpu.memory >> 20, "MiB"),
    "memory.used": (lambda gpu: gpu.used >> 20, "MiB"),
    "memory.free": (lambda gpu: (gpu.memory - gpu.used) >> 20, "MiB"),
    "driver_version": (lambda gpu: DRIVER, ""),
    "compute_cap": (lambda gpu: "{}.{}".format(*gpu.capability), ""),
    "timestamp": (lambda gpu: time.strftime("%Y/%m/%d %H:%M:%S.000"), ""),
}
_FIELDS |= {"gpu_name": _FIELDS["name"], "gpu_uuid": _FIELDS["uuid"], "gpu_bus_id": _FIELDS["pci.bus_id"]}
_FIELDS |= {"utilization.memory": _FIELDS["utilization.gpu"], "display_active": _FIELDS["display_mode"]}
_NOT_MODELLED = ("clocks.", "compute_mode", "ecc.", "enforced.power.limit", "fan.speed", "gpu_serial", "mig.", "pcie.",
                 "persistence_mode", "power.", "pstate", "serial", "temperature.", "vbios_version")  # fmt: skip


def _select(gpus: list[GPUView], wanted: str | None) -> list[GPUView]:
    if wanted is None:
        return gpus
    names = wanted.split(",")
    selected = [gpu for gpu in gpus if {str(gpu.slot), gpu.uuid, gpu.bus_id} & set(names)]
    if len(selected) < len(names):
        sys.exit("No devices were found")
    return selected


def query_gpus(gpus: list[GPUView], names: Sequence[str], form: Sequence[str]) -> Iterator[str]:
    """The lines of `--query-gpu`. names: fields. form: "csv", and perhaps "noheader" and "nounits"."""
    fields: dict[str, _Field] = {**_FIELDS, "count": (lambda gpu: len(gpus), "")}
    for name in names:
        if name not in fields and not name.startswith(_NOT_MODELLED):
            sys.exit(f'Field "{name}" is not a valid field to query.')
    units = {name: fields[name][1] if name in fields and "nounits" not in form else "" for name in names}
    if "noheader" not in form:
        yield ", ".join(f"{name} [{units[name]}]" if units[name] else name for name in names)
    for gpu in gpus:
        cells = (f"{fields[name][0](gpu)} {units[name]}".rstrip() if name in fields else "[N/A]" for name in names)
        yield ", ".join(cells)


def table(gpus: list[GPUView]) -> Iterator[str]:
    """The lines of nvidia-smi without options, for people to read."""
    rule = f"+{'-' * 78}+"
    yield _NOTICE
    yield time.strftime("%a %b %d %H:%M:%S %Y")
    yield rule
    yield f"| {f'NVIDIA-SMI {DRIVER}':<37}{f'Driver Version: {DRIVER}':<40}|"
    yield rule
    yield f"| {'GPU':<4}{'Name':<33}{'Memory-Usage':>24}  {'GPU-Util':>12}  |"
    yield rule
    for gpu in gpus:
        memory, load = f"{gpu.used >> 20}MiB / {gpu.memory >> 20}MiB", f"{gpu.load:.0%}"
        yield f"| {gpu.slot:<4}{gpu.name:<33}{memory:>24}  {load:>12}  |"
    yield rule
    yield f"| {'Processes: GPU':<22}{'PID':>12}{'GPU Memory':>24}{'':<19}|"
    users = [(gpu.slot, *process) for gpu in gpus for process in gpu.processes]
    for slot, process, used in users:
        yield f"| {slot:>14}{process:>20}{f'{used >> 20}MiB':>24}{'':<19}|"
    if not users:
        yield f"| {'No running processes found':<77}|"
    yield rule


def main() -> None:
    """Answer the command line. Exits with 2 for what is not modelled and with 9 if no virtual GPUs are on."""
    parser = argparse.ArgumentParser(prog="nvidia-smi", description=_NOTICE, allow_abbrev=False)
    parser.add_argument("-L", "--list-gpus", action="store_true")
    parser.add_argument("-i", "--id", default=None, help="a GPU by its number, UUID or bus address")
    parser.add_argument("--query-gpu", default=None, help="fields, separated by commas")
    parser.add_argument("--format", default="csv", help="csv, and perhaps noheader and nounits")
    options = parser.parse_args()
    gpus = from_environment()
    if gpus is None:
        print(_NO_GPUS, file=sys.stderr)
        sys.exit(9)
    gpus, form = _select(gpus, options.id), [part.strip() for part in options.format.split(",")]
    if options.list_gpus:
        lines = iter([f"GPU {gpu.slot}: {gpu.name} (UUID: {gpu.uuid})" for gpu in gpus])
    elif options.query_gpu is not None:
        lines = query_gpus(gpus, [name.strip() for name in options.query_gpu.split(",")], form)
    else:
        print("\n".join(table(gpus)))
        return
    sys.stderr.write(f"{_NOTICE}\n")  # in one go: ranks that ask at once do not mix their lines
    print("\n".join(lines))
