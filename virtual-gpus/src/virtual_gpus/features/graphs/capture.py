"""CUDA graphs: operators are recorded as a stream captures them, and replayed on the same storages.

While a thread captures, its `Capture` follows each operator. An operator on a captured stream runs as always, so that
shapes, memory and errors are those of the operator. But as CUDA runs nothing during a capture, what was written to
tensors from outside is undone at the end, and tensors from inside are zeros until the first replay.

The recording holds no tensor that the capture made, because its block must go back to the pool as on CUDA. It describes
each tensor by its storage (a `Slot`), sizes and strides. A replay runs the operators again. What they make goes into
the storage that they made during the capture, if that is still held, and is gone after the replay otherwise.

Sources: aten/src/ATen/cuda/CUDAGraph.cpp, CUDA's programming guide on stream capture.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from virtual_gpus import errors
from virtual_gpus.dispatch import valueless
from virtual_gpus.dispatch.op_call import OpCall
from virtual_gpus.features.graphs.graph_clock import GraphClock
from virtual_gpus.machine import Redirection, VirtualGPU, VirtualMachine, active
from virtual_gpus.memory.allocator import CachingAllocator, PrivatePool
from virtual_gpus.memory.blocks import BlockPool
from virtual_gpus.placement.random_numbers import default_generator, known_generator
from virtual_gpus.placement.storages import find_gpu, gpu_of, is_pinned, tensors_in
from virtual_gpus.threads import below, this_thread

_WRITTEN_IN_SECRET = frozenset(("running_mean", "running_var"))  # native_batch_norm's schema does not say so
_REPLAYED = 1 << 60  # first address of what a replay makes on the way: no address of a GPU


# ---- the recording --------------------------------------------------------------------------------------------------


class Slot:
    """A storage of the recording. From outside the capture it is held; one that the capture made is only watched."""

    __slots__ = ("_held", "_watched", "was_made")

    def __init__(self, storage: torch.UntypedStorage, was_made: bool):
        self.was_made = was_made
        self._held = None if was_made else storage
        self._watched = StorageWeakRef(storage)  # its address stays taken, so that it can be a key

    def storage(self) -> torch.UntypedStorage | None:
        """The storage, or None if it is not held any more."""
        return self._held if self._held is not None else torch.UntypedStorage._new_with_weak_ptr(self._watched.cdata)


class Ref(NamedTuple):
    """A tensor of the recording: where in which slot. requires_grad: only functions ask for it, see `Capture.node`."""

    slot: Slot
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    requires_grad: bool


class Node(NamedTuple):
    """One operator (or a function in place of several): what to call, with what, and where its results belong."""

    func: Callable[..., Any]
    is_operator: bool
    args: tuple
    kwargs: dict[str, Any]
    results: list[Ref]


class GraphRecording:
    """The nodes of one graph, in the order in which they were issued. seconds: modelled time of a replay, by slot."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.seconds: dict[int, float] = {}
        self._slots: dict[int, Slot] = {}  # by the address of the storage in C++

    def slot(self, storage: torch.UntypedStorage, was_made: bool) -> Slot:
        """The slot of a storage. was_made: whether the capture made it, if it is new here."""
        slot = self._slots.get(storage._cdata)
        if slot is None:
            slot = self._slots[storage._cdata] = Slot(storage, was_made)
        return slot

    def knows(self, storage: torch.UntypedStorage) -> bool:
        """True for a storage that has a slot."""
        return storage._cdata in self._slots

    def made(self) -> list[torch.UntypedStorage]:
        """The storages that the capture made and that are still held."""
        return [s for slot in self._slots.values() if slot.was_made and (s := slot.storage()) is not None]

    def described(self, value: Any) -> Any:
        """`value` with a Ref in the place of each tensor, also within lists."""
        if isinstance(value, torch.Tensor):
            if value.layout == torch.strided and not value.dim() and self._is_number(value.untyped_storage()):
                return value.clone()  # CUDA takes a number along by its value
            return self.ref(value, was_made=False)
        if isinstance(value, (list, tuple)):
            return type(value)(map(self.described, value))
        return {name: self.described(part) for name, part in value.items()} if isinstance(value, dict) else value

    def _is_number(self, storage: torch.UntypedStorage) -> bool:
        """True for a CPU tensor from outside the capture that no C++ made on the way."""
        record = storage._record
        return record.gpu is None and record.creation_site is None and not self.knows(storage)

    def ref(self, tensor: torch.Tensor, was_made: bool) -> Ref:
        """The description of a tensor."""
        if tensor.layout != torch.strided or tensor.is_conj() or tensor.is_neg():
            raise errors.not_modelled("sparse and lazily conjugated tensors in a CUDA graph")
        slot = self.slot(tensor.untyped_storage(), was_made)
        where = tensor.size(), tensor.stride(), tensor.storage_offset()
        return Ref(slot, tensor.dtype, *where, tensor.requires_grad)


