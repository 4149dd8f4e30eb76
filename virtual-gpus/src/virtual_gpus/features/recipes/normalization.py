"""Temporaries of normalization layers on CUDA, and how long some of them take.

Layer norm adds up the gradients of its parameters in two steps when there are very many rows (layer_norm_kernel.cu in
aten/src/ATen/native/cuda). Group norm keeps a scale and a shift per channel (group_norm_kernel.cu). Batch norm over
channels that lie together, (N, C) or channels_last, adds up partial sums in GPU memory (Normalization.cuh); cuDNN's,
for (N, C, H, W), needs nothing beyond a packed gradient. RMS norm is one fused kernel that keeps one number per row,
where the CPU's is made of five operators (aten/src/ATen/native/layer_norm.cpp).
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch

from virtual_gpus.arithmetic import ceil_div, power_of_2
from virtual_gpus.clock.cost import FITTED, OperatorClass, moves
from virtual_gpus.clock.work import Cost, Operation
from virtual_gpus.dispatch import known
from virtual_gpus.dispatch.op_call import OpCall
from virtual_gpus.dispatch.timing import charge_kernel
from virtual_gpus.entrance import entrance
from virtual_gpus.features.recipes.packed_inputs import packed_copies
from virtual_gpus.machine import VirtualGPU
from virtual_gpus.operators import Row
from virtual_gpus.patches.table import Patch
from virtual_gpus.placement.storages import StorageAllocation, gpu_of, is_wrapper, nbytes, place_all, put, scratch
from virtual_gpus.placement.wrappers import arrived, is_dtensor
from virtual_gpus.threads import below

_MANY_ROWS = 64 * 1024
_LAST_BLOCK, _ELEMENTS_PER_THREAD = 512, 16  # of the channels-last kernels


def layer_norm(call: OpCall) -> tuple[torch.Tensor, ...]:
    """Mean and deviation of each row are floats, where the CPU keeps those of half types in half precision."""
    sizes = packed_copies(call, ("input",))
    result = call.compute()
    call.place(result[0])
    for kept in result[1:]:
        if kept.element_size() < 4:
            put(kept, StorageAllocation(call.gpu, kept.numel() * 4))
    call.place(result)
    with call.scratch(*sizes):
        return result


def layer_norm_backward(call: OpCall) -> tuple[torch.Tensor, ...]:
    """With very many rows, the gradients of weight and bias are added up in two steps (layer_norm_kernel.cu)."""
    sizes = packed_copies(call, ("input", "grad_out"))
    result = call.run()
    with call.scratch(*sizes, *_partial_gradients(call)):
        return result


def _partial_gradients(call: OpCall) -> list[int]:
    tensor, columns = call["input"], torch.Size(call["normalized_shape"]).numel()
    rows = tensor.numel() // max(1, columns)
    if rows <= _MANY_ROWS or columns // 32 >= call.gpu.spec.multi_processor_count // 2:
        return []
    blocks = min(_MANY_ROWS // 2 // ceil_div(columns, 32), ceil_div(rows, 32))
    size = blocks * columns * tensor.element_size()
    return [size for name in ("weight", "bias") if call[name] is not None]


def group_norm(call: OpCall) -> tuple[torch.Tensor, ...]:
    """A scale and a shift per sample and channel, in float."""
    size = call["N"] * call["C"] * 4
    with call.scratch(size, size, *packed_copies(call, ("input",))):
        return call.run()


def group_norm_backward(call: OpCall) -> tuple[torch.Tensor, ...]:
    """Sums and factors per sample and channel, and two factors per group."""
    channels, groups = call["N"] * call["C"] * 4, call["N"] * call["group"] * 4
    sizes = [channels, channels] + ([channels] if call["weight"] is not None else []) + [groups, groups]
    with call.scratch(*packed_copies(call, ("grad_out", "input"))):
        result = call.run()
        with call.scratch(*sizes):
            return result


def batch_norm(call: OpCall) -> tuple[torch.Tensor, ...]:
    """cuDNN's for (N, C, ...), PyTorch's own kernels for (N, C), half types with half weights and channels_last."""
    result, tensor = call.run(), call["input"]
    if call["training"] and not _cudnn(tensor, call["weight"]) and _channels_last(tensor):
        _partial_sums(call, tensor, 4)
    return result


def batch_norm_backward(call: OpCall) -> tuple[torch.Tensor, ...]:
    """cuDNN wants a packed gradient; the kernels for channels that lie together take partial sums."""
    tensor = call["input"]
    if _cudnn(tensor, call["weight"]):
        with call.scratch(*packed_copies(call, ("grad_out",))):
            return call.run()
    result = call.run()
    if call["train"] and _channels_last(tensor) and _channels_last(call["grad_out"]):
        _partial_sums(call, tensor, 2)
    return result


def _cudnn(tensor: torch.Tensor, weight: torch.Tensor | None) -> bool:
    """PyTorch's conditions for cuDNN (aten/src/ATen/native/Normalization.cpp, _select_batch_norm_backend)."""
    if not torch._C._get_cudnn_enabled() or weight is None or tensor.dtype == torch.bfloat16 or tensor.dim() < 3:
        return False
    return tensor.dtype != torch.float16 or weight.dtype == torch.float32


