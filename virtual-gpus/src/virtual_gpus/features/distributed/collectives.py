"""Collectives of torch.distributed on the clock: processes, each with a clock of its own, agree on one time.

A collective begins as soon as the work before it on the current stream is done, and after the collectives that its
process group was given before: a group has one queue, as a communicator of NCCL has. It moves bytes once the last
process has come. So each process says when it would begin, by a tiny collective more over the same group, and all
arrive at the same end. In a group of the backend "fake", the other ranks do not exist.

What uses the result waits for that end, on the GPU, and so does the stream on which `work.wait()` or `wait_tensor`
is called; the host goes on. That is how NCCL works, and how DistributedDataParallel's buckets overlap with the backward
pass, and FSDP2's all-gathers with the computation before.
"""

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from virtual_gpus.clock.work import Operand
from virtual_gpus.dispatch.operators import OpCall, cost
from virtual_gpus.dispatch.routes import on_host
from virtual_gpus.features.distributed import groups, one_rank
from virtual_gpus.features.distributed.agreement import CollectiveMismatch, mismatch, number, purpose
from virtual_gpus.features.distributed.arrivals import Arrival, Lane, begins, gpu_bytes, lane_of, note, occupy, on_gpus
from virtual_gpus.features.distributed.messages import on_their_way, send_or_receive
from virtual_gpus.features.distributed.whereabouts import connect, tell_who_is_missing, wait_for_all
from virtual_gpus.features.nccl.traffic import COLLECTIVES, MESSAGES, TRAFFIC, GroupLinks, collective_seconds, kind_of
from virtual_gpus.machine import VirtualGPU
from virtual_gpus.placement.storages import nbytes, place, scratch, tensors_in
from virtual_gpus.threads import below
from virtual_gpus.timeline.peak import BUFFERS

_EXCHANGE_TAG = 1 << 21  # its messages go beside those of the program


class Meeting(NamedTuple):
    """The ranks of a group that have come to a collective: when this one could begin, and when all can.

    start: the modelled time at which the last one is there. links: those between the ranks. nbytes: of the larger side.
    """

    gpu: VirtualGPU
    lane: Lane
    began: float
    start: float
    links: GroupLinks
    nbytes: int


def meet(call: OpCall, gpu: VirtualGPU, group: torch.distributed.ProcessGroup) -> Meeting:
    """Before a collective of GPU tensors: wait for the other ranks. Raises CollectiveMismatch if one called another."""
    kind, row = kind_of(call.op.base), COLLECTIVES[kind_of(call.op.base)]
    sides = list(filter(None, (gpu_bytes([side]) for side in call.args[:2])))
    size = (min if row.at_root else max)(sides, default=0)
    if row.at_root or (row.whole == (0,) and call.func.namespace != "c10d"):
        size *= group.size()  # a rank beside the root has one part, and a functional collective no result yet
    what = "" if groups.is_fake_group(group) else purpose(call, kind, size, group)
    return _meet(gpu, group, kind, what, size, call)


def charge(
    call: OpCall, gpu: VirtualGPU, group: torch.distributed.ProcessGroup | None, meeting: Meeting | None, result: Any
) -> None:
    """After a collective (with its meeting) or message was issued. gpu: of the first tensor. result: its own."""
    name, kind = call.op.base, kind_of(call.op.base)
    if name in ("wait_tensor", "wait_tensors"):
        gpu.late.hold(gpu, call.tensors)
        gpu.machine.follower.stream_waits_for(gpu, call.tensors)
    elif group is None:
        return
    elif kind in MESSAGES:
        peer = next((call[side] for side in ("dst", "src") if side in call.op.positions), None)
        send_or_receive(kind, gpu, group, on_gpus([call.args[0]]), peer, call["tag"])
    elif name == "batch_p2p_ops":
        for one, peer, tag, tensor in zip(*(call[n] for n in [*call.op.positions][:4]), strict=True):
            send_or_receive(kind_of(one), gpu, group, [tensor], peer, tag)
    elif meeting is not None:
        results = [] if call.func.namespace == "c10d" else on_gpus([result])
        end = _charge_on_clock(meeting, gpu_bytes(results))  # an all-to-all may return more than it was given
        arrival = Arrival(gpu, _copy(_listed(call, group, 0), gpu, meeting.lane, end))
        note(results or on_gpus(call.args[:1]), arrival)
        arrival.given = call.func.namespace.startswith("_c10d_functional")  # whose callers wait themselves
        written = results or _written(call, group)
        reads = [tensor for tensor in call.tensors if not any(tensor is other for other in written)]
        gpu.machine.follower.queued(gpu, meeting.lane.queue, name, reads, written, arrival)


