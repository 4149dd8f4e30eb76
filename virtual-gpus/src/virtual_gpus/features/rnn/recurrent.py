"""LSTM, GRU and RNN on a GPU: one operation of cuDNN each, with a reserve that backward needs and workspaces.

torch.lstm, gru, rnn_tanh and rnn_relu get patches. Where cuDNN would run, the numbers and gradients are those of the
CPU, computed below the accounting; the memory is cuDNN's, in the order of aten/src/ATen/native/cudnn/RNN.cpp
(`_cudnn_rnn`, `_cudnn_rnn_backward`). Elsewhere (bfloat16, cuDNN off, torch.func) PyTorch's own function runs.

The CPU's autograd graph hangs on the storage of the reserve: it lives as long as that, so that checkpointing, which
drops the reserve, drops it too. Where the reserve comes back as another tensor (`save_on_cpu`) backward computes anew.
"""

from __future__ import annotations

import functools
import warnings
from contextlib import ExitStack

import torch
from torch.autograd.function import once_differentiable
from torch.overrides import handle_torch_function, has_torch_function

from virtual_gpus.entrance import entrance
from virtual_gpus.features.autocast import cast, is_eligible
from virtual_gpus.features.rnn import weights
from virtual_gpus.features.rnn.recurrent_call import RecurrentCall, bind, check
from virtual_gpus.features.rnn.recurrent_costs import charge_recurrent
from virtual_gpus.features.rnn.sizes import DROPOUT_STATE, is_small, reserve_bytes, weight_offsets, workspace_bytes
from virtual_gpus.machine import VirtualGPU, active
from virtual_gpus.patches.table import Patch
from virtual_gpus.placement.random_numbers import default_generator
from virtual_gpus.placement.storages import ScratchBlock, StorageAllocation, gpu_of, nbytes, put, scratch
from virtual_gpus.placement.wrappers import arrived
from virtual_gpus.threads import this_thread

_NOT_FLAT = (
    "RNN module weights are not part of single contiguous chunk of memory, so every call copies them into one. "
    "To compact weights again call flatten_parameters()."
)


def _replacement(name: str):
    raw = getattr(torch._C._VariableFunctions, name)

    @functools.wraps(raw)
    @entrance
    def recurrent(*args, **kwargs):
        if this_thread.inside or active() is None or torch._C._are_functorch_transforms_active():
            return raw(*args, **kwargs)
        call = bind(name, raw, args, kwargs)
        if call is None:  # PyTorch says what is wrong with the arguments
            return raw(*args, **kwargs)
        if has_torch_function(call.tensors):
            return handle_torch_function(recurrent, call.tensors, *args, **kwargs)
        if all(gpu_of(tensor) is None for tensor in call.tensors):
            return raw(*args, **kwargs)
        call.input, call.hx, call.cx = map(arrived, (call.input, call.hx, call.cx))
        if not weights.is_acceptable(call.input):
            check(call, dtypes=False)
            return raw(*args, **kwargs)
        return _on_cudnn(call)

    return recurrent


def _on_cudnn(call: RecurrentCall) -> tuple[torch.Tensor, ...]:
    """`_cudnn_impl`: casts under autocast, checks, and the operation, with a graph where one is wanted."""
    call.gpu = gpu_of(call.input)
    call.measure()
    call.flat = weights.are_flat(call.net, call.params, call.biases)
    _draw_dropout_state(call)
    if torch.is_autocast_enabled("cuda"):
        _cast(call)
    check(call)
    if not call.flat:
        warnings.warn(_NOT_FLAT, stacklevel=4)
    if torch.is_grad_enabled() and any(t.requires_grad for t in call.tensors):
        return CudnnRnn.apply(call.without_tensors(), call.input, call.hx, call.cx, *call.params)
    return _forward(call.without_tensors(), call.input, call.hx, call.cx, call.params, False)[0]


