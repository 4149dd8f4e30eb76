"""What nn.DataParallel stands on: the communication functions, threads for the replicas, and grouping by GPU.

nn.DataParallel, replicate, scatter, parallel_apply and gather themselves are PyTorch's own, unmodified.
"""

from __future__ import annotations

import sys
import threading
from collections import defaultdict
from contextlib import nullcontext
from types import SimpleNamespace
from typing import ClassVar

import torch
from torch._utils import _flatten_dense_tensors, _get_device_index, _handle_complex

from virtual_gpus.clock.clock import ConcurrentThreads
from virtual_gpus.clock.traffic import collective_here
from virtual_gpus.dispatch.copies import move
from virtual_gpus.entrance import entrance
from virtual_gpus.machine import active
from virtual_gpus.ops.autocast import casting
from virtual_gpus.patches.cuda import gpu_at
from virtual_gpus.placement.storages import device_of, gpu_of
from virtual_gpus.threads import this_thread


@entrance
def broadcast(tensor, devices=None, *, out=None):
    """Copies of `tensor` on each of `devices`; the one on its own GPU is the tensor itself."""
    tensor = _handle_complex(tensor)
    if (devices is None) == (out is None):
        raise RuntimeError(
            f"Exactly one of 'devices' and 'out' must be specified, but got devices={devices} and out={out}"
        )
    if out is not None:
        return tuple(target.copy_(tensor) for target in out)
    return tuple(move(tensor, gpu_at(_get_device_index(d))) for d in devices)


@entrance
def broadcast_coalesced(tensors, devices, buffer_size: int = 10485760):
    """Copies of many tensors on each of `devices`, sent in flat buffers of `buffer_size` bytes.

    As in torch/csrc/cuda/comm.cpp: the first device's list holds the tensors themselves, the others' hold pieces of
    flat buffers. Returns one list per device.
    """
    tensors = [_handle_complex(t) for t in tensors]
    gpus = [gpu_at(_get_device_index(d)) for d in devices]
    if any(gpu_of(t) is not gpus[0] for t in tensors):
        raise RuntimeError(f"all tensors must be on {torch.device('cuda', gpus[0].index)}")
    copies = [{} for _ in gpus[1:]]
    for chunk in _chunks([t for t in tensors if not t.is_sparse], buffer_size):
        for made, pieces in zip(copies, _sent(chunk, gpus[1:]), strict=True):
            made.update(zip(map(id, chunk), pieces, strict=True))
    return [list(tensors)] + [
        [move(t, gpu) if t.is_sparse else made[id(t)] for t in tensors]
        for made, gpu in zip(copies, gpus[1:], strict=True)
    ]


# c10::ScalarType, in its order: what remains at the end is sent type by type.
_TYPES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.float32, torch.float64,
          torch.complex32, torch.complex64, torch.complex128, torch.bool)  # fmt: skip


def _chunks(tensors, limit: int):
    """Groups of one dtype, each closed by the tensor that fills it (`take_tensors`, torch/csrc/utils/tensor_flatten).

    PyTorch's Python has a function of that name as well, which closes a group before it would overflow.
    """
    groups, sizes = defaultdict(list), defaultdict(int)
    for tensor in tensors:
        groups[tensor.dtype].append(tensor)
        sizes[tensor.dtype] += tensor.numel() * tensor.element_size()
        if sizes[tensor.dtype] >= limit:
            yield groups.pop(tensor.dtype)
            sizes[tensor.dtype] = 0
    yield from (groups[t] for t in sorted(groups, key=lambda t: _TYPES.index(t) if t in _TYPES else len(_TYPES)))


@torch.no_grad()
def _sent(chunk, gpus):
    """Copies of a chunk's tensors on each GPU, cut from one flat buffer there; that at the source goes at once."""
    flat = _flatten_dense_tensors(chunk)
    if not gpus:
        return []
    with gpus[0].machine.without_time():  # NCCL sends to all at once
        made = [_pieces(move(flat, gpu, copy=True), chunk) for gpu in gpus]
    collective_here([gpu_of(flat), *gpus], "broadcast", flat.numel() * flat.element_size())
    return made


