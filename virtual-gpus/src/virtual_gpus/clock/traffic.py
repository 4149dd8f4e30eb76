"""Collectives and messages: how long bytes take on their way. No torch here.

Collectives go around a ring, as NCCL's do for large tensors: an all-reduce of n GPUs sends 2(n - 1)/n of the bytes over
each link, and the slowest link sets the pace (Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for
clusters of workstations"). https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md derives these parts for
all collectives. Each hop costs half of a link's latency, as in the alpha-beta model. That is 2.5 microseconds on NVLink
and InfiniBand, an estimate. NCCL's own model has 3.4 and 9.6 for large messages, and 1.9 and 4.0 for smaller ones
(src/graph/tuning.cc). All-reduces over several hosts go along a tree where that is faster. Other
collectives over many hosts lose speed (`ring_loss` in `figures/links.toml`). NVLink SHARP and reductions in the network
are not modelled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import ceil, log2

from virtual_gpus import figures
from virtual_gpus.clock.links import REACHED_BY_COLLECTIVES, GroupLinks, Topology
from virtual_gpus.gpus import LinkSpec

_FIGURES = figures.read("links.toml")["collectives"]
# Parts of the bytes that pass over each link of a ring of n, and the number of hops one after the other.
_RING: dict[str, tuple[Callable[[int], float], Callable[[int], int]]] = {
    "all_reduce": (lambda n: 2 * (n - 1) / n, lambda n: 2 * (n - 1)),
    "reduce_scatter": (lambda n: (n - 1) / n, lambda n: n - 1),
    "all_gather": (lambda n: (n - 1) / n, lambda n: n - 1),
    "broadcast": (lambda n: 1.0, lambda n: n - 1),
    "reduce": (lambda n: 1.0, lambda n: n - 1),
    "gather": (lambda n: (n - 1) / n, lambda n: 1),
    "scatter": (lambda n: (n - 1) / n, lambda n: 1),
    "all_to_all": (lambda n: (n - 1) / n, lambda n: n - 1),
    "send": (lambda n: 1.0, lambda n: 1),
    "barrier": (lambda n: 0.0, lambda n: 2 * (n - 1)),
}


def ring_seconds(links: Sequence[LinkSpec], count: int, kind: str, nbytes: int) -> float:
    """Seconds of a collective of `count` GPUs. links: from each to the next, around the ring. nbytes: what each GPU has
    in the end, or begins with if that is more."""
    if count < 2 or not links:
        return _FIGURES["start"]
    part, hops = _RING[kind]
    slowest = min(link.bandwidth for link in links) * REACHED_BY_COLLECTIVES
    latency = max(link.latency for link in links)
    return _FIGURES["start"] + part(count) * nbytes / slowest + hops(count) * latency / 2


def collective_seconds(group: GroupLinks, kind: str, nbytes: int) -> float:
    """Seconds of a collective of a process group. The cost of this function does not grow with the group.

    kind: a key of `_RING`. nbytes: what each GPU has in the end, or begins with if that is more.

    In an all-to-all, (count - here) / count of each GPU's bytes go to other hosts, and the members on a host send
    theirs through its adapters at the same time. The bytes for the same host travel meanwhile.
    """
    links = group.links
    if kind in ("all_gather", "reduce_scatter") and group.across is not None and group.count > 4 * group.here:
        kept = max(_FIGURES["ring_least"], 1 - _FIGURES["ring_loss"] * log2(group.count / group.here / 4))
        links = (*group.inside, replace(group.across, bandwidth=group.across.bandwidth * kept))
    ring = ring_seconds(links, group.count, kind, nbytes)
    if group.across is None or kind not in ("all_reduce", "all_to_all"):
        return ring
    if kind == "all_reduce":
        return min(ring, _tree_seconds(group, nbytes))
    leaving, staying = (nbytes * part / group.count for part in (group.count - group.here, group.here - 1))
    inside = min((link.bandwidth for link in group.inside), default=group.across.bandwidth)
    wire = max(leaving * group.here / group.across.bandwidth, staying / inside) / REACHED_BY_COLLECTIVES
    return ring_seconds(group.links, group.count, kind, 0) + wire


def _tree_seconds(group: GroupLinks, nbytes: int) -> float:
    """Seconds of an all-reduce up and down a tree of hosts, with a chain through the members of each.

    Its bandwidth and hops are those of NCCL's own model (src/graph/tuning.cc).
    """
    slowest = min(link.bandwidth for link in group.links) * REACHED_BY_COLLECTIVES * _FIGURES["tree"]
    hops = 2 * (group.here - 1 + ceil(log2(group.count / group.here)))
    return _FIGURES["start"] + 2 * nbytes / slowest + hops * max(link.latency for link in group.links) / 2


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
        link = topology.network
        links = [link if share is None or share.bandwidth > link.bandwidth else share]
    return ring_seconds(links, 2, "send", nbytes)


def sent_bytes(count: int, kind: str, nbytes: int) -> float:
    """The bytes that the busiest of `count` GPUs sends or receives in a collective: the fewest possible."""
    return _RING[kind][0](count) * nbytes if count > 1 else 0.0
