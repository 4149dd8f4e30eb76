"""Convolutions on CUDA: cuDNN with its workspaces, PyTorch's own kernels for the rest.

Which library runs follows `_select_conv_backend` of aten/src/ATen/native/Convolution.cpp: PyTorch's own kernels for
depthwise convolutions channels first, else cuDNN. Without it (`torch.backends.cudnn.enabled = False`) no workspace is
modelled, as for the depthwise kernels. The order of blocks is that of aten/src/ATen/native/cudnn/ConvShared.cpp: packed
copies, the result, the workspace; backward the input's gradient first, then the filters', then the bias's, each with a
workspace of its own.
A workspace that does not fit is no error: PyTorch then tries cuDNN's other kernels, which need less (Conv_v8.cpp).

`torch.backends.cudnn.benchmark`: the first convolution of a shape tries all kernels, with the largest workspace among
them, and empties the cache afterwards. That largest one is an estimate, by Winograd's numbers: no real GPU was asked.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import lru_cache

import torch
from torch import Tensor

from virtual_gpus import errors
from virtual_gpus.clock.cost import OperatorClass
from virtual_gpus.dispatch.half_precision import MULTIPLIED, widened
from virtual_gpus.dispatch.operators import OpCall, Row
from virtual_gpus.dispatch.timing import precision_of
from virtual_gpus.features.conv import convolution_costs, workspaces
from virtual_gpus.machine import Kept, VirtualGPU
from virtual_gpus.memory.allocator import OutOfMemory
from virtual_gpus.placement.storages import CHANNELS_LAST, ScratchBlock, nbytes, scratch


def memory_format(tensor: Tensor) -> torch.memory_format:
    """What C++ calls `suggest_memory_format`: channels last only if the strides say so beyond doubt."""
    return _suggested(tensor.shape, tensor.stride())


@lru_cache(maxsize=4096)
def _suggested(sizes: torch.Size, strides: tuple[int, ...]) -> torch.memory_format:
    least = 0
    if len(strides) not in CHANNELS_LAST or strides[1] > strides[-1] or strides[1] == 0:
        return torch.contiguous_format
    for d in (1, *range(len(strides) - 1, 1, -1), 0):
        if sizes[d] == 0 or strides[d] < least or (d == 0 and least == strides[1]):
            return torch.contiguous_format
        least = strides[d] * max(sizes[d], 1)
    return CHANNELS_LAST[len(strides)]


def _layout(first: Tensor, second: Tensor) -> torch.memory_format:
    """Channels last if either tensor is (cudnn_conv_suggest_memory_format); never in double precision."""
    if first.dtype == torch.float64:
        return torch.contiguous_format
    layout = memory_format(first)
    return layout if layout is not torch.contiguous_format else memory_format(second)


def _on_cudnn(call: OpCall, x: Tensor, weight: Tensor) -> bool:
    """True if cuDNN computes; else kernels of PyTorch do."""
    if not torch._C._get_cudnn_enabled():
        return False
    if call["transposed"]:
        return all(p < s for p, s in zip(call["output_padding"], call["stride"], strict=False))
    depthwise = call["groups"] > 1 and x.shape[1] == call["groups"]
    return not depthwise or _layout(x, weight) is not torch.contiguous_format


def _shape(call: OpCall, x: Tensor, weight: Tensor, y: Tensor, layout: torch.memory_format) -> workspaces.Shape:
    """What decides about cuDNN's workspaces for `x -> y`; a transposed convolution is a gradient, from y to x."""
    large, kernel, small = (y, weight, x) if call["transposed"] else (x, weight, y)
    row = (1,) if x.dim() == 3 else ()  # 1d: images of one row
    image, window, out = ((*row, *tensor.shape[2:]) for tensor in (large, kernel, small))
    last, strided, spec = layout is not torch.contiguous_format, max(call["stride"]) > 1, call.gpu.spec
    return workspaces.Shape(large.shape[0], large.shape[1], small.shape[1], call["groups"], image, window, out, strided,
                            x.itemsize, last, precision_of("conv", [x.dtype]) in spec.tensor_cores,
                            spec.multi_processor_count)  # fmt: skip


_sizes = Kept(lambda gpu: dict[tuple[workspaces.Step, workspaces.Shape], int]())  # bytes, so far, by step


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


def _laid_out(tensor: Tensor | None, layout: torch.memory_format) -> Tensor | None:
    """The result in CUDA's order of channels; the CPU's kernels and the meta ones pick their own."""
    return None if tensor is None else tensor.contiguous(memory_format=layout)


def _packed(copies: ExitStack, gpu: VirtualGPU, tensor: Tensor, layout: torch.memory_format) -> None:
    """Have a packed copy of `tensor` until `copies` closes, unless it has this layout already."""
    if not tensor.is_contiguous(memory_format=layout):
        copies.enter_context(scratch(gpu, nbytes(tensor)))


# ---- forward -------------------------------------------------------------------------------------------------------


