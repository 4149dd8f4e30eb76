"""Which kernels CUDA takes for a convolution, for its memory and its time: cuDNN's or PyTorch's own. No torch here.
The rules are those of `_select_conv_backend` in aten/src/ATen/native/Convolution.cpp: PyTorch's own kernels for
depthwise convolutions channels first, and for all without cuDNN (`torch.backends.cudnn.enabled = False`)."""

from functools import lru_cache

from virtual_gpus.clock.work import Operand

Sizes = tuple[int, ...]
DECIDING = ("transposed", "groups", "stride", "output_padding")  # arguments of the operator, as `choose` takes them


def is_depthwise(groups: int, channels: int) -> bool:
    """Every channel has filters of its own. channels: of the images, those that a transposed convolution makes."""
    return groups > 1 and groups == channels


@lru_cache(maxsize=4096)
def choose(
    images: Operand, filters: Operand, transposed: bool, groups: int, stride: Sizes, output_padding: Sizes, cudnn: bool
) -> tuple[bool, bool]:
    """Whether cuDNN computes, and whether all tensors are to have the channels last.

    images, filters: `input` and `weight` of the operator, with strides. cudnn: if it is enabled.
    """
    if transposed:  # `is_output_padding_big`
        cudnn = cudnn and all(p < s for p, s in zip(output_padding, stride, strict=False))
    own = not transposed and is_depthwise(groups, images.shape[1])
    # One is enough, but never in double precision (`cudnn_conv_suggest_memory_format` in ConvUtils.h).
    last = images.itemsize < 8 and (images.channels_last or filters.channels_last)
    on_cudnn = cudnn and (last or not own)
    return on_cudnn, on_cudnn and last
