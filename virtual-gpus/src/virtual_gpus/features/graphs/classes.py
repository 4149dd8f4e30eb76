"""torch.cuda's CUDA graphs and memory pools: PyTorch's own Python classes, on bases that capture and replay here.

`torch.cuda.graph`, `make_graphed_callables` and `use_mem_pool` are PyTorch's code. `CUDAGraph` and `MemPool` are thin
classes over others in C++ (torch/csrc/cuda/Graph.cpp, MemPool.cpp), for which `CapturedGraph` and `Pool` stand in.
"""

from __future__ import annotations

import itertools
import threading
import types
import warnings
import weakref
from typing import Any

import torch

from virtual_gpus import errors
from virtual_gpus.entrance import entrance
from virtual_gpus.features.cuda.devices import gpu_at
from virtual_gpus.features.graphs.capture import Capture, GraphRecording, replay
from virtual_gpus.features.streams import streams
from virtual_gpus.machine import Redirection, VirtualMachine
from virtual_gpus.memory.allocator import PrivatePool
from virtual_gpus.patches.table import in_package

PoolId = tuple[int, int]
_counts = itertools.count(1), itertools.count(1)  # of pools that graphs made for themselves, and of handles
_MODES = ("global", "thread_local", "relaxed")


def _new_id(for_graph: bool) -> PoolId:
    """Graphs' own pools are told from others by the first number (at::cuda::MemPool::graph_pool_handle)."""
    return (next(_counts[0]), 0) if for_graph else (0, next(_counts[1]))


class _Use:
    """Holds a private pool. When it dies, the pool has one use less, and without any its memory may go back."""

    def __init__(self, machine: VirtualMachine, id: PoolId, no_split: bool = False):
        known = machine.private_pools
        self.pool = known[id] = known.get(id) or PrivatePool(id, no_split)
        self.pool.uses += 1

    def __del__(self):
        self.pool.uses -= 1


# ---- graphs ---------------------------------------------------------------------------------------------------------


