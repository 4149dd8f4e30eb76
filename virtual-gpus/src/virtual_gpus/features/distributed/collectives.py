"""Collectives of torch.distributed on the clock: processes, each with a clock of its own, agree on one time.

A collective begins as soon as the work before it on the current stream is done, and after the collectives that its
process group was given before: a group has one queue, as a communicator of NCCL has. It moves bytes once the last
process has come. So each process says when it would begin, by a tiny collective more over the same group, and all
arrive at the same end. In a group of the backend "fake", the other ranks do not exist.

A message begins after the collectives of its group too, and collectives after the messages. What a rank sends and what
it receives do not wait for each other, because links carry both directions at once. Messages in one direction share the
link, so they go one after the other.

What uses the result waits for that end, on the GPU, and so does the stream on which `work.wait()` or `wait_tensor`
is called; the host goes on. That is how NCCL works, and how DistributedDataParallel's buckets overlap with the backward
pass, and FSDP2's all-gathers with the computation before.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch

from virtual_gpus.clock.links import Route
from virtual_gpus.clock.traffic import collective_seconds, message_seconds, sent_bytes
from virtual_gpus.dispatch import foreach_ops
from virtual_gpus.dispatch.op_call import OpCall
from virtual_gpus.dispatch.routes import on_host
from virtual_gpus.dispatch.timing import await_tensors
from virtual_gpus.features.distributed import alone
from virtual_gpus.features.distributed.agreement import CollectiveMismatch, count, mismatch, number, purpose
from virtual_gpus.features.distributed.groups import (
    carrier,
    carriers,
    first_gpu_of,
    is_alone,
    is_boxed,
    is_nccl,
    kind_of,
    place_of,
    require_backend,
    route,
    route_of,
    row_of,
)
from virtual_gpus.features.distributed.whereabouts import connect, tell_who_is_missing, wait_for_all
from virtual_gpus.machine import VirtualGPU
from virtual_gpus.placement.storages import allocation_of, gpu_of, tensors_in
from virtual_gpus.threads import below, this_thread

_SENDS, _RECEIVES = ("send", "isend"), ("recv_", "recv_any_source_", "irecv")
_CLOCK_TAG = 1 << 20  # messages about the time go beside those of the program
_PATIENCE = timedelta(seconds=30)  # real time for a sender's time to arrive, once its tensor is here
_LEAVES_AFTER_S = 5.0  # real time for a receiver to take such times, before a process ends
_NOT_TOLD = (
    f"A tensor has arrived on a GPU, but its sender did not tell within {_PATIENCE.seconds} s at which modelled time "
    "it sent it. It has ended, or it sent a tensor of the CPU. Send from a GPU what a GPU receives. Gloo has closed "
    "the connections of the group."
)
# (work, tensor) of times that may be on their way: gloo does not say which are, and hangs if their memory goes.
_on_their_way: deque = deque(maxlen=1024)
_sent: deque = deque(maxlen=1024)  # the same of times that this process sends
_ends: weakref.WeakKeyDictionary[Any, tuple[VirtualGPU, Any]] = weakref.WeakKeyDictionary()  # of works that Python has


class _Lane(NamedTuple):
    """Where a collective stands: its kind, its row in a timeline, the queue that it is put in, and those that it waits
    for."""

    kind: str
    row: str
    queue: str
    after: tuple[str, ...]


class Arrival:
    """When a tensor from other processes is here. end: its modelled time, or what asks the sender for it.

    given: whether Python has the Work, so that the program must wait for it; else C++ does.
    """

    given = False

    def __init__(self, end: float | Callable[[], float]):
        self._end = end

    @property
    def known(self) -> bool:
        """True if `time` need not wait."""
        return not callable(self._end)

    def time(self) -> float:
        """The modelled time of arrival. Raises DistNetworkError if the sender does not tell when it sent the tensor."""
        if callable(self._end):
            self._end = self._end()
        return self._end


class Meeting(NamedTuple):
    """The ranks of a group that have come to a collective: when this one could begin, and when all can.

    start: the modelled time at which the last one is there. links: those between the ranks. nbytes: of the larger side.
    """

    gpu: VirtualGPU
    lane: _Lane
    began: float
    start: float
    links: Route
    nbytes: int


def meet(call: OpCall, gpus: Sequence[VirtualGPU | None]) -> Meeting | None:
    """Called before a collective on tensors of GPUs is issued: wait for the other ranks. None for what has no ranks.

    Raises CollectiveMismatch if another rank called something else.
    """
    gpu, kind = next((gpu for gpu in gpus if gpu is not None), None), kind_of(call.op.base)
    group = _group_of(call) if gpu is not None and kind else None
    if type(group) is not torch.distributed.ProcessGroup:  # of a class in Python, which has no backend and no links
        return None
    nbytes = _size(kind, call.args[:2], group)
    if kind == "all_gather" and call.func.namespace != "c10d":
        nbytes *= group.size()  # of the result, which is not there yet
    what = "" if is_alone(group) else purpose(call, kind, nbytes, group)
    return _meet(gpu, group, kind, what, nbytes, call.tensors)


def charge_collective(call: OpCall, gpus: Sequence[VirtualGPU | None], result: Any, meeting: Meeting | None) -> None:
    """Called after a collective or a message on tensors of GPUs was issued.

    gpus: those of the tensors of its first list. result: what it returned. meeting: that of a collective.
    """
    gpu, name = next((gpu for gpu in gpus if gpu is not None), None), call.op.base
    if gpu is None:
        return
    if name in ("wait_tensor", "wait_tensors"):
        await_tensors(gpu, call.tensors)
        gpu.machine.follower.tensors_arrived(gpu, call.tensors)
        return
    group = _group_of(call)
    if type(group) is not torch.distributed.ProcessGroup:  # of a class in Python, which has no backend and no links
        return
    if name in _SENDS or name in _RECEIVES:
        peer = call["dst"] if name in _SENDS else call["src"] if "src" in call.op.names else None
        _message(name, gpu, group, _on_gpus([call.args[0]]), peer, call["tag"])
    elif name == "batch_p2p_ops":
        for kind, peer, tag, tensor in zip(*(call[n] for n in call.op.names[:4]), strict=True):
            _message(kind, gpu, group, [tensor], peer, tag)
    elif meeting is not None:
        made = [] if call.func.namespace == "c10d" else _on_gpus([result])
        end = _carry(meeting, _bytes(made))  # an all-to-all may return more than it was given
        arrival = Arrival(end)
        _note(gpu, made or _on_gpus(call.args[:1]), arrival)
        arrival.given = call.func.namespace.startswith("_c10d_functional")  # whose callers wait themselves
        written = made or _written(call, group)
        reads = [tensor for tensor in call.tensors if not any(tensor is other for other in written)]
        gpu.machine.follower.collective(gpu, meeting.lane.queue, name, reads, written, arrival)


def charge_barrier(gpu: VirtualGPU, group) -> None:
    """`dist.barrier()`: the hosts wait until the last one has come."""
    gpu.machine.clock.wait(_carry(_meet(gpu, group, "barrier", "barrier")), gpu.slot)
    gpu.machine.follower.host_waits(gpu)


def _written(call: OpCall, group) -> list[torch.Tensor]:
    """The tensors that a collective fills: the first ones, but for a root that broadcasts."""
    if call.op.base == "broadcast_" and call["root_rank"] == group.rank():
        return []
    if call.op.written:
        return [tensor for name, tensor in call.named_tensors() if name in call.op.written]
    return _on_gpus(call.args[:1])


def remember(work: Any) -> None:
    """Called when Python is given a Work: it stands for the collective that this thread issued last."""
    noted, this_thread.collective = this_thread.collective, None
    if noted is not None and work is not None:
        _ends[work] = noted
        noted[1].given = True


def give_to_future(work: Any) -> None:
    """C++ waits for the collective of a Work, before it calls what was given to its future."""
    if work in _ends:
        _ends[work][1].given = False


def await_work(work: Any) -> None:
    """`work.wait()`: the current stream waits for the collective, and the host does not."""
    gpu, arrival = _ends.get(work, (None, None))
    if arrival is None:
        return
    gpu.machine.follower.arrived(gpu, arrival)
    if arrival.known:
        gpu.machine.clock.hold(gpu.slot, gpu.stream, arrival.time())


# ---- collectives -----------------------------------------------------------------------------------------------------


def _meet(
    gpu: VirtualGPU, group, kind: str, what: str, nbytes: int = 0, tensors: Iterable[torch.Tensor] = ()
) -> Meeting:
    first_gpu_of.setdefault(group, gpu)
    lane = _lane(group, kind)
    began = _begins(gpu, lane, tensors)
    if is_alone(group):
        return Meeting(gpu, lane, began, began, route_of(gpu, group), nbytes)
    count(group)
    connect(group)
    try:
        numbers = torch.tensor([began, *place_of(gpu), number(what)], dtype=torch.float64, device="cpu")
        others = [told.tolist() for told in _gathered(group, what, numbers)]
    except CollectiveMismatch:
        raise
    except RuntimeError as error:  # gloo's word for a time limit, or for a connection that was closed
        tell_who_is_missing(error, group, what)
        raise
    if any(other[3] != others[0][3] for other in others):
        raise mismatch(group, what, functools.partial(_gathered, group, what))
    places = [(int(host), int(slot)) for _, host, slot, _ in others]
    if is_nccl(group):
        _refuse_shared_gpus(places)
    start = max(start for start, *_ in others)
    return Meeting(gpu, lane, began, start, route(gpu, group, places), nbytes)


def _carry(meeting: Meeting, made: int = 0) -> float:
    """Put a collective on this process's clock; returns its end, which is the same in all processes.

    made: the bytes of its result, if it makes one.
    """
    gpu, lane, began, start, links, given = meeting
    nbytes = max(given, made)
    end = start + collective_seconds(links, lane.kind, nbytes)
    _occupy(gpu, lane, began, end, sent_bytes(links.count, lane.kind, nbytes))
    return end


def _refuse_shared_gpus(places: Sequence[tuple[int, int]]) -> None:
    """NCCL wants a GPU for each rank (`ncclCommInitRank`'s error, as NCCLUtils.cpp in PyTorch words it)."""
    for rank, place in enumerate(places):
        other = places.index(place)
        if other < rank:
            version = ".".join(map(str, torch.cuda.nccl.version()))
            raise torch.distributed.DistBackendError(
                "NCCL error in: torch/csrc/distributed/c10d/NCCLUtils.cpp, invalid usage (run with NCCL_DEBUG=WARN for "
                f"details), NCCL version {version}\n"
                "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.\nLast error:\n"
                f"Duplicate GPU detected : rank {rank} and rank {other} both on CUDA device {place[1] + 1:x}000"
            )


def _lane(group, kind: str) -> _Lane:
    whole = f"queue {group.group_name}"
    parts = {"send": f"{whole}, send", "recv": f"{whole}, recv"}
    queue = parts.get(kind, whole)
    return _Lane(kind, row_of(group, kind), queue, (whole, queue) if kind in parts else (whole, *parts.values()))


def _begins(gpu: VirtualGPU, lane: _Lane, tensors: Iterable[torch.Tensor]) -> float:
    """When this GPU could begin: the host has issued it, and what came before on its stream, in its queue and on its
    tensors is done."""
    clock = gpu.machine.clock
    now = clock.spend(clock.host.operator, gpu.slot)
    begins = max(now, clock.ready(gpu.slot, gpu.stream), *(clock.ready(gpu.slot, queue) for queue in lane.after))
    late = clock.tracks[gpu.slot].late
    for tensor in tensors if late else ():
        allocation = allocation_of(tensor)
        arrival, owner = late.get(id(allocation), (None, None))
        if arrival is not None and arrival.known and owner() is allocation:
            begins = max(begins, arrival.time())
    return begins


def _occupy(gpu: VirtualGPU, lane: _Lane, start: float, end: float, sent: float) -> None:
    """sent: the bytes that this GPU sends."""
    clock = gpu.machine.clock
    clock.occupy(gpu.slot, lane.row, start, end, "collective", lane.kind, kernel=True, sent=sent)
    clock.hold(gpu.slot, lane.queue, end)


def _gathered(group, what: str, mine: torch.Tensor) -> list[torch.Tensor]:
    """A CPU tensor of every process of the group, in order of rank."""
    with below(), torch._C._DisableTorchDispatch(), torch.no_grad():
        found = [torch.empty_like(mine) for _ in range(group.size())]
        work = carrier(group).allgather([found], [mine])
        try:
            wait_for_all(work, group, what)
        except CollectiveMismatch:
            _on_their_way.append((work, (found, mine)))
            raise
        return found


# ---- messages --------------------------------------------------------------------------------------------------------


def _message(name: str, gpu: VirtualGPU, group, tensors: list[torch.Tensor], peer: int | None, tag: int) -> None:
    """Put a message on the clock. name: of its operator."""
    first_gpu_of.setdefault(group, gpu)
    sends = name in _SENDS
    lane, nbytes = _lane(group, "send" if sends else "recv"), _bytes(tensors)
    began = _begins(gpu, lane, tensors)
    here = place_of(gpu)
    end: float | Callable[[], float]
    if is_alone(group):  # the other side is ready when this one is
        ranks = torch.distributed.get_process_group_ranks(group)
        other = ranks[(group.rank() + 1) % group.size() if peer is None else peer]  # any: the next is as good as others
        here, there = (gpu.machine.settings.place_of(rank) for rank in (ranks[group.rank()], other))
        end = began + message_seconds(gpu.machine.topology, here, there, nbytes, route_of(gpu, group).across)
    else:
        end = _tell_or_ask(sends, gpu, group, lane, began, nbytes, peer, tag)
    if not callable(end):
        _occupy(gpu, lane, began, end, nbytes if sends else 0)
    arrival = Arrival(end)
    _note(gpu, tensors, arrival)
    gpu.machine.follower.collective(gpu, lane.queue, name, *((tensors, []) if sends else ([], tensors)), arrival)


def _tell_or_ask(
    sends: bool, gpu: VirtualGPU, group, lane: _Lane, began: float, nbytes: int, peer: int | None, tag: int
) -> float | Callable[[], float]:
    """Tell the receiver when this message begins. Returns its end; for the receiver, a function that waits for it."""
    with below(), torch._C._DisableTorchDispatch(), torch.no_grad():
        message = torch.tensor([began, *place_of(gpu)], dtype=torch.float64, device="cpu")
        carried = carrier(group)
        work = (carried.send if sends else carried.recv)([message], peer, tag + _CLOCK_TAG)
    (_sent if sends else _on_their_way).append((work, message))
    here, topology = place_of(gpu), gpu.machine.topology
    if sends:  # as good a guess as any: where the rank would be
        return began + message_seconds(topology, here, (here[0], peer % len(gpu.machine.slots)), nbytes)

    def ask() -> float:
        try:
            work.wait(_PATIENCE)  # gloo's messages never say is_completed() before a wait
        except RuntimeError as error:
            raise torch.distributed.DistNetworkError(_NOT_TOLD) from error
        sent, host, slot = message.tolist()
        seconds = message_seconds(topology, (int(host), int(slot)), here, nbytes)
        end = max(began, sent) + seconds
        _occupy(gpu, lane, end - seconds, end, 0)
        return end

    return ask


def until_times_have_arrived() -> None:
    """Wait until the times of this process's messages are received. Gloo sends nothing of a process that has ended."""
    end = time.monotonic() + _LEAVES_AFTER_S
    while _sent:
        with contextlib.suppress(RuntimeError):  # the other process has ended, or does not receive
            _sent.popleft()[0].wait(timedelta(seconds=max(end - time.monotonic(), 1e-3)))


def run(call: OpCall) -> Any:
    """The route of collectives and messages."""
    if call.op.base == "_wrap_tensor_autograd" and call.gpu is not None:
        return unawaited(call)
    if call.gpu is None:
        if alone.answers(call):
            return alone.collective(call)
        # What C++ sends by operators of c10d may be numbers that CUDA would have on the GPU: those of DDP's reducer.
        if call.func.namespace != "c10d" and "group_name" in call.op.names:
            require_backend(_group_of(call), "cpu")  # of NCCL's groups; the methods of a group say so themselves
        return on_host(call)
    columns, gpus = foreach_ops.columns_of(call)
    meeting = meet(call, gpus)
    if call.gpu.machine.shapes_only:
        result = alone.answer(call)
    elif alone.answers(call):
        result = alone.collective(call)
    elif kind_of(call.op.base) and type(_group_of(call)) is torch.distributed.ProcessGroup:
        return _carry_out(call, gpus, lambda result: foreach_ops.place_rows(columns, gpus, result), meeting)
    else:
        result = _issue(call)
        foreach_ops.place_rows(columns, gpus, result)
    charge_collective(call, gpus, result, meeting)
    return result


ROUTES = {"collective": run}


def unawaited(call: OpCall) -> torch.Tensor:
    """`_wrap_tensor_autograd`: the result of a functional collective as a tensor that waits when it is first used.

    It has no memory but that of the tensor inside. PyTorch's shape function makes a new tensor instead, for which
    no operator would wait.
    """
    from torch.distributed._functional_collectives import AsyncCollectiveTensor  # loaded, since it was called

    return AsyncCollectiveTensor(call.args[0])


# ---- tensors and groups ----------------------------------------------------------------------------------------------


def _note(gpu: VirtualGPU, tensors: Iterable[torch.Tensor], arrival) -> None:
    """What uses `tensors` waits for `arrival`, and so does `wait()` of the Work that stands for it."""
    this_thread.collective = gpu, arrival
    for tensor in tensors:
        allocation = allocation_of(tensor)
        if allocation is not None:
            owner = allocation.gpu
            owner.machine.clock.tracks[owner.slot].late[id(allocation)] = arrival, weakref.ref(allocation)


def _group_of(call: OpCall):
    """The process group of a call: a TorchScript object among its arguments, or the name of one. None without one."""
    if "group_name" in call.op.names:
        group = call["group_name"]
        return torch.distributed.distributed_c10d._resolve_process_group(group) if isinstance(group, str) else group
    boxed = next((value for value in call.args if is_boxed(value, "ProcessGroup")), None)
    return None if boxed is None else torch.distributed.ProcessGroup.unbox(boxed)


def _carry_out(
    call: OpCall, gpus: Sequence[VirtualGPU | None], place: Callable[[Any], None], meeting: Meeting | None
) -> Any:
    """Have gloo carry out a collective of GPU tensors, and put it on the clock. Returns its result.

    gpus: those of the tensors of its first list. place: gives results their blocks on the GPU. meeting: see `meet`.

    A thread of gloo's keeps the tensors of a collective until it comes to let them go, which may be after the program
    did so and measured its memory. So gloo gets the bytes of the program's tensors and not their storages, and what it
    makes is copied. The collective is over when this returns. That delays no rank: all ranks have come by then
    (`meet`), and how long a collective takes on GPUs is for the clock to say.
    """
    sent = _issue(call, _same_bytes)
    makes_tensors = call.func.namespace != "c10d" and not call.op.written
    try:
        result = None if makes_tensors else alone.answer(call)
        if makes_tensors:
            with below(), torch.no_grad():
                result = [torch.empty_like(t) for t in sent] if isinstance(sent, list) else torch.empty_like(sent)
            place(result)
        charge_collective(call, gpus, result, meeting)
        with below(), torch.no_grad():
            _await(sent, result if makes_tensors else None)
    except BaseException:
        _on_their_way.append((sent, call.args, call.kwargs))  # gloo may still write
        raise
    if not makes_tensors:
        place(None)  # the new storages of a sparse tensor
    return result


def _issue(call: OpCall, stand_in: Callable[[torch.Tensor], torch.Tensor] | None = None) -> Any:
    """Run the operator in the group that gloo has for it (`carrier`), with a stand-in for each of its tensors."""
    group, given = _group_of(call), (call.args, call.kwargs)  # `wait_tensor` has no group
    other = None if group is None else carriers.get(group)

    def argument(name: str, value: Any) -> Any:
        if isinstance(value, (list, tuple)) and stand_in is not None:
            return type(value)([argument(name, part) for part in value])
        if isinstance(value, torch.Tensor) and stand_in is not None:
            return stand_in(value)
        if other is not None and is_boxed(value, "ProcessGroup"):
            return other.boxed()
        return other.group_name if other is not None and name == "group_name" else value

    try:
        with below(), torch.no_grad():
            call.args = tuple([argument(name, value) for name, value in zip(call.op.names, call.args, strict=False)])
            call.kwargs = {name: argument(name, value) for name, value in call.kwargs.items()}
        return call.compute()
    finally:
        call.args, call.kwargs = given


def _same_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same bytes in a storage of its own, which does not keep them."""
    storage = tensor.untyped_storage() if tensor.layout == torch.strided else None
    if not storage:  # none, or without a byte
        return tensor
    memory = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    other = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    empty = torch.empty(0, dtype=tensor.dtype, device="cpu")
    return empty.set_(other, tensor.storage_offset(), tensor.shape, tensor.stride())


def _await(sent: Any, result: Any) -> None:
    """Wait for what gloo was given, really, and copy the tensors that it made into `result`."""
    parts = sent if isinstance(sent, (list, tuple)) else [sent]
    for i, part in enumerate(parts):
        if is_boxed(part, "Work"):
            torch.distributed.Work.unbox(part).wait()
        elif result is not None:
            arrived = torch.ops._c10d_functional.wait_tensor(part)
            (result if isinstance(result, list) else [result])[i].copy_(arrived)


def _on_gpus(values: list | tuple) -> list[torch.Tensor]:
    return [tensor for tensor in tensors_in(values) if gpu_of(tensor) is not None]


def _size(kind: str, given: Sequence[Any], group) -> int:
    """The bytes of the larger side. Of what is gathered or scattered, which only the root has, each rank has a part."""
    sides = [nbytes for side in given if (nbytes := _bytes([side]))]
    return min(sides, default=0) * group.size() if kind in ("gather", "scatter") else max(sides, default=0)


def _bytes(tensors) -> int:
    return sum(t.numel() * t.element_size() for t in _on_gpus(tensors))
