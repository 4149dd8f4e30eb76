"""What nn.DataParallel stands on, beside `comm`: NCCL, and threads for the replicas.

nn.DataParallel, replicate, scatter, parallel_apply and gather themselves are PyTorch's own, unmodified.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import ClassVar

import torch

from virtual_gpus.clock.clock import ConcurrentThreads
from virtual_gpus.clock.traffic import ring_seconds
from virtual_gpus.features.blas import in_this_thread, leave_handle
from virtual_gpus.machine import VirtualGPU, active
from virtual_gpus.patches.table import Patch
from virtual_gpus.placement.storages import gpu_of, has_values, nbytes
from virtual_gpus.threads import this_thread
from virtual_gpus.timeline.peak import OTHER, PARAMETERS

ALLOCATES = [("torch/nn/parallel/replicate.py", None, PARAMETERS),
             ("torch/nn/parallel/scatter_gather.py", ("scatter_map",), OTHER)]  # inputs, from outside  # fmt: skip

# ---- NCCL inside one process: only what reduce_add asks of it -----------------------------------------------------


def is_available(tensors: Sequence[torch.Tensor]) -> bool:
    """NCCL takes dense, contiguous tensors on different GPUs."""
    tensors = list(tensors)
    gpus = [gpu_of(t) for t in tensors]
    dense = all(g is not None and not t.is_sparse and t.is_contiguous() for g, t in zip(gpus, tensors, strict=False))
    return dense and len({id(g) for g in gpus}) == len(gpus)


def collective_here(gpus: Sequence[VirtualGPU], kind: str, nbytes: int) -> None:
    """A collective of several GPUs of this process, in their current streams (DataParallel's)."""
    clock, slots = gpus[0].machine.clock, [gpu.slot for gpu in gpus]
    now = clock.spend(clock.host.operator * len(gpus), slots[0])
    start = max([now, *(clock.ready(gpu.slot, gpu.stream) for gpu in gpus)])
    links = [
        gpus[0].machine.topology.between(a, b) for a, b in zip(slots, [*slots[1:], slots[0]], strict=True) if a != b
    ]
    end = start + ring_seconds(links, len(slots), kind, nbytes)
    clock.join(*((gpu.slot, gpu.stream) for gpu in gpus))
    for gpu in gpus:
        clock.occupy(gpu.slot, gpu.stream, start, end, "collective", kind, kernel=True)


def reduce(inputs, output=None, root: int = 0, op: int = 0, streams=None, comms=None, *, outputs=None) -> None:
    """Sum `inputs` into `output` on the root's GPU. NCCL passes the data on in pieces: no buffer of the size of it."""
    output = outputs[root] if outputs is not None else inputs[root] if output is None else output
    collective_here([gpu_of(t) for t in inputs], "reduce", nbytes(output))
    if not has_values(output):
        return
    with torch._C._DisableTorchDispatch(), torch.no_grad():
        output.copy_(inputs[root])
        for index, tensor in enumerate(inputs):
            if index != root:
                output.add_(tensor)


# ---- the replicas' threads ------------------------------------------------------------------------------------------


class SequentialThread:
    """A patch for threading.Thread that runs its target in `start`: replicas run one after the other.

    The order is then always the same, which stored notebook outputs need, and two cores are no slower.
    """

    _waiting: ClassVar = threading.local()  # `together`: those made and not started yet, which will run side by side

    def __init__(self, target, args=(), kwargs=None):
        self._call = (target, args, kwargs or {})
        issued = active().clock.issued  # nothing is issued while threads are made that run together
        self._together = getattr(self._waiting, "together", None)
        if self._together is None or self._together.issued != issued or self._together.on_clock is not None:
            self._together = self._waiting.together = SimpleNamespace(count=0, issued=issued, on_clock=None)
        self._together.count += 1

    def _beside_the_others(self) -> ConcurrentThreads:
        """On the clock the threads run side by side, as many as were made before the first one started."""
        if self._together.on_clock is None:
            self._together.on_clock = ConcurrentThreads(active().clock, self._together.count)
        return self._together.on_clock

    def start(self) -> None:
        """Run now, and leave the thread's settings as they were."""
        target, args, kwargs = self._call
        thread = active().of_thread  # set below by C alone: Ctrl-C comes at the beginning of functions of Python
        index, grad, lower = active().current, torch.is_grad_enabled(), torch.get_autocast_dtype("cuda")
        outer = in_this_thread.worker, this_thread.in_backward
        clock = active().clock
        share = clock.share
        worker = object()  # not `self`, whose tensors would stay should Ctrl-C cut the end off
        active().current = 0  # a new thread starts on GPU 0
        in_this_thread.worker, this_thread.in_backward = worker, False
        try:
            torch.set_autocast_dtype("cuda", torch.float16)  # as a new thread finds it
            with self._beside_the_others():
                target(*args, **kwargs)
        finally:
            clock.share = share
            thread.index = index
            torch.set_autocast_dtype("cuda", lower)
            torch._C._set_grad_enabled(grad)  # one call into C++, which Ctrl-C cannot cut in two
            _end(worker, outer)

    def join(self) -> None:
        """It has run."""


def _end(worker: object, outer: tuple[object | None, bool]) -> None:
    """Be the caller's thread again. The replica's cuBLAS handles are free for the next one, and for autograd's."""
    in_this_thread.worker, this_thread.in_backward = outer
    for gpu in active().slots:
        leave_handle(gpu, worker)


def forget() -> None:
    """Scatter keeps its streams for good."""
    sys.modules["torch.nn.parallel._functions"]._streams = None


def patches() -> list[Patch]:
    """See `features`. The modules are taken from sys.modules: functions of the same names hide them."""
    rows = [(torch.cuda.nccl, "is_available", is_available), (torch.cuda.nccl, "reduce", reduce)]
    shim = SimpleNamespace(Thread=SequentialThread, Lock=threading.Lock)
    return [*rows, (sys.modules["torch.nn.parallel.parallel_apply"], "threading", shim)]
