"""The streams of a backward pass: each node runs on the stream of its forward pass (torch/csrc/autograd/engine.cpp).

Hooks on the nodes change streams during the pass. A program that makes no node on a stream of its own has no hooks.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch.autograd.graph import GradientEdge, Node
from torch.utils.hooks import RemovableHandle

from virtual_gpus.features.streams import streams
from virtual_gpus.machine import VirtualGPU, VirtualMachine
from virtual_gpus.placement.storages import gpu_of


@contextmanager
def on_the_streams_of_forward(
    machine: VirtualMachine, outputs: Iterable[torch.Tensor | GradientEdge]
) -> Iterator[None]:
    """Within it, the engine runs the nodes behind `outputs` on their streams. At its end the caller's streams wait."""
    if not streams.have_changed(machine):
        yield
        return
    run = _Pass(machine)
    handles = [handle for node in _nodes(outputs) for handle in run.watch(node)]
    try:
        yield
    finally:
        run.end()
        for handle in handles:
            handle.remove()


def _nodes(outputs: Iterable[torch.Tensor | GradientEdge]) -> Iterator[Node]:
    waiting = [getattr(output, "grad_fn", None) or getattr(output, "node", None) for output in outputs]
    visited: set[Node] = set()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in visited:
            visited.add(node)
            waiting.extend(following for following, _ in node.next_functions)
            yield node


class _Pass:
    """One backward pass: the streams it has used, and for each node how long its inputs take on the modelled clock."""

    def __init__(self, machine: VirtualMachine):
        self._machine, self._used = machine, set[streams.Stream]()
        self._ready: dict[Node | None, float] = {}
        self._callers: dict[int, streams.Stream] = {}  # by the GPU's index: what was current before
        self._missing: Counter[Node | None] = Counter()  # gradients of its inputs
        self._next: set[Node] = set()  # nothing is missing, and they have not run

    def watch(self, node: Node) -> list[RemovableHandle]:
        """Hooks before and after a node. The node that adds up a leaf's gradient stays on the current stream."""
        number = node._sequence_nr()
        of_leaf = not node.next_functions
        self._missing.update(following for following, _ in node.next_functions)

        def before(gradients: tuple[torch.Tensor | None, ...]) -> None:
            self._next.discard(node)
            for gpu in _gpus(gradients):
                stream = streams.current_stream(gpu.index)
                self._callers.setdefault(gpu.index, stream)
                if not of_leaf:
                    stream = streams.stream_of_node(gpu, number)
                    streams.make_current(gpu, stream)
                self._used.add(stream)
                stream._hold(self._ready.get(node, 0.0))

        def after(_: object, gradients: tuple[torch.Tensor | None, ...]) -> None:
            marks = [streams.current_stream(gpu.index)._mark() for gpu in _gpus(gradients)]
            for following, _ in node.next_functions:
                self._ready[following] = self._machine.clock.latest([*marks, self._ready.get(following, 0.0)])
                self._missing[following] -= 1
                if following is not None and not self._missing[following]:
                    self._next.add(following)
            following = max(self._next, key=lambda node: node._sequence_nr(), default=None)
            if following is not None and following.next_functions:  # hooks on its tensors come before `before`
                for gpu in _gpus(gradients):
                    streams.make_current(gpu, streams.stream_of_node(gpu, following._sequence_nr()))

        return [node.register_prehook(before), node.register_hook(after)]

    def end(self) -> None:
        """The caller's streams are current again, and wait for all others."""
        for index, caller in self._callers.items():
            streams.make_current(caller._gpu, caller)
            for stream in self._used:
                if stream.device_index == index:
                    caller.wait_stream(stream)


def _gpus(gradients: tuple[torch.Tensor | None, ...]) -> set[VirtualGPU]:
    gpus = (gpu_of(gradient) for gradient in gradients if isinstance(gradient, torch.Tensor))
    return {gpu for gpu in gpus if gpu is not None}


def start(machine: VirtualMachine) -> None:
    machine.around_backward = partial(on_the_streams_of_forward, machine)