class CapturedGraph:
    """What PyTorch's CUDAGraph is built on. Errors in the words of aten/src/ATen/cuda/CUDAGraph.cpp."""

    def __new__(cls, keep_graph: bool = False):
        made = super().__new__(cls)
        made._keeps, made._generators, made._capture = keep_graph, [], None
        made._clear()
        return made

    def __init__(self, *args, **kwargs) -> None:
        """Nothing more: see `__new__`."""

    def _clear(self) -> None:
        self._recording: GraphRecording | None = None
        self._machine: VirtualMachine | None = None
        self._has_graph_exec = False
        self._uses: list[_Use] = []

    @entrance
    def capture_begin(self, pool: PoolId | None = None, capture_error_mode: str = "global") -> None:
        """Capture the current stream from now on."""
        if self._has_graph_exec:
            raise RuntimeError(
                "This CUDAGraph instance already owns a captured graph. To capture a new graph, create a new instance."
            )
        capture_error_mode = {"default": "global"}.get(capture_error_mode, capture_error_mode)  # torch.accelerator's
        if capture_error_mode not in _MODES:
            raise RuntimeError(
                f"Unknown capture error mode. Expected `global`, `thread_local`, or `relaxed`, got {capture_error_mode}"
            )
        gpu = gpu_at()
        gpu.start_context()
        if not gpu.stream:
            raise RuntimeError(
                "CUDA graphs must be captured on a non-default stream. "
                "(However, after capture, it's ok to replay them on the default stream.)"
            )
        if (under_way := streams.capture_of(gpu, gpu.stream)) is not None:
            raise under_way.violation()
        self._machine = gpu.machine
        self._uses = [_Use(gpu.machine, _new_id(for_graph=True) if pool in (None, (0, 0)) else tuple(pool))]
        self._capture = Capture(gpu, self._uses[0].pool, capture_error_mode, self._generators)
        self._capture.graph = weakref.ref(self)
        self._capture.begin()
        weakref.finalize(self, self._capture.abandon)

    def capture_end_pre(self) -> None:
        """End the capture. Raises CUDA's error where something happened that a capture forbids."""
        capture, self._capture = self._capture, None
        if capture is None:
            raise RuntimeError("capture_end() called before capture_begin().")
        if gpu_at().stream != capture.origin[1]:
            self._capture = capture
            raise RuntimeError("Capture must end on the same stream it began on.")
        try:
            self._recording = capture.end()
        except BaseException:
            self._clear()
            raise
        if not self._recording.nodes:
            warnings.warn(
                "The CUDA Graph is empty. This usually means that the graph was attempted to be captured on wrong "
                "device or stream.",
                UserWarning,
                stacklevel=3,
            )

    def capture_end_post(self) -> None:
        """Nothing is left to do: a virtual graph is not compiled."""

    @entrance
    def capture_end(self) -> None:
        """End the capture, and make the graph ready unless it was asked to wait (keep_graph)."""
        self.capture_end_pre()
        if not self._keeps:
            self.instantiate()

    def instantiate(self) -> None:
        """Make the graph ready for `replay`."""
        if self._recording is None:
            raise RuntimeError("capture_end() must have been called before calling instantiate")
        if self._has_graph_exec and not self._keeps:
            raise RuntimeError("instantiate() is intended to be called by the user only when keep_graph=true")
        self._has_graph_exec = True

    @entrance
    def replay(self) -> None:
        """Run what was captured once more, in the current stream. For the modelled host it is one launch."""
        if self._recording is None:
            raise RuntimeError("Called CUDAGraph::replay without a preceding successful capture.")
        self._has_graph_exec = True
        machine = self._machine
        if not machine.on:
            raise RuntimeError("The virtual GPUs of this CUDA graph are off. Capture it again on those that are on.")
        if machine.captures:
            capture = machine.captures[-1]
            if (capture.gpu.slot, capture.gpu.stream) in capture.streams:
                raise capture.violation()
        if not machine.shapes_only:
            replay(self._recording, machine)
        clock = machine.clock
        for slot, seconds in self._recording.seconds.items():
            clock.launch(slot, machine.slots[slot].stream, seconds, clock.host.operator, "CUDA graph")

    def reset(self) -> None:
        """Forget what was captured. The pool's memory may go back if no other graph uses it."""
        self._clear()

    def pool(self) -> PoolId:
        """The id of the graph's memory pool."""
        if self._recording is None:
            raise RuntimeError("Called CUDAGraph::pool() without a preceding successful capture.")
        return self._uses[0].pool.id

    def pools(self) -> list[PoolId]:
        """The ids of all pools that the graph holds."""
        if self._recording is None:
            raise RuntimeError("Called CUDAGraph::pools() without a preceding successful capture.")
        return [use.pool.id for use in self._uses]

    def _retain_pool(self, pool: PoolId) -> None:
        self._uses.append(_Use(self._machine, tuple(pool)))

    def register_generator_state(self, generator: torch.Generator) -> None:
        """Let the graph draw from this generator as well."""
        self._generators.append(generator)

    def enable_debug_mode(self) -> None:
        """Keep the graph, as on CUDA. What it would be kept for, `debug_dump`, is not modelled."""
        self._keeps = True

    @staticmethod
    def get_currently_capturing_graph() -> Any:
        """The graph that the current stream captures."""
        gpu = gpu_at()
        capture = streams.capture_of(gpu, gpu.stream)
        if capture is None:
            raise RuntimeError("The current stream is not currently capturing.")
        return capture.graph()


_REFUSED = ("debug_dump", "raw_cuda_graph", "raw_cuda_graph_exec", "get_graph_data", "begin_capture_to_if_node",
            "begin_capture_to_while_node", "end_capture_to_conditional_node",
            "set_conditional_handle_for_current_node")  # fmt: skip


# ---- memory pools ---------------------------------------------------------------------------------------------------


class Pool:
    """What PyTorch's MemPool is built on: a private pool as a thing of its own (ATen/cuda/MemPool.h)."""

    def __new__(cls, *args, **kwargs):
        return super().__new__(cls)

    def __init__(self, allocator=None, is_user_created=True, use_on_oom=False, no_split=False):
        if allocator is not None or use_on_oom:
            raise errors.not_modelled(f"torch.cuda.MemPool({'use_on_oom=True' if allocator is None else 'allocator'})")
        gpu = gpu_at()
        self._machine, self._use = gpu.machine, _Use(gpu.machine, _new_id(not is_user_created), no_split)

    @property
    def id(self) -> PoolId:
        """The two numbers that name the pool."""
        return self._use.pool.id

    def use_count(self) -> int:
        """How many graphs, contexts and objects hold it."""
        return self._use.pool.uses

    def __del__(self):
        if hasattr(self, "_use"):
            pool, self._use = self._use.pool, None
            for gpu in self._machine.slots if not pool.uses else ():
                gpu.allocator.abandon(pool)


