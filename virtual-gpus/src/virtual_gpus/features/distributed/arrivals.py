"""When a tensor from other processes is here, and in which queue of its GPU a collective or a message stands."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from virtual_gpus.clock.clock import Arrival
from virtual_gpus.features.distributed.groups import row_of
from virtual_gpus.machine import VirtualGPU
from virtual_gpus.placement.storages import allocation_of, gpu_of, tensors_in
from virtual_gpus.threads import OfEachThread

_ends: weakref.WeakKeyDictionary[Any, tuple[VirtualGPU, Arrival]] = weakref.WeakKeyDictionary()  # of Python's works
# The GPU and the end of the collective that was issued last, for its Work.
_last_issued: OfEachThread[tuple[VirtualGPU, Arrival] | None] = OfEachThread(None)


class Lane(NamedTuple):
    """Where a collective stands: its kind, its row in a timeline, its queue, and those that it waits for."""

    kind: str
    row: str
    queue: str
    after: tuple[str, ...]


def lane_of(group: torch.distributed.ProcessGroup, kind: str) -> Lane:
    whole = f"queue {group.group_name}"
    parts = {"send": f"{whole}, send", "recv": f"{whole}, recv"}
    queue = parts.get(kind, whole)
    return Lane(kind, row_of(group, kind), queue, (whole, queue) if kind in parts else (whole, *parts.values()))


def begins(gpu: VirtualGPU, lane: Lane, tensors: Sequence[torch.Tensor]) -> float:
    """When this GPU could begin: the host has issued it, and its stream, its queues and its tensors are ready."""
    clock = gpu.machine.clock
    if gpu.machine.charger is not None:
        gpu.machine.charger.before(gpu, tensors)
    now = clock.spend(clock.host.operator, gpu.slot)
    arrivals = clock.tracks[gpu.slot].arrivals(map(allocation_of, tensors))
    known = [arrival.time() for arrival in arrivals if arrival.known]
    return max(now, *(clock.ready(gpu.slot, queue) for queue in (gpu.stream, *lane.after)), *known)


def occupy(gpu: VirtualGPU, lane: Lane, start: float, end: float, sent: float) -> None:
    """sent: the bytes that this GPU sends."""
    clock = gpu.machine.clock
    clock.occupy(gpu.slot, lane.row, start, end, "collective", lane.kind, kernel=True, sent=sent)
    clock.hold(gpu.slot, lane.queue, end)


def note(gpu: VirtualGPU, tensors: Iterable[torch.Tensor], arrival: Arrival) -> None:
    """What uses `tensors` waits for `arrival`, and so does `wait()` of the Work that stands for it."""
    _last_issued.value = gpu, arrival
    for tensor in tensors:
        allocation = allocation_of(tensor)
        if allocation is not None:
            owner = allocation.gpu
            owner.machine.clock.tracks[owner.slot].expect(allocation, arrival)


def remember(work: Any) -> None:
    """Called when Python is given a Work: it stands for the collective that this thread issued last."""
    noted, _last_issued.value = _last_issued.value, None
    if noted is not None and work is not None:
        _ends[work] = noted
        noted[1].given = True


def give_to_future(work: Any) -> None:
    """C++ waits for the collective of a Work, before it calls what was given to its future."""
    if work in _ends:
        _ends[work][1].given = False


def await_work(work: Any) -> None:
    """`work.wait()`: the current stream waits for the collective, and the host does not."""
    if work not in _ends:
        return
    gpu, arrival = _ends[work]
    gpu.machine.follower.stream_waits(gpu, arrival)
    if arrival.known:
        gpu.machine.clock.hold(gpu.slot, gpu.stream, arrival.time())


def on_gpus(values: Sequence[Any]) -> list[torch.Tensor]:
    """The tensors that are on GPUs, also within lists."""
    return [tensor for tensor in tensors_in(values) if gpu_of(tensor) is not None]


def gpu_bytes(tensors: Sequence[Any]) -> int:
    """Bytes of the tensors that are on GPUs."""
    return sum(t.numel() * t.element_size() for t in on_gpus(tensors))
