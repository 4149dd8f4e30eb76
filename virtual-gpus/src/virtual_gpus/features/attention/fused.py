"""One call of a fused attention kernel: its memory, its numbers, and what autograd keeps of it."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager

import torch
from torch.utils._python_dispatch import _len_torch_dispatch_stack

from virtual_gpus.dispatch.timing import charge_attention
from virtual_gpus.features.attention import memory as memory
from virtual_gpus.features.attention.attention_call import CUDNN, EFFICIENT, FLASH
from virtual_gpus.features.attention.efficient import Efficient
from virtual_gpus.features.attention.numbers import Numbers
from virtual_gpus.machine import VirtualGPU
from virtual_gpus.placement.random_numbers import count_draws, default_generator
from virtual_gpus.placement.storages import put
from virtual_gpus.threads import below

_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA)
KERNELS = {CUDNN: memory.Cudnn, FLASH: memory.Flash, EFFICIENT: Efficient}


def fused(backend: int, gpu: VirtualGPU, trains: bool, query, key, value, bias, dropout, causal, scale):
    """Attention by CUDNN, FLASH or EFFICIENT. `bias`: None, or what is added to the scores, in four dimensions."""
    sizes = memory.Sizes(gpu, query, key, value, bias, dropout, trains)
    numbers = Numbers(query, key, value, bias, dropout, causal, scale)
    return _FUNCTIONS[backend].apply(query, key, value, bias, Plan(gpu, KERNELS[backend](sizes), numbers))


class Plan:
    """How to run forward and backward."""

    __slots__ = ("gpu", "memory", "numbers")

    def __init__(self, gpu: VirtualGPU, kernel, numbers: Numbers):
        self.gpu, self.memory, self.numbers = gpu, kernel, numbers

    def forward(self, query, key, value, bias):
        """The output, and what backward needs of it: one number per row, seed and offset of the random numbers."""
        out_allocation, lse_allocation, seed_allocations = self.memory.forward()
        charge_attention(self.gpu, self.memory.name, query, key, value, self.numbers)
        with unseen():
            seed = _draw(self.gpu) if self.numbers.dropout else None
            out, lse = self._forward(query, key, value, bias, seed)
            if seed_allocations:
                seed = query.new_empty((), dtype=torch.float64) if seed is None else seed
                offset = _at(query.new_empty((), dtype=torch.float64), seed_allocations[1])
                return _at(out, out_allocation), _at(lse, lse_allocation, query), _at(seed, seed_allocations[0]), offset
            return _at(out, out_allocation), _at(lse, lse_allocation, query), seed, None

    def _forward(self, query, key, value, bias, seed):
        strides = self.memory.strides(query, shape := (*query.shape[:3], value.shape[3]))
        if self.gpu.machine.shapes_only:
            return query.new_empty_strided(shape, strides), query.new_empty(query.shape[:3], dtype=torch.float32)
        out, lse = self.numbers.forward(query, key, value, bias, seed)
        return _with_strides(out, strides), lse

    def backward(self, gradient, query, key, value, bias, out, lse, seed, _):
        """Gradients of query, key, value and bias (None if it wants none)."""
        allocations = self.memory.backward(gradient, out)
        charge_attention(self.gpu, f"{self.memory.name}_backward", query, key, value, self.numbers)
        inputs = (query, key, value, bias)[: len(allocations)]
        with unseen():
            strides = [self.memory.strides(part, part.shape) for part in inputs]
            if self.gpu.machine.shapes_only:
                found = [part.new_empty_strided(part.shape, s) for part, s in zip(inputs, strides, strict=True)]
            else:
                found = self.numbers.backward(gradient, query, key, value, bias, out, lse, seed)
                found = [_with_strides(*pair) for pair in zip(found, strides, strict=False)]
            found = [_at(*pair) for pair in zip(found, allocations, strict=True)]
        return *found, *[None] * (4 - len(found))


@contextmanager
def unseen():
    """The CPU's operators run below the accounting, below autocast, and unless others look on below dispatch modes."""
    with ExitStack() as stack:
        if torch.is_autocast_enabled("cuda"):
            stack.enter_context(torch._C._ExcludeDispatchKeyGuard(_AUTOCAST))
        if _len_torch_dispatch_stack() <= 1:
            stack.enter_context(torch._C._DisableTorchDispatch())
        with below():
            yield


def _with_strides(result, strides):
    """`result` as CUDA's kernel lays it into memory."""
    return result if result.stride() == strides else result.new_empty_strided(result.shape, strides).copy_(result)


def _draw(gpu: VirtualGPU):
    """A seed from the GPU's generator: one number per call, where CUDA moves its generator's offset on."""
    if gpu.machine.shapes_only:
        return None
    generator = default_generator(gpu)
    count_draws(generator, 1)
    return torch.empty((), dtype=torch.int64).random_(generator=generator)


def _at(tensor, allocation, like=None):
    """`tensor`, or an empty one, in a block that was taken for it; as it is where there is none."""
    if allocation is None:
        return tensor
    tensor = like.new_empty(0) if tensor is None else tensor
    put(tensor, allocation)
    return tensor


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, bias, plan):
        out, *kept = plan.forward(query, key, value, bias)
        ctx.save_for_backward(query, key, value, bias, out, *kept)
        ctx.plan = plan
        return out

    @staticmethod
    def backward(ctx, gradient):
        tensors = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True: the gradients need a graph, if only to refuse a second pass
            return *_FusedBackward.apply(ctx.plan, gradient, *tensors), None
        return *ctx.plan.backward(gradient, *tensors), None


class _FusedBackward(torch.autograd.Function):
    """The backward pass as a function of its own, which has no derivative on CUDA."""

    @staticmethod
    def forward(ctx, plan, *tensors):
        ctx.name = plan.memory.name
        return plan.backward(*tensors)

    @staticmethod
    def backward(ctx, *_):
        raise RuntimeError(f"derivative for aten::{ctx.name}_backward is not implemented")


# One class each, since `out.grad_fn` tells which kernel ran: ScaledDotProductFlashAttentionBackward0 and its like.
_NAMES = {CUDNN: "Cudnn", FLASH: "Flash", EFFICIENT: "Efficient"}
_FUNCTIONS = {backend: type(f"ScaledDotProduct{name}Attention", (_Fused,), {}) for backend, name in _NAMES.items()}
for _function in _FUNCTIONS.values():
    _function._backward_cls.__name__ += "0"  # as PyTorch names the nodes of its operators
