"""What nn.DataParallel stands on, beside `comm`: NCCL, and threads for the replicas.

nn.DataParallel, replicate, scatter, parallel_apply and gather themselves are PyTorch's own, unmodified.
"""

import sys
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

import torch

from virtual_gpus.clock.clock import Clock
from virtual_gpus.features.blas import leave_handle, stands_in_for
from virtual_gpus.features.nccl.traffic import collective_seconds, links_of_group, occupy
from virtual_gpus.machine import VirtualGPU, get_machine
from virtual_gpus.patches.table import Patch
from virtual_gpus.placement.storages import gpu_of, nbytes
from virtual_gpus.threads import this_thread
from virtual_gpus.timeline.peak import OTHER, PARAMETERS

ALLOCATES = [("torch/nn/parallel/replicate.py", None, PARAMETERS),
             ("torch/nn/parallel/scatter_gather.py", ("scatter_map",), OTHER)]  # inputs, from outside  # fmt: skip

# ---- NCCL inside one process: only what reduce_add asks of it -----------------------------------------------------


def is_available(tensors: Sequence[torch.Tensor]) -> bool:
    """NCCL takes dense, contiguous tensors on different GPUs."""
    gpus = [gpu_of(t) for t in tensors]
    dense = all(g is not None and not t.is_sparse and t.is_contiguous() for g, t in zip(gpus, tensors, strict=False))
    return dense and len({id(g) for g in gpus}) == len(gpus)


def collective_here(members: Sequence[VirtualGPU | None], kind: str, nbytes: int) -> None:
    """A collective of several GPUs of this process, in their current streams (DataParallel's)."""
    gpus = [gpu for gpu in members if gpu is not None]
    clock, slots = gpus[0].machine.clock, [gpu.slot for gpu in gpus]
    now = clock.spend(clock.host.operator * len(gpus), slots[0])
    start = max([now, *(clock.ready(gpu.slot, gpu.stream) for gpu in gpus)])
    topology = gpus[0].machine.topology
    links = links_of_group(topology, [(topology.hosts[slot], slot) for slot in slots], per_host=len(slots))
    end = start + collective_seconds(links, kind, nbytes)
    clock.join(*((gpu.slot, gpu.stream) for gpu in gpus))
    for gpu in gpus:
        occupy(clock, gpu.slot, gpu.stream, start, end, kind)


def reduce(
    inputs: Sequence[torch.Tensor], output: torch.Tensor | None = None, root: int = 0, op: int = 0, streams: Any = None,
    comms: Any = None, *, outputs: Sequence[torch.Tensor] | None = None,
) -> None:  # fmt: skip
    """Sum `inputs` into `output` on the root's GPU. NCCL passes the data on in pieces: no buffer of the size of it."""
    output = outputs[root] if outputs is not None else inputs[root] if output is None else output
    collective_here([gpu_of(t) for t in inputs], "reduce", nbytes(output))
    get_machine().follower.kernel("reduce", inputs, [output])
    with torch._C._DisableTorchDispatch(), torch.no_grad():
        output.copy_(inputs[root])
        for index, tensor in enumerate(inputs):
            if index != root:
                output.add_(tensor)


# ---- the replicas' threads ------------------------------------------------------------------------------------------


class ConcurrentThreads:
    """Threads of one Python process that run side by side: they share the interpreter, so each is slowed by the others.

    Here they run one after the other. Each begins at the time when the first one began and pays each cost as many times
    over as there are threads; the caller goes on when the last one is through.
    """

    def __init__(self, clock: Clock, members: int = 0):
        self.clock, self.members, self.started = clock, members, False
        self.began, self.ended, self.issued, self.share = clock.now, clock.now, clock.issued, clock.share

    def __enter__(self) -> None:
        self.started = True
        self.clock.now, self.clock.share = self.began, self.share * self.members

    def __exit__(self, *_: object) -> None:
        clock = self.clock
        self.ended = max(self.ended, clock.now)
        clock.now, clock.share = self.ended, self.share


class SequentialThread:
    """A patch for threading.Thread that runs its target in `start`: replicas one by one, always in one order."""

    _waiting: ClassVar = threading.local()  # `team`: those made and not started yet, which will run side by side

    def __init__(self, target: Callable[..., object], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None):
        self._call = (target, args, kwargs or {})
        team: ConcurrentThreads | None = getattr(self._waiting, "team", None)
        clock = get_machine().clock  # on which nothing is issued while threads are made that run together
        if team is None or team.clock is not clock or team.started or team.issued != clock.issued:
            team = self._waiting.team = ConcurrentThreads(clock)
        team.members += 1
        self._team = team

    def start(self) -> None:
        """Run now, and leave the thread's settings as they were."""
        target, args, kwargs = self._call
        machine = get_machine()
        current = machine.index_of_thread  # set below by C alone: Ctrl-C comes at the beginning of functions of Python
        index, grad, lower = machine.current, torch.is_grad_enabled(), torch.get_autocast_dtype("cuda")
        outer = stands_in_for.value, this_thread.in_backward
        share = machine.clock.share
        worker = object()  # not `self`, whose tensors would stay should Ctrl-C cut the end off
        machine.current = 0  # a new thread starts on GPU 0
        stands_in_for.value, this_thread.in_backward = worker, False
        try:
            torch.set_autocast_dtype("cuda", torch.float16)  # as a new thread finds it
            with self._team:
                target(*args, **kwargs)
        finally:
            machine.clock.share = share
            current.value = index
            torch.set_autocast_dtype("cuda", lower)
            torch._C._set_grad_enabled(grad)  # one call into C++, which Ctrl-C cannot cut in two
            _end(worker, outer)

    def join(self) -> None:
        """It has run."""


def _end(worker: object, outer: tuple[object | None, bool]) -> None:
    """Be the caller's thread again. The replica's cuBLAS handles are free for the next one, and for autograd's."""
    stands_in_for.value, this_thread.in_backward = outer
    for gpu in get_machine().slots:
        leave_handle(gpu, worker)


def forget() -> None:
    """Scatter keeps its streams for good."""
    vars(sys.modules["torch.nn.parallel._functions"])["_streams"] = None


def patches() -> list[Patch]:
    """See `features`. The modules are taken from sys.modules: functions of the same names hide them."""
    rows: list[Patch] = [(torch.cuda.nccl, "is_available", is_available), (torch.cuda.nccl, "reduce", reduce)]
    shim = SimpleNamespace(Thread=SequentialThread, Lock=threading.Lock)
    return [*rows, (sys.modules["torch.nn.parallel.parallel_apply"], "threading", shim)]
