"""The settings of a set of virtual GPUs: their number, their kind and their links. Features add checks of their own."""

import argparse
import dataclasses
import functools
import os
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

import torch

from virtual_gpus.clock.links import ARRANGEMENTS, NETWORKS, Topology, arrange
from virtual_gpus.clock.measured import Measured, load
from virtual_gpus.gpus import GPUSpec, kinds, parse_bytes, spec
from virtual_gpus.versions import NEWEST, OLDEST, Version, parse_version

CHECKS: list[Callable[["Settings"], None]] = []  # of features; each raises an error for a setting of its own
INSTALLED: Version = int(torch.__version__.split(".")[0]), int(torch.__version__.split(".")[1])


def _setting(default: Any, text: str, option: str | None = None, feature: str | None = None, **how: Any) -> Any:
    """A field of `Settings`.

    text: for `help(virtual_gpus)` and the command line. option: its name there, if it has one. feature: the one of
    `features` that sees to it, if one does. how: further arguments of argparse.
    """
    return dataclasses.field(default=default, metadata={"text": text, "option": option, "feature": feature, "how": how})


@dataclasses.dataclass(frozen=True)
class Settings:
    """The arguments of `virtual_gpus` and the options of `python -m virtual_gpus`: this list is the only one of them.

    Raises ValueError or TypeError for an invalid argument.
    """

    count: int = _setting(1, "number of GPUs", "--gpus")
    _: dataclasses.KW_ONLY
    memory: int | str | None = _setting(
        None, 'memory of each GPU, in bytes or as text ("16GiB", "512 MiB"). None: the memory of the kind', "--memory"
    )
    kind: str = _setting("H200", f"kind of GPU: {', '.join(kinds())}", "--kind")
    shapes_only: bool = _setting(
        False, "keep sizes, but no values. Use it for jobs that are larger than this computer", "--shapes-only"
    )
    honour_visible_devices: bool = _setting(
        True, "let CUDA_VISIBLE_DEVICES hide and reorder GPUs, as on a real machine"
    )
    torch_version: str | None = _setting(
        None,
        "the PyTorch version whose memory rules apply, as text from {}.{} to {}.{}, for example that of a cluster. "
        "None: the installed version".format(*OLDEST, *NEWEST),
        "--torch",
    )
    links: str | Sequence[Sequence[str]] | None = _setting(
        None,
        f"the links between the GPUs, for the modelled clock: {', '.join(ARRANGEMENTS)}, or a matrix. "
        '`help("virtual_gpus.clock.links.arrange")` explains them and the next three. None: the links of the kind',
        "--links",
    )
    hosts: int = _setting(1, "number of machines over which the GPUs are spread", "--hosts", type=int)
    network: str = _setting("Ethernet 100", f"the network between machines: {', '.join(NETWORKS)}", "--network")
    adapters: int = _setting(1, "network adapters of each machine", "--adapters", type=int)
    measured: str | os.PathLike[str] | None = _setting(
        None,
        "a file, or a folder of files, with measured seconds of operators, which the modelled clock prefers to its "
        'formulas: `help("virtual_gpus.clock.measured")`',
        "--measured",
    )
    children: bool = _setting(
        False,
        "let Python programs that are started with `subprocess` have these GPUs too, and let all programs that are "
        "started have an `nvidia-smi`. How it works and what switches it off: "
        '`help("virtual_gpus.processes.children")`',
        "--no-children",
        feature="multiprocessing",
        action="store_false",
        help="programs that it starts have no virtual GPUs",
    )
    check_races: bool = _setting(
        False,
        "raise `virtual_gpus.RaceError` where two streams, or a stream and the host, use the same memory and nothing "
        'orders them. `help("virtual_gpus.features.races")` says how',
        "--check-races",
        feature="races",
    )
    refuse_forks: bool = _setting(
        False,
        "raise CUDA's RuntimeError in a forked process whose parent has used a GPU. Without it, such a process "
        "inherits GPUs and tensors, which no real GPU allows",
        "--refuse-forks",
    )
    compile: str = _setting(
        "eager",
        "let the modelled clock fuse operators in code that torch.compile was called on while these GPUs were on, with "
        '"modelled": `help("virtual_gpus.features.compile.fusion")`',
        "--compile",
        feature="compile",
        choices=("eager", "modelled"),
    )
    rank: int | None = _setting(
        None,
        "with world_size: be one rank of a job of `world_size` ranks, whose other ranks do not exist. Each host of the "
        'job has `count` GPUs. `help("virtual_gpus.features.distributed.one_rank")` says what the program sees',
        "--as-rank",
        feature="distributed",
        type=int,
    )
    world_size: int | None = _setting(None, "number of ranks of that job", "--of", feature="distributed")

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
    rows = [f"{field.name}: {field.metadata['text']}." for field in dataclasses.fields(Settings)]
    lines = (textwrap.wrap(row, 112, subsequent_indent="    ") for row in rows)
    return "\n".join(f"    {line}" for wrapped in lines for line in wrapped)


def add_options(parser: argparse.ArgumentParser, number: Callable[[str], object]) -> None:
    """The options of the command line. number: the type of --gpus and --of, which a search leaves open."""
    for field in dataclasses.fields(Settings):
        option, how = field.metadata["option"], dict(field.metadata["how"])
        if option in ("--gpus", "--of"):
            how["type"] = number
        if option is None:
            continue
        how.setdefault("help", f"{field.metadata['text']} (default: {field.default})")
        if field.default is False:
            how.setdefault("action", "store_true")
        else:
            how["default"] = field.default
        parser.add_argument(option, dest=field.name, **how)
