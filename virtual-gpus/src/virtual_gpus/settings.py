"""The settings of a set of virtual GPUs: their number, their kind and their links. Features add checks of their own."""

import argparse
import dataclasses
import functools
import os
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

import torch

from virtual_gpus import figures
from virtual_gpus.clock.links import ARRANGEMENTS, NETWORKS, Topology, arrange
from virtual_gpus.clock.measured import Measured, load
from virtual_gpus.gpus import GPUSpec, kinds, parse_bytes, spec
from virtual_gpus.versions import NEWEST, OLDEST, Version, parse_version

CHECKS: list[Callable[["Settings"], None]] = []  # of features; each raises an error for a setting of its own
INSTALLED: Version = int(torch.__version__.split(".")[0]), int(torch.__version__.split(".")[1])
_SHOWN = {
    "kinds": ", ".join(kinds()), "arrangements": ", ".join(ARRANGEMENTS), "networks": ", ".join(NETWORKS),
    "oldest": "{}.{}".format(*OLDEST), "newest": "{}.{}".format(*NEWEST),
}  # fmt: skip
FACTS: dict[str, dict[str, str]] = {  # by the name of a setting: what settings.toml says of it
    name: {part: words.format(**_SHOWN) for part, words in row.items()}
    for name, row in figures.beside(__file__).items()
}


@dataclasses.dataclass(frozen=True)
class Settings:
    """The arguments of `virtual_gpus` and the options of `python -m virtual_gpus`: this list is the only one of them.

    What each says is in settings.toml. Raises ValueError or TypeError for an invalid argument.
    """

    count: int = 1
    _: dataclasses.KW_ONLY
    memory: int | str | None = None
    kind: str = "H200"
    shapes_only: bool = False
    honour_visible_devices: bool = True
    torch_version: str | None = None
    links: str | Sequence[Sequence[str]] | None = None
    hosts: int = 1
    network: str = "Ethernet 100"
    adapters: int = 1
    measured: str | os.PathLike[str] | None = None
    children: bool = False
    check_races: bool = False
    refuse_forks: bool = False
    compile: str = "eager"
    rank: int | None = None
    world_size: int | None = None

    def __post_init__(self) -> None:
        if self.measured is not None:
            object.__setattr__(self, "measured", os.path.abspath(self.measured))
        if isinstance(self.count, bool) or not isinstance(self.count, int) or self.count < 1:
            raise ValueError(f"The number of virtual GPUs must be an integer of at least 1, not {self.count!r}.")
        for check in CHECKS:
            check(self)
        _ = self.bytes_per_gpu, self.version, self.topology, self.table  # each raises an error if its part is invalid

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
        return INSTALLED if self.torch_version is None else parse_version(self.torch_version)

    @property
    def topology(self) -> Topology:
        """The links between the GPUs."""
        return arrange(self.spec, self.count, self.links, self.hosts, self.network, self.adapters)

    @functools.cached_property
    def table(self) -> Measured | None:
        """The measured seconds of operators that win over the formulas."""
        return None if self.measured is None else load(str(self.measured), self.spec.kind)

    def arguments(self) -> dict[str, Any]:
        """The settings as keyword arguments for `virtual_gpus(**settings.arguments())`."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}


def described() -> str:
    """The settings with their texts, for a docstring."""
    rows = [f"{name}: {facts['text']}." for name, facts in FACTS.items()]
    lines = (textwrap.wrap(row, 112, subsequent_indent="    ") for row in rows)
    return "\n".join(f"    {line}" for wrapped in lines for line in wrapped)


def add_options(parser: argparse.ArgumentParser, number: Callable[[str], object]) -> None:
    """The options of the command line. number: the type of --gpus and --of, which a search leaves open."""
    for field in dataclasses.fields(Settings):
        facts, how = FACTS[field.name], dict[str, Any]()
        option = facts.get("option", "")
        if field.default is False:
            how["action"] = "store_false" if option.startswith("--no-") else "store_true"
        else:
            given = number if option in ("--gpus", "--of") else int if field.type in (int, int | None) else None
            choices = facts["choices"].split() if "choices" in facts else None
            how.update(default=field.default, type=given, choices=choices)
        text = facts.get("help", f"{facts['text']} (default: {field.default})")
        if option:
            parser.add_argument(option, dest=field.name, help=text, **how)
