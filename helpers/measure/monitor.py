"""Records the memory of a run event by event, with the peak of every GPU and what filled it.

    with MemoryMonitor() as monitor:
        train()
    print(monitor)                            # the peak of each GPU, and what filled it

Real and virtual GPUs are recorded in the same way, with PyTorch's memory history, which contains every allocation and
every free. `replay` adds the allocator's rounding, so that the sum equals `torch.cuda.memory_allocated`.
"""

import gc
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from operator import itemgetter

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from helpers.gpus import PeakLog, block_address, kind_of, owned, replay
from helpers.measure.memory import gpu_indices
from helpers.measure.readings import format_bytes

MOST_EVENTS = 1_000_000  # per GPU; each takes a few hundred bytes of host memory
place_of = itemgetter("filename", "name")  # of a frame in a snapshot


class MemoryMonitor:
    """Records the memory of `gpus` (a device, an index, or a list of them; None for all) while its block runs.

    allocated: by GPU, the allocated bytes at the beginning and after each event. Filled when the block ends.

    Raises what `read_memory` raises, and RuntimeError at the end of a run that is too long for the history.
    """

    def __init__(self, gpus=None):
        self.allocated: dict[int, list[int]] = {}
        self._gpus = gpus
        self._peaks: dict[int, PeakLog] = {}

    def __enter__(self) -> "MemoryMonitor":
        indices = gpu_indices(self._gpus)
        with ExitStack() as undo:
            undo.enter_context(memory_history())
            self._before = torch.cuda.memory._snapshot()
            self._first = {index: _events(index) for index in indices}
            self._marks = defaultdict(list)  # by GPU and event: (address, kind) of blocks with parameters and the like
            for register in (register_optimizer_step_pre_hook, register_optimizer_step_post_hook):
                undo.callback(register(lambda optimizer, *_: self._mark([optimizer])).remove)
            self._mark(None)
            self._undo = undo.pop_all()
        return self

    def __exit__(self, kind: type | None, *error) -> None:
        with self._undo:  # removes hooks and history even if something fails here
            self._mark(None)
            traces = torch.cuda.memory._snapshot()["device_traces"]
            for index in self._first:
                self._play(index, traces[index][len(self._before["device_traces"][index]) :])
        if kind is None and any(curve[-1] != torch.cuda.memory_allocated(gpu) for gpu, curve in self.allocated.items()):
            raise RuntimeError("PyTorch's memory history does not contain the whole run. Record fewer steps.")

    def at_peak(self, gpu: int = 0) -> dict[str, int]:
        """Bytes of each kind that GPU number `gpu` held at its peak. They add up to the peak."""
        return {kind: size for kind, size in self._peaks[gpu].by_kind.items() if size}

    def __str__(self) -> str:
        lines = []
        for gpu, log in self._peaks.items():
            held = ", ".join(f"{kind} {format_bytes(size)}" for kind, size in self.at_peak(gpu).items())
            lines.append(f"GPU {gpu} peaked at {format_bytes(log.peak)}: {held}.")
        return "\n".join(lines)

    def _mark(self, things: list | None) -> None:
        """Note what kinds of tensors there are now. things: see `blocks_by_kind`."""
        now = {gpu: _events(gpu) - first for gpu, first in self._first.items()}
        for gpu, address, kind in blocks_by_kind(things):
            self._marks[gpu, now.get(gpu)].append((address, kind))

    def _play(self, gpu: int, trace: list[dict]) -> None:
        """Replay the history of one GPU."""
        segments = [segment for segment in self._before["segments"] if segment["device"] == gpu]
        blocks = [block for segment in segments for block in segment["blocks"]]
        log = PeakLog((each["address"], each["size"]) for each in blocks if each["state"] == "active_allocated")
        states, curve = replay(trace, segments), []
        for entry, state in zip([{"action": "begin"}, *trace], states, strict=True):
            if entry["action"] not in ("begin", "alloc", "free_requested"):
                continue
            curve.append(state.allocated)
            if entry["action"] == "alloc":
                log.allocated(entry["addr"], curve[-1] - curve[-2], kind_of(map(place_of, entry.get("frames", []))))
            elif entry["action"] == "free_requested":
                log.freed(entry["addr"], curve[-2] - curve[-1])
            for address, kind in self._marks[gpu, len(curve) - 1]:
                log.mark(kind, address)
        log.fold()
        self.allocated[gpu], self._peaks[gpu] = curve, log


def _events(gpu: int) -> int:
    """The number of allocations and frees on one GPU so far, from the allocator's own counters."""
    counters = torch.cuda.memory_stats_as_nested_dict(gpu)["allocation"]["all"]
    return counters["allocated"] + counters["freed"]


@contextmanager
def memory_history() -> Iterator[None]:
    """Let PyTorch record each allocation with its stack in the block. If somebody records already, that goes on."""
    torch.cuda.init()
    already = torch._C._cuda_isHistoryEnabled()
    if not already:
        torch.cuda.memory._record_memory_history("all", context="alloc", stacks="python", max_entries=MOST_EVENTS)
    try:
        yield
    finally:
        if not already:
            torch.cuda.memory._record_memory_history(None)


def blocks_by_kind(things: list | None = None) -> Iterator[tuple[int, int | None, str]]:
    """Yield (GPU, address, kind) for each block that contains a parameter, a gradient, or optimizer state.

    things: the parameters and optimizers to ask. None means all that Python knows.
    """
    for kind, tensor in owned(objects_of(nn.Parameter, Optimizer) if things is None else things):
        if tensor.is_cuda and tensor.layout is torch.strided:
            yield tensor.get_device(), block_address(tensor), kind


def objects_of(*kinds: type) -> list:
    """Return the objects of these classes that Python's gc knows, by `type`, as `__class__` may be overridden."""
    objects = gc.get_objects()
    wanted = {each for each in set(map(type, objects)) if issubclass(each, kinds)}
    return [each for each in objects if type(each) in wanted]
