"""The streams of a backward pass: each node runs on the stream of its forward pass (torch/csrc/autograd/engine.cpp).

Hooks on the nodes change streams during the pass. A program that makes no node on a stream of its own has no hooks.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch.autograd.graph import GradientEdge, Node
from torch.utils.hooks import RemovableHandle

from virtual_gpus.features.streams import streams
from virtual_gpus.machine import VirtualGPU, VirtualMachine
from virtual_gpus.placement.storages import gpu_of

_Gradients = Sequence[torch.Tensor | None]
_Edge = tuple[Node | None, int]  # an input of a node


@contextmanager
def on_the_streams_of_forward(
    machine: VirtualMachine, outputs: Sequence[torch.Tensor | GradientEdge], gradients: _Gradients
) -> Iterator[None]:
    """Within it, the engine runs the nodes behind `outputs` on their streams. The caller's streams have made the
    `gradients` of the outputs, and wait for all others at its end."""
    if not streams.have_changed(machine):
        yield
        return
    nodes = (getattr(output, "grad_fn", None) or getattr(output, "node", None) for output in outputs)
    run, roots = _Pass(machine), [(node, output.output_nr) for node, output in zip(nodes, outputs, strict=True)]
    handles = list(run.watch(roots))
    try:
        run.arrive(gradients, roots, gradients)
        yield
    finally:
        run.end()
        for handle in handles:
            handle.remove()


class _Pass:
    """One backward pass. `_waiting`: nodes whose gradients arrive, where they will run, and when it is all there."""

    def __init__(self, machine: VirtualMachine):
        self._machine, self._used = machine, set[streams.Stream]()
        self._callers = [streams.current_stream(gpu.index) for gpu in machine.gpus]
        self._waiting = defaultdict[Node, dict[VirtualGPU, tuple[streams.Stream, float]]](dict)
        self._arrived: set[_Edge] = set()

    def watch(self, roots: Sequence[_Edge]) -> Iterator[RemovableHandle]:
        """Hooks before and after each node behind `roots`."""
        waiting, visited = [node for node, _ in roots], set[Node]()
        while waiting:
            node = waiting.pop()
            if node is not None and node not in visited:
                visited.add(node)
                waiting.extend(following for following, _ in node.next_functions)
                yield node.register_prehook(partial(self._run, node))
                yield node.register_hook(partial(self._after, node))

    def _after(self, node: Node, results: _Gradients, gradients: _Gradients) -> None:
        self._waiting.pop(node, None)
        self.arrive(results, node.next_functions, gradients)

    def arrive(self, results: _Gradients, edges: Sequence[_Edge], gradients: _Gradients) -> None:
        """What was computed of `gradients` goes to other nodes (torch/csrc/autograd/input_buffer.cpp).

        One that another stream uses is recorded there. Two for the same input are added on the stream of the node. A
        leaf, whose number is larger than all others, adds up on the stream that computed the first.
        """
        marks, sums = [streams.current_stream(gpu.index)._mark() for gpu in _gpus(gradients)], list[Node]()
        for result, (node, number) in zip(results, edges, strict=False):
            if node is None or result is None:
                continue
            for gpu in _gpus((result,)):
                own = streams.stream_of_node(gpu, node._sequence_nr())
                stream, ready = self._waiting[node].get(gpu, (own, 0.0))
                self._waiting[node][gpu] = stream, self._machine.clock.latest([*marks, ready])
                if stream != streams.current_stream(gpu.index):
                    streams.record_stream(result, stream)
                if (node, number) in self._arrived:
                    sums.append(node)
                self._arrived.add((node, number))
        # The engine adds now. Before the next node, the youngest, come hooks on its tensors.
        inner = (node for node in self._waiting if node.next_functions)
        for node in sums or sorted(inner, key=lambda node: node._sequence_nr())[-1:]:
            self._run(node)

    def _run(self, node: Node, *_: object) -> None:
        """Make a node's streams the current ones, and let them wait for the gradients that have arrived."""
        for gpu, (stream, ready) in self._waiting[node].items():
            streams.make_current(gpu, stream)
            self._used.add(stream)
            stream._hold(ready)

    def end(self) -> None:
        """The caller's streams are current again, and wait for all others."""
        for caller in self._callers:
            streams.make_current(caller._gpu, caller)
            for stream in self._used:
                if stream.device_index == caller.device_index:
                    caller.wait_stream(stream)


def _gpus(gradients: _Gradients) -> set[VirtualGPU]:
    gpus = (gpu_of(gradient) for gradient in gradients if isinstance(gradient, torch.Tensor))
    return {gpu for gpu in gpus if gpu is not None}


def start(machine: VirtualMachine) -> None:
    machine.around_backward = partial(on_the_streams_of_forward, machine)
