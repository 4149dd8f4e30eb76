"""Collectives and messages: how long bytes take on their way. No torch here.

Collectives go around a ring, as NCCL's do for large tensors: an all-reduce of n GPUs sends 2(n - 1)/n of the bytes over
each link, and the slowest link sets the pace (Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for
clusters of workstations"). https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md derives these parts for
all collectives. Each hop costs part of a link's latency, as in the alpha-beta model. All-reduces over several hosts go
along a tree where that is faster. Other collectives over many hosts lose speed (`ring_loss` in `figures.toml`).
NVLink SHARP and reductions in the network are not modelled.
"""

import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, log2
from typing import Literal, NamedTuple

from virtual_gpus import figures
from virtual_gpus.clock.clock import Clock
from virtual_gpus.clock.links import Topology
from virtual_gpus.gpus import LinkSpec

_FIGURES = figures.beside(__file__)["collectives"]


class Collective(NamedTuple):
    """What sets a kind of collective apart: all that `features.distributed` asks of it, too.

    kernel: NCCL's name. whole: which of the result (0) and what is given (1) has a part for each rank. root: what one
    rank does with all others, "sends" or "receives". rounds: the times that the bytes go around the ring.
    """

    kernel: str = "SendRecv"
    whole: tuple[int, ...] = ()
    reduces: bool = False
    root: Literal["", "sends", "receives"] = ""
    rounds: int = 1

    @property
    def at_root(self) -> bool:
        """Whether the root alone has the parts of all ranks."""
        return bool(self.root and self.whole)

    def share(self, count: int) -> float:
        """The part of the bytes that passes over each link of a ring of `count`. A GPU's own part stays where it is."""
        return self.rounds * (count - 1) / count if self.whole or self.rounds > 1 or count == 1 else 1.0

    def hops(self, count: int) -> int:
        """The hops one after the other. The root has a link to each rank."""
        return 1 if self.at_root else self.rounds * (count - 1)


# By the functions of torch.distributed. A longer name stands before one that it contains (`kind_of`).
COLLECTIVES = {
    "all_reduce": Collective("AllReduce", reduces=True, rounds=2),
    "all_gather": Collective("AllGather", whole=(0,)),
    "all_to_all": Collective(whole=(0, 1)),
    "reduce_scatter": Collective("ReduceScatter", whole=(1,), reduces=True),
    "broadcast": Collective("Broadcast", root="sends"),
    "gather": Collective(whole=(0,), root="receives"),
    "scatter": Collective(whole=(1,), root="sends"),
    "reduce": Collective("Reduce", reduces=True, root="receives"),
}
MESSAGES = {"send": Collective(), "recv": Collective()}
# All that is in a queue of a group. NCCL's barrier is an all-reduce of one number.
TRAFFIC = COLLECTIVES | MESSAGES | {"barrier": COLLECTIVES["all_reduce"]}


@functools.cache
def kind_of(name: str) -> str:
    """The kind of a collective or message, by the base name of an operator or a method, or a row's. Empty for others.

    The operators are those of torch/csrc/distributed/c10d/Ops.cpp ("_allgather_base_"), those of Functional.cpp
    ("all_gather_into_tensor_out"), which DTensor and compiled programs call, and DTensor's "shard_dim_alltoall".
    """
    letters = name.replace("_", "").replace("-", "")
    return next((kind for kind in COLLECTIVES | MESSAGES if kind.replace("_", "") in letters), "")


@dataclass(frozen=True)
class GroupLinks:
    """The links of a process group, which do not grow with the number of its members.

    count: members of the group. here: the members on one host, or the fewest if hosts differ.
    inside: the kinds of links between neighbours on one host.
    across: the link between two hosts with the group's adapters together. None if the group is on one host.
    """

    count: int
    here: int
    inside: tuple[LinkSpec, ...]
    across: LinkSpec | None

    @property
    def links(self) -> tuple[LinkSpec, ...]:
        """All kinds of links of a ring through the group."""
        return self.inside if self.across is None else (*self.inside, self.across)