_entered = threading.local()  # uses and routes of `use_mem_pool`, innermost last


def _cuda_beginAllocateCurrentThreadToPool(device: int, pool: PoolId) -> None:
    """This thread's allocations on a GPU go to a pool, until `_cuda_endAllocateToPool`."""
    gpu = gpu_at(device)
    use = _Use(gpu.machine, tuple(pool))
    redirection = Redirection(pool=use.pool, thread=threading.get_ident())
    gpu.redirections.append(redirection)
    vars(_entered).setdefault("stack", []).append((gpu, redirection, use))


def _cuda_endAllocateToPool(device: int, pool: PoolId) -> None:
    """The end of `_cuda_beginAllocateCurrentThreadToPool`."""
    gpu, redirection, _ = _entered.stack.pop()
    gpu.redirections.remove(redirection)


def _cuda_releasePool(device: int, pool: PoolId) -> None:
    """The use ended with `_cuda_endAllocateToPool` already."""


# ---- names ----------------------------------------------------------------------------------------------------------


def _rebased(kind: type, base: type, refused: tuple[str, ...] = (), path: str = "") -> type:
    """PyTorch's Python class on another base: the same functions, whose `super()` finds the new class."""
    cell = types.CellType()
    members: dict[str, Any] = {}
    for name, member in vars(kind).items():
        inner = member.__func__ if isinstance(member, (staticmethod, classmethod)) else member
        if isinstance(inner, types.FunctionType) and "__class__" in inner.__code__.co_freevars:
            free = zip(inner.__code__.co_freevars, inner.__closure__, strict=True)
            closure = tuple(cell if free_name == "__class__" else found for free_name, found in free)
            twin = types.FunctionType(inner.__code__, inner.__globals__, name, inner.__defaults__, closure)
            twin.__kwdefaults__, twin.__doc__ = inner.__kwdefaults__, inner.__doc__
            twin.__qualname__, twin.__annotations__ = inner.__qualname__, inner.__annotations__
            members[name] = type(member)(twin) if inner is not member else twin
        elif isinstance(member, property) and member.fget is not None:
            members[name] = _rebased_property(member, cell)
        elif name not in ("__dict__", "__weakref__"):
            members[name] = member
    members |= {name: errors.refusing(f"{path}.{name}") for name in refused}
    cell.cell_contents = made = type(kind.__name__, (base,), members)
    return made


def _rebased_property(member: property, cell: types.CellType) -> property:
    getter = member.fget
    if "__class__" not in getter.__code__.co_freevars:
        return member
    return property(types.FunctionType(getter.__code__, getter.__globals__, getter.__name__, None, (cell,)))


def _cuda_isCurrentStreamCapturing() -> bool:
    """True while a graph captures this thread's current stream."""
    gpu = gpu_at()
    return streams.capture_of(gpu, gpu.stream) is not None


def _graph_pool_handle() -> PoolId:
    """A new id for a pool that several graphs may share."""
    return _new_id(for_graph=False)


def _host_emptyCache() -> None:
    """Pinned memory is not kept here."""


CUDAGraph = _rebased(torch.cuda.CUDAGraph, CapturedGraph, _REFUSED, "torch.cuda.CUDAGraph")
MemPool = _rebased(torch.cuda.MemPool, Pool)
_AcceleratorGraph = (
    _rebased(torch.accelerator.Graph, CapturedGraph, ("debug_dump",), "torch.accelerator.Graph")
    if hasattr(torch.accelerator, "Graph")
    else None
)


def patches():
    """See `features`."""
    functions = [_cuda_isCurrentStreamCapturing, _graph_pool_handle, _cuda_beginAllocateCurrentThreadToPool,
                 _cuda_endAllocateToPool, _cuda_releasePool]  # fmt: skip
    rows = in_package("torch.cuda", CUDAGraph, MemPool, *functions,
                      is_current_stream_capturing=_cuda_isCurrentStreamCapturing)  # fmt: skip
    rows += [(torch._C, function.__name__, function) for function in (*functions, _host_emptyCache)]
    if _AcceleratorGraph is not None:
        rows.append((torch.accelerator, "Graph", _AcceleratorGraph))
    return [*rows, (torch.cuda.graphs.graph, "default_capture_stream", None)]