def convolution(call: OpCall) -> Tensor:
    """`aten::convolution`, of one, two or three dimensions, transposed or not."""
    x, weight = call["input"], call["weight"]
    if x.dtype not in MULTIPLIED:  # ATen/cudnn/Types.cpp, native/cudnn/Conv_v8.cpp: types it has, and no kernels for
        no_kernel = x.dtype in (torch.int32, torch.int8, torch.uint8)
        no_type = f"getCudnnDataTypeFromScalarType() not supported for {errors.scalar_type(x)}"
        raise RuntimeError("GET was unable to find an engine to execute this computation" if no_kernel else no_type)
    if call.op.written or not x.numel():  # `out=` decides the layout itself; nothing in, nothing to do
        return call.run()
    result, on_cudnn = call.compute(), _on_cudnn(call, x, weight)
    layout = _layout(x, weight) if on_cudnn else torch.contiguous_format
    with ExitStack() as copies:
        _packed(copies, call.gpu, x, layout)
        result = call.place(_laid_out(result, layout))
        _packed(copies, call.gpu, weight, layout)
        if on_cudnn:
            step = workspaces.data_gradient if call["transposed"] else workspaces.forward
            _with_cudnn(call.gpu, step, _shape(call, x, weight, result, layout))
    return result


# ---- backward ------------------------------------------------------------------------------------------------------


def convolution_backward(call: OpCall) -> tuple[Tensor | None, ...]:
    """`aten::convolution_backward`: gradients of input, filters and bias, as `output_mask` asks."""
    x, weight = call["input"], call["weight"]
    if call.op.written or not x.numel():
        return call.run()
    results = call.compute()
    gradients = _cudnn_gradients if _on_cudnn(call, x, weight) else _depthwise_gradients
    return (*gradients(call, results[0], results[1]), call.place(results[2]))


def _cudnn_gradients(call: OpCall, for_x: Tensor | None, for_weight: Tensor | None) -> tuple[Tensor | None, ...]:
    """Two calls of cuDNN. Each copies what is not packed for itself, and frees its copies."""
    grad, x, weight = call["grad_output"], call["input"], call["weight"]
    layout = _layout(x, weight)
    shape = _shape(call, x, weight, grad, layout)
    gpu, for_x, for_weight = call.gpu, _laid_out(for_x, layout), _laid_out(for_weight, layout)
    # `grad.to(memory_format)` compares what strides suggest, so a gradient that was expanded from one number passes as
    # packed, and each call copies it anew. A transposed convolution's backward asks for `contiguous` instead.
    packed = call["transposed"] or memory_format(grad) is not memory_format(x)
    with ExitStack() as copies, ExitStack() as held:
        if for_weight is not None:
            _packed(held, gpu, x, layout)
        if packed:
            _packed(held, gpu, grad, memory_format(x))
        if for_x is not None:
            call.place(for_x)
            _packed(copies, gpu, weight, layout)
            if not packed:
                _packed(copies, gpu, grad, layout)
            _with_cudnn(gpu, workspaces.forward if call["transposed"] else workspaces.data_gradient, shape)
            copies.close()
        if for_weight is not None:
            if not packed:
                _packed(copies, gpu, grad, layout)
            call.place(for_weight)
            _with_cudnn(gpu, workspaces.weight_gradient, shape)
    return for_x, for_weight


def _depthwise_gradients(call: OpCall, for_x: Tensor | None, for_weight: Tensor | None) -> tuple[Tensor | None, ...]:
    """PyTorch's own kernels (DepthwiseConv2d.cu, DepthwiseConv3d.cu): filters first, no workspace."""
    for_x, for_weight = (_laid_out(gradient, torch.contiguous_format) for gradient in (for_x, for_weight))
    with ExitStack() as copies:
        _packed(copies, call.gpu, call["grad_output"], torch.contiguous_format)
        _packed(copies, call.gpu, call["input"], torch.contiguous_format)
        call.place((for_weight, for_x))
    return for_x, for_weight


def weight_elsewhere(call: OpCall, name: str, common: torch.device, device: torch.device) -> RuntimeError | None:
    """A weight on another device: the types are compared first, and two GPUs have the same. Then cuDNN complains."""
    if name != "weight":
        return None
    if common.type == device.type:
        operator = "cudnn_convolution_transpose" if call["transposed"] else "cudnn_convolution"
        return errors.argument_elsewhere(operator, "weight", device, common)
    types = [Tensor.type(tensor) for tensor in call.args[:2]]  # aten/src/ATen/native/Convolution.cpp
    return RuntimeError(f"Input type ({types[0]}) and weight type ({types[1]}) should be the same")


_TIMES, _TIMES_BACKWARD = (
    OperatorClass(formula, is_fusible=False, tf32_setting="conv", depends_on_strides=True, arguments=("transposed",))
    for formula in (convolution_costs.forward, convolution_costs.backward)
)
OPERATORS = {
    "convolution": Row(_TIMES, convolution, cpu_kernel=widened, mixture=weight_elsewhere),
    "convolution_backward": Row(_TIMES_BACKWARD, convolution_backward, cpu_kernel=widened),
}
