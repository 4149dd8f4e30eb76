"""Collectives of torch.distributed on the clock: processes, each with a clock of its own, agree on one time.

A collective begins on a stream of its own as soon as the work before it is done, and moves bytes once the last process
has come. So each process says when it would begin, by a tiny collective more over the same group, and all arrive at the
same end. Whoever uses the result waits for that end, on the GPU; the host goes on. That is how NCCL works, and how
DistributedDataParallel's buckets overlap with the backward pass.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections import deque
from collections.abc import Sequence
from datetime import timedelta

import torch

from virtual_gpus.clock.clock import COLLECTIVES
from virtual_gpus.clock.traffic import ring_seconds
from virtual_gpus.dispatch.call import OpCall
from virtual_gpus.machine import VirtualGPU, active
from virtual_gpus.placement.storages import allocation_of, gpu_of
from virtual_gpus.threads import below

_KINDS = {
    "allreduce_": "all_reduce", "allreduce_coalesced_": "all_reduce", "broadcast_": "broadcast", "reduce_": "reduce",
    "allgather_": "all_gather", "_allgather_base_": "all_gather", "allgather_into_tensor_coalesced_": "all_gather",
    "reduce_scatter_": "reduce_scatter", "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter", "gather_": "gather", "scatter_": "scatter",
    "alltoall_": "all_to_all", "alltoall_base_": "all_to_all",
}  # fmt: skip
# The backends that a group was asked to have: {"cuda": "nccl"}. Gloo carries the messages of all of them.
backends_of: weakref.WeakKeyDictionary[object, dict[str, str]] = weakref.WeakKeyDictionary()
# The GPU that this process first used in a group: NCCL's barriers go there.
first_gpu_of: weakref.WeakKeyDictionary[object, VirtualGPU] = weakref.WeakKeyDictionary()
_CLOCK_TAG = 1 << 20  # messages about the time go beside those of the program
_PATIENCE = timedelta(seconds=5)  # real time for a sender's time to arrive, once its tensor is here
# (work, tensor) of times that may be on their way: gloo does not say which are, and hangs if their memory goes.
_on_their_way: deque = deque(maxlen=1024)


def is_nccl(group: object) -> bool:
    """True for a process group whose backend for GPUs is to be NCCL."""
    return backends_of.get(group, {}).get("cuda", "").startswith("nccl")


class Arrival:
    """When a tensor from another process is here: known once the sender has said when it sent it."""

    def __init__(self, gpu: VirtualGPU, work, message: torch.Tensor, began: float, nbytes: int):
        self._gpu, self._work, self._message, self._began, self._nbytes = gpu, work, message, began, nbytes
        self._end: float | None = None

    @property
    def known(self) -> bool:
        """True if `time` need not wait."""
        return self._end is not None

    def time(self) -> float:
        """The modelled time of arrival. Waits for the sender's message."""
        if self._end is None:
            with contextlib.suppress(RuntimeError):  # gloo's word for "no answer in time"
                self._work.wait(_PATIENCE)  # gloo's messages never say is_completed() before somebody waits
            sent, host, slot = self._message.tolist()
            seconds = _ring(self._gpu, [(int(host), int(slot)), _place(self._gpu)], "send", self._nbytes)
            self._end = max(self._began, sent) + seconds
            clock = self._gpu.machine.clock
            clock.occupy(self._gpu.slot, COLLECTIVES, self._end - seconds, self._end, "collective", "recv", True)
        return self._end


class _Known:
    """An arrival whose time is known."""

    __slots__ = ("_end",)
    known = True

    def __init__(self, end: float):
        self._end = end

    def time(self) -> float:
        return self._end


def record_collective(call: OpCall, gpus: Sequence[VirtualGPU | None]) -> None:
    """Called after a `c10d` operator on tensors of GPUs was issued. gpus: those of the tensors of its first list."""
    gpu = next((gpu for gpu in gpus if gpu is not None), None)
    group = next((g for g in map(_group, call.args) if g is not None), None)
    if gpu is None or group is None:
        return
    name = call.op.base
    if name in ("send", "recv_"):
        _point_to_point(name == "send", gpu, group, call.args)
    elif name in _KINDS:
        end = _meet(gpu, group, _KINDS[name], _bytes(call.args))
        for tensor in _tensors(call.args):
            _arrives(tensor, _Known(end))


def record_barrier(gpu: VirtualGPU, group) -> None:
    """`dist.barrier()`: the hosts wait until the last one has come."""
    end = _meet(gpu, group, "barrier", 0)
    gpu.machine.clock.wait(end, gpu.slot)


