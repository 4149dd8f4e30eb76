"""One call of torch.lstm, gru, rnn_tanh or rnn_relu: its arguments, its sizes, its numbers from the CPU's kernels.

The host reads the lengths of packed sequences, on the CPU (aten/src/ATen/native/PackedSequence.cpp).
"""

import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple, Self

import torch

from virtual_gpus.clock.cost import READS_AND_WRITES
from virtual_gpus.dispatch.half_precision import slow_types, wide
from virtual_gpus.dispatch.operators import OpCall, Row
from virtual_gpus.errors import scalar_type
from virtual_gpus.features.autocast import below_autocast
from virtual_gpus.features.rnn.sizes import Network
from virtual_gpus.features.rnn.weights import are_flat
from virtual_gpus.machine import VirtualGPU
from virtual_gpus.placement.random_numbers import drawing_from
from virtual_gpus.placement.storages import device_of, gpu_of, nbytes, record_of
from virtual_gpus.threads import below

_NAMES = ("params", "has_biases", "num_layers", "dropout", "train", "bidirectional")
_CELLS = {"lstm": "LSTM", "gru": "GRU", "rnn_tanh": "RNN", "rnn_relu": "RNN"}
_run_backward = torch.autograd.graph._engine_run_backward
Tensor, Maybe, Results = torch.Tensor, torch.Tensor | None, tuple[torch.Tensor, ...]


