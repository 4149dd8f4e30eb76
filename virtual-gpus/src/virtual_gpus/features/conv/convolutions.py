"""Convolutions on CUDA: cuDNN with its workspaces, PyTorch's own kernels for the rest.
Which of them run says `convolution_choice`. The order of blocks is that of aten/src/ATen/native/cudnn/ConvShared.cpp:
packed copies, the result, the workspace; backward the input's gradient first, then the filters', then the bias's, each
with a workspace of its own. PyTorch's own kernels are modelled without one. A workspace that does not fit is no error:
PyTorch then tries cuDNN's other kernels, which need less (Conv_v8.cpp).

`torch.backends.cudnn.benchmark`: the first convolution of a shape tries all kernels, with the largest workspace among
them, and empties the cache afterwards. That one is an estimate, by Winograd's numbers: no real GPU was asked."""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from virtual_gpus import errors
from virtual_gpus.clock.cost import OperatorClass
from virtual_gpus.clock.work import Operand
from virtual_gpus.dispatch.half_precision import widened
from virtual_gpus.dispatch.operators import OpCall, Row
from virtual_gpus.dispatch.timing import precision_of
from virtual_gpus.features.blas import MULTIPLIED
from virtual_gpus.features.conv import convolution_costs, workspaces
from virtual_gpus.features.conv.convolution_choice import DECIDING, Sizes, choose
from virtual_gpus.machine import Kept, VirtualGPU
from virtual_gpus.memory.allocator import OutOfMemory
from virtual_gpus.placement.storages import CHANNELS_LAST, ScratchBlock, nbytes, scratch

MaybeTensor = Tensor | None
_How = tuple[bool, int, Sizes, Sizes]  # the arguments in DECIDING
_Choice = tuple[bool, torch.memory_format, workspaces.Shape]  # if cuDNN computes, how all tensors lie, its workspaces
_sizes = Kept(lambda gpu: dict[tuple[workspaces.Step, workspaces.Shape], int]())  # bytes, so far, by step


def _chosen(call: OpCall, x: Tensor, weight: Tensor, y: Tensor, how: _How) -> _Choice:
    """What is chosen for a call, of which y is the result or its gradient."""
    images, filters = (x.shape, x.itemsize, x.stride()), (weight.shape, x.itemsize, weight.stride())
    spec = call.gpu.spec
    cores = precision_of("conv", x.dtype) in spec.tensor_cores
    return _choose(images, filters, y.shape, how, torch._C._get_cudnn_enabled(), cores, spec.multi_processor_count)


@lru_cache(maxsize=4096)
def _choose(images: Any, filters: Any, y: Sizes, how: _How, cudnn: bool, cores: bool, processors: int) -> _Choice:
    """images, filters: the fields of an `Operand`. A transposed convolution is a gradient, from y to the images."""
    (x, itemsize, _), (kernel, _, _), (transposed, groups, stride, _) = images, filters, how
    on_cudnn, last = choose(Operand(*images), Operand(*filters), *how, cudnn)
    large, small = (y, x) if transposed else (x, y)
    row = (1,) if len(x) == 3 else ()  # 1d: images of one row
    image, window, out = ((*row, *sizes[2:]) for sizes in (large, kernel, small))
    shape = workspaces.Shape(large[0], large[1], small[1], groups, image, window, out, max(stride) > 1, itemsize, last,
                             cores, processors)  # fmt: skip
    return on_cudnn, CHANNELS_LAST[len(x)] if last else torch.contiguous_format, shape


@lru_cache(maxsize=4096)
def _lies_last(shape: Sizes, strides: Sizes) -> bool:
    return Operand(shape, 0, strides).channels_last


def _with_cudnn(gpu: VirtualGPU, step: workspaces.Step, shape: workspaces.Shape) -> None:
    """Take and give back the workspace of one cuDNN call."""
    sizes = _sizes.of(gpu)
    size = sizes.get((step, shape))
    if size is None:
        size = sizes[step, shape] = step(shape)
        if torch._C._get_cudnn_benchmark():  # asked only here: a kernel that was found without the flag stays
            _try(gpu, workspaces.largest(step, shape))
            gpu.allocator.empty_cache()
    _try(gpu, size)


def _try(gpu: VirtualGPU, size: int) -> None:
    if size:
        try:
            ScratchBlock(gpu, size)
        except OutOfMemory:
            return  # another kernel needs less


def _hold_copy(copies: scratch, tensor: Tensor, layout: torch.memory_format) -> None:
    """Have a packed copy of `tensor` until `copies` closes, unless it has this layout already."""
    if not tensor.is_contiguous(memory_format=layout):
        copies.take(nbytes(tensor))


