"""`compile="modelled"`: the modelled time of what torch.compile fuses. Numbers and memory stay those of the program.

In compiled code and in its backward pass, all operators are fused except matrix multiplications, convolutions,
attention, optimizers, writing by index, and FSDP's copies. A fused operator takes the time to read its arguments. Its
result is neither written nor read again until something that is not fused needs it, such as a collective or a copy to
another device, and is then written once. Views cost nothing. Copies within a GPU, casts among them, cost what they do
in eager code.

What leaves the compiled code is written once too, as Inductor writes every output of a graph and every input that it
changes (`GraphLowering.output` in torch/_inductor/graph.py): when the function returns, its results and what it changed
of older tensors, and at the end of a backward pass, the gradients that are still there. What autograd alone keeps of
the forward pass is not written: the backward pass computes it again (torch/_functorch/partitioners.py).

Eager code keeps its eager backward pass. A node of autograd belongs to compiled code if it was made while a compiled
function ran, or another such node, as in a checkpoint. Its number says so: a thread gives them out one after the other.
The node that adds a gradient to a leaf's has none, and belongs to eager code.
"""

import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves

from virtual_gpus.dispatch import timing
from virtual_gpus.dispatch.operators import OpCall, row_of
from virtual_gpus.follower import Charger
from virtual_gpus.machine import VirtualGPU, VirtualMachine
from virtual_gpus.placement.storages import StorageAllocation, allocation_of, nbytes, tensors_in
from virtual_gpus.settings import Settings
from virtual_gpus.threads import this_thread

_next_number = torch._C._autograd._get_sequence_nr
_current_node = torch._C._current_autograd_node
_OF_A_LEAF = 2**64 - 1  # the number of every node that adds to a leaf's gradient (torch/csrc/autograd/function.h)
_MOST = 65536  # ranges of numbers that are kept, chosen: more than the calls that one graph comes from


def check_settings(settings: Settings) -> None:
    """See `features`."""
    if settings.compile not in ("eager", "modelled"):
        raise ValueError(f'compile must be "eager" or "modelled", not {settings.compile!r}.')


class _CompiledCall:
    """A call of a compiled function. made: what it allocated; changed: what was there before, and it wrote on."""

    def __init__(self) -> None:
        self.in_backward = this_thread.in_backward  # then a pass computes it again; else a pass within it is its own
        self.made, self.changed = weakref.WeakSet[StorageAllocation](), weakref.WeakSet[StorageAllocation]()


class _Pass:
    """A backward pass."""


class _Unwritten(NamedTuple):
    """Bytes that fused operators have still to write. owner: what made them."""

    nbytes: int
    owner: _CompiledCall | _Pass


class _OfThread(threading.local):
    """The outermost call and the innermost pass that run in a thread. numbers: those of compiled code's nodes."""

    def __init__(self) -> None:
        self.call: _CompiledCall | None = None
        self.running: _Pass | None = None
        self.numbers = deque[range](maxlen=_MOST)  # in order


