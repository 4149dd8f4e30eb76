"""Races: two accesses to the same memory, at least one of them a write, of which neither waits for the other.

`virtual_gpus(check_races=True)` follows what CUDA guarantees, not what the modelled times happen to be: work of one
stream runs in order, work that the host issues comes after all that the host has waited for, and events, `wait_stream`,
`work.wait()` and `synchronize` carry such knowledge on (vector clocks, as in PyTorch's torch/cuda/_sanitizer.py). Every
operator, copy and collective then looks up what used its bytes before. If nothing orders the two, it raises RaceError.
"""

from __future__ import annotations

import functools
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from virtual_gpus.clock.clock import Clock
from virtual_gpus.dispatch.operators import OpCall, Operator
from virtual_gpus.entrance import program_line, quoted_line
from virtual_gpus.follower import Follower, QueuedWork
from virtual_gpus.machine import VirtualGPU, VirtualMachine
from virtual_gpus.placement.storages import HostStorage, StorageAllocation, allocation_of, gpu_of, storages, tensors_in
from virtual_gpus.threads import OfEachThread

Place = tuple[int, int | str]  # (GPU's slot, stream or queue of collectives): work in one place runs in order
Tensors = Iterable[torch.Tensor]
Past = dict[Place, int]  # of each place, the number of its last work that is known to be done
_HOST: Place = (-1, "host")
_KEPT = 64  # freed blocks that other streams may still use
_sanitizer: OfEachThread[Any] = OfEachThread(None)  # PyTorch's own, a mode of one thread, while it is off


class RaceError(RuntimeError):
    """Two accesses to the same memory that nothing orders. On a real GPU, the numbers may be wrong."""


class Moment(float):
    """A modelled time that also says which work is done by then."""

    __slots__ = ("past",)
    past: Past


class Order:
    """For each place, the work of all places that what is given to it now comes after."""

    def __init__(self) -> None:
        self.known: dict[Place, Past] = {_HOST: {}}

    def past(self, place: Place) -> Past:
        """What work that is given to a place now comes after."""
        return self.known.setdefault(place, {})

    def begin(self, place: Place) -> int:
        """The host gives work to a place. Returns its number there."""
        past = self.past(place)
        _join(past, self.known[_HOST])
        past[place] = number = past.get(place, 0) + 1
        return number

    def wait(self, place: Place, past: Past) -> None:
        """What is given to a place from now on comes after `past`."""
        _join(self.past(place), past)

    def join(self, places: Sequence[Place]) -> None:
        """Each of several places waits for all others."""
        for place in places:
            for other in places:
                self.wait(place, self.past(other))


def _join(past: Past, other: Past) -> None:
    for place, number in other.items():
        if number > past.get(place, 0):
            past[place] = number


class OrderedClock(Clock):
    """A clock whose marks carry what they order, so that events, streams and the host pass it on."""

    order: Order

    def mark(self, gpu: int, stream: int) -> float:
        """See `Clock`."""
        return _moment(super().mark(gpu, stream), self.order.past((gpu, stream)))

    def done(self, gpu: int) -> float:
        """See `Clock`."""
        past: Past = {}
        for place, known in self.order.known.copy().items():
            if place[0] == gpu:
                _join(past, known)
        return _moment(super().done(gpu), past)

    def latest(self, times: Iterable[float]) -> float:
        """See `Clock`."""
        times, past = list(times), Past()
        for time in times:
            _join(past, getattr(time, "past", {}))
        return _moment(super().latest(times), past)

    def hold(self, gpu: int, lane: int | str, until: float) -> None:
        """See `Clock`."""
        if isinstance(until, Moment):
            self.order.wait((gpu, lane), until.past)
        super().hold(gpu, lane, until)

    def wait(self, until: float, gpu: int | None = None) -> None:
        """See `Clock`."""
        self.observe(until)
        super().wait(until, gpu)

    def observe(self, until: float) -> None:
        """See `Clock`."""
        if isinstance(until, Moment):
            self.order.wait(_HOST, until.past)

    def join(self, *lanes: Place) -> None:
        """See `Clock`."""
        self.order.join(lanes)


