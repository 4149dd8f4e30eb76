"""Machines with GPUs, from data sheets: the room on a card, and what an all-reduce takes on many of them. Modelled.

    cluster = Cluster("A100", per_machine=8, network="InfiniBand HDR")
    cluster.room                                    # bytes that PyTorch can have on a card
    cluster.all_reduce_seconds(87_001_280, 64)      # around a ring of 64 GPUs in eight machines

The figures are those that virtual GPUs use (`help("virtual_gpus.clock.links")` says where they come from): a ring moves
2 (n - 1) / n of the bytes over each link, and its slowest link sets the pace. No GPU is needed, real or virtual.
"""

from __future__ import annotations

from dataclasses import dataclass

from helpers.gpus import GPU_KINDS as KINDS
from helpers.gpus import NETWORKS, Rates, all_reduce_seconds, copy_seconds, data_sheet, rates

__all__ = ["Cluster", "KINDS", "NETWORKS"]


@dataclass(frozen=True)
class Cluster:
    """Machines of `per_machine` GPUs of a `kind`. links: within a machine, the kind's own if None ("PCIe 3", ...,
    "NVLink pairs", "NVSwitch"). network: between machines, a name of `NETWORKS`. ValueError for unknown names."""

    kind: str
    per_machine: int = 4
    links: str | None = None
    network: str = "Ethernet 100"

    def __post_init__(self):
        self.all_reduce_seconds(1, self.per_machine)

    @property
    def name(self) -> str:
        """The card's name, as torch.cuda.get_device_properties prints it."""
        return data_sheet(self.kind).name

    @property
    def room(self) -> int:
        """Bytes that PyTorch can have on a card: its memory without CUDA's context."""
        return data_sheet(self.kind).memory - data_sheet(self.kind).context

    @property
    def rates(self) -> Rates:
        """Operations and bytes per second that a card reaches, modelled."""
        return rates(self.kind)

    def machines(self, ranks: int) -> int:
        """How many machines `ranks` GPUs take."""
        return -(-ranks // self.per_machine)

    def all_reduce_seconds(self, nbytes: int, ranks: int) -> float:
        """Modelled seconds of an all-reduce of `nbytes` on `ranks` GPUs, one machine filled after the other.

        Raises ValueError for ranks that leave a machine partly empty.
        """
        return all_reduce_seconds(nbytes, ranks, self.kind, self.per_machine, self.links, self.network)

    def copy_seconds(self, nbytes: float, ranks: int) -> float:
        """Modelled seconds of a copy to a neighbour among `ranks` GPUs, over the slowest link between them.

        Raises ValueError for ranks that leave a machine partly empty.
        """
        return copy_seconds(nbytes, ranks, self.kind, self.per_machine, self.links, self.network)