def charge_barrier(gpu: VirtualGPU, group: torch.distributed.ProcessGroup) -> None:
    """`dist.barrier()`: the hosts wait until the last one has come."""
    gpu.machine.clock.wait(_charge_on_clock(_meet(gpu, group, "barrier", "barrier")), gpu.slot)
    gpu.machine.follower.host_waits(gpu)


def _written(call: OpCall, group: torch.distributed.ProcessGroup) -> list[torch.Tensor]:
    """The tensors that a collective fills: the first ones, but for a root that broadcasts."""
    row = COLLECTIVES[kind_of(call.op.base)]
    if row.root == "sends" and not row.whole and call["root_rank"] == group.rank():
        return []
    written = [tensor for name, tensor in call.named_tensors() if name in call.op.written]
    return written or on_gpus(call.args[:1])


# ---- collectives -----------------------------------------------------------------------------------------------------


def _meet(gpu: VirtualGPU, group: Any, kind: str, what: str, size: int = 0, call: OpCall | None = None) -> Meeting:
    """size: see `Meeting.nbytes`."""
    state = groups.state_of(group)
    state.first_gpu = state.first_gpu or gpu
    lane = lane_of(group, kind)
    began = begins(gpu, lane, () if call is None else call.tensors)
    began = _copy([] if call is None else _listed(call, group, 1), gpu, lane, began)
    if groups.is_fake_group(group):
        return Meeting(gpu, lane, began, began, groups.fake_links(gpu, group), size)
    state.begun += 1
    connect(group)
    try:
        numbers = torch.tensor([began, *groups.host_and_slot(gpu), number(what)], dtype=torch.float64, device="cpu")
        others = [row.tolist() for row in _gathered(group, what, numbers)]
    except CollectiveMismatch:
        raise
    except RuntimeError as error:  # gloo's word for a time limit, or for a connection that was closed
        tell_who_is_missing(error, group, what)
        raise
    if any(other[3] != others[0][3] for other in others):
        raise mismatch(group, what, functools.partial(_gathered, group, what))
    members = [(int(host), int(slot)) for _, host, slot, _ in others]
    if groups.is_nccl(group):
        _refuse_shared_gpus(members)
    start = max(start for start, *_ in others)
    return Meeting(gpu, lane, began, start, groups.links_between(gpu, group, members), size)


def _charge_on_clock(meeting: Meeting, result_bytes: int = 0) -> float:
    """Put a collective on this process's clock; returns its end, that of all processes."""
    gpu, lane, began, start, links, given = meeting
    size = max(given, result_bytes)
    end = start + collective_seconds(links, lane.kind, size)
    occupy(gpu, lane, began, end, TRAFFIC[lane.kind].share(links.count) * size)
    return end


def _listed(call: OpCall, group: torch.distributed.ProcessGroup | None, *sides: int) -> list[torch.Tensor]:
    """The list of tensors that a call gathers (side 0) or scatters (1), if they have one size: NCCL's backend does so
    in a flat tensor, and copies between the two where the collective is (ProcessGroupNCCL.cpp, `newLikeFlat`)."""
    row = COLLECTIVES.get(kind_of(call.op.base))
    if row is None or row.kernel == "SendRecv" or group is None or not groups.is_nccl(group):  # those go part by part
        return []
    lists = [call.args[side] for side in row.whole if side in sides and isinstance(call.args[side], list)]
    listed = on_gpus([parts for parts in lists if isinstance(parts[0], list)])  # coalesced ones have flat tensors
    return listed if len({tensor.shape for tensor in listed}) == 1 else []


def _copy(parts: Sequence[torch.Tensor], gpu: VirtualGPU, lane: Lane, after: float) -> float:
    """Copies from or to the flat tensor, a kernel for each part. after: seconds. Returns when they are done."""
    clock = gpu.machine.clock
    for part in parts:
        clock.hold(gpu.slot, lane.row, after)
        bytes_ = (Operand((nbytes(part),), 1),)
        clock.launch(gpu.slot, lane.row, cost("copy_", bytes_, bytes_, gpu.spec).seconds, clock.host.kernel, "copy_")
        after = clock.ready(gpu.slot, lane.row)
        clock.hold(gpu.slot, lane.queue, after)
    return after


