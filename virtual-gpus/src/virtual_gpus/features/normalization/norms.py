"""Temporaries of normalization layers on CUDA, and how long some of them take. Layer norm adds up the gradients of its
parameters in two steps when there are very many rows (layer_norm_kernel.cu in aten/src/ATen/native/cuda). Group norm
keeps a scale and a shift per channel (group_norm_kernel.cu). Batch norm over channels that lie together, (N, C) or
channels_last, adds up partial sums in GPU memory (Normalization.cuh)."""

from functools import lru_cache, partial
from math import prod
from typing import Any

import torch

from virtual_gpus import errors, figures
from virtual_gpus.arithmetic import ceil_div, power_of_2
from virtual_gpus.clock.cost import COPIES, OperatorClass, moves
from virtual_gpus.clock.work import Cost, Operand, Operation
from virtual_gpus.dispatch.operators import OpCall, Row
from virtual_gpus.dispatch.recipes import packed_copies
from virtual_gpus.placement.storages import StorageAllocation

_FITTED = figures.beside(__file__)
_Mask, _Kernels = tuple[bool, ...], tuple[bool, bool, bool]  # the gradients that are wanted; see `choose`
_MANY_ROWS = 64 * 1024
# MAX_BLOCK_SIZE, ELEMENTS_PER_THREAD, OPTIMAL_TILE_W, MAX_H_BLOCK of channels-last kernels; the fewest blocks that pay
_LAST_BLOCK, _ELEMENTS_PER_THREAD, _TILE_WIDTH, _MOST_BLOCKS, _LEAST_BLOCKS = 512, 16, 32, 128, 8


def layer_norm(call: OpCall) -> tuple[torch.Tensor, ...]:
    """Mean and deviation of each row are floats, where the CPU keeps those of half types in half precision."""
    tensor, shape, *parameters = call.args[:4]
    rows = prod(tensor.shape[: -len(shape)])
    for parameter in parameters:
        if parameter is not None and parameter.dtype is not tensor.dtype and rows and tensor.is_floating_point():
            raise errors.other_scalar_type(tensor, parameter)
    return _with_statistics(call, rows * max(4, tensor.itemsize), *packed_copies(call, ("input",)))


def _with_statistics(call: OpCall, nbytes: int, *then: int) -> tuple[torch.Tensor, ...]:
    """The result, then the statistics, each of so many bytes on CUDA; then `scratch`."""
    result = call.compute()
    call.place(result[0])
    for statistic in result[1:]:
        storage: Any = statistic.untyped_storage()
        if storage._record.gpu is None:  # else it was given, as `out=`
            storage._record = StorageAllocation(call.gpu, nbytes)
    if then:
        call.scratch(*then)
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
    """A scale and a shift per sample and channel, in float. Only the CPU takes parameters in float for halves."""
    scale = shift = call["N"] * call["C"] * 4
    tensor, *parameters = call.args[:3]
    for parameter in parameters:
        if parameter is not None and parameter.dtype is not tensor.dtype and call["N"] and tensor.is_floating_point():
            raise errors.other_scalar_type(tensor, parameter)
    return call.run_with(scale, shift, *packed_copies(call, ("input",)))


def group_norm_backward(call: OpCall) -> tuple[torch.Tensor, ...]:
    """Two sums, and a factor if there is a weight, per sample and channel. Two factors per group."""
    channels, groups = call["N"] * call["C"] * 4, call["N"] * call["group"] * 4
    with call.scratch(*packed_copies(call, ("grad_out", "input"))):
        return call.run(channels, channels, 0 if call["weight"] is None else channels, groups, groups)


@lru_cache(maxsize=4096)
def choose(images: Operand, weight: int, bf16: bool, cudnn: bool, training: bool, mask: _Mask) -> _Kernels:
    """What CUDA takes for a batch norm: cuDNN, or PyTorch's own kernels; those for channels that lie together, or not;
    those that add up over a channel, or not. `_select_batch_norm_backend` (aten/src/ATen/native/Normalization.cpp)
    decides about the first, cuda/Normalization.cu about the others.

    weight: bytes of one of its numbers, 0 if there is none. cudnn: if it is enabled. mask: of a backward pass, which is
    never cuDNN's in evaluation (tools/autograd/derivatives.yaml).
    """
    fits = not bf16 and (weight == 4 or (weight > 0 and images.itemsize > 2))
    on_cudnn = cudnn and fits and len(images.shape) > 2 and (training or not mask)
    return on_cudnn, images.channels_last if on_cudnn else _lies_last(images), training or any(mask[1:])


def _choose_for(tensor: torch.Tensor, weight: torch.Tensor | None, training: bool, mask: _Mask = ()) -> _Kernels:
    images, size = Operand(tensor.shape, tensor.itemsize, tensor.stride()), 0 if weight is None else weight.itemsize
    return choose(images, size, tensor.dtype == torch.bfloat16, torch._C._get_cudnn_enabled(), training, mask)


def batch_norm_elsewhere(call: OpCall, name: str, common: torch.device, device: torch.device) -> RuntimeError | None:
    """An argument elsewhere than the images: cuDNN's operator, if it is taken, refuses it as PyTorch's own does."""
    on_cudnn = common.type == "cuda" and _choose_for(call["input"], call["weight"], call["training"])[0]
    return errors.argument_elsewhere("cudnn_batch_norm", name, device, common) if on_cudnn else None


