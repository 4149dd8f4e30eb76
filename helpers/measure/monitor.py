"""Records the memory of a run event by event, with the peak of every GPU, when it occurred, and what filled it.

    with MemoryMonitor() as monitor:
        monitor.watch(model, optimizer)       # marks forward, backward and step, and finds parameters and states
        train()
    monitor.peak(0)                           # Peak(gpu=0, bytes=812000000, event=1204, phase="backward")
    monitor.at_peak(0)                        # {"parameters": 44700000, "gradients": ..., ...}, in bytes
    plot_memory(monitor)                      # from helpers.show; describe_memory says the same in words

Real and virtual GPUs are recorded in the same way, with PyTorch's memory history. It contains every allocation and
every free, which a sampling thread would miss, and gives the same curve every time. The history gives the bytes that
were requested. `helpers.gpus.replay` adds the allocator's rounding, so the sum equals `torch.cuda.memory_allocated`.

Each block at the peak gets a kind:

    parameters, gradients, optimizer state   A tensor of this kind was seen in the block. The monitor looks for
                                             parameters when the watch and each DataParallel replica begin, for
                                             gradients after each backward pass, and for states after each step.
    activations   The block was created in a forward phase, outlived it, and was freed before the next one ended.
    other         Everything else: temporary buffers, workspaces, gradients of activations, the batch, older blocks.
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
MOST_EVENTS = 1_000_000  # per GPU; each takes a few hundred bytes of host memory
_COUNTED = ("alloc", "free_requested")  # the actions in the history that the allocator's counters count


class Span(NamedTuple):
    """A phase, which covers the events after `start` up to and including `end`."""

    start: int
    end: int
    phase: str | None


class Peak(NamedTuple):
    """The peak of allocated memory on `gpu`, in `bytes`, after event number `event`, in `phase` (None between two)."""

    gpu: int
    bytes: int
    event: int
    phase: str | None


class Life(NamedTuple):
    """A block of `size` bytes, in use from event `born` (0 if before the run) to `died` (`last` + 1 if not freed)."""

    address: int
    size: int
    born: int
    died: int


@dataclass(frozen=True)
class Run:
    """The recording of one GPU.

    allocated   allocated bytes after each event; element 0 is the beginning
    lives       one `Life` for each block that was in use
    ooms        the events after which memory ran out
    marks       (event, phase) pairs: `phase` begins after `event`; None means between two phases
    owners      by address of a block: (event, kind) pairs, one each time a tensor of this kind was seen in it
    off         bytes by which the end of the curve differs from the allocator's own count
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
        """The phases in order and without gaps. The phase None fills the time between two phases."""
        found: list[Span] = []
        ends = [*(event for event, _ in self.marks[1:]), self.last]
        for (start, phase), end in zip(self.marks, ends, strict=True):
            if found and found[-1].start == found[-1].end:
                found.pop()
            joined = found.pop().start if found and found[-1].phase == phase else start
            found.append(Span(joined, end, phase))
        return found

    def peak(self) -> Peak:
        """The peak of allocated memory, in bytes, and the first event at which it is reached."""
        most = max(self.allocated)
        event = self.allocated.index(most)
        phase = next((span.phase for span in self.spans() if span.start < event <= span.end), None)
        return Peak(self.gpu, most, event, phase)

    def at_peak(self) -> dict[str, int]:
        """Bytes of each kind (`KINDS`) at the peak. They add up to the peak."""
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
        """For each forward phase: its start, its end, and the end of the next forward phase."""
        spans = [span for span in self.spans() if span.phase == "forward" and span.start < span.end]
        found = []
        for span, following in zip_longest(spans, spans[1:]):
            # If memory ran out, the phase ends there, because the frees that follow belong to the error's unwinding.
            end = next((oom for oom in self.ooms if span.start <= oom <= span.end), span.end)
            found.append((span.start, end, following.end if following else self.last + 1))
        return found