class Inputs(NamedTuple):
    """input: (time, batch, input), (batch, time, input) with `batch_first`, or (steps, input) with `batch_sizes`.

    hx, cx: (layers x directions, batch, output or hidden size), cx None but for an LSTM. params: as `nn.LSTM` has them.
    """

    input: torch.Tensor
    hx: torch.Tensor
    cx: Maybe
    params: Sequence[torch.Tensor]

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [t for t in (*self[:3], *self.params) if t is not None]

    def mapped(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Self:
        """What `function` makes of each tensor."""
        cx = None if self.cx is None else function(self.cx)
        return type(self)(function(self.input), function(self.hx), cx, list(map(function, self.params)))


class Graph:
    """What the CPU's autograd keeps between forward and backward."""

    def __init__(self, leaves: Sequence[Maybe], outputs: tuple[torch.Tensor, ...]):
        self.leaves, self.outputs = leaves, outputs

    def has(self, wanted: Sequence[bool]) -> bool:
        """True if it knows all gradients that are wanted."""
        return all(leaf is not None and leaf.requires_grad for leaf, w in zip(self.leaves, wanted, strict=True) if w)

    def gradients(self, given: Sequence[Maybe], wanted: Sequence[bool], keep: bool) -> list[Maybe]:
        """Gradients of the leaves that are wanted, from those of the outputs (None: not used)."""
        pairs = [(o, g) for o, g in zip(self.outputs, given, strict=True) if g is not None and o.requires_grad]
        inputs = tuple(leaf for leaf, w in zip(self.leaves, wanted, strict=True) if w)
        with below(), torch._C._DisableTorchDispatch(), below_autocast():
            outputs, gradients = zip(*((output, gradient.detach()) for output, gradient in pairs), strict=True)
            results = iter(_run_backward(outputs, gradients, keep, False, inputs, True, accumulate_grad=False))
            triples = zip(self.leaves, wanted, [next(results) if w else None for w in wanted], strict=True)
            return [torch.zeros_like(leaf) if w and leaf is not None and g is None else g for leaf, w, g in triples]


class RecurrentCall:
    """A call without its tensors, which autograd keeps in its own way. flat: whether the weights lie as cuDNN wants."""

    def __init__(self, name: str, raw: Callable[..., Any], gpu: VirtualGPU, arguments: dict[str, Any], inputs: Inputs):
        self.gpu, self.raw, self.cell = gpu, raw, _CELLS[name]
        self.batch_sizes: torch.Tensor | None = arguments.get("batch_sizes")
        self.biases, self.layers, self.dropout = (arguments[key] for key in ("has_biases", "num_layers", "dropout"))
        self.train, self.bidirectional = arguments["train"], arguments["bidirectional"]
        self.batch_first = bool(arguments.get("batch_first"))
        self.random_state: torch.Tensor | None = None  # that dropout began with
        self.measure(inputs)
        self.flat = are_flat(self.net, inputs.params, self.biases)

    @property
    def draws(self) -> bool:
        """True if dropout has something to drop."""
        return bool(self.train and self.dropout > 0 and self.layers > 1)

    def measure(self, inputs: Inputs) -> None:
        """Set `net` and the shapes of the results."""
        (*sizes, width), output, lengths = inputs.input.shape, inputs.hx.shape[2], self.batch_sizes
        if lengths is not None:
            time, batch = len(lengths), int(lengths[0])
        else:
            time, batch = sizes[::-1] if self.batch_first else sizes
        hidden = output if inputs.cx is None else inputs.cx.shape[2]
        directions = 2 if self.bidirectional else 1
        self.net = Network(self.cell, self.layers, directions, time, batch, width, hidden, output,
                           inputs.input.element_size(), lengths is not None, self.draws)  # fmt: skip
        steps = sizes if lengths is not None else (time, batch)
        states = [state.shape for state in inputs[1:3] if state is not None]
        self.shapes = [torch.Size((*steps, output * directions)), *states]

    def empty_results(self, dtype: torch.dtype) -> list[torch.Tensor]:
        """Meta tensors in the place of results."""
        with below(), torch._C._DisableTorchDispatch(), torch.no_grad():
            output, *states = (torch.empty(shape, dtype=dtype, device="meta") for shape in self.shapes)
            return [output.transpose(0, 1) if self.batch_first else output, *states]

    def laid_out(self, sequence: Maybe, *states: Maybe, copied: bool = False) -> list[Maybe]:
        """Results or gradients on storages of their own, time first in memory, as cuDNN writes them.

        copied: copy the states, which the CPU's graph has; cuDNN keeps the output for backward, but not these.
        """
        own = torch.clone if copied else _own
        with below(), torch._C._DisableTorchDispatch(), torch.no_grad():
            if sequence is not None:
                sequence = sequence.detach()
                sequence = _own(sequence.transpose(0, 1)).transpose(0, 1) if self.batch_first else _own(sequence)
            return [sequence, *(None if state is None else own(state.detach()) for state in states)]

    def compute(self, inputs: Inputs, with_graph: bool, generator: torch.Generator | None) -> Graph:
        """Run the CPU's kernels, unseen by modes, hooks and accounting. `generator`: dropout's, None without it."""
        with below(), torch._C._DisableTorchDispatch(), below_autocast(), ExitStack() as stack:
            leaves = inputs.mapped(torch.Tensor.detach)
            stack.enter_context(torch.set_grad_enabled(with_graph))
            # The program's saved-tensor hooks are kept away from the CPU's graph by others on top, which save outputs
            # without the node that saves them: it would keep itself alive.
            if torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
                stack.enter_context(torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, lambda saved: saved))
            if generator is not None:
                stack.enter_context(drawing_from(generator))
            if self.net.output != self.net.hidden:  # the CPU warns that it has no fast way for projections
                stack.enter_context(warnings.catch_warnings())
                warnings.simplefilter("ignore")
            if with_graph:
                for leaf, source in zip(leaves.tensors, inputs.tensors, strict=True):
                    leaf.requires_grad_(source.requires_grad)
            return Graph([*leaves[:3], *leaves.params], self._run(leaves))

    def _run(self, inputs: Inputs) -> tuple[torch.Tensor, ...]:
        """In float32 where this CPU has no kernels for the type: the results are rounded once, as a GPU's are."""
        dtype = inputs.input.dtype
        input, hx, cx, params = inputs.mapped(wide) if dtype in slow_types() else inputs
        states = hx if cx is None else [hx, cx]
        settings = (params, self.biases, self.layers, self.dropout, self.train, self.bidirectional)
        if self.batch_sizes is not None:
            results = self.raw(input, self.batch_sizes, states, *settings)
        else:
            results = self.raw(input, states, *settings, self.batch_first)
        return tuple(result.to(dtype) for result in results)


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` contiguous on a storage that holds nothing else and lives nowhere yet."""
    tensor = tensor.contiguous()
    storage = tensor.untyped_storage()
    alone = storage.nbytes() == nbytes(tensor) and record_of(storage).gpu is None
    return tensor if alone else tensor.clone(memory_format=torch.contiguous_format)


def bind(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[dict[str, Any], Inputs] | None:
    """The arguments by name, in either of the two forms, and the tensors; None if they do not fit."""
    packed = "batch_sizes" in kwargs or isinstance((*args, None, None, None)[1 if name == "lstm" else 2], torch.Tensor)
    names = ("data", "batch_sizes", "hx", *_NAMES) if packed else ("input", "hx", *_NAMES, "batch_first")
    arguments = {**dict(zip(names, args, strict=False)), **kwargs}
    if set(arguments) != set(names) or len(args) + len(kwargs) != len(names) or not arguments["params"]:
        return None
    if name == "lstm" and len(arguments["hx"]) != 2:
        return None
    hx, cx = arguments["hx"] if name == "lstm" else (arguments["hx"], None)
    inputs = Inputs(arguments[names[0]], hx, cx, list(arguments["params"]))
    return (arguments, inputs) if inputs.input.dim() == (2 if packed else 3) and hx.dim() == 3 else None


def check(inputs: Inputs, dtypes: bool = True) -> None:
    """One device, one dtype, contiguous states: `check_attributes` of aten/src/ATen/native/RNN.h, and RNN.cpp."""
    here = device_of(inputs.input)
    states = [state for state in inputs[1:3] if state is not None]
    for kind, tensors in (("hidden", states), ("parameter", inputs.params)):
        for tensor in tensors:
            if device_of(tensor) != here:
                where = f"found input tensor at {here} and {kind} tensor at {device_of(tensor)}"
                raise RuntimeError(f"Input and {kind} tensors are not at the same device, {where}")
            if dtypes and tensor.dtype != inputs.input.dtype:
                types = f"input tensor with {scalar_type(inputs.input)} and {kind} tensor with {scalar_type(tensor)}"
                raise RuntimeError(f"Input and {kind} tensors are not the same dtype, found {types}")
    if dtypes and not all(state.is_contiguous() for state in states):
        raise RuntimeError("rnn: hx is not contiguous")


def _packed_sequence(call: OpCall) -> tuple[torch.Tensor, torch.Tensor]:
    """The data on the GPU, the lengths on the CPU."""
    result = call.compute()
    call.place(result[0])
    return result


def _check_lengths(call: OpCall) -> None:
    """Raises PyTorch's RuntimeError for lengths on a GPU."""
    lengths = call["lengths"]
    if gpu_of(lengths) is not None:
        given = f"{lengths.dim()}D {lengths.device} {scalar_type(lengths)} tensor"
        raise RuntimeError(f"'lengths' argument should be a 1D CPU int64 tensor, but got {given}")


_SIZES = {"batch_sizes"}
OPERATORS = {
    "_pack_padded_sequence": Row(READS_AND_WRITES, _packed_sequence, _check_lengths, on_host={"lengths"}),
    "_pad_packed_sequence": Row(READS_AND_WRITES, _packed_sequence, on_host=_SIZES),
    **dict.fromkeys(("_pack_padded_sequence_backward", *_CELLS), Row(READS_AND_WRITES, on_host=_SIZES)),
}
