"""One call of torch.lstm, gru, rnn_tanh or rnn_relu: its arguments, its sizes, its numbers from the CPU's kernels.

The host reads the lengths of packed sequences, on the CPU (aten/src/ATen/native/PackedSequence.cpp).
"""

from __future__ import annotations

import copy
import warnings
from contextlib import ExitStack

import torch

from virtual_gpus.dispatch.op_call import OpCall
from virtual_gpus.errors import scalar_type
from virtual_gpus.features.half_precision import slow_types
from virtual_gpus.features.rnn.sizes import Network
from virtual_gpus.placement.random_numbers import drawing_from
from virtual_gpus.placement.storages import device_of, gpu_of, nbytes, record_of
from virtual_gpus.threads import below

_NAMES = ("params", "has_biases", "num_layers", "dropout", "train", "bidirectional")
_CELLS = {"lstm": "LSTM", "gru": "GRU", "rnn_tanh": "RNN", "rnn_relu": "RNN"}
_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA) | torch._C.DispatchKeySet(
    torch._C.DispatchKey.AutocastCPU
)
_run_backward = torch.autograd.graph._engine_run_backward


class RecurrentCall:
    """input: (time, batch, input), (batch, time, input) with `batch_first`, or (steps, input) with `batch_sizes`.

    hx, cx: (layers x directions, batch, output or hidden size), cx None but for an LSTM. params: as `nn.LSTM` has them.
    """

    def __init__(self, name: str, raw, found: dict):
        self.raw, self.cell = raw, _CELLS[name]
        self.batch_sizes = found.get("batch_sizes")
        self.input = found["data" if self.batch_sizes is not None else "input"]
        self.hx, self.cx = found["hx"] if self.cell == "LSTM" else (found["hx"], None)
        self.params = list(found["params"])
        self.biases, self.layers, self.dropout = found["has_biases"], found["num_layers"], found["dropout"]
        self.train, self.bidirectional = found["train"], found["bidirectional"]
        self.batch_first = bool(found.get("batch_first"))
        self.random_state = None

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All tensors but the batch sizes."""
        return [t for t in (self.input, self.hx, self.cx, *self.params) if t is not None]

    @property
    def draws(self) -> bool:
        """True if dropout has something to drop."""
        return bool(self.train and self.dropout > 0 and self.layers > 1)

    def measure(self) -> None:
        """Set `net` and the shapes of the results."""
        packed, output = self.batch_sizes is not None, self.hx.shape[2]
        if packed:
            time, batch = len(self.batch_sizes), int(self.batch_sizes[0])
        else:
            time, batch = self.input.shape[:2] if not self.batch_first else self.input.shape[1::-1]
        hidden = output if self.cx is None else self.cx.shape[2]
        directions = 2 if self.bidirectional else 1
        width = self.input.shape[-1]
        self.net = Network(self.cell, self.layers, directions, time, batch, width, hidden, output,
                           self.input.element_size(), packed, self.draws)  # fmt: skip
        steps = (self.input.shape[0],) if packed else (time, batch)
        shapes = [(*steps, output * directions), self.hx.shape] + ([] if self.cx is None else [self.cx.shape])
        self.shapes = [torch.Size(shape) for shape in shapes]

    def without_tensors(self) -> RecurrentCall:
        """A copy for the autograd graph, which keeps tensors in its own way."""
        made = copy.copy(self)
        made.input = made.hx = made.cx = made.params = None
        return made

    # ---- results without numbers, and their layout ----

    def empty_results(self, dtype: torch.dtype) -> list[torch.Tensor]:
        """Meta tensors in the place of results."""
        with below(), torch._C._DisableTorchDispatch(), torch.no_grad():
            output, *states = (torch.empty(shape, dtype=dtype, device="meta") for shape in self.shapes)
            return [output.transpose(0, 1) if self.batch_first else output, *states]

    def laid_out(self, sequence, *states, copied: bool = False) -> list[torch.Tensor | None]:
        """Results or gradients on storages of their own, time first in memory, as cuDNN writes them.

        copied: copy the states, which the CPU's graph has; cuDNN keeps the output for backward, but not these.
        """
        own = torch.clone if copied else _own
        with below(), torch._C._DisableTorchDispatch(), torch.no_grad():
            if sequence is not None:
                sequence = sequence.detach()
                sequence = _own(sequence.transpose(0, 1)).transpose(0, 1) if self.batch_first else _own(sequence)
            return [sequence, *(None if state is None else own(state.detach()) for state in states)]

    # ---- numbers ----

    def compute(self, input, hx, cx, params, with_graph: bool, generator) -> Graph:
        """Run the CPU's kernels, unseen by modes, hooks and accounting. `generator`: dropout's, None without it."""
        leaves = [None if t is None else t.detach() for t in (input, hx, cx, *params)]
        with ExitStack() as stack:
            for context in (below(), torch._C._DisableTorchDispatch(), torch._C._ExcludeDispatchKeyGuard(_AUTOCAST)):
                stack.enter_context(context)
            stack.enter_context(torch.set_grad_enabled(with_graph))
            stack.enter_context(_without_hooks())
            if generator is not None:
                stack.enter_context(drawing_from(generator))
            if self.net.output != self.net.hidden:  # the CPU warns that it has no fast way for projections
                stack.enter_context(warnings.catch_warnings())
                warnings.simplefilter("ignore")
            if with_graph:
                sources = (input, hx, cx, *params)
                for leaf, source in zip(leaves, sources, strict=True):
                    if leaf is not None:
                        leaf.requires_grad_(source.requires_grad)
            return Graph(leaves, self._run(*leaves[:3], leaves[3:]))

    def _run(self, input: torch.Tensor, hx, cx, params) -> tuple[torch.Tensor, ...]:
        """In float32 where this CPU has no kernels for the type: the results are rounded once, as a GPU's are."""
        dtype = input.dtype
        if dtype in slow_types():
            input, hx, cx, *params = (None if t is None else t.float() for t in (input, hx, cx, *params))
        states = hx if cx is None else [hx, cx]
        settings = (params, self.biases, self.layers, self.dropout, self.train, self.bidirectional)
        if self.batch_sizes is not None:
            results = self.raw(input, self.batch_sizes, states, *settings)
        else:
            results = self.raw(input, states, *settings, self.batch_first)
        return tuple(result.to(dtype) for result in results)


