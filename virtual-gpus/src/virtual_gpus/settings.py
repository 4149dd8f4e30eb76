"""The settings of a set of virtual GPUs: their number, their kind and their links. All checks are in this module."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Sequence
from typing import Any

import torch

from virtual_gpus import sanitizer
from virtual_gpus.clock.links import Topology, arrange
from virtual_gpus.clock.measured import Measured, load
from virtual_gpus.gpus import GPUSpec, parse_bytes, spec

sanitizer.switch_off()  # before any module of this package makes a tensor
OLDEST_TORCH, NEWEST_TORCH = (2, 11), (2, 15)  # the versions whose memory rules are known
INSTALLED = int(torch.__version__.split(".")[0]), int(torch.__version__.split(".")[1])


@dataclasses.dataclass(frozen=True)
class Settings:
    """The arguments of `virtual_gpus`, which documents them. Raises ValueError or TypeError for an invalid one."""

    count: int = 1
    memory: int | str | None = None
    kind: str = "H200"
    shapes_only: bool = False
    honour_visible_devices: bool = True
    torch_version: str | None = None
    links: str | Sequence[Sequence[str]] | None = None
    hosts: int = 1
    network: str = "Ethernet 100"
    children: bool = False
    rank: int | None = None
    world_size: int | None = None
    adapters: int = 1
    measured: str | None = None
    check_races: bool = False
    refuse_forks: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.count, bool) or not isinstance(self.count, int) or self.count < 1:
            raise ValueError(f"The number of virtual GPUs must be an integer of at least 1, not {self.count!r}.")
        if self.rank is not None or self.world_size is not None:
            self._check_rank()
        _ = self.bytes_per_gpu, self.version, self.topology, self.table  # each raises an error if its part is invalid

    def _check_rank(self) -> None:
        rank, world_size = _integer("rank", self.rank), _integer("world_size", self.world_size)
        if world_size < 1 or world_size % self.count:
            raise ValueError(
                f"Cannot fill hosts of {self.count} GPUs with {world_size} ranks, one on each GPU. "
                f"Choose a world_size that is a multiple of {self.count}, or another number of GPUs per host."
            )
        if not 0 <= rank < world_size:
            raise ValueError(f"There is no rank {rank}. The ranks of {world_size} are 0 to {world_size - 1}.")
        if self.hosts != 1:
            raise ValueError(
                f"As one rank of {world_size}, {self.count} is the number of GPUs of each host, so there are "
                f"{world_size // self.count} hosts. Leave hosts={self.hosts!r} out."
            )

    def place_of(self, rank: int) -> tuple[int, int]:
        """(host, slot) of a rank of a job of many: ranks fill the hosts in order, as torchrun does it."""
        return divmod(rank, self.count // self.hosts)

    @property
    def spec(self) -> GPUSpec:
        """The data sheet of one GPU."""
        return spec(self.kind)

    @property
    def bytes_per_gpu(self) -> int:
        """The memory of one GPU in bytes."""
        return self.spec.memory if self.memory is None else parse_bytes(self.memory)

    @property
    def version(self) -> tuple[int, int]:
        """(major, minor) of the PyTorch version whose memory rules apply."""
        return INSTALLED if self.torch_version is None else _parse_version(self.torch_version)

    @property
    def topology(self) -> Topology:
        """The links between the GPUs."""
        return arrange(self.spec, self.count, self.links, self.hosts, self.network, self.adapters)

    @functools.cached_property
    def table(self) -> Measured | None:
        """The measured seconds of operators that win over the formulas."""
        return None if self.measured is None else load(self.measured, self.spec.kind)

    def arguments(self) -> dict[str, Any]:
        """The settings as keyword arguments for `virtual_gpus(**settings.arguments())`."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}


def _integer(name: str, value: int | None) -> int:
    """An argument of one rank of many, of which both must be there."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"One rank of many needs both rank and world_size as integers, but {name} is {value!r}.")
    return value


def _parse_version(text: str) -> tuple[int, int]:
    """ "2.11", "2.11.0" or "2.11.0+cu130" as (2, 11). Raises ValueError for versions with unknown memory rules."""
    match = re.match(r"(\d+)\.(\d+)(?:[.+]|$)", str(text))
    version = match and (int(match[1]), int(match[2]))
    if not version or not OLDEST_TORCH <= version <= NEWEST_TORCH:
        oldest, newest = ("{}.{}".format(*v) for v in (OLDEST_TORCH, NEWEST_TORCH))
        raise ValueError(
            f"torch_version must be text from {oldest!r} to {newest!r}, for example '2.13', not {text!r}. "
            "The memory rules of other versions are not known."
        )
    return version