def _cast(call: RecurrentCall) -> None:
    """To float16, whatever dtype autocast was given (aten/src/ATen/cudnn/AutocastRNN.cpp), the last argument first."""
    call.cx, call.hx, call.input = (cast(part, torch.float16) for part in (call.cx, call.hx, call.input))
    if is_eligible(call.params[0]) and call.params[0].dtype != torch.float16:
        call.params = list(weights.CastFlat.apply(call.net, call.biases, call.gpu, *call.params))
        call.flat = True
    call.measure()


def _draw_dropout_state(call: RecurrentCall) -> None:
    """cuDNN's random states, made at a GPU's first dropout and kept. Our numbers come from the GPU's generator."""
    if call.train and call.dropout > 0 and "rnn" not in call.gpu.feature_state:
        with scratch(call.gpu, 8):  # the seed
            pass
        call.gpu.feature_state["rnn"] = ScratchBlock(call.gpu, call.gpu.spec.multi_processor_count * DROPOUT_STATE)


# ---- forward -------------------------------------------------------------------------------------------------------


def _forward(call: RecurrentCall, input, hx, cx, params, with_graph: bool):
    """((output, hy[, cy]), reserve, weight buffer if the weights were not in one). Blocks first, then the numbers."""
    gpu, net, dtype = call.gpu, call.net, input.dtype
    with ExitStack() as temporary:
        _contiguous(temporary, gpu, _time_first(call, input))
        allocations = [StorageAllocation(gpu, shape.numel() * dtype.itemsize) for shape in call.shapes]
        buffer = None if call.flat else weights.empty(gpu, weight_offsets(net, True)[1], dtype)
        small = is_small(net, False, gpu.spec.capability)
        temporary.enter_context(scratch(gpu, workspace_bytes(net, small, call.train)))
        reserve = weights.empty(gpu, reserve_bytes(net) if call.train else 0, torch.uint8)
        if gpu.machine.shapes_only:
            results = call.empty_results(dtype)
        else:
            if with_graph:
                call.random_state = default_generator(gpu).raw_state() if call.draws else None
            graph = call.compute(input, hx, cx, params, with_graph, default_generator(gpu) if call.draws else None)
            results = call.laid_out(*graph.outputs, copied=True)
            if with_graph:
                reserve.untyped_storage()._graph = graph
    for result, allocation in zip(results, allocations, strict=True):
        put(result, allocation)
    charge_recurrent(gpu, net, (input, hx), with_graph, backward=False)
    return tuple(results), reserve, buffer


def _time_first(call: RecurrentCall, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().transpose(0, 1) if call.batch_first else tensor


def _contiguous(stack: ExitStack, gpu: VirtualGPU, tensor: torch.Tensor) -> None:
    """The copy that `tensor.contiguous()` makes, if it makes one."""
    if not tensor.is_contiguous():
        stack.enter_context(scratch(gpu, nbytes(tensor)))


class CudnnRnn(torch.autograd.Function):
    """The operation with its backward pass, which takes cuDNN's memory again. Named as PyTorch's own node."""

    @staticmethod
    def forward(ctx, call, input, hx, cx, *params):
        """Results of `_forward`, and what backward needs: inputs, output, reserve, weights."""
        results, reserve, buffer = _forward(call, input, hx, cx, params, True)
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(input, hx, cx, results[0], reserve, buffer, *params)
        return results

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients):
        """Gradients of all inputs. Raises as cuDNN does in evaluation mode."""
        call, (input, hx, cx, _, reserve, _, *params) = ctx.call, ctx.saved_tensors
        if all(gradient is None for gradient in gradients):
            return (None,) * (4 + len(params))
        if not call.train:
            raise RuntimeError("cudnn RNN backward can only be called in training mode")
        leaves = (input, hx, cx, *params)
        gradients = tuple(map(arrived, gradients))
        return None, *_backward(call, leaves, reserve, gradients, ctx.needs_input_grad[1:])


CudnnRnn._backward_cls.__name__ = "CudnnRnnBackward0"  # as PyTorch names the node of its operator


