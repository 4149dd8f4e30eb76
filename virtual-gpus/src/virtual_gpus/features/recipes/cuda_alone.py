"""Operators, and dtypes of operators, for which PyTorch has a kernel on CUDA alone: computed with others of the CPU.

Source: aten/src/ATen/native/cudnn (ConvShared.cpp, GridSampler.cpp), aten/src/ATen/native/cuda (SummaryOps.cu,
fused_adamw_impl.cu).
"""

from __future__ import annotations

import torch

from virtual_gpus.dispatch.op_call import OpCall
from virtual_gpus.features.conv.convolutions import convolution
from virtual_gpus.threads import below

_BILINEAR, _ZEROS = 0, 0  # as C++ counts the ways of grid_sample
_STATES_OF_ADAM = ("exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs")


def cudnn_convolution(call: OpCall):
    """cuDNN's own convolutions, which have no bias: what `aten.convolution` calls as well."""
    transposed = call.op.base == "cudnn_convolution_transpose"
    output_padding = call["output_padding"] if transposed else [0] * len(call["stride"])
    args = (call["self"], call["weight"], None, call["stride"], call["padding"], call["dilation"], transposed,
            output_padding, call["groups"])  # fmt: skip
    inner = OpCall(torch.ops.aten.convolution.default, args, {})
    inner.gpu = call.gpu
    return convolution(inner)


def cudnn_grid_sampler(call: OpCall):
    """cuDNN's `grid_sample`, which interpolates linearly between corners that are aligned."""
    with below():
        return call.place(torch.grid_sampler_2d(call["self"], call["grid"], _BILINEAR, _ZEROS, True))


def histc(call: OpCall):
    """CUDA counts integers too."""
    x = call["self"]
    if x.is_floating_point():
        return call.run()
    with below():
        return call.place(torch.histc(x.double(), call["bins"], call["min"], call["max"]).to(x.dtype))


def fused_adam(call: OpCall):
    """CUDA also takes parameters of float32 with states of bfloat16, and computes in float32."""
    first = [tensors[0].dtype for tensors in (call["self"], call["exp_avgs"]) if tensors]
    if first != [torch.float32, torch.bfloat16]:
        return call.compute()
    states = [call[name] for name in _STATES_OF_ADAM]
    with below():
        wide = [[state.float() for state in kind] for kind in states]
        call.func(call["self"], call["grads"], *wide, call["state_steps"], **call.kwargs)
        for state, result in zip(sum(states, []), sum(wide, []), strict=True):
            state.copy_(result)
    return None


RECIPES = {
    "_fused_adam_": fused_adam,
    "_fused_adamw_": fused_adam,
    "cudnn_convolution": cudnn_convolution,
    "cudnn_convolution_transpose": cudnn_convolution,
    "cudnn_grid_sampler": cudnn_grid_sampler,
    "histc": histc,
}