def _channels_last(tensor: torch.Tensor) -> bool:
    return tensor.stride(1) == 1 and tensor.numel() > 0 and (tensor.dim() == 2 or not tensor.is_contiguous())


def _partial_sums(call: OpCall, tensor: torch.Tensor, per_block: int) -> None:
    """`per_block` floats per channel and thread block, and a semaphore per column of blocks."""
    channels = tensor.shape[1]
    blocks = _blocks(tensor.numel() // channels, channels)
    if blocks > 1:
        with call.scratch(per_block * channels * blocks * 4, ceil_div(channels, 32) * 4):
            pass


def _blocks(rows: int, channels: int) -> int:
    """How many blocks share a channel (flexible_launch_configs: at least 16 rows per thread, at most 128 blocks)."""
    width = min(power_of_2(channels), 32)
    height = min(power_of_2(ceil_div(rows, _ELEMENTS_PER_THREAD)), _LAST_BLOCK // width)
    blocks = min(128, ceil_div(rows, height * _ELEMENTS_PER_THREAD))
    return blocks if blocks >= 8 else 1  # fewer are not worth their trouble


# ---- RMS norm ------------------------------------------------------------------------------------------------------

T, Shape, Weight, Eps = torch.Tensor, tuple[int, ...], torch.Tensor | None, float | None
_raw_rms_norm = torch.rms_norm


class RMSNorm(torch.autograd.Function):
    """The fused kernel's memory: forward keeps one float per row, backward works in place of its results."""

    @staticmethod
    def forward(ctx: Any, input: T, weight: Weight, shape: Shape, eps: Eps, trains: bool, gpu: VirtualGPU) -> T:
        """(..., *shape) -> the same; numbers as the CPU's composite operator gives them."""
        result, kept = _rms_forward(gpu, input, weight, shape, eps, trains)
        ctx.save_for_backward(input, weight, kept)
        ctx.shape, ctx.eps = shape, eps
        return result

    @staticmethod
    def backward(ctx: Any, gradient: T) -> tuple[T | None, ...]:
        """Gradients of input and weight. Those that are differentiated again come from composite operators, as CUDA's
        do (`infinitely_differentiable_native_rms_norm_backward`)."""
        (input, weight, _), gradient = ctx.saved_tensors, arrived(gradient)
        if not torch.is_grad_enabled():
            return *_rms_backward(input, weight, ctx.shape, ctx.eps, gradient), None, None, None, None
        needed = [tensor for tensor, asked in zip((input, weight), ctx.needs_input_grad, strict=False) if asked]
        result = _raw_rms_norm(input, ctx.shape, weight, ctx.eps)
        gradients = iter(torch.autograd.grad(result, needed, gradient, create_graph=True))
        return *(next(gradients) if asked else None for asked in ctx.needs_input_grad[:2]), None, None, None, None


def _rms_forward(gpu: VirtualGPU, input: T, weight: Weight, shape: Shape, eps: Eps, trains: bool) -> tuple[T, T]:
    result, kept = _below(gpu, _normalized, input, weight, shape, eps)
    place_all(result, gpu)
    charge_kernel(gpu, "native_layer_norm", [input], [result], trains)
    place_all(kept, gpu)
    return result, kept


def _rms_backward(input: T, weight: Weight, shape: Shape, eps: Eps, gradient: T) -> tuple[T, T | None]:
    gpu = gpu_of(input)
    if gpu is None:  # gradients may be asked for after the virtual GPUs have gone: then nothing is counted
        return _gradients(input, weight, shape, eps, gradient)
    with scratch(gpu, 0 if gradient.is_contiguous() else nbytes(gradient)):
        gradients = _below(gpu, _gradients, input, weight, shape, eps, gradient)
        place_all(gradients, gpu)
        charge_kernel(gpu, "native_layer_norm_backward", [input, gradient], [input])
    return gradients


def _below(gpu: VirtualGPU, function: Any, *args: Any) -> Any:
    """Compute below the accounting. PyTorch takes the operator apart in Python to find shapes, so they are kept, but
    for those under autocast, whose types differ."""
    keeps = gpu.machine.shapes_only and not torch.is_autocast_enabled("cuda")
    with below():
        return known.computed(function, *args) if keeps else function(*args)


def _normalized(input: T, weight: Weight, shape: Shape, eps: Eps) -> tuple[T, T]:
    """By the CPU's operator, and room for what the fused kernel keeps."""
    result = _raw_rms_norm(input.detach(), shape, None if weight is None else weight.detach(), eps)
    return result, torch.empty(input.numel() // max(1, torch.Size(shape).numel()), device=result.device)


def _gradients(input: T, weight: Weight, shape: Shape, eps: Eps, gradient: T) -> tuple[T, T | None]:
    """Those of the CPU's operator."""
    with torch.enable_grad():
        x = input.detach().requires_grad_()
        w = None if weight is None else weight.detach().requires_grad_()
        parts = [x] if w is None else [x, w]
        gradients = torch.autograd.grad(_raw_rms_norm(x, shape, w, eps), parts, gradient)
        return gradients[0], gradients[1] if w is not None else None


@entrance
def rms_norm(input: T, normalized_shape: list[int], weight: Weight = None, eps: Eps = None) -> T:
    """`torch.rms_norm`, with the fused kernel's memory for a tensor on a GPU."""
    same = weight is None or weight.dtype == getattr(input, "dtype", None)
    transformed, gpu = torch._C._functorch.is_functorch_wrapped_tensor(input), gpu_of(input)
    if gpu is None or not same or transformed:
        return _raw_rms_norm(input, normalized_shape, weight, eps)
    if is_wrapper(type(input)) and (is_dtensor(input) or is_dtensor(weight)):
        return _rms_norm_on_each_rank(gpu, input, tuple(normalized_shape), weight, eps)
    return _on_one_gpu(gpu, input, weight, tuple(normalized_shape), eps)


def _on_one_gpu(gpu: VirtualGPU, input: T, weight: Weight, shape: Shape, eps: Eps) -> T:
    trains = torch.is_grad_enabled() and any(part is not None and part.requires_grad for part in (input, weight))
    return RMSNorm.apply(arrived(input), weight, shape, eps, trains, gpu)


def _rms_norm_on_each_rank(gpu: VirtualGPU, input: Any, shape: Shape, weight: Any, eps: Eps) -> T:
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
        sums = [Partial() if p.is_shard() else p for p in input.placements]
        weight = weight.to_local(grad_placements=sums)
    rows_here = _on_one_gpu(gpu, input.to_local(), weight, shape, eps)
    sizes = {"shape": input.shape, "stride": torch.empty(input.shape, device="meta").stride()}
    return DTensor.from_local(rows_here, input.device_mesh, input.placements, run_check=False, **sizes)


def patches() -> list[Patch]:
    """See `features`. torch.nn.functional calls torch.rms_norm."""
    return [(torch, "rms_norm", rms_norm)]


def _batch_norm_cost(operation: Operation) -> Cost:
    """A block of threads per channel: few channels leave the GPU half idle, unless the channels are last."""
    backward = not operation.name.endswith("norm")
    images, fitted = operation.inputs[backward], FITTED["batch_norm"]
    channels = images.shape[1] if len(images.shape) > 1 else 1
    direction = FITTED["batch_norm_backward" if backward else "batch_norm_forward"]
    waves = channels / operation.spec.multi_processor_count
    if operation.precision == "bf16" and len(images.shape) > 2 and not images.channels_last:
        # PyTorch's own kernels: a block of threads goes through the pieces of its channel one after the other
        chain = direction["chain"] + direction["per_number"] * (images.nbytes / 2 / channels)
        kernels = fitted["chain"] + max(1.0, waves) * chain
        return Cost(kernels * operation.kernel + operation.reading(images.nbytes), 3)
    share = direction["share_channels_last"]
    if not images.channels_last:
        busy = channels / (fitted["waves"] * operation.spec.multi_processor_count)
        share = min(1.0, max(fitted["least"], busy)) * direction["share"]
    moved = images.nbytes * (3 if backward else 2)
    return Cost(fitted["floor"] * operation.kernel + operation.reading(moved, share), 1)


def _group_norm_cost(operation: Operation) -> Cost:
    """A block of threads per sample and group, which the statistics count: few of them leave the GPU half idle."""
    fitted, blocks = FITTED["group_norm"], prod(operation.outputs[1].shape) if len(operation.outputs) > 1 else 1
    busy = min(fitted["share"], blocks / (fitted["waves"] * operation.spec.multi_processor_count))
    images = operation.inputs[0].nbytes
    return Cost(fitted["floor"] * operation.kernel + operation.reading(images, busy) + operation.reading(2 * images), 2)


# Without training, it reads and writes once, as `sync_batch_norm` has it.
_BATCH_NORM = OperatorClass(_batch_norm_cost, depends_on_strides=True, unless=("training", "batch_norm_elemt"))
OPERATORS = {
    "native_layer_norm": Row(moves("layer_norm"), layer_norm),
    "native_layer_norm_backward": Row(moves("layer_norm_backward"), layer_norm_backward),
    "native_group_norm": Row(OperatorClass(_group_norm_cost), group_norm),
    "native_group_norm_backward": Row(moves("group_norm_backward"), group_norm_backward),
    "native_batch_norm": Row(_BATCH_NORM, batch_norm),
    "native_batch_norm_backward": Row(OperatorClass(_batch_norm_cost, depends_on_strides=True), batch_norm_backward),
}
