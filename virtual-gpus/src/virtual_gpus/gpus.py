"""Data sheets of GPUs and links, sizes as text, and the table of `nvidia-smi topo -m`. Does not import torch.

    spec("H200").memory            # 150109880320 bytes
    parse_bytes("16 GiB")          # 17179869184
    print(draw_topology([["X", "NV6"], ["NV6", "X"]]))

The figures are data: `figures/kinds` has a file for each kind of GPU, with the sources in its README, and
`figures/links.toml` has the links.
"""

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from virtual_gpus import figures

Precision = Literal["fp64", "fp32", "tf32", "fp16", "bf16"]
_BY_LOWER = {unit.lower(): size for unit, size in figures.SIZES.items()}
_KINDS = {kind.lower(): kind for kind in sorted(path.stem for path in (figures.FOLDER / "kinds").glob("*.toml"))}


def parse_bytes(size: int | str) -> int:
    """Convert a size to bytes. It is an integer or text such as "16 GiB" (units of 2^30) or "16GB" (units of 10^9).

    Raises ValueError for other text and for less than one byte, and TypeError for other types.
    """
    nbytes = _bytes_of_text(size) if isinstance(size, str) else size
    if isinstance(nbytes, bool) or not isinstance(nbytes, int):
        raise TypeError(f'A size must be an integer number of bytes or text such as "16 GiB", not {size!r}.')
    if nbytes < 1:
        raise ValueError(f"A size must be at least one byte, not {size!r}.")
    return nbytes


def _bytes_of_text(text: str) -> int:
    match = re.fullmatch(r"\s*([+-]?\d+(?:\.\d*)?|[+-]?\.\d+)\s*([A-Za-z]*)\s*", text)
    if match is None:
        raise ValueError(f'Cannot read {text!r} as a size. Write a number and a unit, for example "16 GiB".')
    number, unit = match.groups()
    if unit.lower() not in _BY_LOWER:
        problem = f"has the unknown unit {unit!r}" if unit else "has no unit"
        raise ValueError(f"The size {text!r} {problem}. Use one of {', '.join(figures.SIZES)}.")
    return int(float(number) * _BY_LOWER[unit.lower()])


def format_bytes(nbytes: int) -> str:
    """Format bytes in the largest binary unit that fits, with one decimal: "16 GiB", "139.8 GiB", "512 B"."""
    if nbytes < 0:
        return "-" + format_bytes(-nbytes)
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if nbytes >= figures.SIZES[unit]:
            return f"{nbytes / figures.SIZES[unit]:.1f}".removesuffix(".0") + f" {unit}"
    return f"{nbytes} B"


@dataclass(frozen=True)
class LinkSpec:
    """A link between two GPUs, between a GPU and the host, or between machines.

    bandwidth: peak bytes per second in one direction.
    latency: seconds of the shortest copy.
    label: what `nvidia-smi topo -m` prints for two GPUs with this link.
    """

    name: str
    label: str
    bandwidth: float
    latency: float


LINKS = {name: LinkSpec(**link) for name, link in figures.read("links.toml")["links"].items()}
_LEGEND: dict[str, str] = figures.read("links.toml")["legend"]


class Flops(NamedTuple):
    """Peak operations per second of matrix multiplications, by data type."""

    fp32: float
    tf32: float
    fp16: float
    bf16: float
    fp64: float


class Reached(NamedTuple):
    """[reached] in `figures/kinds`, whose README.md says what each is: kernel in seconds, all others from 0 to 1."""

    kernel: float
    memory: float
    simt: float
    tensor: float
    conv: float
    tensor_conv: float
    conv_in_two_bytes: float


