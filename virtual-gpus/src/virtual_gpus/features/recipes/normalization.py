"""Temporaries of normalization layers on CUDA, and how long some of them take. Layer norm adds up the gradients of its
parameters in two steps when there are very many rows (layer_norm_kernel.cu in aten/src/ATen/native/cuda). Group norm
keeps a scale and a shift per channel (group_norm_kernel.cu). Batch norm over channels that lie together, (N, C) or
channels_last, adds up partial sums in GPU memory (Normalization.cuh); cuDNN's, for (N, C, H, W), needs nothing beyond a
packed gradient."""

from __future__ import annotations

from math import prod

import torch

from virtual_gpus.arithmetic import ceil_div, power_of_2
from virtual_gpus.clock.cost import FITTED, OperatorClass, moves
from virtual_gpus.clock.work import Cost, Operation
from virtual_gpus.dispatch.operators import OpCall, Row
from virtual_gpus.features.recipes.packed_inputs import packed_copies
from virtual_gpus.placement.storages import StorageAllocation, put

_MANY_ROWS = 64 * 1024
_LAST_BLOCK, _ELEMENTS_PER_THREAD = 512, 16  # of the channels-last kernels


def layer_norm(call: OpCall) -> tuple[torch.Tensor, ...]:
    """Mean and deviation of each row are floats, where the CPU keeps those of half types in half precision."""
    result = call.compute()
    call.place(result[0])
    for kept in result[1:]:
        if kept.element_size() < 4:
            put(kept, StorageAllocation(call.gpu, kept.numel() * 4))
    call.place(result)
    with call.scratch(*packed_copies(call, ("input",))):
        return result


def layer_norm_backward(call: OpCall) -> tuple[torch.Tensor, ...]:
    """With very many rows, the gradients of weight and bias are added up in two steps (layer_norm_kernel.cu)."""
    sizes = packed_copies(call, ("input", "grad_out"))
    tensor, columns = call["input"], torch.Size(call["normalized_shape"]).numel()
    rows = tensor.numel() // max(1, columns)
    if rows > _MANY_ROWS and columns // 32 < call.gpu.spec.multi_processor_count // 2:
        blocks = min(_MANY_ROWS // 2 // ceil_div(columns, 32), ceil_div(rows, 32))
        sizes += [blocks * columns * tensor.element_size() for name in ("weight", "bias") if call[name] is not None]
    return call.run(*sizes)


def group_norm(call: OpCall) -> tuple[torch.Tensor, ...]:
    """A scale and a shift per sample and channel, in float."""
    with call.scratch(*[call["N"] * call["C"] * 4] * 2, *packed_copies(call, ("input",))):
        return call.run()


def group_norm_backward(call: OpCall) -> tuple[torch.Tensor, ...]:
    """Sums and factors per sample and channel, and two factors per group."""
    channels, groups = call["N"] * call["C"] * 4, call["N"] * call["group"] * 4
    with call.scratch(*packed_copies(call, ("grad_out", "input"))):
        return call.run(*[channels] * (2 if call["weight"] is None else 3), groups, groups)


def batch_norm(call: OpCall) -> tuple[torch.Tensor, ...]:
    """cuDNN's for (N, C, ...), PyTorch's own kernels for (N, C), half types with half weights and channels_last."""
    tensor = call["input"]
    adds = call["training"] and not _cudnn(tensor, call["weight"]) and _channels_last(tensor)
    return call.run(*_partial_sums(tensor, 4) if adds else ())


def batch_norm_backward(call: OpCall) -> tuple[torch.Tensor, ...]:
    """cuDNN wants a packed gradient; the kernels for channels that lie together take partial sums."""
    tensor = call["input"]
    if _cudnn(tensor, call["weight"]):
        with call.scratch(*packed_copies(call, ("grad_out",))):
            return call.run()
    adds = call["train"] and _channels_last(tensor) and _channels_last(call["grad_out"])
    return call.run(*_partial_sums(tensor, 2) if adds else ())


def _cudnn(tensor: torch.Tensor, weight: torch.Tensor | None) -> bool:
    """PyTorch's conditions for cuDNN (aten/src/ATen/native/Normalization.cpp, _select_batch_norm_backend)."""
    if not torch._C._get_cudnn_enabled() or weight is None or tensor.dtype == torch.bfloat16 or tensor.dim() < 3:
        return False
    return tensor.dtype != torch.float16 or weight.dtype == torch.float32


def _channels_last(tensor: torch.Tensor) -> bool:
    """As `batch_norm_use_channels_last_kernels` asks: (N, C) too, which `suggest_memory_format` takes for plain."""
    return tensor.stride(1) == 1 and tensor.numel() > 0 and (tensor.dim() == 2 or not tensor.is_contiguous())


def _partial_sums(tensor: torch.Tensor, per_block: int) -> tuple[int, ...]:
    """Bytes of `per_block` floats per channel and thread block, and a semaphore per column of blocks, which share a
    channel (flexible_launch_configs: at least 16 rows per thread, at most 128 blocks)."""
    channels = tensor.shape[1]
    rows, width = tensor.numel() // channels, min(power_of_2(channels), 32)
    height = min(power_of_2(ceil_div(rows, _ELEMENTS_PER_THREAD)), _LAST_BLOCK // width)
    blocks = min(128, ceil_div(rows, height * _ELEMENTS_PER_THREAD))
    return (per_block * channels * blocks * 4, ceil_div(channels, 32) * 4) if blocks >= 8 else ()  # fewer do not pay


def _batch_norm_cost(operation: Operation) -> Cost:
    """A block of threads per channel: few channels leave the GPU half idle, unless the channels are last."""
    training = operation.arguments.get("training")  # which the operator of a backward pass does not have
    if training is False:
        return _EVALUATION.cost(operation)
    backward = training is None
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
    return Cost(fitted["floor"] * operation.kernel + operation.reading(images.nbytes * (2 + backward), share), 1)


def _group_norm_cost(operation: Operation) -> Cost:
    """A block of threads per sample and group, which the statistics count: few of them leave the GPU half idle."""
    fitted, blocks = FITTED["group_norm"], prod(operation.outputs[1].shape) if len(operation.outputs) > 1 else 1
    busy = min(fitted["share"], blocks / (fitted["waves"] * operation.spec.multi_processor_count))
    images = operation.inputs[0].nbytes
    return Cost(fitted["floor"] * operation.kernel + operation.reading(images, busy) + operation.reading(2 * images), 2)


_EVALUATION = moves("copied_in", lambda operation: 2 * operation.outputs[0].nbytes)  # reads and writes once
_BATCH_NORM = OperatorClass(_batch_norm_cost, depends_on_strides=True, arguments=("training",))
OPERATORS = {
    "native_layer_norm": Row(moves("layer_norm"), layer_norm),
    "native_layer_norm_backward": Row(moves("layer_norm_backward"), layer_norm_backward),
    "native_group_norm": Row(OperatorClass(_group_norm_cost), group_norm),
    "native_group_norm_backward": Row(moves("group_norm_backward"), group_norm_backward),
    "native_batch_norm": Row(_BATCH_NORM, batch_norm),
    "native_batch_norm_backward": Row(_BATCH_NORM, batch_norm_backward),
}