def _moment(time: float, past: Past) -> Moment:
    moment = Moment(time)
    moment.past = dict(past)
    return moment


class _Issued:
    """One operator, copy or collective: in which place it is which work, its name and the program's line."""

    __slots__ = ("line", "number", "past", "place", "queued", "what")

    def __init__(self, order: Order, place: Place, what: str, queued: QueuedWork | None = None):
        self.place, self.what, self.queued = place, what, queued
        self.past = order.past(place)
        self.number = order.begin(place) if place != _HOST else 0
        self.line = program_line()[:2]

    def comes_after(self, other: _Issued) -> bool:
        if other.number <= self.past.get(other.place, 0):
            return True
        if other.queued is None or other.queued.given:  # a collective whose Work Python has is waited for
            return False
        _join(self.past, other.queued.past)  # C++ has it, and waits itself
        return True


class _Access(NamedTuple):
    """Bytes `start` to `end` of a storage that a work reads or writes. freed: the storage is gone since."""

    work: _Issued
    start: int
    end: int
    writes: bool
    freed: bool = False


class _History:
    """The accesses to one storage that a later one may have to wait for."""

    __slots__ = ("accesses", "address", "owner", "size", "slot", "stream", "waited_for")

    def __init__(self, allocation: StorageAllocation, forget: Callable[[Any], None]):
        self.owner = weakref.ref(allocation, forget)
        block = allocation.block
        self.slot, self.stream = allocation.gpu.slot, block.pool.stream
        self.address, self.size = block.address, block.size
        self.accesses: list[_Access] = []
        self.waited_for: set[Place] = set()  # streams of `record_stream`, for which the allocator waits