def links_of_group(topology: Topology, members: Sequence[tuple[int, int]], per_host: int) -> GroupLinks:
    """How the members of a process group reach each other.

    members: (host, slot) of each member in the order of ranks. Every host has the slots of `topology`.
    per_host: ranks of the whole program on one host, which share its adapters.

    A ring passes through each host once, and its members there follow each other in the order of ranks. NCCL builds
    several such rings, each through another adapter (NCCL_CROSS_NIC in its user guide), so a group that has all
    ranks of a host uses all of its adapters. Assumption: all ranks of a host run such collectives at the same time,
    each in its own group. So `here` of a host's `per_host` ranks get the fraction here / per_host of the adapters.
    """
    ring = sorted(members, key=lambda member: member[0])
    inside = {
        topology.between(first[1], second[1])
        for first, second in zip(ring, [*ring[1:], ring[0]], strict=True)
        if first[0] == second[0] and first != second
    }
    on_hosts = Counter(host for host, _ in members)
    here = min(on_hosts.values())
    share = topology.adapters * min(1.0, here / per_host)
    across = replace(topology.network, bandwidth=topology.network.bandwidth * share) if len(on_hosts) > 1 else None
    return GroupLinks(len(members), here, tuple(inside), across)


def ring_seconds(links: Sequence[LinkSpec], count: int, kind: str, nbytes: int) -> float:
    """Seconds of a collective of `count` GPUs. links: around the ring. kind, nbytes: see `collective_seconds`."""
    if count < 2 or not links:
        return _FIGURES["start"]
    row = TRAFFIC[kind]
    slowest = min(link.bandwidth for link in links) * _FIGURES["reached"]
    latency = max(link.latency for link in links)
    return _FIGURES["start"] + row.share(count) * nbytes / slowest + row.hops(count) * latency * _FIGURES["hop"]


def collective_seconds(group: GroupLinks, kind: str, nbytes: int) -> float:
    """Seconds of a collective of a process group. The cost of this function does not grow with the group.

    kind: a key of `TRAFFIC`. nbytes: what each GPU has in the end, or begins with if that is more.

    In an all-to-all, (count - here) / count of each GPU's bytes go to other hosts, and the members on a host send
    theirs through its adapters at the same time. The bytes for the same host travel meanwhile.
    """
    links = group.links
    doublings = log2(group.count / group.here / _FIGURES["ring_hosts"])
    if kind in ("all_gather", "reduce_scatter") and group.across is not None and doublings > 0:
        kept = max(_FIGURES["ring_least"], 1 - _FIGURES["ring_loss"] * doublings)
        links = (*group.inside, replace(group.across, bandwidth=group.across.bandwidth * kept))
    ring = ring_seconds(links, group.count, kind, nbytes)
    if group.across is None or kind not in ("all_reduce", "all_to_all"):
        return ring
    if kind == "all_reduce":
        return min(ring, _tree_seconds(group, nbytes))
    leaving, staying = (nbytes * part / group.count for part in (group.count - group.here, group.here - 1))
    inside = min((link.bandwidth for link in group.inside), default=group.across.bandwidth)
    wire = max(leaving * group.here / group.across.bandwidth, staying / inside) / _FIGURES["reached"]
    return ring_seconds(group.links, group.count, kind, 0) + wire


def _tree_seconds(group: GroupLinks, nbytes: int) -> float:
    """Seconds of an all-reduce along a tree of hosts, with chains within, by NCCL's own model (src/graph/tuning.cc)."""
    slowest = min(link.bandwidth for link in group.links) * _FIGURES["reached"] * _FIGURES["tree"]
    hops = 2 * (group.here - 1 + ceil(log2(group.count / group.here)))
    return _FIGURES["start"] + 2 * nbytes / slowest + hops * _FIGURES["hop"] * max(link.latency for link in group.links)


def message_seconds(
    topology: Topology, here: tuple[int, int], there: tuple[int, int], nbytes: int, share: LinkSpec | None = None
) -> float:
    """Seconds of a message between two GPUs, (host, slot) each.

    Between hosts it goes through one network adapter. share: `GroupLinks.across` of a group whose ranks all send at the
    same time, if that is less. None: no others send.
    """
    if here[0] == there[0]:
        links: list[LinkSpec] = [] if here == there else [topology.between(here[1], there[1])]
    else:
        links = [min(filter(None, (share, topology.network)), key=lambda link: link.bandwidth)]
    return ring_seconds(links, 2, "send", nbytes)


def occupy(clock: Clock, slot: int, lane: int | str, start: float, end: float, kind: str, sent: float = 0.0) -> None:
    """Put a collective or message on the clock of the GPU in `slot`. Its kernel holds some of the multiprocessors."""
    kernel = f"ncclDevKernel_{TRAFFIC[kind].kernel}"  # by which tools tell collectives from other kernels
    clock.occupy(slot, lane, start, end, "collective", kind, kernel, _FIGURES["held"], sent)
