"""The fused attention kernels, `torch.ops.aten._scaled_dot_product_flash_attention` and the others.

The CPU has no such operators, but PyTorch's autograd knows their derivatives, and DTensor their shards. PyTorch's
context parallelism calls them as well, and so do programs that merge the results of several blocks of keys by the
logarithms of their sums. The order of the results is that of aten/src/ATen/native/native_functions.yaml.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from virtual_gpus.clock.cost import CHARGED_ELSEWHERE, READS_AND_WRITES
from virtual_gpus.dispatch.half_precision import widened
from virtual_gpus.dispatch.measured_calls import KernelCall, argument
from virtual_gpus.dispatch.operators import OpCall, Row
from virtual_gpus.dispatch.timing import launch
from virtual_gpus.features.attention.kernels import FUSED, Fused, Kernel, cost
from virtual_gpus.features.autocast import below_autocast
from virtual_gpus.placement.random_numbers import count_draws, default_generator
from virtual_gpus.placement.storages import empty_in, put
from virtual_gpus.threads import below, seen


def _forward(kind: type[Fused], call: OpCall) -> tuple[Any, ...]:
    kernel, gpu = kind(call), call.gpu
    query, numbers = kernel.parts[0], kernel.numbers
    of_out, of_lse, of_seeds = kernel.forward()
    _charge(kernel)
    seed = lse = None
    shape = (*query.shape[:3], kernel.value_width)
    strides = kernel.strides(query, shape)
    if gpu.machine.shapes_only:
        out = empty_in(of_out, shape, query.dtype, strides)
    else:
        with below(), below_autocast():  # the CPU's operators
            if numbers.dropout:  # a seed from the GPU's generator: one number, where CUDA moves its offset on
                generator = default_generator(gpu)
                count_draws(generator, 1)
                seed = torch.empty((), dtype=torch.int64).random_(generator=generator)
            out, lse = numbers.forward(seed)
            out = put(_with_strides(out, strides), of_out)
            lse = None if lse is None or of_lse is None else put(_shaped(lse, kernel.lse), of_lse)
    if lse is None:
        lse = empty_in(of_lse, kernel.lse if of_lse else (0,), torch.float32)
    return kernel.results(out, lse, seed, of_seeds)


def _shaped(lse: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The logarithms (N, heads, rows) with as many rows and dimensions as the kernel gives."""
    if lse.shape[2] < shape[2]:
        lse = torch.nn.functional.pad(lse, (0, shape[2] - lse.shape[2]), value=math.inf)
    return lse.unsqueeze(-1) if len(shape) == 4 else lse


def _backward(kind: type[Fused], call: OpCall) -> tuple[Any, ...]:
    kernel, out, gradient, gpu = kind(call), call["out"], call[kind.gradient], call.gpu
    with seen():  # it asks transposed views whether they are packed, which costs CUDA's host the same
        allocations = kernel.backward(gradient, out)
    _charge(kernel, "_backward")
    inputs: Any = (*kernel.parts, kernel.bias)[: len(allocations)]
    strides = [kernel.strides(part, part.shape) for part in inputs]
    if gpu.machine.shapes_only:
        rows = zip(allocations, inputs, strides, strict=True)
        placed = [empty_in(allocation, part.shape, part.dtype, stride) for allocation, part, stride in rows]
    else:
        with below(), below_autocast():  # the CPU's operators
            lse = call["logsumexp"]
            lse = lse.squeeze(-1) if lse.dim() == 4 else lse[..., : kernel.rows]
            gradients: Any = kernel.numbers.backward(gradient, out, lse, call["philox_seed"])
            placed = list(map(put, map(_with_strides, gradients, strides), allocations))
    return *placed, *[None] * (len(call.func._schema.returns) - len(placed))


def _charge(kernel: Kernel, direction: str = "") -> None:
    name, settings = f"{kernel.name}{direction}", {"is_causal": kernel.numbers.causal, "dropout_p": kernel.dropout}
    query, how = kernel.parts[0], (bool(direction), kernel.numbers.causal, kernel.dropout > 0)
    charge = cost(kernel.gpu.spec.kind, query.shape, kernel.columns, query.dtype, *how)
    launch(kernel.gpu, name, charge, kernel.parts, call=KernelCall(name, kernel.parts, settings))


def _with_strides(result: Tensor, strides: tuple[int, ...]) -> Tensor:
    """`result` as CUDA's kernel lays it into memory."""
    return result if result.stride() == strides else result.new_empty_strided(result.shape, strides).copy_(result)


def _timed(backward: bool, tensors: list[Any], settings: dict[str, Any], device: str) -> Callable[[], Any]:
    """A kernel on zeros, for `measure`: what `_charge` asks for."""
    query, key, value = (argument(part, device).requires_grad_() for part in tensors)
    attend = partial(torch.nn.functional.scaled_dot_product_attention, query, key, value, **settings)
    if not backward:
        return attend
    out = attend()
    return partial(torch.autograd.grad, out, (query, key, value), torch.zeros_like(out), retain_graph=True)


TIMED = {f"{kernel.name}{end}": partial(_timed, bool(end)) for kernel in FUSED for end in ("", "_backward")}
_OF_CPU = "_scaled_dot_product_flash_attention_for_cpu"  # torch.func's transforms come to it
OPERATORS = {
    **{kernel.name: Row(CHARGED_ELSEWHERE, partial(_forward, kernel)) for kernel in FUSED},
    **{f"{kernel.name}_backward": Row(CHARGED_ELSEWHERE, partial(_backward, kernel)) for kernel in FUSED},
    _OF_CPU: Row(READS_AND_WRITES, cpu_kernel=partial(widened, rounded=1)),
    f"{_OF_CPU}_backward": Row(READS_AND_WRITES, cpu_kernel=widened),
}