def convolution(call: OpCall) -> Tensor:
    """`aten::convolution`, of one, two or three dimensions, transposed or not."""
    x, weight, _, stride, _, _, transposed, output_padding, groups = call.args
    if x.dtype not in MULTIPLIED or not x.dtype is weight.dtype is call.tensors[-1].dtype:
        _refuse(call, x)
    if call.op.written or not x.numel():  # `out=` decides the layout itself; nothing in, nothing to do
        return call.run()
    result, how = call.compute(), (transposed, groups, tuple(stride), tuple(output_padding))
    on_cudnn, layout, shape = _chosen(call, x, weight, result, how)
    with call.scratch() as copies:
        _hold_copy(copies, x, layout)
        result = call.place(result.contiguous(memory_format=layout))  # the CPU's picks its own
        _hold_copy(copies, weight, layout)
        if on_cudnn:
            _with_cudnn(call.gpu, workspaces.data_gradient if transposed else workspaces.forward, shape)
    return result


def _refuse(call: OpCall, x: Tensor) -> None:
    """Raise what CUDA says of other types than it multiplies, and of several."""
    for name in ("weight", "bias"):
        if call[name] is not None and call[name].dtype is not x.dtype:
            raise unlike_input(call, name, x.device, x.device)
    if x.dtype not in MULTIPLIED:  # ATen/cudnn/Types.cpp, native/cudnn/Conv_v8.cpp: types it has, and no kernels for
        no_kernel = x.dtype in (torch.int32, torch.int8, torch.uint8)
        no_type = f"getCudnnDataTypeFromScalarType() not supported for {errors.scalar_type(x)}"
        raise RuntimeError("GET was unable to find an engine to execute this computation" if no_kernel else no_type)


def convolution_backward(call: OpCall) -> tuple[MaybeTensor, ...]:
    """`aten::convolution_backward`: gradients of input, filters and bias, as `output_mask` asks."""
    grad, x, weight, _, stride, _, _, transposed, output_padding, groups, _ = call.args
    if call.op.written or not x.numel():
        return call.run()
    results, how = call.compute(), (transposed, groups, tuple(stride), tuple(output_padding))
    on_cudnn, layout, shape = _chosen(call, x, weight, grad, how)
    for_x, for_weight = (None if made is None else made.contiguous(memory_format=layout) for made in results[:2])
    if on_cudnn:
        _cudnn_gradients(call, for_x, for_weight, layout, shape)
    else:  # PyTorch's own kernels (DepthwiseConv2d.cu, DepthwiseConv3d.cu): filters first, no workspace
        with call.scratch() as copies:
            _hold_copy(copies, grad, layout)
            _hold_copy(copies, x, layout)
            call.place((for_weight, for_x))
    return for_x, for_weight, call.place(results[2])


def _cudnn_gradients(
    call: OpCall, for_x: MaybeTensor, for_weight: MaybeTensor, layout: torch.memory_format, shape: workspaces.Shape
) -> None:
    """Two calls of cuDNN. Each copies what is not packed for itself, and frees its copies."""
    gpu, transposed, (grad, x, weight) = call.gpu, call["transposed"], call.args[:3]
    # `grad.to(memory_format)` compares what strides suggest, so a gradient that was expanded from one number passes as
    # packed, and each call copies it anew. A transposed convolution's backward asks for `contiguous` instead.
    last = _lies_last(x.shape, x.stride())
    packed = transposed or _lies_last(grad.shape, grad.stride()) is not last
    with call.scratch() as copies, call.scratch() as held:
        if for_weight is not None:
            _hold_copy(held, x, layout)
        if packed:
            _hold_copy(held, grad, CHANNELS_LAST[x.dim()] if last else torch.contiguous_format)
        if for_x is not None:
            call.place(for_x)
            _hold_copy(copies, weight, layout)
            if not packed:
                _hold_copy(copies, grad, layout)
            _with_cudnn(gpu, workspaces.forward if transposed else workspaces.data_gradient, shape)
            copies.close()
        if for_weight is not None:
            if not packed:
                _hold_copy(copies, grad, layout)
            call.place(for_weight)
            _with_cudnn(gpu, workspaces.weight_gradient, shape)


def unlike_input(call: OpCall, name: str, common: torch.device, device: torch.device) -> RuntimeError:
    """A weight or bias of another type, or elsewhere: types are compared first (aten/src/ATen/native/Convolution.cpp).
    Those of two GPUs are the same. Then cuDNN refuses the weight, and the sum with the bias is one of two devices."""
    types = [Tensor.type(tensor) for tensor in (call["input"], call[name])]
    if types[0] != types[1]:
        return RuntimeError(f"Input type ({types[0]}) and {name} type ({types[1]}) should be the same")
    if name == "bias":
        return errors.two_devices(common, device)
    operator = "cudnn_convolution_transpose" if call["transposed"] else "cudnn_convolution"
    return errors.argument_elsewhere(operator, "weight", device, common)


_TIMES = OperatorClass(convolution_costs.forward, is_fusible=False, tf32_setting="conv", depends_on_strides=True)
_FORWARD = _TIMES._replace(arguments=DECIDING, flag=torch._C._get_cudnn_enabled)
_BACKWARD = _FORWARD._replace(formula=convolution_costs.backward, arguments=(*_FORWARD.arguments, "output_mask"))
OPERATORS = {
    "convolution": Row(_FORWARD, convolution, cpu_kernel=widened, mixture=unlike_input, refuses_more=True),
    "convolution_backward": Row(_BACKWARD, convolution_backward, cpu_kernel=widened),
}