class Fusion(Charger[VirtualGPU]):
    """The results of fused operators that nothing has written yet. One per machine, once it runs compiled code."""

    def __init__(self) -> None:
        self._unwritten: weakref.WeakKeyDictionary[StorageAllocation, _Unwritten] = weakref.WeakKeyDictionary()
        self._of_thread = _OfThread()

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a compiled function, whose operators are fused, and charge the writing of what it leaves behind."""
        state, outer = self._of_thread, self._of_thread.call
        if outer is not None and outer.in_backward == this_thread.in_backward:  # one compiled function in another
            return function(*args, **kwargs)
        state.call = call = _CompiledCall()
        if outer is None:
            state.numbers.append(range(_next_number(), _OF_A_LEAF))
        try:
            result = function(*args, **kwargs)
        finally:
            state.call = outer
            if outer is None:
                state.numbers[-1] = range(state.numbers[-1].start, _next_number())
        results = (allocation_of(leaf) for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor))
        self._write([*call.changed, *results])
        return result

    def takes(self, call: OpCall, result: object) -> bool:
        """Charge an operator if it is fused."""
        owner = self._owner()
        if owner is None:
            return False
        if call.op.is_view:
            return True
        given, time = set(map(allocation_of, call.tensors)), call.op.row.time
        filled = timing.filled(call)
        written = {allocation_of(tensor): nbytes(tensor) for tensor in tensors_in(result) or filled}
        if isinstance(owner, _CompiledCall):
            owner.made.update(allocation for allocation in written if allocation not in given and allocation)
        if not time.is_fusible:
            return False
        reads: list[torch.Tensor] = [] if time is row_of("zeros").time else call.tensors
        if call.op.outputs:  # which it does not read
            reads = [tensor for tensor in reads if not any(tensor is target for target in filled)]
        self._read(call.gpu, call.op.base, reads, owner)
        for allocation, size in written.items():
            if allocation is not None:
                before = self._unwritten.get(allocation)
                size = min(allocation.nbytes, size + (before.nbytes if before and allocation in given else 0))
                self._unwritten[allocation] = _Unwritten(size, owner)
                if isinstance(owner, _CompiledCall) and allocation in given and allocation not in owner.made:
                    owner.changed.add(allocation)
        return True

    def before(self, gpu: VirtualGPU, tensors: Iterable[torch.Tensor], is_fusible: bool = False) -> None:
        """Charge the writing of what an operator that is not fused reads, if it is not written yet.

        is_fusible: in compiled code it is part of a fused kernel, as a cast is, though it costs what it does in eager.
        """
        if self._unwritten and not (is_fusible and self._owner() is not None):
            self._write(map(allocation_of, tensors))

    @contextmanager
    def around_backward(self, around: Callable[..., AbstractContextManager[object]], *given: Any) -> Iterator[None]:
        """A backward pass, within what else is done around it. Charges the writing of the gradients that it leaves."""
        state, outer = self._of_thread, self._of_thread.running
        with around(*given):
            state.running = running = _Pass()
            try:
                yield
            finally:
                state.running = outer
            self._write([allocation for allocation, part in list(self._unwritten.items()) if part.owner is running])

    def _owner(self) -> _CompiledCall | _Pass | None:
        """Whose the operator is that runs now: a compiled call's, a backward pass's through one, or eager code's."""
        state = self._of_thread
        if not this_thread.in_backward or (state.call is not None and state.call.in_backward):
            return state.call
        node = _current_node()
        number = _OF_A_LEAF if node is None else node._sequence_nr()
        made = next((part for part in reversed(state.numbers) if part.start <= number), range(0))
        if number not in made:
            return None
        last, newest = state.numbers[-1], _next_number() - 1
        if torch.is_grad_enabled() and newest >= last.stop:  # the operator has made a node
            if newest > last.stop:
                state.numbers.append(range(newest, newest))
            state.numbers[-1] = range(state.numbers[-1].start, newest + 1)
        return state.running

    def _read(self, gpu: VirtualGPU, name: str, tensors: list[torch.Tensor], owner: _CompiledCall | _Pass) -> None:
        """Charge a fused operator the reading of its arguments, but for what is fused with it."""
        sizes: dict[StorageAllocation, int] = {}
        for tensor in tensors:
            allocation = allocation_of(tensor)
            if allocation is None:
                continue
            part, size = self._unwritten.get(allocation), nbytes(tensor)
            if part is not None and (part.owner is owner or not isinstance(owner, _CompiledCall)):
                size = max(0, min(size, allocation.nbytes) - part.nbytes)  # the rest, if it changed a part only
            elif part is not None:  # another call left it to the program, and not as a result
                self._write([allocation])
            sizes[allocation] = max(size, sizes.get(allocation, 0))
        if gpu.late:
            gpu.late.hold(gpu, tensors)
        seconds, clock = gpu.spec.seconds_to_move(sum(sizes.values())), gpu.machine.clock
        if seconds:
            clock.launch(gpu.slot, gpu.stream, seconds, clock.host.kernel, name)

    def _write(self, allocations: Iterable[StorageAllocation | None]) -> None:
        """Charge the writing of what is not written yet, which the kernel does that computes it."""
        sizes = Counter[VirtualGPU]()
        for allocation in allocations:
            part = self._unwritten.pop(allocation, None) if allocation is not None else None
            if part is not None and allocation is not None:
                sizes[allocation.gpu] += part.nbytes
        for gpu, size in sizes.items():
            seconds = gpu.spec.seconds_to_move(size)
            gpu.machine.clock.launch(gpu.slot, gpu.stream, seconds, 0.0, "fused")


def fused(function: Callable[..., Any], machine: VirtualMachine) -> Callable[..., Any]:
    """`function` as a compiled one: its operators on the GPUs of `machine` are fused."""
    charger = machine.charger
    if not isinstance(charger, Fusion):
        charger = machine.charger = Fusion()
        machine.around_backward = partial(charger.around_backward, machine.around_backward)
    return partial(charger.run, function)