def _meet(gpu: VirtualGPU, group, kind: str, nbytes: int) -> float:
    """Put a collective on this process's clock; returns its end, which is the same in all processes."""
    first_gpu_of.setdefault(group, gpu)
    began = _begins(gpu)
    others = _exchange(group, [began, *_place(gpu)])
    places = [(int(host), int(slot)) for _, host, slot in others]
    if is_nccl(group):
        _refuse_shared_gpus(places)
    end = max(start for start, *_ in others) + _ring(gpu, places, kind, nbytes)
    gpu.machine.clock.occupy(gpu.slot, COLLECTIVES, began, end, "collective", kind, kernel=True)
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


def _begins(gpu: VirtualGPU) -> float:
    """When this GPU could begin: the host has issued it, and what came before on its stream is done."""
    clock = gpu.machine.clock
    now = clock.spend(clock.host.operator, gpu.slot)
    return max(now, clock.ready(gpu.slot, gpu.stream), clock.ready(gpu.slot, COLLECTIVES))


def _place(gpu: VirtualGPU) -> tuple[int, int]:
    """(machine, slot): torchrun numbers the machines; a described topology may have several as well."""
    return int(os.environ.get("GROUP_RANK", 0)) * gpu.machine.settings.hosts + gpu.machine.topology.hosts[
        gpu.slot
    ], gpu.slot


def _ring(gpu: VirtualGPU, places, kind: str, nbytes: int) -> float:
    """Seconds around the GPUs in order of rank. Those of other machines are reached by the network."""
    topology = gpu.machine.topology
    links = [
        topology.network if here[0] != there[0] else topology.between(here[1], there[1])
        for here, there in zip(places, [*places[1:], places[0]], strict=True)
        if here != there
    ]
    return ring_seconds(links, len(places), kind, nbytes)


def _exchange(group, numbers: list[float]) -> list[list[float]]:
    """`numbers` of every process of the group, in order of rank: its time, then its place."""
    settings = active().settings
    if settings.rank is not None:  # the others do not exist, and come at the same time
        return [[numbers[0], *settings.place_of(rank)] for rank in torch.distributed.get_process_group_ranks(group)]
    mine = torch.tensor(numbers, dtype=torch.float64, device="cpu")  # whatever the default device is
    with below(), torch._C._DisableTorchDispatch(), torch.no_grad():
        found = [torch.empty_like(mine) for _ in range(group.size())]
        group.allgather([found], [mine]).wait()
        return [part.tolist() for part in found]


def _point_to_point(sends: bool, gpu: VirtualGPU, group, args) -> None:
    peer, tag = (value for value in args if isinstance(value, int) and not isinstance(value, bool))
    began, nbytes = _begins(gpu), _bytes(args)
    settings = gpu.machine.settings
    if settings.rank is not None:
        there = settings.place_of(torch.distributed.get_global_rank(group, peer))
        end = began + _ring(gpu, [_place(gpu), there], "send", nbytes)
        gpu.machine.clock.occupy(gpu.slot, COLLECTIVES, began, end, "collective", "send" if sends else "recv", True)
        for tensor in [] if sends else _tensors(args):
            _arrives(tensor, _Known(end))
        return
    with below(), torch._C._DisableTorchDispatch(), torch.no_grad():
        message = torch.tensor([began, *_place(gpu)], dtype=torch.float64, device="cpu")
        work = (group.send if sends else group.recv)([message], peer, tag + _CLOCK_TAG)
    _on_their_way.append((work, message))
    if not sends:
        for tensor in _tensors(args):
            _arrives(tensor, Arrival(gpu, work, message, began, nbytes))
        return
    there = peer % len(gpu.machine.slots)  # as good a guess as any: where the rank would be
    end = began + _ring(gpu, [_place(gpu), (_place(gpu)[0], there)], "send", nbytes)
    gpu.machine.clock.occupy(gpu.slot, COLLECTIVES, began, end, "collective", "send", kernel=True)


def _arrives(tensor: torch.Tensor, arrival) -> None:
    allocation = allocation_of(tensor)
    if allocation is not None:
        gpu = allocation.gpu
        gpu.machine.clock.tracks[gpu.slot].late[id(allocation)] = arrival, weakref.ref(allocation)


def _group(value):
    """The process group in a TorchScript object, or None."""
    if isinstance(value, torch.ScriptObject):
        try:
            return torch.distributed.ProcessGroup.unbox(value)
        except RuntimeError:  # a reduce operation
            return None
    return None


def _tensors(values) -> list[torch.Tensor]:
    found = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += _tensors(value)
    return [tensor for tensor in found if gpu_of(tensor) is not None]


def _bytes(args) -> int:
    """Bytes of the larger side: of what is gathered, or what is scattered."""
    return max(sum(t.numel() * t.element_size() for t in _tensors([value])) for value in args[:2])
