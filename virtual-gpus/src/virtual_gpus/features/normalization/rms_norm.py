"""RMS norm on CUDA: one fused kernel that keeps one number per row, where the CPU's is made of five operators.

Source: aten/src/ATen/native/layer_norm.cpp, and layer_norm_kernel.cu in aten/src/ATen/native/cuda.
"""

from typing import Any

import torch

from virtual_gpus.dispatch import known
from virtual_gpus.dispatch.mixed_devices import require_one_device
from virtual_gpus.dispatch.operators import cost
from virtual_gpus.dispatch.timing import launch, operands
from virtual_gpus.entrance import entrance
from virtual_gpus.machine import VirtualGPU
from virtual_gpus.patches.table import Patch
from virtual_gpus.placement.storages import gpu_of, is_wrapper, nbytes, place_all, scratch
from virtual_gpus.placement.wrappers import arrived, is_dtensor
from virtual_gpus.threads import below

Tensor, Maybe, Shape, Eps = torch.Tensor, torch.Tensor | None, tuple[int, ...], float | None
_raw_rms_norm = torch.rms_norm


class RMSNorm(torch.autograd.Function):
    """The fused kernel's memory: forward keeps one float per row, backward works in place of its results."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Maybe, shape: Shape, eps: Eps, trains: bool, gpu: VirtualGPU
    ) -> Tensor:
        """(..., *shape) -> the same; numbers as the CPU's composite operator gives them."""
        result, rstd = _below(gpu, _normalized, input, weight, shape, eps)
        place_all(result, gpu)
        charge = cost("native_layer_norm", operands([input]), operands([result]), gpu.spec)
        launch(gpu, "native_layer_norm", charge, [input], trains, [result])
        place_all(rstd, gpu)
        ctx.save_for_backward(input, weight, rstd)
        ctx.shape, ctx.eps = shape, eps
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Maybe, ...]:
        """Gradients of input and weight. Those that are differentiated again come from composite operators, as CUDA's
        do (`infinitely_differentiable_native_rms_norm_backward`)."""
        (input, weight, _), gradient = ctx.saved_tensors, arrived(gradient)
        if not torch.is_grad_enabled():
            return *_backward(input, weight, ctx.shape, ctx.eps, gradient), None, None, None, None
        needed = [tensor for tensor, asked in zip((input, weight), ctx.needs_input_grad, strict=False) if asked]
        result = _raw_rms_norm(input, ctx.shape, weight, ctx.eps)
        gradients = iter(torch.autograd.grad(result, needed, gradient, create_graph=True))
        return *(next(gradients) if asked else None for asked in ctx.needs_input_grad[:2]), None, None, None, None


def _backward(input: Tensor, weight: Maybe, shape: Shape, eps: Eps, gradient: Tensor) -> tuple[Tensor, Maybe]:
    gpu = gpu_of(input)
    if gpu is None:  # gradients may be asked for after the virtual GPUs have gone: then nothing is counted
        return _gradients(input, weight, shape, eps, gradient)
    with scratch(gpu, 0 if gradient.is_contiguous() else nbytes(gradient)):
        gradients = _below(gpu, _gradients, input, weight, shape, eps, gradient)
        place_all(gradients, gpu)
        given = [input, gradient]
        charge = cost("native_layer_norm_backward", operands(given), operands([input]), gpu.spec)
        launch(gpu, "native_layer_norm_backward", charge, given)
    return gradients


def _below(gpu: VirtualGPU, function: Any, *args: Any) -> Any:
    """Compute below the accounting. PyTorch takes the operator apart in Python to find shapes, so they are kept, but
    for those under autocast, whose types differ."""
    keeps = gpu.machine.shapes_only and not torch.is_autocast_enabled("cuda")
    with below():
        return known.computed(function, *args) if keeps else function(*args)


def _normalized(input: Tensor, weight: Maybe, shape: Shape, eps: Eps) -> tuple[Tensor, Tensor]:
    """The result of the CPU's operator, and an empty tensor for what the fused kernel keeps."""
    result = _raw_rms_norm(input.detach(), shape, None if weight is None else weight.detach(), eps)
    return result, torch.empty(input.numel() // max(1, torch.Size(shape).numel()), device=result.device)


def _gradients(input: Tensor, weight: Maybe, shape: Shape, eps: Eps, gradient: Tensor) -> tuple[Tensor, Maybe]:
    """The gradients of the CPU's operator."""
    with torch.enable_grad():
        x, w = input.detach().requires_grad_(), None if weight is None else weight.detach().requires_grad_()
        gradients = torch.autograd.grad(_raw_rms_norm(x, shape, w, eps), [x] if w is None else [x, w], gradient)
        return gradients[0], None if w is None else gradients[1]


@entrance
def rms_norm(input: Tensor, normalized_shape: list[int], weight: Maybe = None, eps: Eps = None) -> Tensor:
    """`torch.rms_norm`, with the fused kernel's memory for a tensor on a GPU."""
    same = weight is None or weight.dtype == getattr(input, "dtype", None)
    transformed, gpu = torch._C._functorch.is_functorch_wrapped_tensor(input), gpu_of(input)
    if gpu is None or not same or transformed:
        return _raw_rms_norm(input, normalized_shape, weight, eps)
    if is_wrapper(type(input)) and (is_dtensor(input) or is_dtensor(weight)):
        return _on_each_rank(gpu, input, tuple(normalized_shape), weight, eps)
    return _on_one_gpu(gpu, input, weight, tuple(normalized_shape), eps)


def _on_one_gpu(gpu: VirtualGPU, input: Tensor, weight: Maybe, shape: Shape, eps: Eps) -> Tensor:
    require_one_device("_fused_rms_norm", input, weight=weight)
    trains = torch.is_grad_enabled() and any(part is not None and part.requires_grad for part in (input, weight))
    return RMSNorm.apply(arrived(input), weight, shape, eps, trains, gpu)


def _on_each_rank(gpu: VirtualGPU, input: Any, shape: Shape, weight: Any, eps: Eps) -> Tensor:
    """Of DTensors: each rank normalizes its own rows, and the weight's gradient is a sum over the ranks.

    What DTensor's strategy (torch/distributed/tensor/_ops/_math_ops.py) does where the rows are sharded; where the
    normalized dimensions are, or the two differ in their mesh, PyTorch's composite operator runs.
    """
    from torch.distributed.tensor import DTensor, Partial  # loaded already, since there is a DTensor

    parts = [input] if weight is None else [input, weight]
    rows = input.dim() - len(shape)
    local = all(map(is_dtensor, parts)) and all(part.device_mesh == input.device_mesh for part in parts)
    local = local and all(p.is_replicate() or (p.is_shard() and p.dim < rows) for p in input.placements)
    if not local or not all(p.is_replicate() for part in parts[1:] for p in part.placements):
        return _raw_rms_norm(input, shape, weight, eps)
    if weight is not None:
        weight = weight.to_local(grad_placements=[Partial() if p.is_shard() else p for p in input.placements])
    rows_here = _on_one_gpu(gpu, input.to_local(), weight, shape, eps)
    sizes = {"shape": input.shape, "stride": torch.empty(input.shape, device="meta").stride()}
    return DTensor.from_local(rows_here, input.device_mesh, input.placements, run_check=False, **sizes)


def patches() -> list[Patch]:
    return [(torch, "rms_norm", rms_norm)]  # which torch.nn.functional calls
