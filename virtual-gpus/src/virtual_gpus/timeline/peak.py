"""What fills a GPU, by kind, now or at its peak: the one classifier of the engine, and of tools on PyTorch's history.

A block that contains a parameter, its gradient or an optimizer's state is of that kind (`owned` lists these tensors).
For all other blocks it counts which function of PyTorch asked for them: the innermost one of `ALLOCATORS` on the stack
of the allocation (`kind_of`). A snapshot of `torch.cuda.memory` has these stacks on real GPUs too. `PeakLog` replays
allocations and frees, wherever they come from. `AllocatorLog` takes them from a virtual GPU.
"""

import functools
import re
import sys
import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import NamedTuple

import torch

from virtual_gpus.machine import VirtualGPU
from virtual_gpus.memory.device import Event
from virtual_gpus.placement.storages import ScratchBlock, allocation_of, is_wrapper, parts_of

PARAMETERS, GRADIENTS, STATE = "parameters", "gradients", "optimizer state"
ACTIVATIONS, GATHERED, BUFFERS = "activations", "gathered layers", "communication buffers"
UPDATES, WORKSPACES, OTHER = "optimizer step", "workspaces", "other"  # what a step computes in between; of libraries
KINDS = (PARAMETERS, GRADIENTS, STATE, ACTIVATIONS, GATHERED, BUFFERS, UPDATES, WORKSPACES, OTHER)


class Allocator(NamedTuple):
    """Functions that ask for memory of one kind: the end of their file's name, and their names (None: all in it).

    owned: of a running one, by its frame, the (kind, tensor) that it has and no parameter or optimizer shows.
    """

    file: str
    functions: tuple[str, ...] | None
    kind: str
    owned: Callable[[FrameType], Iterable[tuple[str, torch.Tensor]]] = lambda frame: ()


ALLOCATORS = [  # the first that fits counts; features add their `ALLOCATES`
    Allocator("torch/nn/modules/module.py", ("_apply", "to_empty"), PARAMETERS),
    Allocator("torch/nn/modules/module.py", ("_call_impl",), ACTIVATIONS),
    Allocator("torch/nn/functional.py", None, ACTIVATIONS),
    Allocator("torch/autograd/graph.py", ("_engine_run_backward",), ACTIVATIONS),
    Allocator("torch/optim/optimizer.py", ("profile_hook_step", "wrapper"), UPDATES),
]
_MAKES_LAYER = Allocator("", ("__init__",), PARAMETERS)  # in any file of torch/nn/modules

_NUMBER = re.compile(r"\.\d+(?=\.|$)")
_CALLS_MODULE = torch.nn.Module._call_impl.__code__
_RUNS_BACKWARD = torch.autograd.graph._engine_run_backward.__code__


@functools.cache
def _allocator(file: str, function: str) -> Allocator | None:
    """The row of a function; None if it says nothing of what it allocates, and its caller is to be asked."""
    name = file.replace("\\", "/")
    for row in ALLOCATORS:
        if name.endswith(row.file) and (row.functions is None or function in row.functions):
            return row
    return _MAKES_LAYER if "/torch/nn/modules/" in name and function == "__init__" else None


def kind_of(frames: Iterable[tuple[str, str]]) -> str:
    """The kind of a block from the stack of its allocation: (file, function), innermost first.

    No frame at all means the backward pass: on a real GPU it runs in threads of C++, where there is no Python. The rows
    of features count once `virtual_gpus.virtual_gpus` was imported.
    """
    kind = ACTIVATIONS
    for file, function in frames:
        row, kind = _allocator(file, function), OTHER
        if row is not None:
            return row.kind
    return kind


def owned(things: Iterable[torch.Tensor | torch.optim.Optimizer]) -> Iterator[tuple[str, torch.Tensor]]:
    """(kind, tensor) for the tensors of parameters and optimizers: the parameters, their gradients, the state."""
    for thing in things:
        if isinstance(thing, torch.optim.Optimizer):
            yield from owned(parameter for group in thing.param_groups for parameter in group["params"])
            values = (value for state in thing.state.values() for value in state.values())
            yield from ((STATE, value) for value in values if isinstance(value, torch.Tensor))
        else:
            yield PARAMETERS, thing
            if thing.grad is not None:
                yield GRADIENTS, thing.grad


@dataclass(eq=False, slots=True)
class _Block:
    size: int  # bytes
    kind: str
    module: str = ""  # that asked for it, if it is known


