"""Records a run's memory, event by event: how high it went on every GPU, when, and what held it.

    with MemoryMonitor() as monitor:
        monitor.watch(model, optimizer)       # marks forward, backward and step, and knows what parameters take
        train()
    monitor.peak(0)                           # Peak(gpu=0, bytes=812000000, event=1204, phase="backward")
    monitor.at_peak(0)                        # {"parameters": 44700000, "gradients": ..., ...}, in bytes
    plot_memory(monitor)                      # of helpers.show, as is describe_memory: the same in words

Real and virtual GPUs are recorded by the same means: PyTorch's own memory history. It has every allocation and every
free, which a thread that samples would miss, and gives the same curve every time. It notes the bytes that were asked
for; `helpers.gpus.replay` knows how much more the allocator hands out, so the sum is `torch.cuda.memory_allocated`.

How the kind of a block at the peak is known:

    parameters, gradients, optimizer state   a tensor of this kind is seen in it: parameters when the watch begins and
                                             when a replica of DataParallel begins, gradients after each backward pass,
                                             states after each step
    activations   made in a forward phase that it outlives, but not the next forward phase too
    other         the rest: temporary buffers, workspaces, gradients of activations, the batch, what was there before
"""

import threading
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import zip_longest
from typing import NamedTuple

import torch
from torch import Tensor, nn

from helpers.gpus import block_address, replay
from helpers.measure.memory import gpu_indices

KINDS = ("parameters", "gradients", "optimizer state", "activations", "other")
MOST_EVENTS = 1_000_000  # per GPU, a few hundred bytes each on the host
_COUNTED = ("alloc", "free_requested")  # the actions in the history that the allocator's counters count


class Span(NamedTuple):
    """A phase: the events after `start` up to and including `end`."""

    start: int
    end: int
    phase: str | None


class Peak(NamedTuple):
    """The most that was allocated on `gpu`, in bytes, after event number `event`, in `phase` (None: in none)."""

    gpu: int
    bytes: int
    event: int
    phase: str | None


class Life(NamedTuple):
    """A block of `size` bytes in use from event `born` (0: before the run) until event `died` (`last` + 1: still)."""

    address: int
    size: int
    born: int
    died: int


@dataclass(frozen=True)
class Run:
    """What was recorded on one GPU.

    allocated   bytes after each event; 0 is the beginning
    lives       of all blocks that were in use
    ooms        the events after which memory ran out
    marks       (event, phase): after this event it is this phase; None is between two
    owners      by address of a block: (event, kind) when a tensor of this kind was seen in it
    off         bytes by which the curve ends elsewhere than the allocator's own count
    """

    gpu: int
    allocated: Sequence[int]
    lives: Sequence[Life]
    ooms: Sequence[int]
    marks: Sequence[tuple[int, str | None]]
    owners: Mapping[int, Sequence[tuple[int, str]]]
    off: int = 0

    @property
    def last(self) -> int:
        """The number of the last event."""
        return len(self.allocated) - 1

    def spans(self) -> list[Span]:
        """The phases in order and without gaps; None is what lies between two."""
        found: list[Span] = []
        ends = [*(event for event, _ in self.marks[1:]), self.last]
        for (start, phase), end in zip(self.marks, ends, strict=True):
            if found and found[-1].start == found[-1].end:
                found.pop()
            joined = found.pop().start if found and found[-1].phase == phase else start
            found.append(Span(joined, end, phase))
        return found

    def peak(self) -> Peak:
        """The most that was allocated, and when: the first time."""
        most = max(self.allocated)
        event = self.allocated.index(most)
        phase = next((span.phase for span in self.spans() if span.start < event <= span.end), None)
        return Peak(self.gpu, most, event, phase)

    def at_peak(self) -> dict[str, int]:
        """Bytes by kind (`KINDS`) at the peak; they add up to it."""
        event, forwards = self.peak().event, self._forwards()
        held = dict.fromkeys(KINDS, 0)
        for life in self.lives:
            if life.born <= event < life.died:
                held[self._kind(life, forwards)] += life.size
        return held

    def _kind(self, life: Life, forwards: Sequence[tuple[int, int, int]]) -> str:
        for event, kind in self.owners.get(life.address, ()):
            if life.born <= event < life.died:
                return kind
        made = any(start < life.born <= end and end < life.died <= limit for start, end, limit in forwards)
        return "activations" if made else "other"

    def _forwards(self) -> list[tuple[int, int, int]]:
        """Of each forward phase its start and end, and the end of the next one."""
        spans = [span for span in self.spans() if span.phase == "forward" and span.start < span.end]
        found = []
        for span, following in zip_longest(spans, spans[1:]):
            # Where memory ran out, everything alive was wanted: what came after is the error's way out.
            end = next((oom for oom in self.ooms if span.start <= oom <= span.end), span.end)
            found.append((span.start, end, following.end if following else self.last + 1))
        return found