# ---- backward ------------------------------------------------------------------------------------------------------


def _backward(call: RecurrentCall, leaves, reserve, gradients, wanted):
    """Gradients of (input, hx, cx, *params), None where not `wanted`."""
    on = call.gpu.machine.on  # gradients may be asked for after the virtual GPUs have gone: then nothing is counted
    allocations, flat = _blocks(call, leaves, reserve, gradients, wanted) if on else ([None] * 3, None)
    params = leaves[3:]
    if flat is None and any(wanted[3:]):
        flat = torch.empty(weight_offsets(call.net, True)[1], dtype=params[0].dtype, device=params[0].device)
    parts = weights.pieces(flat, params, weight_offsets(call.net, call.biases)[0]) if any(wanted[3:]) else params
    if call.gpu.machine.shapes_only:
        made = [torch.empty_like(t, device="meta") if w else None for t, w in zip(leaves[:3], wanted, strict=False)]
    else:
        made = _numbers(call, leaves, reserve, gradients, wanted)
        if any(wanted[3:]):
            weights.fill(flat, parts, made[3:])
    if on:
        charge_recurrent(call.gpu, call.net, [g for g in gradients if g is not None], True, backward=True)
    first = []
    for gradient, allocation in zip(call.laid_out(*made[:3]), allocations, strict=True):
        if gradient is not None and allocation is not None:
            put(gradient, allocation)
        first.append(gradient)
    return [*first, *(part if w else None for part, w in zip(parts, wanted[3:], strict=True))]


def _blocks(call: RecurrentCall, leaves, reserve, gradients, wanted):
    """Take the memory of `_cudnn_rnn_backward`. Returns the blocks of (dx, dhx, dcx) and the buffer of dw, if any."""
    gpu, (input, hx, cx) = call.gpu, leaves[:3]
    size = workspace_bytes(call.net, is_small(call.net, True, gpu.spec.capability))
    output, *states = (*gradients, None)[:3]
    with ExitStack() as whole:
        if _keeps_graph():
            whole.enter_context(scratch(gpu, nbytes(reserve)))  # cuDNN writes into it: a clone is given
        if output is None:
            whole.enter_context(scratch(gpu, call.shapes[0].numel() * input.element_size()))
        for state, gradient in zip((hx, cx), states, strict=True):
            if state is not None and gradient is None:
                whole.enter_context(scratch(gpu, nbytes(state)))  # zeros
        with ExitStack() as data:
            _contiguous(data, gpu, _time_first(call, input))
            for gradient in (_time_first(call, output) if output is not None else None, *states):
                if gradient is not None:
                    _contiguous(data, gpu, gradient)
            allocations = [None if t is None else StorageAllocation(gpu, nbytes(t)) for t in (input, hx, cx)]
            data.enter_context(scratch(gpu, size))
        if not any(wanted[3:]):
            return allocations, None
        with ExitStack() as data:
            _contiguous(data, gpu, _time_first(call, input))
            flat = weights.empty(gpu, weight_offsets(call.net, True)[1], input.dtype)
            data.enter_context(scratch(gpu, size))
    return allocations, flat


def _keeps_graph() -> bool:
    return torch._C._autograd._get_current_graph_task_keep_graph()


def _numbers(call: RecurrentCall, leaves, reserve, gradients, wanted):
    graph = getattr(reserve.untyped_storage(), "_graph", None)
    if graph is None or not graph.needs(wanted):
        generator = None
        if call.draws:
            generator = torch._C.Generator("cpu")
            generator.set_state(call.random_state)
        graph = call.compute(*leaves[:3], leaves[3:], True, generator)
    return graph.gradients(gradients, wanted, _keeps_graph())


def patches() -> list[Patch]:
    """See `features`. torch._VF finds its functions by __getattr__: an attribute of its own comes first."""
    functions = [(name, _replacement(name)) for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")]
    return [(owner, name, f) for name, f in functions for owner in (torch, torch._VF)]
