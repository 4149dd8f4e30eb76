"""Copies and collectives on the clock: who waits for whom, and how long bytes take on their road. No torch here.

The rules are PyTorch's and CUDA's. A copy between the computer and a GPU runs in the GPU's current stream. Pageable
memory goes through a buffer of the driver, so the host stands still meanwhile; from pinned memory, with
`non_blocking=True`, it goes on. A copy from GPU to GPU waits for both current streams, and both wait for it. Each GPU
has one engine for copies in each direction.

Collectives go around a ring, as NCCL's do for large tensors: an all-reduce of n GPUs sends 2(n - 1)/n of the bytes over
each link, and the slowest link sets the pace.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from virtual_gpus.clock.clock import COPY_IN, COPY_OUT
from virtual_gpus.clock.links import REACHED, REACHED_BY_COLLECTIVES
from virtual_gpus.gpus import LinkSpec

if TYPE_CHECKING:  # the machine lies above its clock
    from virtual_gpus.machine import VirtualGPU

_COLLECTIVE_START = 15e-6  # seconds: NCCL's kernel, and its first handshake
# Parts of the bytes that pass over each link of a ring of n, and the number of hops one after the other.
_RING = {
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


def host_copy(gpu: VirtualGPU, nbytes: int, pinned: bool, blocking: bool, inwards: bool) -> None:
    """A copy between the computer's memory and `gpu`."""
    clock, slot, stream = gpu.machine.clock, gpu.slot, gpu.stream
    link, pace, lane = gpu.machine.topology.pcie, clock.host, COPY_IN if inwards else COPY_OUT
    now = clock.spend(pace.copy, slot)
    speed, latency = link.bandwidth * REACHED, link.latency / 2
    if not pinned:
        speed, latency, blocking = min(speed, pace.pageable), pace.pageable_copy, True
    start = max(now, clock.mark(slot, stream), clock.ready(slot, lane))
    end = start + latency + nbytes / speed
    clock.occupy(slot, lane, start, end, "copy", "to the GPU" if inwards else "to the CPU", kernel=False)
    clock.hold(slot, stream, end)
    if blocking:
        clock.wait(end, slot)


def peer_copy(source: VirtualGPU, target: VirtualGPU, nbytes: int) -> None:
    """A copy from GPU to GPU."""
    clock = source.machine.clock
    clock.meet(source.slot, target.slot)
    now = clock.spend(clock.host.copy, source.slot)
    clock.meet(source.slot, target.slot)
    link = source.machine.topology.between(source.slot, target.slot)
    ends = (source.slot, source.stream, COPY_OUT), (target.slot, target.stream, COPY_IN)
    start = max(now, *(clock.ready(slot, lane) for slot, *lanes in ends for lane in lanes))
    end = start + link.latency + nbytes / (link.bandwidth * REACHED)
    for slot, stream, lane in ends:
        clock.occupy(slot, lane, start, end, "copy", f"cuda:{source.index} to cuda:{target.index}", kernel=False)
        clock.hold(slot, stream, end)


def read_value(gpu: VirtualGPU) -> None:
    """`.item()` and its like: the host waits for everything issued to the current stream, and reads one number."""
    clock = gpu.machine.clock
    clock.wait(clock.mark(gpu.slot, gpu.stream), gpu.slot)
    clock.spend(clock.host.wait, gpu.slot)


def ring_seconds(links: Sequence[LinkSpec], count: int, kind: str, nbytes: int) -> float:
    """Seconds of a collective of `count` GPUs. links: from each to the next, around the ring. nbytes: what each GPU has
    in the end, or begins with if that is more."""
    if count < 2 or not links:
        return _COLLECTIVE_START
    part, hops = _RING[kind]
    slowest = min(link.bandwidth for link in links) * REACHED_BY_COLLECTIVES
    latency = max(link.latency for link in links)
    return _COLLECTIVE_START + part(count) * nbytes / slowest + hops(count) * latency / 2


def collective_here(gpus: Sequence[VirtualGPU], kind: str, nbytes: int) -> None:
    """A collective of several GPUs of this process, in their current streams (DataParallel's)."""
    clock, slots = gpus[0].machine.clock, [gpu.slot for gpu in gpus]
    now = clock.spend(clock.host.operator * len(gpus), slots[0])
    start = max([now, *(clock.ready(gpu.slot, gpu.stream) for gpu in gpus)])
    links = [
        gpus[0].machine.topology.between(a, b) for a, b in zip(slots, [*slots[1:], slots[0]], strict=True) if a != b
    ]
    end = start + ring_seconds(links, len(slots), kind, nbytes)
    for gpu in gpus:
        clock.occupy(gpu.slot, gpu.stream, start, end, "collective", kind, kernel=True)
