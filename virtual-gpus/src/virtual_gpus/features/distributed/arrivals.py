"""When a tensor from other processes is here, and in which queue of its GPU a collective or a message stands."""

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from virtual_gpus.features.distributed.groups import row_of
from virtual_gpus.features.nccl import traffic
from virtual_gpus.follower import LateTensors, QueuedWork
from virtual_gpus.machine import VirtualGPU, VirtualMachine
from virtual_gpus.placement.storages import allocation_of, gpu_of, tensors_in
from virtual_gpus.threads import OfEachThread


class Arrival(QueuedWork):
    """When a tensor from other processes is on a GPU. end: its modelled time, or what asks the sender for it."""

    def __init__(self, gpu: VirtualGPU, end: float | Callable[[], float]):
        self.gpu, self._end = gpu, end

    @property
    def known(self) -> bool:
        """True if `time` need not wait."""
        return not callable(self._end)

    def time(self) -> float:
        """The modelled time of arrival. Raises DistNetworkError if the sender does not tell when it sent."""
        if callable(self._end):
            self._end = self._end()
        return self._end


class _Late(LateTensors[VirtualGPU]):
    """What collectives and messages fill, with their arrivals, and a reference to the record, which may go before."""

    def hold(self, gpu: VirtualGPU, tensors: Iterable[torch.Tensor]) -> None:
        """Work of the current stream waits for what fills its tensors. What is past or has no storage is forgotten."""
        clock, stream = gpu.machine.clock, gpu.stream
        ready = clock.ready(gpu.slot, stream)
        for arrival in arrivals(gpu, tensors):
            clock.hold(gpu.slot, stream, arrival.time())
        for key, (arrival, owner) in self.copy().items():  # a copy, since other threads may add and forget
            if owner() is None or (arrival.known and arrival.time() <= ready):
                self.pop(key, None)


def arrivals(gpu: VirtualGPU, tensors: Iterable[torch.Tensor]) -> list[Arrival]:
    """What fills some of these tensors."""
    late = ((gpu.late.get(id(allocation)), allocation) for allocation in map(allocation_of, tensors))
    return [row[0] for row, allocation in late if row is not None and row[1]() is allocation]


def start(machine: VirtualMachine) -> None:
    """Tensors may be late from now on."""
    for gpu in machine.slots:
        gpu.late = _Late()


_of_works: weakref.WeakKeyDictionary[Any, Arrival] = weakref.WeakKeyDictionary()  # those that Python has
_last_issued: OfEachThread[Arrival | None] = OfEachThread(None)  # of the collective that was, for its Work


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
    known = [arrival.time() for arrival in arrivals(gpu, tensors) if arrival.known]
    return max(now, *(clock.ready(gpu.slot, queue) for queue in (gpu.stream, *lane.after)), *known)


def occupy(gpu: VirtualGPU, lane: Lane, start: float, end: float, sent: float) -> None:
    """sent: the bytes that this GPU sends."""
    clock = gpu.machine.clock
    traffic.occupy(clock, gpu.slot, lane.row, start, end, lane.kind, sent)
    clock.hold(gpu.slot, lane.queue, end)


def note(tensors: Iterable[torch.Tensor], arrival: Arrival) -> None:
    """What uses `tensors` waits for `arrival`, and so does `wait()` of the Work that stands for it."""
    _last_issued.value = arrival
    for tensor in tensors:
        allocation = allocation_of(tensor)
        if allocation is not None:
            allocation.gpu.late[id(allocation)] = arrival, weakref.ref(allocation)


def remember(work: Any) -> None:
    """Called when Python is given a Work: it stands for the collective that this thread issued last."""
    arrival, _last_issued.value = _last_issued.value, None
    if arrival is not None and work is not None:
        _of_works[work] = arrival
        arrival.given = True


def give_to_future(work: Any) -> None:
    """C++ waits for the collective of a Work, before it calls what was given to its future."""
    if work in _of_works:
        _of_works[work].given = False


def await_work(work: Any) -> None:
    """`work.wait()`: the current stream waits for the collective, and the host does not."""
    if work in _of_works:
        gpu, arrival = _of_works[work].gpu, _of_works[work]
        gpu.machine.follower.stream_waits(gpu, arrival)
        if arrival.known:
            gpu.machine.clock.hold(gpu.slot, gpu.stream, arrival.time())


def on_gpus(values: Sequence[Any]) -> list[torch.Tensor]:
    """The tensors that are on GPUs, also within lists."""
    return [tensor for tensor in tensors_in(values) if gpu_of(tensor) is not None]


def gpu_bytes(tensors: Sequence[Any]) -> int:
    """Bytes of the tensors that are on GPUs."""
    return sum(t.numel() * t.element_size() for t in on_gpus(tensors))
