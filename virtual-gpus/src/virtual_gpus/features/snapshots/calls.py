"""Memory snapshots: what torch.cuda.memory asks of C++ to record a history, to take a snapshot and to report an OOM.

PyTorch's own Python code does the rest (`_record_memory_history`, `_snapshot`, `_dump_snapshot`, `memory_snapshot`),
and its viewer reads the result: dictionaries with the keys of torch/csrc/cuda/Module.cpp, in its order. See `history`.
"""

import functools
import time
from collections.abc import Callable
from typing import Any

import torch

from virtual_gpus import errors
from virtual_gpus.dispatch.mode import enter_thread
from virtual_gpus.features.cuda.allocator_settings import described
from virtual_gpus.features.snapshots import stacks
from virtual_gpus.features.snapshots.history import ALL, ALLOC, NEVER, STATE, Entry, Recorder
from virtual_gpus.machine import Kept, VirtualGPU, VirtualMachine, get_machine
from virtual_gpus.memory.allocator import OutOfMemory
from virtual_gpus.patches.table import Patch
from virtual_gpus.settings import INSTALLED
from virtual_gpus.threads import seen
from virtual_gpus.versions import Version

_CONTEXTS = {None: NEVER, "state": STATE, "alloc": ALLOC, "all": ALL}
_DEFAULT_POOL = (0, 0)
_POOLS_IN_HISTORY: Version = (2, 12)  # this and the next one: torch/csrc/cuda/Module.cpp
_HOST_IN_SNAPSHOTS: Version = (2, 14)
_Facts = dict[str, Any]  # a segment, a block or an event as PyTorch describes it
recorders = Kept(lambda machine: [Recorder(gpu.allocator) for gpu in machine.gpus])


# ---- recording -----------------------------------------------------------------------------------------------------


def _cuda_record_memory_history(
    enabled: str | None, context: str | None, stacks: str, max_entries: int, clear: bool = False, *others: object
) -> None:
    """Behind `torch.cuda.memory._record_memory_history`. Stacks are Python's, whatever `stacks` says.

    others: what was compiled, marks of record_function, actions to leave out, pinned memory of the host, whether CUDA's
    is recorded. Older versions have fewer.
    """
    enter_thread()
    if any(others[1:4]) or False in others[4:]:
        raise errors.not_modelled("skip_actions, global_record_annotations and pinned memory of a memory history")
    if enabled not in (None, "state", "all") or context not in _CONTEXTS:
        raise RuntimeError("expected enabled and context to be 'state', 'all', or None; context also 'alloc'")
    for recorder in recorders.of(get_machine()):
        if enabled is None:
            recorder.stop()
        else:
            recorder.start(max_entries if enabled == "all" else 1, _CONTEXTS[context], clear)


def _cuda_record_memory_history_legacy(enabled: bool, *options: object) -> None:
    """The same for a call with True or False."""
    if enabled:
        raise errors.not_modelled('_record_memory_history(True) (an old way to say "all" or "state")')
    stop(get_machine())


def _cuda_isHistoryEnabled() -> bool:
    """True while the history is recorded."""
    return any(recorder.context is not None for recorder in recorders.of(get_machine()))


# ---- the snapshot --------------------------------------------------------------------------------------------------


def _cuda_memorySnapshot(request: tuple[Any, ...] | None = None) -> _Facts:
    """Behind `torch.cuda.memory._snapshot` and `torch.cuda.memory_snapshot`.

    request: None, or the two numbers of a pool's id, (0, 0) for all pools, and perhaps whether traces are wanted.
    """
    enter_thread()
    pool, with_traces = (_DEFAULT_POOL, True) if request is None else (tuple(request[:2]), request[2:] != (False,))
    segments: list[tuple[Recorder, _Facts]] = []
    traces: list[list[Entry]] = []
    for recorder, gpu in zip(recorders.of(get_machine()), get_machine().gpus, strict=True):
        of_gpu = gpu.allocator.snapshot(gpu.index)  # before the trace is read, so that all frees are in there
        traces.append(list(recorder.entries) if with_traces else [])
        segments += [(recorder, s) for s in of_gpu if pool in (_DEFAULT_POOL, s["segment_pool_id"])]
        recorder.snapshot_taken(sum(segment["active_size"] for segment in of_gpu))
    return _as_dictionary(segments, traces)


def _as_dictionary(segments: list[tuple[Recorder, _Facts]], traces: list[list[Entry]]) -> _Facts:
    origins = [(segment, recorder.segment_origin(segment["address"])) for recorder, segment in segments]
    used = [(recorder, block) for recorder, s in segments for block in s["blocks"] if block["requested_size"]]
    origins += [(block, recorder.origin(block["address"])) for recorder, block in used]
    frames = stacks.named([*(stack for _, stack in origins), *(entry.stack for trace in traces for entry in trace)])
    for facts, stack in origins:
        facts["frames"] = frames.get(id(stack), [])
    epoch = time.time_ns() - time.perf_counter_ns()
    result: _Facts = {
        "segments": [segment for _, segment in segments],
        "device_traces": [[_event(entry, frames, epoch) for entry in trace] for trace in traces],
        "allocator_settings": described(),
        "external_annotations": [],
    }
    return result | (dict[str, Any](host_segments=[], host_traces=[]) if INSTALLED >= _HOST_IN_SNAPSHOTS else {})


def _event(entry: Entry, frames: dict[int, list[stacks.Frame]], epoch: int) -> _Facts:
    """One event as PyTorch describes it. `epoch`: nanoseconds from perf_counter_ns to Unix time."""
    event: _Facts = {
        "action": entry.action,
        "device_free" if entry.action == "oom" else "addr": entry.value,
        "size": entry.size,
        "stream": entry.stream,
        "time_us": (entry.time + epoch) // 1000,
        "compile_context": "N/A",
        "user_metadata": "",
    }
    if INSTALLED >= _POOLS_IN_HISTORY:
        event["pool_id"] = _DEFAULT_POOL
    if entry.stack is not None:
        event["frames"] = frames[id(entry.stack)]
    return event


# ---- out of memory -------------------------------------------------------------------------------------------------


def _cuda_attach_out_of_memory_observer(observer: Callable[..., object]) -> None:
    """Call `observer(device, alloc_size, device_total, device_free)` (bytes) before each OutOfMemoryError is raised."""
    enter_thread()
    for gpu in get_machine().gpus:
        gpu.allocator.oom_observers.append(functools.partial(_tell, observer, gpu))


def _tell(observer: Callable[..., object], gpu: VirtualGPU, error: OutOfMemory) -> None:
    total = error.capacity if error.allowed is None else error.allowed
    with seen():
        observer(gpu.index, error.requested, total, error.free)


def stop(machine: VirtualMachine) -> None:
    """Record no more and forget what was recorded."""
    for recorder in machine.feature_state.get(recorders, ()):
        recorder.stop()


def patches() -> list[Patch]:
    """See `features`. Set in builds without CUDA too, whose C++ has none of them."""
    functions = [_cuda_record_memory_history, _cuda_record_memory_history_legacy, _cuda_isHistoryEnabled,
                 _cuda_memorySnapshot, _cuda_attach_out_of_memory_observer]  # fmt: skip
    rows: list[Patch] = [(torch._C, function.__name__, function) for function in functions]
    if hasattr(torch.cuda.memory, "_memory_metadata_supported"):  # labels: `refused` says so to a program that sets one
        rows.append((torch._C, "_cuda_memoryMetadataSupported", lambda: False))
    return rows