def _refuse_shared_gpus(members: Sequence[tuple[int, int]]) -> None:
    """NCCL wants a GPU for each rank (`ncclCommInitRank`)."""
    for rank, member in enumerate(members):
        other = members.index(member)
        if other < rank:
            meaning = "This usually reflects invalid usage of NCCL library."
            last = f"Duplicate GPU detected : rank {rank} and rank {other} both on CUDA device {member[1] + 1:x}000"
            raise groups.nccl_error("NCCLUtils.cpp", "usage", meaning, last)


def _gathered(group: torch.distributed.ProcessGroup, what: str, mine: torch.Tensor) -> list[torch.Tensor]:
    """A CPU tensor of every process of the group, in order of rank."""
    with below(), torch._C._DisableTorchDispatch(), torch.no_grad():
        gathered = [torch.empty_like(mine) for _ in range(group.size())]
        work = groups.gloo_group(group).allgather([gathered], [mine])
        try:
            wait_for_all(work, group, what)
        except CollectiveMismatch:
            on_their_way.append((work, (gathered, mine)))
            raise
        return gathered


def run(call: OpCall) -> Any:
    """The route of collectives and messages."""
    if call.op.base == "_wrap_tensor_autograd" and call.gpu is not None:
        from torch.distributed._functional_collectives import AsyncCollectiveTensor  # loaded, since it was called

        # It waits when it is first used. PyTorch's shape function makes a new tensor instead, for which nothing would.
        return AsyncCollectiveTensor(call.args[0])
    if call.gpu is None:
        if one_rank.fill(call):
            return _answer(call)
        # What C++ sends by operators of c10d may be numbers that CUDA would have on the GPU: those of DDP's reducer.
        if call.func.namespace != "c10d" and "group_name" in call.op.positions:
            groups.require_backend(_group_of(call), "cpu")  # of NCCL's groups; methods of a group say so themselves
        return on_host(call)
    gpu, group = call.gpu, _group_of(call)
    if type(group) is not torch.distributed.ProcessGroup:  # of a class in Python, which has no backend and no links
        group = None
    with scratch(gpu, *filter(None, [sum(map(nbytes, _listed(call, group, 0, 1)))])):
        meeting = meet(call, gpu, group) if group is not None and kind_of(call.op.base) in COLLECTIVES else None
        charging = functools.partial(charge, call, gpu, group, meeting)
        if call.gpu.machine.shapes_only or one_rank.fill(call):
            result = _answer(call)
        elif meeting is not None:
            return _run_and_charge(call, charging)
        else:
            result = _run_on_gloo(call)
            _place(call, result)
        charging(result)
        return result


KINDS = dict.fromkeys(("c10d", "_c10d_functional", "_dtensor"), "collective")
ROUTES = {"collective": run}
ALLOCATES = [("torch/distributed/_functional_collectives.py", None, BUFFERS),
             ("torch/distributed/distributed_c10d.py", None, BUFFERS)]  # fmt: skip


def _answer(call: OpCall) -> Any:
    """What a collective returns that is done at once: no numbers are sent. The ranks have told each other the time."""
    from torch._C._distributed_c10d import _create_work_from_future  # not in builds without distributed

    if call.func.namespace != "c10d":
        return _functional(call)
    written, future = call.args[0], torch.futures.Future()
    future.set_result(tensors_in(written))
    work, results = _create_work_from_future(future).boxed(), len(call.func._schema.returns)
    return (None, work, (written, work))[results]  # two results: the tensors that were written, and the work


def _functional(call: OpCall) -> Any:
    """What a functional collective returns: the tensor that it was given to write or to wait for, or else a new one.

    PyTorch's shape functions make new tensors of all, as a trace wants them. That would be a second block, which no
    collective fills, so it would never be waited for.
    """
    if call.op.base in ("wait_tensor", "wait_tensors", "irecv"):
        return call.args[0]
    if call.op.written:
        return call[next(iter(call.op.written))]
    made = call.compute()
    if call.op.base == "shard_dim_alltoall":  # its shape function may cut the result out of what all ranks have
        with below():
            made = torch.empty_like(made)
    return call.place(made)


# ---- tensors and groups ----------------------------------------------------------------------------------------------