class MemoryMonitor:
    """Records the memory of `gpus` (a device, an index, or a list of them; None for all) while its block runs.

    Entering raises RuntimeError if there is no GPU or the monitor was used before, and ValueError for a GPU that does
    not exist. Results are available after the block, even if it failed. Before its end, they raise RuntimeError.
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
            raise RuntimeError("This MemoryMonitor has already recorded a run. Create a new one for the next run.")
        self.indices = gpu_indices(self._gpus)
        torch.cuda.init()
        with ExitStack() as undo:  # undone at the end, or at once if anything fails here
            if not torch._C._cuda_isHistoryEnabled():  # otherwise somebody else's recording goes on
                torch.cuda.memory._record_memory_history("all", context=None, stacks="python", max_entries=MOST_EVENTS)
                undo.callback(torch.cuda.memory._record_memory_history, None)
            self._before = torch.cuda.memory._snapshot()
            self._counted = dict.fromkeys(self.indices, 0)  # events before the run
            self._counted |= {index: self._events(index) for index in self.indices}
            self._marks = {index: [] for index in self.indices}
            self._owners = {index: defaultdict(list) for index in self.indices}
            self._mark(None)
            # PyTorch has no hook that runs before the first node of a backward pass.
            self._engine, torch.autograd.backward = torch.autograd.backward, self._backward
            undo.callback(setattr, torch.autograd, "backward", self._engine)
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *error) -> None:
        with self._undo:  # restores hooks and history even if something fails here
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
        """Mark the phases of training `model`, and find the blocks of its parameters and of `optimizer`'s state.

        "forward" lasts from the model's call to backward() and includes the loss, "backward" is the call of backward(),
        and "step" is the optimizer's step. With nn.DataParallel, pass the DataParallel model. Call this method inside
        the block. Elsewhere it raises RuntimeError.
        """
        if not self._marks or self._runs:
            raise RuntimeError("Nothing is being recorded. Call watch inside the `with MemoryMonitor()` block.")
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
        """Begin `phase` on `gpus` (None means all)."""
        for index in self.indices if gpus is None else gpus:
            if index in self._marks:
                self._marks[index].append((self._events(index), phase))

    def _events(self, index: int) -> int:
        """The number of allocations and frees on one GPU since the beginning, from the allocator's own counters."""
        counters = torch.cuda.memory_stats_as_nested_dict(index)["allocation"]["all"]
        return counters["allocated"] + counters["freed"] - self._counted[index]

    def _own(self, kind: str, tensors: Iterable[Tensor | None]) -> None:
        """Note that these tensors existed at the last mark and are of this kind."""
        for tensor in tensors:
            gpu = -1 if tensor is None else tensor.get_device()
            if gpu in self._owners and tensor.layout is torch.strided:
                self._owners[gpu][block_address(tensor)].append((self._marks[gpu][-1][0], kind))

    def _forward_begins(self, module: nn.Module, inputs) -> None:
        if self._in_backward:  # checkpointing runs forward passes again within the backward pass
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
        # With gradients, the phase lasts until backward() begins, because the loss belongs to the forward pass.
        if not torch.is_grad_enabled() and not self._in_backward:
            self._mark(None)

    def _backward(self, *args, **kwargs):
        """Replaces torch.autograd.backward while the monitor records."""
        if self._in_backward:  # checkpointing may call it within a backward pass
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
        self._mark("backward" if self._in_backward else None)  # a gradient hook may run a step
        self._own("optimizer state", _states(optimizer))

    # ---- results

    def run(self, gpu: int = 0) -> Run:
        """The recording of one GPU. Raises RuntimeError if the run is not over or was too long, or if it has no event
        on any GPU, and ValueError for a GPU that was not recorded."""
        if not self._runs:
            raise RuntimeError("The run is not over. Ask for results after the `with MemoryMonitor()` block.")
        if gpu not in self._runs:
            raise ValueError(f"GPU {gpu!r} was not recorded. The recorded GPUs are {self.indices}.")
        if self._too_long:
            raise RuntimeError(
                "PyTorch's memory history does not contain the whole run. Record fewer steps, and do not change the "
                "history or the allocator's counters during the run."
            )
        if not any(run.last or run.ooms for run in self._runs.values()):
            raise RuntimeError("Nothing was recorded, because no GPU memory was allocated or freed in the block.")
        return self._runs[gpu]

    def peak(self, gpu: int = 0) -> Peak:
        """The peak of allocated memory, in bytes, and when it is first reached. Raises what `run` raises."""
        return self.run(gpu).peak()

    def at_peak(self, gpu: int = 0) -> dict[str, int]:
        """Bytes of each kind (`KINDS`) at the peak. Raises what `run` raises, and RuntimeError without `watch`."""
        if not self.watched:
            raise RuntimeError("The kinds of blocks are not known. Call monitor.watch(model, optimizer) in the run.")
        return self.run(gpu).at_peak()


def _states(optimizer: torch.optim.Optimizer | None) -> list[Tensor]:
    states = () if optimizer is None else optimizer.state.values()
    return [value for state in states for value in state.values() if isinstance(value, Tensor)]


def _played(trace: Sequence[Mapping], segments: Sequence[Mapping]) -> tuple[list[int], list[Life], list[int]]:
    """Replay one GPU's history, starting from its `segments`. Returns `allocated`, `lives` and `ooms` of a `Run`."""
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