class RaceChecker(Follower[VirtualGPU]):
    """What `check_races` does on one machine."""

    def __init__(self, machine: VirtualMachine):
        self._machine, self._order = machine, Order()
        clock = OrderedClock(len(machine.slots), machine.clock.host)
        clock.order = self._order
        machine.clock, machine.follower = clock, self
        self._of_blocks: dict[int, _History] = {}  # by the id of the StorageAllocation
        self._freed: list[tuple[_History, list[_Access]]] = []
        self._of_host: weakref.WeakKeyDictionary[HostStorage, list[_Access]] = weakref.WeakKeyDictionary()

    # ---- what runs ----

    def follow(self, call: OpCall) -> Any:
        """Run an operator, after a look at what it reads and writes. Raises RaceError."""
        op = call.op
        if _has_no_access(op) or (op.row.crosses and not call.on_one_gpu):  # `copy` is told
            return op.route(call)
        works = _IssuedByGPU(self._order, op.base)
        written = {id(tensor) for name, tensor in call.named_tensors() if name in op.written} if op.written else ()
        for tensor in call.tensors:
            self._access(tensor, id(tensor) in written, works)
        result = op.route(call)
        for tensor in tensors_in(result):
            if not any(tensor is given for given in call.tensors):
                self._access(tensor, True, works)
        return result

    def kernel(self, name: str, reads: Tensors, writes: Tensors) -> None:
        """Work on the current streams that the dispatch mode does not see."""
        works = _IssuedByGPU(self._order, name)
        for tensor in reads:
            self._access(tensor, False, works)
        for tensor in writes:
            self._access(tensor, True, works)

    def copy(self, source: torch.Tensor, target: torch.Tensor, blocking: bool) -> None:
        """A copy between two devices. blocking: whether the program asked the host to wait for it."""
        gpus = [gpu for gpu in (gpu_of(source), gpu_of(target)) if gpu is not None]
        places = [(gpu.slot, gpu.stream) for gpu in gpus]
        self._order.join(places)  # a copy from GPU to GPU waits for both streams, and both wait for it
        works = _IssuedByGPU(self._order, "copy_")
        for tensor in (source, target):
            if gpu_of(tensor) is not None:
                self._access(tensor, tensor is target, works)
                continue
            pinned = _pinned(tensor)
            work = works.on(gpus[0])
            if pinned is not None and not blocking:
                self._note(self._of_host.setdefault(pinned, []), work, tensor, tensor is target)
            else:
                self._order.wait(_HOST, work.past)
        self._order.join(places)

    def queued(self, gpu: VirtualGPU, queue: str, name: str, reads: Tensors, writes: Tensors, work: QueuedWork) -> None:
        """A collective or message in a queue of its group, behind what the current stream was given so far."""
        place = (gpu.slot, queue)
        self._order.wait(place, self._order.past((gpu.slot, gpu.stream)))
        works = _IssuedByGPU(self._order, name)
        works[gpu.slot] = issued = _Issued(self._order, place, name, work)
        work.past = dict(issued.past)
        for tensor in reads:
            self._access(tensor, False, works)
        for tensor in writes:
            self._access(tensor, True, works)

    def stream_waits(self, gpu: VirtualGPU, work: QueuedWork | None) -> None:
        """The current stream waits for a collective."""
        if work is not None and work.past:
            self._order.wait((gpu.slot, gpu.stream), work.past)

    def stream_waits_for(self, gpu: VirtualGPU, tensors: Tensors) -> None:
        """The current stream waits for the collectives that fill some tensors."""
        for tensor in tensors:
            allocation = allocation_of(tensor)
            history = None if allocation is None else self._of_blocks.get(id(allocation))
            for access in history.accesses if history else ():
                self.stream_waits(gpu, access.work.queued)

    def host_waits(self, gpu: VirtualGPU) -> None:
        """The host waits for the current stream."""
        self._order.wait(_HOST, self._order.past((gpu.slot, gpu.stream)))

    def used_by(self, allocation: StorageAllocation, slot: int, stream: int) -> None:
        """`record_stream`: the allocator waits for this stream before the memory is used again."""
        self._history(allocation).waited_for.add((slot, stream))

    # ---- what is used ----

    def _access(self, tensor: torch.Tensor, writes: bool, works: _IssuedByGPU) -> None:
        allocation = allocation_of(tensor)
        if allocation is None:
            pinned = _pinned(tensor)
            if pinned is not None and pinned in self._of_host:
                self._note(self._of_host[pinned], _Issued(self._order, _HOST, works.what), tensor, writes)
        elif allocation.block is not None and allocation.block.size:  # it has bytes
            self._note(self._history(allocation).accesses, works.on(allocation.gpu), tensor, writes)

    def _history(self, allocation: StorageAllocation) -> _History:
        key = id(allocation)
        history = self._of_blocks.get(key)
        if history is None:
            history = self._of_blocks[key] = _History(allocation, lambda _: self.freed(key))
            for former, accesses in self._freed:
                shift = former.address - history.address
                if -former.size < shift < history.size:
                    history.accesses += [a._replace(start=a.start + shift, end=a.end + shift) for a in accesses]
        return history

    def freed(self, key: int) -> None:
        """A storage gave its block back. It goes to others of its stream, while other streams may still use it."""
        gone = self._of_blocks.pop(key, None)
        if gone is None:
            return
        host, safe = self._order.known[_HOST], {(gone.slot, gone.stream), *gone.waited_for}
        left = [
            access._replace(freed=True)
            for access in gone.accesses
            if not access.freed  # else it is in the list since then
            and access.work.place not in safe
            and access.work.queued is None  # a collective's tensors are held until it is waited for
            and access.work.number > host.get(access.work.place, 0)
        ]
        if left:
            self._freed.append((gone, left))
            del self._freed[:-_KEPT]

    def _note(self, accesses: list[_Access], work: _Issued, tensor: torch.Tensor, writes: bool) -> None:
        """An access to the storage whose earlier ones are `accesses`. Raises RaceError."""
        start, end = _span(tensor)
        new, remaining, host = _Access(work, start, end, writes), list[_Access](), self._order.known[_HOST]
        for old in accesses:
            if old.work.number <= host.get(old.work.place, 0):
                continue  # all that comes from now on comes after it
            ordered = old.work.place == work.place
            if not ordered and (writes or old.writes) and old.start < end and start < old.end:
                ordered = work.comes_after(old.work)
                if not ordered:
                    raise RaceError(self._text(old, new, tensor))
            if ordered and start <= old.start and old.end <= end and (writes or not old.writes):
                continue  # what comes after the new one comes after this one
            remaining.append(old)
        if work.place != _HOST:
            remaining.append(new)
        accesses[:] = remaining

    # ---- what is said ----

    def _text(self, old: _Access, new: _Access, tensor: torch.Tensor) -> str:
        where = "the computer's pinned memory" if gpu_of(tensor) is None else f"the same memory of {tensor.device}"
        advice = (
            "Wait for the copy first, for example with torch.cuda.current_stream().synchronize()."
            if new.work.place == _HOST or gpu_of(tensor) is None
            else "The memory was freed while another stream still used it. Call tensor.record_stream(stream) before."
            if old.freed
            else "Call wait() of the Work, or of the tensor that the collective returned, before."
            if old.work.queued is not None
            else "Let the second stream wait first, for example with stream.wait_stream(other) or stream.wait_event(e)."
        )
        return (
            f"Race: two uses of {where}, and nothing orders them.\n  {self._said(old)}\n  {self._said(new)}\n{advice}"
        )

    def _said(self, access: _Access) -> str:
        slot, lane = access.work.place
        if access.work.place == _HOST:
            where = "by the host"
        elif isinstance(lane, str):
            where = f"in the {lane} of cuda:{self._machine.slots[slot].index}"
        else:
            stream = f"stream {lane}" if lane else "the default stream"
            where = f"on {stream} of cuda:{self._machine.slots[slot].index}"
        verb = "written" if access.writes else "read"
        return f"{verb} by {access.work.what} {where}, {quoted_line(*access.work.line)}"