def _pieces(flat, like):
    """Tensors shaped as `like` on the storage of `flat`, each a tensor of its own rather than a view of it."""
    pieces, offset = [], 0
    for tensor in like:
        piece = torch.empty(0, dtype=flat.dtype, device=flat.device)
        pieces.append(piece.set_(flat.untyped_storage(), offset, tensor.size()))
        offset += tensor.numel()
    return pieces


@entrance
def scatter(tensor, devices=None, chunk_sizes=None, dim: int = 0, streams=None, *, out=None):
    """Pieces of `tensor` along `dim`, one per device; a piece that is on its GPU already is not copied."""
    tensor = _handle_complex(tensor)
    if out is not None:
        sizes = [t.size(dim) for t in out]
        return tuple(
            target.copy_(piece) for target, piece in zip(out, tensor.split_with_sizes(sizes, dim), strict=False)
        )
    gpus = [gpu_at(_get_device_index(d)) for d in devices]
    pieces = tensor.chunk(len(gpus), dim) if chunk_sizes is None else tensor.split_with_sizes(list(chunk_sizes), dim)
    return tuple(map(_move_on_stream, pieces, gpus, streams or [None] * len(gpus)))


def _move_on_stream(piece, gpu, stream):
    """DataParallel copies inputs from the CPU on a stream of their own: their blocks come from segments of that."""
    with nullcontext() if stream is None else stream:
        return move(piece, gpu, blocking=stream is None)


@entrance
def gather(tensors, dim: int = 0, destination=None, *, out=None):
    """One tensor of all, along `dim`, on `destination` (a GPU, or the CPU for "cpu" and -1)."""
    tensors = [_handle_complex(t) for t in tensors]
    _check_shapes(tensors, dim)
    if out is None:
        size = list(tensors[0].size())
        size[dim] = sum(t.size(dim) for t in tensors)
        out = torch.empty(
            size, dtype=tensors[0].dtype, device=_destination(destination), memory_format=_format(tensors)
        )
    for piece, tensor in zip(out.split_with_sizes([t.size(dim) for t in tensors], dim), tensors, strict=False):
        piece.copy_(tensor)
    return out


def _format(tensors) -> torch.memory_format:
    """Channels last if all tensors are."""
    last = all(t.dim() == 4 and t.is_contiguous(memory_format=torch.channels_last) for t in tensors)
    plain = all(t.is_contiguous() for t in tensors)
    return torch.channels_last if last and not plain else torch.contiguous_format


def _check_shapes(tensors, dim: int) -> None:
    """The check and the words of torch/csrc/cuda/comm.cpp."""
    if not tensors:
        raise RuntimeError("Expected at least one tensor to gather from")
    for index, tensor in enumerate(tensors[1:], 1):
        expected = list(tensors[0].size())
        expected[dim] = tensor.size(dim) if tensor.dim() == len(expected) else expected[dim]
        if list(tensor.size()) != expected:
            raise RuntimeError(
                f"Input tensor at index {index} has invalid shape {list(tensor.size())}, but expected {expected}"
            )


def _destination(destination) -> torch.device:
    index = _get_device_index(destination, allow_cpu=True, optional=True)
    return torch.device("cpu") if index == -1 else torch.device("cuda", index)


# ---- NCCL inside one process: only what reduce_add asks of it -----------------------------------------------------


def is_available(tensors) -> bool:
    """NCCL takes dense, contiguous tensors on different GPUs."""
    tensors = list(tensors)
    gpus = [gpu_of(t) for t in tensors]
    dense = all(g is not None and not t.is_sparse and t.is_contiguous() for g, t in zip(gpus, tensors, strict=False))
    return dense and len({id(g) for g in gpus}) == len(gpus)