class Graph:
    """What the CPU's autograd keeps between forward and backward."""

    def __init__(self, leaves: list[torch.Tensor | None], outputs: tuple[torch.Tensor, ...]):
        self.leaves, self.outputs = leaves, outputs

    def needs(self, wanted: tuple[bool, ...]) -> bool:
        """True if it knows all gradients that are wanted."""
        return all(leaf.requires_grad for leaf, w in zip(self.leaves, wanted, strict=True) if w)

    def gradients(self, given, wanted, keep: bool) -> list[torch.Tensor | None]:
        """Gradients of the leaves that are wanted, from those of the outputs (None: not used)."""
        pairs = [(o, g.detach()) for o, g in zip(self.outputs, given, strict=True) if g is not None and o.requires_grad]
        outputs, gradients = zip(*pairs, strict=True)
        inputs = tuple(leaf for leaf, w in zip(self.leaves, wanted, strict=True) if w)
        with below(), torch._C._DisableTorchDispatch(), torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
            found = iter(_run_backward(outputs, gradients, keep, False, inputs, True, accumulate_grad=False))
            found = [next(found) if w else None for w in wanted]
            return [
                torch.zeros_like(leaf) if w and gradient is None else gradient
                for gradient, leaf, w in zip(found, self.leaves, wanted, strict=True)
            ]


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` contiguous on a storage that holds nothing else and lives nowhere yet."""
    tensor = tensor.contiguous()
    storage = tensor.untyped_storage()
    alone = storage.nbytes() == nbytes(tensor) and record_of(storage).gpu is None
    return tensor if alone else tensor.clone(memory_format=torch.contiguous_format)


def _without_hooks() -> ExitStack:
    """Keep the program's saved-tensor hooks away from the CPU's graph: others go on top of them.

    They save outputs without the node that saves them, which would keep itself alive.
    """
    stack = ExitStack()
    if torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, lambda tensor: tensor))
    return stack


def bind(name: str, raw, args, kwargs) -> RecurrentCall | None:
    """The arguments by name, in either of the two forms; None if they do not fit."""
    packed = "batch_sizes" in kwargs or isinstance((*args, None, None, None)[1 if name == "lstm" else 2], torch.Tensor)
    names = ("data", "batch_sizes", "hx", *_NAMES) if packed else ("input", "hx", *_NAMES, "batch_first")
    found = {**dict(zip(names, args, strict=False)), **kwargs}
    if set(found) != set(names) or len(args) + len(kwargs) != len(names) or not found["params"]:
        return None
    if name == "lstm" and len(found["hx"]) != 2:
        return None
    call = RecurrentCall(name, raw, found)
    return call if call.input.dim() == (2 if packed else 3) and call.hx.dim() == 3 else None


def check(call: RecurrentCall, dtypes: bool = True) -> None:
    """One device, one dtype, contiguous states: `check_attributes` of aten/src/ATen/native/RNN.h, and RNN.cpp."""
    here = device_of(call.input)
    states = [state for state in (call.hx, call.cx) if state is not None]
    for kind, tensors in (("hidden", states), ("parameter", call.params)):
        for tensor in tensors:
            if device_of(tensor) != here:
                raise RuntimeError(
                    f"Input and {kind} tensors are not at the same device, found input tensor at {here} and {kind} "
                    f"tensor at {device_of(tensor)}"
                )
            if dtypes and tensor.dtype != call.input.dtype:
                raise RuntimeError(
                    f"Input and {kind} tensors are not the same dtype, found input tensor with "
                    f"{scalar_type(call.input)} and {kind} tensor with {scalar_type(tensor)}"
                )
    if dtypes and not all(state.is_contiguous() for state in states):
        raise RuntimeError("rnn: hx is not contiguous")


def _packed(call: OpCall) -> tuple[torch.Tensor, torch.Tensor]:
    """The data on the GPU, the lengths on the CPU."""
    result = call.compute()
    call.place(result[0])
    return result


def _check_lengths(call: OpCall) -> None:
    """Raises PyTorch's RuntimeError for lengths on a GPU."""
    lengths = call["lengths"]
    if gpu_of(lengths) is not None:
        found = f"{lengths.dim()}D {lengths.device} {scalar_type(lengths)} tensor"
        raise RuntimeError(f"'lengths' argument should be a 1D CPU int64 tensor, but got {found}")


RECIPES = dict.fromkeys(("_pack_padded_sequence", "_pad_packed_sequence"), _packed)
CHECKS = {"_pack_padded_sequence": _check_lengths}
ON_THE_HOST = {"_pack_padded_sequence": {"lengths"}} | dict.fromkeys(
    ("_pad_packed_sequence", "_pack_padded_sequence_backward", "lstm", "gru", "rnn_tanh", "rnn_relu"), {"batch_sizes"}
)
