"""LSTM, GRU and RNN on a GPU: one operation of cuDNN each, with a reserve that backward needs and workspaces.

torch.lstm, gru, rnn_tanh and rnn_relu get patches. Where cuDNN would run, the numbers and gradients are those of the
CPU, computed below the accounting; the memory is cuDNN's, in the order of aten/src/ATen/native/cudnn/RNN.cpp
(`_cudnn_rnn`, `_cudnn_rnn_backward`). Elsewhere (bfloat16, cuDNN off, torch.func) PyTorch's own function runs.

The CPU's autograd graph hangs on the storage of the reserve: it lives as long as that, so that checkpointing, which
drops the reserve, drops it too. Where the reserve comes back as another tensor (`save_on_cpu`) backward computes anew.
"""

import warnings
from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any

import torch
from torch.overrides import handle_torch_function, has_torch_function

from virtual_gpus.dispatch.measured_calls import KernelCall
from virtual_gpus.dispatch.timing import launch
from virtual_gpus.entrance import entrance
from virtual_gpus.features.autocast import cast, is_eligible
from virtual_gpus.features.rnn import sizes, weights
from virtual_gpus.features.rnn.recurrent_call import Inputs, Maybe, RecurrentCall, Results, Tensor, bind, check
from virtual_gpus.machine import Kept, VirtualGPU, active
from virtual_gpus.patches.table import Patch
from virtual_gpus.placement.random_numbers import default_generator
from virtual_gpus.placement.storages import ScratchBlock, StorageAllocation, gpu_of, nbytes, put, scratch
from virtual_gpus.placement.wrappers import arrived
from virtual_gpus.threads import this_thread

_keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph
Maybes, Wanted, Blocks = Sequence[Maybe], tuple[bool, ...], list[StorageAllocation | None]
_NAMES = "_cudnn_rnn", "_cudnn_rnn_backward"
_NOT_FLAT = (
    "RNN module weights are not part of single contiguous chunk of memory, so every call copies them into one. "
    "To compact weights again call flatten_parameters()."
)


def _replacement(name: str) -> Callable[..., Any]:
    raw = getattr(torch._C._VariableFunctions, name)

    @wraps(raw)
    @entrance
    def recurrent(*args: Any, **kwargs: Any) -> Any:
        if this_thread.in_kernel or active() is None or torch._C._are_functorch_transforms_active():
            return raw(*args, **kwargs)
        bound = bind(name, args, kwargs)
        if bound is None:  # PyTorch says what is wrong with the arguments
            return raw(*args, **kwargs)
        arguments, inputs = bound
        if has_torch_function(inputs.tensors):
            return handle_torch_function(recurrent, inputs.tensors, *args, **kwargs)
        if all(gpu_of(tensor) is None for tensor in inputs.tensors):
            return raw(*args, **kwargs)
        inputs = Inputs(arrived(inputs.input), arrived(inputs.hx), arrived(inputs.cx), inputs.params)
        gpu = gpu_of(inputs.input)
        if gpu is None or not weights.is_acceptable(inputs.input):
            check(inputs, dtypes=False)
            return raw(*args, **kwargs)
        return _on_cudnn(RecurrentCall(name, raw, gpu, arguments, inputs), inputs)

    return recurrent


def _on_cudnn(call: RecurrentCall, inputs: Inputs) -> tuple[torch.Tensor, ...]:
    """`_cudnn_impl`: casts under autocast, checks, and the operation, with a graph where one is wanted."""
    if call.train and call.dropout > 0:
        _dropout_states.of(call.gpu)
    if torch.is_autocast_enabled("cuda"):
        inputs = _cast(call, inputs)
    check(inputs)
    if not call.flat:
        warnings.warn(_NOT_FLAT, stacklevel=4)
    if torch.is_grad_enabled() and any(t.requires_grad for t in inputs.tensors):
        return CudnnRnn.apply(call, *inputs[:3], *inputs.params)
    return _forward(call, inputs, False)[0]


def _cast(call: RecurrentCall, inputs: Inputs) -> Inputs:
    """To float16, whatever dtype autocast was given (aten/src/ATen/cudnn/AutocastRNN.cpp), the last argument first."""
    cx, hx, input = (cast(part, torch.float16) for part in (inputs.cx, inputs.hx, inputs.input))
    params = inputs.params
    if is_eligible(params[0]) and params[0].dtype != torch.float16:
        params, call.flat = weights.CastFlat.apply(call.net, call.biases, call.gpu, *params), True
    inputs = Inputs(input, hx, cx, params)
    call.measure(inputs)
    return inputs


