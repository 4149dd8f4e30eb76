"""The streams of a backward pass: each node runs on the stream of its forward pass (torch/csrc/autograd/engine.cpp).

Hooks on the nodes change streams during the pass. A program that makes no node on a stream of its own has no hooks.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

from virtual_gpus.features.streams import streams
from virtual_gpus.features.tensors import autograd
from virtual_gpus.machine import VirtualGPU, active
from virtual_gpus.placement.storages import gpu_of


@contextmanager
def on_the_streams_of_forward(outputs) -> Iterator[None]:
    """Within it, the engine runs the nodes behind `outputs` on their streams. At its end the caller's streams wait.

    outputs: tensors or `GradientEdge`s, as the engine takes them.
    """
    if not streams.have_changed():
        yield
        return
    run = _Pass()
    handles = [handle for node in _nodes(outputs) for handle in run.watch(node)]
    try:
        yield
    finally:
        run.end()
        for handle in handles:
            handle.remove()


def _nodes(outputs) -> Iterator[torch.autograd.graph.Node]:
    waiting = [getattr(output, "grad_fn", None) or getattr(output, "node", None) for output in outputs]
    seen = set()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting.extend(following for following, _ in node.next_functions)
            yield node


class _Pass:
    """One backward pass: the streams it has used, and for each node how long its inputs take on the modelled clock."""

    def __init__(self):
        self._ready: dict[torch.autograd.graph.Node, float] = {}
        self._callers: dict[int, streams.Stream] = {}  # by the GPU's index: what was current before
        self._used: set[streams.Stream] = set()
        self._missing: collections.Counter[torch.autograd.graph.Node] = collections.Counter()  # gradients of its inputs
        self._next: set[torch.autograd.graph.Node] = set()  # nothing is missing, and they have not run

    def watch(self, node: torch.autograd.graph.Node) -> list[torch.utils.hooks.RemovableHandle]:
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

        def after(_, gradients: tuple[torch.Tensor | None, ...]) -> None:
            marks = [streams.current_stream(gpu.index)._mark() for gpu in _gpus(gradients)]
            for following, _ in node.next_functions:
                self._ready[following] = active().clock.latest([*marks, self._ready.get(following, 0.0)])
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
    found = {gpu_of(gradient) for gradient in gradients if isinstance(gradient, torch.Tensor)}
    return found - {None}


def prepare() -> None:
    """See `features`. `tensors.autograd` runs its passes so while GPUs are on, and only then."""
    autograd.around_pass = on_the_streams_of_forward


def forget() -> None:
    autograd.around_pass = nullcontext