class MemoryMonitor:
    """Records the memory of `gpus` (a device, an index, or a list of them; None for all) while its block runs.

    Entering raises RuntimeError without any GPU or for a second time, ValueError for a GPU that does not exist.
    Results are there after the block, also when it failed; before, they raise RuntimeError.
    """

    def __init__(self, gpus=None):
        self.indices: list[int] = []
        self.watched: list[nn.Module] = []
        self._gpus, self._too_long = gpus, False
        self._in_backward = False
        self._lock = threading.RLock()  # replicas run in threads of their own
        self._marks: dict[int, list[tuple[int, str | None]]] = {}
        self._owners: dict[int, dict[int, list[tuple[int, str]]]] = {}
        self._runs: dict[int, Run] = {}

    # ---- recording

    def __enter__(self) -> "MemoryMonitor":
        if self._marks:
            raise RuntimeError("A MemoryMonitor records one run: make a new one for the next.")
        self.indices = gpu_indices(self._gpus)
        torch.cuda.init()
        with ExitStack() as undo:  # undone at the end, or at once if anything fails here
            if not torch._C._cuda_isHistoryEnabled():  # whoever records already keeps their history
                torch.cuda.memory._record_memory_history("all", context=None, stacks="python", max_entries=MOST_EVENTS)
                undo.callback(torch.cuda.memory._record_memory_history, None)
            self._before = torch.cuda.memory._snapshot()
            self._counted = dict.fromkeys(self.indices, 0)  # events before the run
            self._counted |= {index: self._events(index) for index in self.indices}
            self._marks = {index: [] for index in self.indices}
            self._owners = {index: defaultdict(list) for index in self.indices}
            self._mark(None)
            # No hook of PyTorch's runs before the first node of a backward pass.
            self._engine, torch.autograd.backward = torch.autograd.backward, self._backward
            undo.callback(setattr, torch.autograd, "backward", self._engine)
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *error) -> None:
        with self._undo:  # whatever fails here, hooks and history are put back
            self._mark(None)
            traces = torch.cuda.memory._snapshot()["device_traces"]
            for index in self.indices:
                trace = traces[index][len(self._before["device_traces"][index]) :]
                segments = [each for each in self._before["segments"] if each["device"] == index]
                allocated, lives, ooms = _played(trace, segments)
                off = abs(allocated[-1] - torch.cuda.memory_allocated(index))
                run = Run(index, allocated, lives, ooms, self._marks[index], self._owners[index], off)
                self._runs[index] = run
                self._too_long |= run.last != self._events(index)

    def watch(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Mark the phases of training `model`, and know the blocks of its parameters and of `optimizer`'s state.

        Call it in the block; elsewhere it raises RuntimeError. forward is from the model's call to backward(), the loss
        included; backward is backward() itself; step is the optimizer's. Under nn.DataParallel watch the wrapped model.
        """
        if not self._marks or self._runs:
            raise RuntimeError("Nothing is recorded now: call watch in the `with MemoryMonitor()` block.")
        self.watched.append(model)
        hooks = [
            model.register_forward_pre_hook(self._forward_begins),
            model.register_forward_hook(self._forward_ends),
        ]
        if isinstance(model, nn.DataParallel):
            hooks.append(model.module.register_forward_pre_hook(self._forward_begins))
        if optimizer is not None:
            hooks.append(optimizer.register_step_pre_hook(lambda *_: self._mark("step")))
            hooks.append(optimizer.register_step_post_hook(self._step_ends))
        for hook in hooks:
            self._undo.callback(hook.remove)
        self._mark(None)
        self._own("parameters", [*model.parameters(), *model.buffers()])
        self._own("gradients", [parameter.grad for parameter in model.parameters()])
        self._own("optimizer state", _states(optimizer))

    def _mark(self, phase: str | None, gpus: Collection[int] | None = None) -> None:
        """From here on it is `phase` on `gpus` (all if None)."""
        for index in self.indices if gpus is None else gpus:
            if index in self._marks:
                self._marks[index].append((self._events(index), phase))

    def _events(self, index: int) -> int:
        """Allocations and frees on one GPU since the beginning, by the allocator's own counters."""
        counters = torch.cuda.memory_stats_as_nested_dict(index)["allocation"]["all"]
        return counters["allocated"] + counters["freed"] - self._counted[index]

    def _own(self, kind: str, tensors: Iterable[Tensor | None]) -> None:
        """At the last mark these tensors were there, and are of this kind."""
        for tensor in tensors:
            gpu = -1 if tensor is None else tensor.get_device()
            if gpu in self._owners and tensor.layout is torch.strided:
                self._owners[gpu][block_address(tensor)].append((self._marks[gpu][-1][0], kind))

    def _forward_begins(self, module: nn.Module, inputs) -> None:
        if self._in_backward:  # a checkpoint computes again what the backward pass needs
            return
        with self._lock:
            if not getattr(module, "_is_replica", False):
                self._mark("forward")
                return
            copies = [
                tensor
                for part in module.modules()
                for tensor in (*getattr(part, "_former_parameters", {}).values(), *part._buffers.values())
                if tensor is not None
            ]
            self._mark("forward", {tensor.get_device() for tensor in copies})
            self._own("parameters", copies)

    def _forward_ends(self, module: nn.Module, inputs, outputs) -> None:
        # With gradients the phase goes on until backward() begins: the loss belongs to the forward pass.
        if not torch.is_grad_enabled() and not self._in_backward:
            self._mark(None)

    def _backward(self, *args, **kwargs):
        """torch.autograd.backward while the monitor is on."""
        if self._in_backward:  # a checkpoint may call it in a backward pass
            return self._engine(*args, **kwargs)
        self._mark("backward")
        self._in_backward = True
        try:
            return self._engine(*args, **kwargs)
        finally:
            self._in_backward = False
            self._mark(None)
            for model in set(self.watched):
                self._own("gradients", [parameter.grad for parameter in model.parameters()])

    def _step_ends(self, optimizer: torch.optim.Optimizer, args, kwargs) -> None:
        self._mark("backward" if self._in_backward else None)  # a step may be a gradient's hook
        self._own("optimizer state", _states(optimizer))

    # ---- results

    def run(self, gpu: int = 0) -> Run:
        """All that was recorded on one GPU. Raises RuntimeError for a run that is not over, that was too long, or in
        which nothing happened on any GPU, ValueError for a GPU that was not recorded."""
        if not self._runs:
            raise RuntimeError("The run is not over: results are there after the `with MemoryMonitor()` block.")
        if gpu not in self._runs:
            raise ValueError(f"GPU {gpu!r} was not recorded: recorded were {self.indices}.")
        if self._too_long:
            raise RuntimeError(
                "PyTorch's memory history does not hold the whole run: record fewer steps, and do not change the "
                "history or the allocator's counters meanwhile."
            )
        if not any(run.last or run.ooms for run in self._runs.values()):
            raise RuntimeError("Nothing was recorded: no GPU memory was allocated or freed in the monitor's block.")
        return self._runs[gpu]

    def peak(self, gpu: int = 0) -> Peak:
        """The most that was allocated, and when: the first time. Errors: `run`."""
        return self.run(gpu).peak()

    def at_peak(self, gpu: int = 0) -> dict[str, int]:
        """Bytes by kind (`KINDS`) at the peak; they add up to it. Errors: `run`, and RuntimeError without `watch`."""
        if not self.watched:
            raise RuntimeError("Whose bytes these are is not known: call monitor.watch(model, optimizer) in the run.")
        return self.run(gpu).at_peak()


def _states(optimizer: torch.optim.Optimizer | None) -> list[Tensor]:
    states = () if optimizer is None else optimizer.state.values()
    return [value for state in states for value in state.values() if isinstance(value, Tensor)]


def _played(trace: Sequence[Mapping], segments: Sequence[Mapping]) -> tuple[list[int], list[Life], list[int]]:
    """The history of one GPU, from its `segments` at the beginning on: the curve, the blocks' lives, the failures."""
    blocks = [block for segment in segments for block in segment["blocks"] if block["state"] == "active_allocated"]
    held = {block["address"]: (block["size"], 0) for block in blocks}
    states = replay(trace, segments)
    allocated, lives, ooms = [next(states).allocated], [], []
    for entry, state in zip(trace, states, strict=True):
        if entry["action"] == "oom":
            ooms.append(len(allocated) - 1)
        if entry["action"] in _COUNTED:
            address, change = entry["addr"], state.allocated - allocated[-1]
            if entry["action"] == "alloc":
                held[address] = change, len(allocated)
            else:
                _, born = held.pop(address, (0, 0))
                lives.append(Life(address, -change, born, len(allocated)))
            allocated.append(state.allocated)
    lives += [Life(address, size, born, len(allocated)) for address, (size, born) in held.items()]
    return allocated, lives, ooms