def _draw_dropout_state(gpu: VirtualGPU) -> ScratchBlock:
    """cuDNN's random states, made at a GPU's first dropout and kept. Our numbers come from the GPU's generator."""
    ScratchBlock(gpu, 8)  # the seed
    return ScratchBlock(gpu, gpu.spec.multi_processor_count * sizes.DROPOUT_STATE)


_dropout_states = Kept(_draw_dropout_state)


# ---- forward -------------------------------------------------------------------------------------------------------


def _forward(call: RecurrentCall, inputs: Inputs, with_graph: bool) -> tuple[Results, Tensor, Maybe]:
    """((output, hy[, cy]), reserve, weight buffer if the weights were not in one). Blocks first, then the numbers."""
    gpu, net, dtype = call.gpu, call.net, inputs.input.dtype
    with scratch(gpu, *_copies(_time_first(call, inputs.input))):
        allocations = [StorageAllocation(gpu, shape.numel() * dtype.itemsize) for shape in call.shapes]
        buffer = None if call.flat else weights.empty(gpu, sizes.weight_offsets(net, True)[1], dtype)
        with scratch(gpu, sizes.workspace_bytes(net, sizes.is_small(net, False, gpu.spec.capability), call.train)):
            reserve = weights.empty(gpu, sizes.reserve_bytes(net) if call.train else 0, torch.uint8)
    if gpu.machine.shapes_only:
        results = call.empty_results(dtype)
    else:
        generator = default_generator(gpu) if call.draws else None
        if with_graph and generator is not None:
            call.random_state = generator.raw_state()
        graph = call.compute(inputs, with_graph, generator)
        results = [result for result in call.laid_out(*graph.outputs, copied=True) if result is not None]
        if with_graph:
            vars(reserve.untyped_storage())["_graph"] = graph
    for result, allocation in zip(results, allocations, strict=True):
        put(result, allocation)
    _charge(call, inputs[:2], with_graph, backward=False)
    return tuple(results), reserve, buffer


def _time_first(call: RecurrentCall, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().transpose(0, 1) if call.batch_first else tensor


def _copies(*tensors: Maybe) -> list[int]:
    """Bytes of the copies that `tensor.contiguous()` makes, where it makes one."""
    return [nbytes(tensor) for tensor in tensors if tensor is not None and not tensor.is_contiguous()]


class CudnnRnn(torch.autograd.Function):
    """The operation with its backward pass, which takes cuDNN's memory again. Named as PyTorch's own node."""

    @staticmethod
    def forward(ctx: Any, call: RecurrentCall, input: Tensor, hx: Tensor, cx: Maybe, *params: Tensor) -> Results:
        """Results of `_forward`, and what backward needs: inputs, output, reserve, weights."""
        results, reserve, buffer = _forward(call, Inputs(input, hx, cx, params), True)
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(input, hx, cx, results[0], reserve, buffer, *params)
        return results

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Maybe) -> tuple[Maybe, ...]:
        """Gradients of all inputs. Raises as cuDNN does in evaluation mode."""
        call, (input, hx, cx, _, reserve, _, *params) = ctx.call, ctx.saved_tensors
        if all(gradient is None for gradient in gradients):
            return (None,) * (4 + len(params))
        if not call.train:
            raise RuntimeError("cudnn RNN backward can only be called in training mode")
        inputs, gradients = Inputs(input, hx, cx, params), tuple(map(arrived, gradients))
        return None, *_backward(call, inputs, reserve, gradients, ctx.needs_input_grad[1:])


CudnnRnn._backward_cls.__name__ = "CudnnRnnBackward0"  # as PyTorch names the node of its operator


# ---- backward ------------------------------------------------------------------------------------------------------