def _lies_last(images: Operand) -> bool:
    """True for (N, C) and single pixels too, unlike cuDNN's rule (`batch_norm_use_channels_last_kernels`)."""
    return images.channels_last or (images.strides[1] == 1 == prod(images.shape[2:]) and images.nbytes > 0)


def batch_norm(call: OpCall) -> tuple[torch.Tensor, ...]:
    """And backward. cuDNN wants a packed gradient; kernels for channels that lie together take partial sums."""
    tensor, weight, backward = call["input"], call["weight"], "train" in call.op.positions
    training, mask = (call["train"], tuple(call["output_mask"])) if backward else (call["training"], ())
    on_cudnn, last, adds = _choose_for(tensor, weight, training, mask)
    # In evaluation cuDNN keeps no statistics, PyTorch's kernels do.
    kept_by_cudnn = weight.itemsize if training and weight is not None else 0
    kept = tensor.shape[1] * (kept_by_cudnn if on_cudnn else max(4, tensor.itemsize))
    run = call.run if backward else partial(_with_statistics, call, kept)
    if last and adds and not on_cudnn:
        grad = call["grad_out"] if backward else tensor
        in_rows = _lies_last(Operand(grad.shape, grad.itemsize, grad.stride()))
        return run(*_partial_sums(tensor, 2 if backward else 4) if in_rows else ())
    if not (on_cudnn and backward):
        return run()
    with call.scratch(*packed_copies(call, ("grad_out",))):
        return run()


def _partial_sums(tensor: torch.Tensor, per_block: int) -> tuple[int, ...]:
    """Bytes of `per_block` floats per channel and thread block, and a semaphore per column of blocks, which share a
    channel (flexible_launch_configs)."""
    channels = tensor.shape[1]
    rows, width = tensor.numel() // channels, min(power_of_2(channels), _TILE_WIDTH)
    height = min(power_of_2(ceil_div(rows, _ELEMENTS_PER_THREAD)), _LAST_BLOCK // width)
    blocks = min(_MOST_BLOCKS, ceil_div(rows, height * _ELEMENTS_PER_THREAD))
    sizes = per_block * channels * blocks * 4, ceil_div(channels, _TILE_WIDTH) * 4
    return sizes if blocks >= _LEAST_BLOCKS else ()


def _batch_norm_cost(operation: Operation) -> Cost:
    """A block of threads per channel: few channels leave the GPU half idle, unless the channels are last."""
    arguments, fitted = operation.arguments, _FITTED["batch_norm"]
    mask = arguments.get("output_mask", ())
    training, backward = arguments["train" if mask else "training"], len(mask) > 0
    images, weight = operation.inputs[backward], operation.inputs[backward + 1].itemsize if arguments["weight"] else 0
    settings = operation.precision == "bf16", operation.flag, training, mask
    on_cudnn, last, adds = choose(images, weight, *settings)
    if not adds:
        return COPIES.formula(operation)
    channels, processors = images.shape[1], operation.spec.multi_processor_count
    direction = _FITTED["batch_norm_backward" if backward else "batch_norm_forward"]
    if not (on_cudnn or last):
        # PyTorch's own kernels: a block of threads goes through the pieces of its channel one after the other
        chain = direction["chain"] + direction["per_number"] * (images.nbytes / images.itemsize / channels)
        kernels = fitted["chain"] + max(1.0, channels / processors) * chain
        return Cost(kernels * operation.kernel + operation.reading(images.nbytes), 3)
    share = direction["share_channels_last"]
    if not last:
        busy = channels / (fitted["waves"] * processors)
        share = min(1.0, max(fitted["least"], busy)) * direction["share"]
    return Cost(fitted["floor"] * operation.kernel + operation.reading(images.nbytes * (2 + backward), share), 1)


def _group_norm_cost(operation: Operation) -> Cost:
    """A block of threads per sample and group, which the statistics count: few of them leave the GPU half idle."""
    fitted, blocks = _FITTED["group_norm"], prod(operation.outputs[1].shape) if len(operation.outputs) > 1 else 1
    busy = min(fitted["share"], blocks / (fitted["waves"] * operation.spec.multi_processor_count))
    images = operation.inputs[0].nbytes
    return Cost(fitted["floor"] * operation.kernel + operation.reading(images, busy) + operation.reading(2 * images), 2)


_cudnn = torch._C._get_cudnn_enabled
_FORWARD = OperatorClass(_batch_norm_cost, depends_on_strides=True, arguments=("weight", "training"), flag=_cudnn)
_BACKWARD = _FORWARD._replace(arguments=("weight", "train", "output_mask"))
OPERATORS = {
    "native_layer_norm": Row(moves(**_FITTED["layer_norm"]), layer_norm),
    "native_layer_norm_backward": Row(moves(**_FITTED["layer_norm_backward"]), layer_norm_backward),
    "native_group_norm": Row(OperatorClass(_group_norm_cost), group_norm),
    "native_group_norm_backward": Row(moves(**_FITTED["group_norm_backward"]), group_norm_backward),
    "native_batch_norm": Row(_FORWARD, batch_norm, mixture=batch_norm_elsewhere),
    "native_batch_norm_backward": Row(_BACKWARD, batch_norm),
}