@dataclass(frozen=True)
class GPUSpec:
    """The data sheet of one kind of GPU.

    kind: the name for `spec`.
    name: the name that torch.cuda.get_device_properties reports.
    memory: bytes, as CUDA reports them.
    capability: compute capability (major, minor).
    cores, threads, registers, shared_memory: of a multiprocessor: cores for fp32, and what it holds at a time; memory
        in bytes. shared_memory_of_block: bytes that one block of threads can have.
    tensor_cores: the types that they multiply ("fp16", "bf16", "tf32").
    bandwidth: bytes per second of the GPU's memory.
    flops: peak operations per second of matrix multiplications by data type, on tensor cores if the GPU has them. A
        type that the GPU does not support counts as fp32.
    context: bytes of a process's CUDA context, which come in addition to PyTorch's reserved memory.
    link: the link between two GPUs. host_link: the link to the CPU.
    reached: what kernels reach of all that.
    """

    kind: str
    name: str
    memory: int
    capability: tuple[int, int]
    cores: int
    threads: int
    registers: int
    shared_memory: int
    shared_memory_of_block: int
    tensor_cores: tuple[str, ...]
    multi_processor_count: int
    l2_bytes: int
    bandwidth: float
    flops: Flops
    context: int
    link: LinkSpec
    host_link: LinkSpec
    reached: Reached

    @property
    def core_clock(self) -> float:
        """Cycles per second at boost: the data sheet's fp32 peak over two operations per core and cycle."""
        return self.flops.fp32 / (2 * self.cores * self.multi_processor_count)

    def flops_of(self, precision: Precision) -> float:
        """Those of `flops` in this precision."""
        return getattr(self.flops, precision)

    def seconds_to_move(self, nbytes: float, share: float = 1.0) -> float:
        """Seconds to read or write bytes in the GPU's memory, at a share (0 to 1) of the speed of an addition."""
        return nbytes / (self.bandwidth * self.reached.memory * share)


def kinds() -> list[str]:
    """The names of all kinds of GPUs that `spec` knows, in alphabetical order."""
    return list(_KINDS.values())


def spec(kind: str) -> GPUSpec:
    """The GPUSpec of a kind: "H200", "titan xp" (case and spaces do not matter). Raises ValueError that names all."""
    name = _KINDS.get(re.sub(r"\s", "", str(kind)).lower())
    if name is None:
        raise ValueError(f"There is no data sheet for a GPU of kind {kind!r}. Choose one of {', '.join(kinds())}.")
    return _read(name)


@functools.cache
def _read(kind: str) -> GPUSpec:
    data = figures.read(f"kinds/{kind}.toml")
    peak, (major, minor) = data["peak"], data["capability"].split(".")
    architecture = figures.read("architectures.toml")["capabilities"][data["capability"]]
    return GPUSpec(
        kind=kind,
        name=data["name"],
        capability=(int(major), int(minor)),
        **architecture | {"tensor_cores": tuple(architecture["tensor_cores"])},
        flops=Flops(**dict.fromkeys(Flops._fields, peak["fp32"]) | peak),
        link=LINKS[data["link"]],
        host_link=LINKS[data["host_link"]],
        reached=Reached(**data["reached"]),
        **data["sheet"],
    )


def draw_topology(labels: Sequence[Sequence[str]]) -> str:
    """The text of `nvidia-smi topo -m` for a square matrix of labels, without the columns about the CPU.

    Raises ValueError if the matrix is not square or if nvidia-smi does not know a label.
    """
    if any(len(row) != len(labels) for row in labels):
        columns = [len(row) for row in labels]
        raise ValueError(f"The matrix of links must be square. It has {len(labels)} rows, with lengths {columns}.")
    for label in {label for row in labels for label in row}:
        if re.sub(r"^NV\d+$", "NV#", label) not in _LEGEND:
            raise ValueError(
                f"The matrix contains the unknown link {label!r}. Use one of {', '.join(_LEGEND)}. "
                "In NV#, # is the number of NVLinks."
            )
    names = [f"GPU{index}" for index in range(len(labels))]
    rows = [["", *names], *([name, *row] for name, row in zip(names, labels, strict=True))]
    lines = ["".join((" X" if cell == "X" else cell).ljust(8) for cell in row).rstrip() for row in rows]
    legend = [f"  {label:<4} = {text}" for label, text in _LEGEND.items()]
    return "\n".join([*lines, "", "Legend:", "", *legend])