def _backward(call: RecurrentCall, inputs: Inputs, reserve: Tensor, gradients: Maybes, wanted: Wanted) -> list[Maybe]:
    """Gradients of (input, hx, cx, *params), None where not `wanted`."""
    on = call.gpu.machine.on  # gradients may be asked for after the virtual GPUs have gone: then nothing is counted
    blocks, flat = _blocks(call, inputs, reserve, gradients, any(wanted[3:])) if on else ([None] * 3, None)
    parts = inputs.params
    if any(wanted[3:]):
        if flat is None:
            flat = torch.empty(sizes.weight_offsets(call.net, True)[1], dtype=parts[0].dtype, device=parts[0].device)
        parts = weights.pieces(flat, parts, sizes.weight_offsets(call.net, call.biases)[0])
    if call.gpu.machine.shapes_only:
        tensors = zip(inputs[:3], wanted, strict=False)
        numbers = [torch.empty_like(t, device="meta") if w and t is not None else None for t, w in tensors]
    else:
        numbers = _numbers(call, inputs, reserve, gradients, wanted)
        if flat is not None:
            weights.fill(flat, parts, numbers[3:])
    if on:
        _charge(call, [g for g in gradients if g is not None], True, backward=True)
    first = call.laid_out(*numbers[:3])
    for gradient, allocation in zip(first, blocks, strict=True):
        if gradient is not None and allocation is not None:
            put(gradient, allocation)
    return [*first, *(part if w else None for part, w in zip(parts, wanted[3:], strict=True))]


def _blocks(call: RecurrentCall, inputs: Inputs, reserve: Tensor, gradients: Maybes, dw: bool) -> tuple[Blocks, Maybe]:
    """Take the memory of `_cudnn_rnn_backward`. Returns the blocks of (dx, dhx, dcx) and the buffer of dw, if any."""
    gpu, (input, hx, cx, _) = call.gpu, inputs
    size = sizes.workspace_bytes(call.net, sizes.is_small(call.net, True, gpu.spec.capability))
    output, *states = (*gradients, None)[:3]
    whole = [nbytes(reserve)] if _keeps_graph() else []  # cuDNN writes into it: a clone is given
    if output is None:
        whole.append(call.shapes[0].numel() * input.element_size())
    whole += [nbytes(s) for s, g in zip((hx, cx), states, strict=True) if s is not None and g is None]  # zeros
    with scratch(gpu, *whole):
        copies = _copies(_time_first(call, input), None if output is None else _time_first(call, output), *states)
        with scratch(gpu, *copies):
            allocations = [None if t is None else StorageAllocation(gpu, nbytes(t)) for t in (input, hx, cx)]
            ScratchBlock(gpu, size)
        if not dw:
            return allocations, None
        with scratch(gpu, *_copies(_time_first(call, input))):
            flat = weights.empty(gpu, sizes.weight_offsets(call.net, True)[1], input.dtype)
            ScratchBlock(gpu, size)
    return allocations, flat


def _numbers(call: RecurrentCall, inputs: Inputs, reserve: Tensor, gradients: Maybes, wanted: Wanted) -> list[Maybe]:
    graph = getattr(reserve.untyped_storage(), "_graph", None)
    if graph is None or not graph.has(wanted):
        generator = None
        if call.random_state is not None:
            generator = torch._C.Generator("cpu")
            generator.set_state(call.random_state)
        graph = call.compute(inputs, True, generator)
    return graph.gradients(gradients, wanted, _keeps_graph())


def _charge(call: RecurrentCall, reads: Sequence[torch.Tensor], trains: bool, backward: bool) -> None:
    """Put a pass on the clock. trains: if autograd notes it down."""
    name, net, gpu = _NAMES[backward], call.net, call.gpu
    launch(gpu, name, sizes.cost(net, gpu.spec, backward), reads, trains, call=KernelCall(name, (), net._asdict()))


def _timed(backward: bool, _: list[Any], measures: dict[str, Any], device: str) -> Callable[[], Any]:
    """A network in training on zeros, for `measure`. All sequences are padded to the longest."""
    net = sizes.Network(**measures)
    projection = {"proj_size": net.output} if net.output != net.hidden else {}
    options = {"dropout": net.dropout / 2, "bidirectional": net.directions == 2, **projection}
    layers = getattr(torch.nn, net.cell)(net.input, net.hidden, net.layers, **options)
    dtype = next(dtype for dtype in weights.DTYPES if dtype.itemsize == net.itemsize)
    layers, given = layers.to(device, dtype), torch.zeros(net.time, net.batch, net.input, dtype=dtype, device=device)
    if not backward:
        return partial(layers, given)
    out, leaves = layers(given.requires_grad_())[0], (given, *layers.parameters())
    return partial(torch.autograd.grad, out, leaves, torch.zeros_like(out), retain_graph=True)


TIMED = {name: partial(_timed, bool(backward)) for backward, name in enumerate(_NAMES)}


def patches() -> list[Patch]:
    functions = [(name, _replacement(name)) for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")]
    return [(owner, name, f) for name, f in functions for owner in (torch, torch._VF)]  # before its __getattr__