class _IssuedByGPU(dict[int, _Issued]):
    """The work of one operator on each GPU, by slot. It begins on the current stream when it is first asked for."""

    def __init__(self, order: Order, what: str):
        self._order, self.what = order, what

    def on(self, gpu: VirtualGPU) -> _Issued:
        issued = self.get(gpu.slot)
        if issued is None:
            issued = self[gpu.slot] = _Issued(self._order, (gpu.slot, gpu.stream), self.what)
        return issued


def prepare() -> None:
    """Switch PyTorch's own checks off, which TORCH_CUDA_SANITIZER put on: they ask the driver at every operator."""
    module = sys.modules.get("torch.cuda._sanitizer")
    if module is not None and module.cuda_sanitizer.dispatch in _get_current_dispatch_mode_stack()[-1:]:
        _sanitizer.value = module.cuda_sanitizer
        module.cuda_sanitizer.disable()


def forget() -> None:
    """Switch them on again."""
    sanitizer, _sanitizer.value = _sanitizer.value, None
    if sanitizer is not None and not sanitizer.enabled:
        sanitizer.enable()


def start(machine: VirtualMachine) -> None:
    """Check a machine that is being switched on for races, if its settings or TORCH_CUDA_SANITIZER ask for it."""
    if machine.settings.check_races or "TORCH_CUDA_SANITIZER" in os.environ:
        RaceChecker(machine)


@functools.cache
def _has_no_access(op: Operator) -> bool:
    """True for what changes no memory itself. The parts of composite operators come one by one; see `queued`."""
    return op.is_composite or op.is_view or op.kind == "collective" or op.row.time.is_free


def _pinned(tensor: torch.Tensor) -> HostStorage | None:
    parts = storages(tensor)
    record = parts[0]._record if parts else None
    return record if isinstance(record, HostStorage) and record.pinned else None


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """The bytes of its storage that a tensor spans; all of them for one that is not strided."""
    try:
        nbytes, whole = tensor.numel() * tensor.itemsize, tensor.untyped_storage().nbytes()
        if nbytes == whole or not nbytes:
            return 0, nbytes
        start, size = int(tensor.storage_offset()), 1
        for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
            size += (length - 1) * stride
        return start * tensor.itemsize, (start + size) * tensor.itemsize
    except (NotImplementedError, RuntimeError):
        return 0, sys.maxsize