def reduce(inputs, output=None, root: int = 0, op: int = 0, streams=None, comms=None, *, outputs=None) -> None:
    """Sum `inputs` into `output` on the root's GPU. NCCL passes the data on in pieces: no buffer of the size of it."""
    output = output if outputs is None else outputs[root]
    collective_here([gpu_of(t) for t in inputs], "reduce", output.numel() * output.element_size())
    if gpu_of(output).machine.shapes_only:
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

    _waiting: ClassVar = threading.local()  # those made and not started yet: the crew that will run side by side

    def __init__(self, target, args=(), kwargs=None):
        self._call = (target, args, kwargs or {})
        issued = active().clock.issued  # nothing is issued while the threads of a crew are made
        self._mates = getattr(self._waiting, "mates", None)
        if self._mates is None or self._mates.issued != issued or self._mates.crew is not None:
            self._mates = self._waiting.mates = SimpleNamespace(count=0, issued=issued, crew=None)
        self._mates.count += 1

    def _beside_the_others(self) -> ConcurrentThreads:
        """On the clock the threads run side by side, as many as were made before the first one started."""
        if self._mates.crew is None:
            self._mates.crew = ConcurrentThreads(active().clock, self._mates.count)
        return self._mates.crew

    def start(self) -> None:
        """Run now, and leave the thread's settings as they were."""
        target, args, kwargs = self._call
        index, grad = active().current, torch.is_grad_enabled()
        outer = this_thread.worker, this_thread.in_backward
        clock = active().clock
        share = clock.share
        worker = object()  # not `self`, whose tensors would stay should Ctrl-C cut the end off
        active().current = 0  # a new thread starts on GPU 0
        this_thread.worker, this_thread.in_backward = worker, False
        try:
            with self._beside_the_others(), casting.as_in_a_new_thread():
                target(*args, **kwargs)
        finally:
            clock.share = share
            active().current = index
            torch._C._set_grad_enabled(grad)  # one call into C++, which Ctrl-C cannot cut in two
            _end(worker, outer)

    def join(self) -> None:
        """It has run."""


def _end(worker: object, outer: tuple[object | None, bool]) -> None:
    """Be the caller's thread again. The replica's cuBLAS handles are free for the next one, and for autograd's."""
    this_thread.worker, this_thread.in_backward = outer
    for gpu in active().slots:
        if gpu.blas is not None:
            gpu.blas.leave(worker)


# ---- foreach and fused optimizers ---------------------------------------------------------------------------------

_raw_group = torch.utils._foreach_utils._group_tensors_by_device_and_dtype


def _group_tensors_by_device_and_dtype(tensorlistlist, with_indices: bool = False):
    """PyTorch's grouping, split by virtual GPU: C++ sees one CPU where a learner sees several GPUs."""
    groups = {}
    for (_, dtype), (lists, indices) in _raw_group(tensorlistlist, True).items():
        for row, leader in enumerate(lists[0]):
            key = (device_of(leader), dtype)
            columns, numbers = groups.setdefault(key, ([[] for _ in lists], []))
            for column, whole in zip(columns, lists, strict=False):
                if whole:
                    column.append(whole[row])
            numbers.append(indices[row])
    return {key: (lists, indices if with_indices else []) for key, (lists, indices) in groups.items()}


def patches():
    """See `patches`. The modules are taken from sys.modules: functions of the same names hide them."""
    functions = (broadcast, broadcast_coalesced, scatter, gather)
    found = [(sys.modules["torch.nn.parallel.comm"], f.__name__, f) for f in functions]
    found += [(sys.modules["torch.cuda.comm"], f.__name__, f) for f in functions if "torch.cuda.comm" in sys.modules]
    found += [(torch.cuda.nccl, "is_available", is_available), (torch.cuda.nccl, "reduce", reduce)]
    shim = SimpleNamespace(Thread=SequentialThread, Lock=threading.Lock)
    found.append((sys.modules["torch.nn.parallel.parallel_apply"], "threading", shim))
    group = _group_tensors_by_device_and_dtype
    users = ("torch.utils._foreach_utils", "torch.optim.optimizer", "torch.nn.utils.clip_grad", "torch.optim.swa_utils")
    return found + [
        (sys.modules[m], group.__name__, group) for m in users if hasattr(sys.modules.get(m), group.__name__)
    ]