def _group_of(call: OpCall) -> torch.distributed.ProcessGroup | None:
    """The process group of a call: a TorchScript object among its arguments, or the name of one. None without one."""
    if "group_name" in call.op.positions:
        group = call["group_name"]
        resolve: Callable[[Any], Any] = torch.distributed.distributed_c10d._resolve_process_group
        return resolve(group) if isinstance(group, str) else group
    boxed = next((value for value in call.args if groups.is_boxed(value, "ProcessGroup")), None)
    return None if boxed is None else torch.distributed.ProcessGroup.unbox(boxed)


def _place(call: OpCall, result: Any) -> None:
    """Give what a collective made its blocks on the GPU: its results, and the new storages of sparse tensors."""
    results = [] if call.func.namespace == "c10d" else tensors_in([result])
    for tensor in (*results, *(tensor for tensor in call.tensors if tensor.layout != torch.strided)):
        place(tensor, call.gpu)


def _run_and_charge(call: OpCall, charging: Callable[[Any], None]) -> Any:
    """Have gloo carry out a collective of GPU tensors, and put it on the clock. Returns its result.

    charging: puts a collective with this result on the clock.

    A thread of gloo's keeps the tensors of a collective until it comes to let them go, which may be after the program
    did so and measured its memory. So gloo gets the bytes of the program's tensors and not their storages, and what it
    makes is copied. The collective is over when this returns. That delays no rank: all ranks have come by then
    (`meet`), and how long a collective takes on GPUs is for the clock to say.
    """
    sent = _run_on_gloo(call, _same_bytes)
    makes_tensors = call.func.namespace != "c10d" and not call.op.written
    try:
        result = None if makes_tensors else _answer(call)
        if makes_tensors:
            with below(), torch.no_grad():
                result = [torch.empty_like(t) for t in sent] if isinstance(sent, list) else torch.empty_like(sent)
            _place(call, result)
        charging(result)
        with below(), torch.no_grad():
            _await(sent, result if makes_tensors else None)
    except BaseException:
        on_their_way.append((sent, call.args, call.kwargs))  # gloo may still write
        raise
    if not makes_tensors:
        _place(call, None)
    return result


def _run_on_gloo(call: OpCall, stand_in: Callable[[torch.Tensor], torch.Tensor] | None = None) -> Any:
    """Run the operator in the group that gloo has for it (`gloo_group`), with a stand-in for each of its tensors."""
    group, given = _group_of(call), (call.args, call.kwargs)  # `wait_tensor` has no group
    other = None if group is None else groups.state_of(group).gloo_group

    def argument(name: str, value: Any) -> Any:
        if isinstance(value, (list, tuple)) and stand_in is not None:
            return type(value)([argument(name, part) for part in value])
        if isinstance(value, torch.Tensor) and stand_in is not None:
            return stand_in(value)
        if other is not None and groups.is_boxed(value, "ProcessGroup"):
            return other.boxed()
        return other.group_name if other is not None and name == "group_name" else value

    try:
        with below(), torch.no_grad():
            call.args = tuple(map(argument, call.op.positions, call.args))
            call.kwargs = {name: argument(name, value) for name, value in call.kwargs.items()}
        if call.op.base == "alltoall_" and group is not None and groups.is_nccl(group):
            return _exchange(group, *call.args[:2])
        return call.compute()
    finally:
        call.args, call.kwargs = given


def _exchange(group: torch.distributed.ProcessGroup, *sides: Sequence[torch.Tensor]) -> list[Any]:
    """The Works of an all-to-all of lists, which gloo does not have: messages from rank to rank. sides: dense tensors
    of the CPU, those that are received and those that are sent, one for each rank."""
    here, gloo = group.rank(), groups.gloo_group(group)
    others = [rank for rank in range(group.size()) if rank != here]
    with below(), torch._C._DisableTorchDispatch(), torch.no_grad():
        outputs, inputs = ([part.as_strided((part.numel(),), (1,)) for part in side] for side in sides)
        outputs[here].copy_(inputs[here])
        works = [gloo.send([inputs[rank]], rank, _EXCHANGE_TAG) for rank in others if inputs[rank].numel()]
        works += [gloo.recv([outputs[rank]], rank, _EXCHANGE_TAG) for rank in others if outputs[rank].numel()]
    return [work.boxed() for work in works]


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
        if groups.is_boxed(part, "Work"):
            torch.distributed.Work.unbox(part).wait()
        elif result is not None:
            received = torch.ops._c10d_functional.wait_tensor(part)
            (result if isinstance(result, list) else [result])[i].copy_(received)
