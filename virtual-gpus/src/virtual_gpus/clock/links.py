"""Links between GPUs: the topology of one machine, and several machines on a network. Does not import torch.

    topology = arrange(spec("A100"), 8, "NVLink pairs")
    topology.between(0, 1).bandwidth      # 100e9 bytes per second: four NVLinks
    print(topology.drawn())               # as `nvidia-smi topo -m` prints it

Figures, with their sources: `figures/links.toml`. Copies reach only a part of the peak.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from virtual_gpus import figures
from virtual_gpus.gpus import LINKS, GPUSpec, LinkSpec, draw_topology

_FIGURES = figures.read("links.toml")
COPIES = _FIGURES["copies"]  # which parts of a link's bandwidth they reach, and of its latency they begin with
# PCIe between two GPUs: nvidia-smi's label of the path, and the fraction of PCIe's speed that the path reaches.
_PATHS = _FIGURES["paths"]
NETWORKS = {name: LinkSpec(label="NET", **link) for name, link in _FIGURES["networks"].items()}
_PCIE = {name: link for name, link in LINKS.items() if name.startswith("PCIe")}
ARRANGEMENTS = (*_PCIE, "NVLink pairs", "NVSwitch")
Links = str | Sequence[Sequence[str]] | None


@dataclass(frozen=True)
class Topology:
    """The links of a set of GPUs.

    labels: a matrix [count][count] of what `nvidia-smi topo -m` prints for two GPUs.
    pcie: the link to the host, and between GPUs without NVLink.
    hosts: the machine of each GPU.
    network: the link between machines, over one network adapter.
    adapters: the network adapters of one machine.
    """

    labels: tuple[tuple[str, ...], ...]
    pcie: LinkSpec
    hosts: tuple[int, ...]
    network: LinkSpec
    adapters: int = 1

    def between(self, first: int, second: int) -> LinkSpec:
        """The link between the GPUs in two slots. Its bandwidth is the peak."""
        if self.hosts[first] != self.hosts[second]:
            return self.network
        return link_of(self.labels[first][second], self.pcie)

    def drawn(self) -> str:
        """The output of `nvidia-smi topo -m` on the first machine, without the columns about the CPU."""
        here = [slot for slot, host in enumerate(self.hosts) if host == self.hosts[0]]
        return draw_topology([[self.labels[row][column] for column in here] for row in here])


def link_of(label: str, pcie: LinkSpec) -> LinkSpec:
    """The link for a label of nvidia-smi. "NV4" is four NVLinks, "SYS" is PCIe across two processors."""
    if match := re.fullmatch(r"NV(\d+)", label):
        one = _FIGURES["nvlink"]
        return LinkSpec(f"NVLink x{match[1]}", label, int(match[1]) * one["bandwidth"], one["latency"])
    if label not in _PATHS:
        raise ValueError(f"The link {label!r} is unknown. Use NV and a number, or one of {', '.join(_PATHS)}.")
    return LinkSpec(f"{pcie.name}, {label}", label, pcie.bandwidth * _PATHS[label], pcie.latency)


def arrange(
    spec: GPUSpec, count: int, links: Links = None, hosts: int = 1, network: str = "Ethernet 100", adapters: int = 1
) -> Topology:
    """The topology of `count` GPUs that are spread evenly over `hosts` machines.

    links: one of these:
        None: the links of the kind of GPU.
        "PCIe 3", "PCIe 4" or "PCIe 5": PCIe between all GPUs.
        "NVLink pairs": NVLink between GPUs 0 and 1, 2 and 3, and so on. All others use PCIe, with half of the GPUs on
            each of two processors.
        "NVSwitch": NVLink at full speed between all GPUs.
        a square matrix of labels as nvidia-smi prints them, with "X" on the diagonal.
    network: the network between machines, a name in `NETWORKS`.
    adapters: the network adapters of each machine.

    Raises ValueError for invalid arguments.
    """
    if isinstance(adapters, bool) or not isinstance(adapters, int) or adapters < 1:
        raise ValueError(f"A machine needs at least one network adapter, not {adapters!r}.")
    if count < 1:
        raise ValueError(f"A machine needs at least one GPU, not {count}.")
    if isinstance(hosts, bool) or not isinstance(hosts, int) or hosts < 1 or count % hosts:
        raise ValueError(f"Cannot spread {count} GPUs evenly over {hosts!r} machines. Choose a divisor of {count}.")
    if network not in NETWORKS:
        raise ValueError(f"There is no network {network!r}. Choose one of {', '.join(NETWORKS)}.")
    own = _PCIE.get(links, spec.host_link) if isinstance(links, str) else spec.host_link
    where = tuple(slot * hosts // count for slot in range(count))
    return Topology(_labels(spec, count, links, count // hosts), own, where, NETWORKS[network], adapters)


def _labels(spec: GPUSpec, count: int, links: Links, per_host: int) -> tuple[tuple[str, ...], ...]:
    if links is not None and not isinstance(links, str):
        return _checked(links, count)
    if links is not None and links not in ARRANGEMENTS:
        raise ValueError(f"There are no links {links!r}. Choose one of {', '.join(ARRANGEMENTS)}, or give a matrix.")
    return tuple(
        tuple("X" if row == column else _label(spec, links, row % per_host, column % per_host, per_host)
              for column in range(count))
        for row in range(count)
    )  # fmt: skip


def _label(spec: GPUSpec, links: str | None, row: int, column: int, count: int) -> str:
    if links is None:
        return spec.link.label
    if links == "NVSwitch":
        return spec.link.label if spec.link.label.startswith("NV") else "NV6"
    if links == "NVLink pairs":
        if row // 2 == column // 2:
            return "NV4"
        half = max(1, (count + 1) // 2)
        return "NODE" if row // half == column // half else "SYS"
    return "PHB"


def _checked(matrix: Sequence[Sequence[str]], count: int) -> tuple[tuple[str, ...], ...]:
    rows = tuple(tuple(row) for row in matrix)
    draw_topology(rows)  # raises an error that says what is wrong
    if len(rows) != count:
        raise ValueError(f"The matrix of links describes {len(rows)} GPUs, but the number of GPUs is {count}.")
    for row in range(count):
        if rows[row][row] != "X" or any(rows[row][column] != rows[column][row] for column in range(row)):
            raise ValueError(
                f"The matrix of links must be symmetric, with X on its diagonal. Check row {row}: {rows[row]}."
            )
    return rows