# ---- capturing ------------------------------------------------------------------------------------------------------


class Capture:
    """One capture under way, from `begin` to `end`.

    mode: "global", "thread_local" or "relaxed": see cudaStreamCaptureMode. streams: the (slot, stream) pairs that are
    captured. generators: those that may draw, besides the GPU's default one. valid: False once something happened that
    CUDA forbids.
    """

    def __init__(self, gpu: VirtualGPU, pool: PrivatePool, mode: str, generators: list[torch.Generator]):
        self.gpu, self.machine, self.mode, self.pool = gpu, gpu.machine, mode, pool
        self.origin = (gpu.slot, gpu.stream)
        self.streams = {self.origin}
        self.thread = threading.get_ident()
        self.recording = GraphRecording()
        self.valid = True
        self._unjoined: set[tuple[int, int]] = set()
        self._generators = [default_generator(gpu), *map(known_generator, generators)]
        self._marks: list[tuple[torch.Tensor, int]] = []
        self._before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # what was written to: bytes, and as they were
        self._redirections: list[tuple[VirtualGPU, Redirection]] = []

    def begin(self) -> None:
        """Capture from now on."""
        machine = self.machine
        self._marks = [generator.marked() for generator in self._generators]
        redirection = Redirection(pool=self.pool, streams=self.streams)
        self._redirections = [(gpu, redirection) for gpu in machine.gpus]
        for gpu, _ in self._redirections:
            gpu.redirections.append(redirection)
            gpu.allocator.device.guard = self._check_segment
        machine.clock = GraphClock(machine.clock, self.streams)
        machine.captures.append(self)
        this_thread.capture = self

    def end(self) -> GraphRecording:
        """Stop capturing. Raises CUDA's error if the capture is not valid; it has ended then all the same."""
        machine = self.machine
        clock = machine.clock
        this_thread.capture = None
        machine.captures.remove(self)
        machine.clock = clock.outer
        for gpu, redirection in self._redirections:
            gpu.redirections.remove(redirection)
            gpu.allocator.device.guard = None
        for generator, mark in zip(self._generators, self._marks, strict=True):
            generator.go_back(mark)
        with _raw():
            shrunk = [now for now, _ in self._before.values() if now.untyped_storage().nbytes() < now.numel()]
            for now, before in self._before.values() if not shrunk else ():
                now.copy_(before)
            for storage in self.recording.made() if not machine.shapes_only else ():
                _bytes(storage).zero_()
        if not self.valid:
            raise errors.capture_error("Invalidated")
        if shrunk:  # as fully_shard does with what it has gathered: a replay would write where nothing is
            raise errors.not_modelled("storages that become smaller in a CUDA graph")
        if self._unjoined:
            raise errors.capture_error("Unjoined")
        self.recording.seconds = clock.seconds()
        return self.recording

    def abandon(self) -> None:
        """End a capture whose graph is no more, which an error cut short. Only the thread that captures can end it."""
        if self in self.machine.captures and this_thread.capture is self:
            self.valid = False
            with contextlib.suppress(RuntimeError):
                self.end()

    # ---- what may happen meanwhile

    def violation(self, kind: str = "Unsupported") -> Exception:
        """The error for what CUDA forbids, which ends the capture's use."""
        self.valid = False
        return errors.capture_error(kind)

    def covers(self, thread: int | None = None) -> bool:
        """True if this capture forbids unsafe calls in a thread: in all threads, in its own, or in none."""
        own = self.thread == (thread or threading.get_ident())
        return self.mode == "global" or (self.mode == "thread_local" and own)

    def join(self, stream: tuple[int, int], waited_for: tuple[int, int]) -> None:
        """`stream` waits for captured work on `waited_for`: it is captured too, and what it waited for is joined."""
        if stream not in self.streams:
            self.streams.add(stream)
        if stream != self.origin:
            self._unjoined.add(stream)
        self._unjoined.discard(waited_for)

    def _check_segment(self, pool: BlockPool) -> None:
        if pool.private is not self.pool and self.covers():
            raise self.violation()

    def check_copy_with_host(self, pinned: bool, blocking: bool) -> None:
        """A copy between a GPU and the computer's memory: only pinned, and only if the host does not wait for it."""
        if not pinned:
            raise errors.copy_while_capturing()
        if blocking:
            raise self.violation()

    # ---- recording

    def follow(self, call: OpCall) -> Any:
        """Run one operator and take it down, if it is on a captured stream."""
        if active() is not self.machine:
            return call.op.route(call)
        gpu = self._gpu_of(call)
        if gpu is None:
            return self._run_on_host(call)
        if (gpu.slot, gpu.stream) not in self.streams:
            return call.op.route(call)
        if not self.valid:
            raise errors.capture_error("Invalidated")
        self._check(call)
        if (gpu.slot, gpu.stream) != self.origin:
            self._unjoined.add((gpu.slot, gpu.stream))
        if self.machine.shapes_only:
            self.recording.nodes.append(None)
            return call.op.route(call)
        written = call.op.written | _WRITTEN_IN_SECRET
        func, args, kwargs = call.func, self.recording.described(call.args), self.recording.described(call.kwargs)
        writes = self._keep([tensor for name, tensor in call.named_tensors() if name in written])
        result = call.op.route(call)
        self._take_down(func, True, args, kwargs, result, writes)
        return result

    def _run_on_host(self, call: OpCall) -> Any:
        """An operator on CPU tensors runs and is forgotten, unless C++ made them and a GPU may adopt them later."""
        func, args, kwargs = call.func, call.args, call.kwargs
        result = call.op.route(call)
        made = [t for t in tensors_in(result) if t.layout == torch.strided]
        if any(t.untyped_storage()._record.creation_site is not None for t in made) and not self.machine.shapes_only:
            args, kwargs = self.recording.described(args), self.recording.described(kwargs)
            self._take_down(func, True, args, kwargs, result, False)
        return result

    def node(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run `function(*args)`, which computes below the accounting, and take it down as one node.

        Its tensors are among `args` and in its result, also within lists.
        """
        if not self.valid:
            raise errors.capture_error("Invalidated")
        described = self.recording.described(args) if not self.machine.shapes_only else ()
        this_thread.capture = None
        try:
            result = function(*args)
        finally:
            this_thread.capture = self
        if self.machine.shapes_only:
            self.recording.nodes.append(None)
        else:
            self._take_down(function, False, described, {}, result, True)
        return result

    def copy(self, function, tensor: torch.Tensor, target: VirtualGPU | None, dtype, memory_format, blocking: bool):
        """Run the copy `function` of a tensor to a GPU or to the CPU (None), and take it down."""
        source = gpu_of(tensor)
        gpu = source or target
        if gpu is None or (gpu.slot, gpu.stream) not in self.streams:
            return function(tensor, target, dtype, memory_format, blocking)
        if target is None:  # what is copied to the CPU without waiting becomes pinned
            self.check_copy_with_host(pinned=not blocking, blocking=blocking)
        elif source is None:
            self.check_copy_with_host(is_pinned(tensor), blocking)
        return self.node(function, tensor, target, dtype, memory_format, blocking)

    def _take_down(self, func, is_operator: bool, args, kwargs, result, writes: bool) -> None:
        tensors = tensors_in(result)
        new = any(not self.recording.knows(tensor.untyped_storage()) for tensor in tensors)
        results = [self.recording.ref(tensor, was_made=True) for tensor in tensors]
        if new or writes:  # else it is a view, which is no work
            self.recording.nodes.append(Node(func, is_operator, args, kwargs, results))

    def _keep(self, tensors: list[torch.Tensor]) -> bool:
        """Keep what will be written to, to restore it; True if there is anything."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            slot = self.recording.slot(storage, was_made=False)
            if not slot.was_made and storage._cdata not in self._before:
                with _raw():
                    now = _bytes(storage)
                    self._before[storage._cdata] = now, now.clone()
        return bool(tensors)

    def _gpu_of(self, call: OpCall) -> VirtualGPU | None:
        for tensor in call.tensors:
            gpu = gpu_of(tensor)
            if gpu is not None:
                return gpu
        device = call.kwargs.get("device")
        return find_gpu(self.machine, device) if device is not None and device.type == "cuda" else None

    def _check(self, call: OpCall) -> None:
        op = call.op
        if op.is_collective:
            raise errors.not_modelled("collectives of torch.distributed in a CUDA graph")
        if op.needs_values and not valueless.size_is_known(call):
            raise self.violation()
        if op.base == "copy_":
            host = next((tensor for tensor in call.args[:2] if gpu_of(tensor) is None), None)
            if host is not None:
                self.check_copy_with_host(is_pinned(host), not call["non_blocking"])
        if op.has_generator and call["generator"] is not None:
            if known_generator(call["generator"]) not in self._generators:
                raise RuntimeError("Attempt to increase offset for a CUDA generator not in capture mode.")


# ---- replaying ------------------------------------------------------------------------------------------------------


def replay(recording: GraphRecording, machine: VirtualMachine) -> None:
    """Run all nodes again. Nothing of this takes memory or time, which are the graph's."""
    made: dict[Slot, torch.UntypedStorage] = {}
    with _replaying(machine):
        for node in recording.nodes:
            args = _rebuilt(node.args, made, not node.is_operator)
            kwargs = {name: _rebuilt(value, made) for name, value in node.kwargs.items()}
            if node.is_operator:
                with _below_autograd():
                    call = OpCall(node.func, args, kwargs)
                    result = call.op.route(call)
            else:
                result = node.func(*args)
            for ref, tensor in zip(node.results, tensors_in(result), strict=True):
                _store(ref, tensor, made)


def _store(ref: Ref, tensor: torch.Tensor, made: dict[Slot, torch.UntypedStorage]) -> None:
    """Put a result where the capture had it; where that is not held any more, what comes later takes the result."""
    storage, found = ref.slot.storage(), tensor.untyped_storage()
    if storage is None:
        made[ref.slot] = found
    elif found._cdata != storage._cdata:
        with _raw():
            _tensor(ref, storage).copy_(tensor)
        if hasattr(found, "_graph"):  # what the CPU's LSTM keeps for the backward pass
            storage._graph = found._graph


def _rebuilt(value: Any, made: dict[Slot, torch.UntypedStorage], with_grad: bool = False) -> Any:
    if isinstance(value, Ref):
        storage = made[value.slot] if value.slot in made else value.slot.storage()
        with _raw():
            tensor = _tensor(value, storage)
        return tensor.requires_grad_() if with_grad and value.requires_grad else tensor
    if isinstance(value, (list, tuple)):
        return type(value)(_rebuilt(part, made, with_grad) for part in value)
    return value


def _tensor(ref: Ref, storage: torch.UntypedStorage) -> torch.Tensor:
    empty = torch.empty(0, dtype=ref.dtype, device="cpu")
    return empty.set_(storage, ref.offset, ref.size, ref.stride)


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)


@contextlib.contextmanager
def _raw():
    """Below the accounting, autograd, and every dispatch mode."""
    with below(), torch._C._DisableTorchDispatch(), _below_autograd():
        yield


_AUTOGRAD = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)


@contextlib.contextmanager
def _below_autograd():
    with torch._C._AutoDispatchBelowAutograd(), torch._C._ExcludeDispatchKeyGuard(_AUTOGRAD):
        yield


@contextlib.contextmanager
def _replaying(machine: VirtualMachine):
    """What runs here takes no time, and its memory comes from nowhere. Autocast is off: operators were cast before."""
    nowhere = CachingAllocator(1 << 60, first_address=_REPLAYED)
    redirection = Redirection(allocator=nowhere, thread=threading.get_ident())
    outer, machine.clock = machine.clock, machine.clock.anew()
    cast, this_thread.autocast = this_thread.autocast, False
    for gpu in machine.gpus:
        gpu.redirections.append(redirection)
    try:
        with torch._C._DisableAutocast(), torch.no_grad():
            yield
    finally:
        for gpu in machine.gpus:
            gpu.redirections.remove(redirection)
        this_thread.autocast, machine.clock = cast, outer