class PeakLog:
    """Allocations and frees of one GPU, and what was in use at the highest moment so far.

    live: (address, bytes) of the blocks that are in use at the beginning.
    peak: bytes at the highest moment. by_kind: the same, bytes per kind. by_module: those of activations, per module
    that allocated them, as far as `allocated` was told. All are up to date after `fold`.
    """

    def __init__(self, live: Iterable[tuple[int, int]]):
        self.peak, self.by_kind = 0, dict.fromkeys(KINDS, 0)
        self.by_module = Counter[str]()
        self._at = {address: _Block(size, OTHER) for address, size in live}  # what is there now
        self._live = dict.fromkeys(self._at.values())  # what was in use when the log began, in order
        self._log: list[tuple[_Block, int]] = []  # the bytes that came or, below zero, went

    def allocated(self, address: int, size: int, kind: str, module: str = "") -> None:
        """Note an allocation of `size` bytes. module: that which asked for them."""
        self._at[address] = block = _Block(size, kind, module)
        self._log.append((block, size))

    def freed(self, address: int, size: int) -> None:
        """Note that a block of `size` bytes was freed. A block whose allocation is not in this log is ignored."""
        if address in self._at:
            self._log.append((self._at.pop(address), -size))

    def mark(self, kind: str, address: int) -> None:
        """Say of what kind the block is that is in use at `address` now."""
        if address in self._at:
            self._at[address].kind = kind

    def fold(self) -> None:
        """Replay the log, keep what was in use at its highest moment if that is a new peak, and begin a new log."""
        log, self._log = self._log, list[tuple[_Block, int]]()
        used = highest = sum(block.size for block in self._live)
        live, until = self._live, 0
        for number, (_, size) in enumerate(log, 1):
            used += size
            if used > highest:
                highest, until = used, number
        if highest > self.peak or not self.peak:
            at_peak = dict(live)
            _apply(log[:until], at_peak)
            self.peak, self.by_kind, self.by_module = highest, dict.fromkeys(KINDS, 0), Counter[str]()
            for block in at_peak:
                self.by_kind[block.kind] += block.size
                if block.kind == ACTIVATIONS and block.module:
                    self.by_module[block.module] += block.size
        _apply(log, live)


def _apply(log: Iterable[tuple[_Block, int]], live: dict[_Block, None]) -> None:
    for block, size in log:
        if size > 0:
            live[block] = None
        else:
            del live[block]


class AllocatorLog(PeakLog):
    """The log of a virtual GPU from now on. Its peak is as `torch.cuda.max_memory_allocated` counts it."""

    def __init__(self, gpu: VirtualGPU):
        self._gpu, self._allocator = gpu, gpu.allocator
        self._names: weakref.WeakKeyDictionary[torch.nn.Module, str] = weakref.WeakKeyDictionary()
        with self._allocator.exclusive():
            super().__init__((address, block.size) for address, block in self._allocator.live_blocks.items())
            self._allocator.observers.append(self._hear)

    def stop(self) -> None:
        with self._allocator.exclusive():
            self._allocator.observers.remove(self._hear)
            self.fold()

    def mark_owned(self, things: Iterable[torch.Tensor | torch.optim.Optimizer]) -> None:
        """Say of what kind the blocks of parameters and optimizers are."""
        for kind, tensor in owned(things):
            self._mark_tensor(kind, tensor)

    def _mark_tensor(self, kind: str, tensor: torch.Tensor) -> None:
        for part in parts_of(tensor) if is_wrapper(type(tensor)) else (tensor,):
            allocation = allocation_of(part)
            if allocation is not None and allocation.gpu is self._gpu and allocation.block is not None:
                self.mark(kind, allocation.block.address)

    def _hear(self, event: Event, address: int, size: int) -> None:
        if event == "alloc":
            kind = self._kind_now(address)
            self.allocated(address, size, kind, self._module_now() if kind == ACTIVATIONS else "")
        elif event in ("free", "free_requested"):
            self.freed(address, size)

    def _kind_now(self, address: int) -> str:
        owner = self._allocator.live_blocks[address].owner
        if owner is not None and isinstance(owner(), ScratchBlock):
            return WORKSPACES
        kind = kind_of(self._stack())
        # What a program computes outside modules, such as logits.float(), autograd keeps. A history does not tell.
        return ACTIVATIONS if kind == OTHER and torch.is_grad_enabled() else kind

    def _module_now(self) -> str:
        """The innermost module that is being called, by its name in the outermost one, with * for numbers."""
        called = list[torch.nn.Module]()
        for frame, _ in traceback.walk_stack(sys._getframe(1)):
            if frame.f_code is _CALLS_MODULE:
                called.append(frame.f_locals["self"])
            if frame.f_code is _RUNS_BACKWARD and not called:
                return "backward pass"
        if not called:
            return "outside modules"
        for outermost in reversed(called):  # DataParallel's replicas are not modules of it
            if called[0] in self._names:
                break
            named = ((module, _NUMBER.sub(".*", f".{name}")[1:]) for name, module in outermost.named_modules())
            self._names.update(named)
        return self._names.get(called[0]) or type(called[0]).__name__

    def _stack(self) -> Iterator[tuple[str, str]]:
        for frame, _ in traceback.walk_stack(sys._getframe(1)):
            function = frame.f_code.co_filename, frame.f_code.co_name
            row = _allocator(*function)
            for kind, tensor in () if row is None else row.owned(frame):
                self._mark_tensor(kind, tensor)
            yield function
