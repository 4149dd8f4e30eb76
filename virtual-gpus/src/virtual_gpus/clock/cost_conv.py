"""Seconds of a convolution as cuDNN computes it: as products of matrices that are not stored. No torch here.

In fp16 and bf16 on tensor cores, a convolution is the product of (pixels, window x channels in) and (window x channels
in, channels out), in tiles as `cost_matmul` cuts them, or takes as long as its images, filters and results need to be
read and written once. cuDNN's kernels want channels last. Images in another order are rewritten before and after, which
takes a reading and a writing for all that the L2 cache does not hold.

Fitted to images per second that timm published (results/benchmark-*.csv in github.com/huggingface/pytorch-image-models)
for about 90 networks on RTX 3090, 4090 and 5090, in both orders: the rows "fit" of `benchmarks.timm_rows`. `_TILES`:
dense convolutions. `_DEPTHWISE_BACKWARD`: ten networks for phones. `_SLOW_GROUPS`: 20 RegNets, ResNeSts and RepVGGs
under PyTorch 1.12. cuDNN still had no fast kernels for most grouped gradients with the channels last then; pytorch's
issue 34977 shows it on a V100. The constants of `_FORWARD` and `_BACKWARD` are those of an H200 in TF32 and bf16.
"""

from __future__ import annotations

from math import prod
from typing import NamedTuple

from virtual_gpus.clock.cost_matmul import in_tiles, tensor_cores
from virtual_gpus.clock.work import Cost, Operand, Work


class _Conv(NamedTuple):
    """Floors in microseconds of an H200, passes over filters and images; for channels that come first."""

    floor: float  # in shortest kernels
    window: float  # more where the window is larger than a pixel
    share: float  # of the speed that the forward pass reaches
    filters: float  # passes over the filters, to bring them into the kernel's order
    images: float
    kernels: int


_FORWARD = _Conv(4.9, 7.4, 1.0, 9.3, 0.8, 3)
CONVOLUTIONS_BACKWARD = 0.83  # share of the forward pass's speed
_BACKWARD = _Conv(15.1, 18.0, CONVOLUTIONS_BACKWARD, 24.0, 1.0, 7)
_COLUMNS, _WIDE, _NARROW = 64, 128, 32  # of a tile on tensor cores: numbers of channels

# In two bytes. Tiles as in `cost_matmul`; images are read and written once each to be rewritten.
_TILES = ((128, 256, 1.0), (128, 128, 0.95), (64, 64, 0.9))
_CHANNELS = 8  # fewer are padded to so many
_REWRITTEN = 2.0
# Depthwise: share of the fp32 peak, and of the bandwidth with the channels first; of a gradient's with them last.
_DEPTHWISE, _DEPTHWISE_FIRST, _DEPTHWISE_BACKWARD = 0.5, 0.5, 0.17
# Depthwise in fp32 and TF32, by PyTorch's own kernels (aten/src/ATen/native/cuda/DepthwiseConv2d.cu), whose threads
# compute more addresses than sums: shares of the fp32 peak. Forward: fitted to the inference of EfficientNet-B0 and B4
# on A100 and V100 (efficientnet/README.md in NVIDIA's DeepLearningExamples), within 12 %. Backward: to their training
# in TF32 on A100, two rows to fit to of `benchmarks.published`, within 8 %.
_NATIVE, _NATIVE_BACKWARD = 0.048, 0.0205
# Grouped without tensor cores: a group narrower than a tile leaves columns idle. RegNetX-400MF on V100, of 16 channels
# per group, is a row to fit to.
_SIMT_COLUMNS = 128
# Gradients of groups for which cuDNN has no kernel on tensor cores: share of the fp32 peak per root of the channels.
_SLOW_GROUPS = 0.0082
_FAST_WIDTHS, _FAST_GROUPS = (4, 8, 16, 32), 32  # the channels of a group, the multiple of groups


def forward(work: Work) -> Cost:
    """With a bias, which a kernel of its own adds to the result (aten/src/ATen/native/cudnn/ConvShared.cpp)."""
    images, filters = work.inputs[:2]
    cost = _conv(work, _FORWARD, images, filters, work.outputs[0], 1)
    return _and(cost, work.kernel + work.reading(2 * work.outputs[0].nbytes)) if len(work.inputs) > 2 else cost


def backward(work: Work) -> Cost:
    """With the gradient of a bias, which is a sum of its own."""
    gradient, images, filters = work.inputs[:3]
    halves = sum(part.shape in (images.shape, filters.shape) for part in work.outputs[:2])
    cost = _conv(work, _BACKWARD, images, filters, gradient, max(1, halves))
    has_bias = len(filters.shape) > 2 and any(len(part.shape) == 1 for part in work.outputs)
    return _and(cost, 7.2 * work.kernel + work.reading(gradient.nbytes, 0.9)) if has_bias else cost


def _and(cost: Cost, seconds: float) -> Cost:
    """One kernel more."""
    return cost._replace(seconds=cost.seconds + seconds, kernels=cost.kernels + 1)


def _conv(work: Work, conv: _Conv, images: Operand, filters: Operand, result: Operand, gradients: int) -> Cost:
    cores = tensor_cores(work.spec, work.precision)
    if cores and images.itemsize == 2 and len(filters.shape) > 2:
        return _in_two_bytes(work, conv, images, filters, result, gradients)
    reached, window = work.spec.reached, prod(filters.shape[2:]) > 1
    groups = max(1, images.shape[1] // filters.shape[1]) if len(filters.shape) > 1 else 1
    flops = 2 * prod(result.shape) * prod(filters.shape[1:]) * gradients
    if cores and groups == 1 and len(filters.shape) > 2:
        flops = _in_tiles(images, filters, result, conv is _BACKWARD, gradients)
    if len(result.shape) > 1 and result.shape[1] != filters.shape[0]:  # transposed: filters are (in, out, ...)
        flops, groups = 2 * prod(images.shape) * prod(filters.shape[1:]) * gradients, 1
    speed = getattr(work.spec.flops, work.precision) * (reached.tensor_conv if cores else reached.conv) * conv.share
    half = gradients / 2 if conv is _BACKWARD else 1
    floor = work.kernel * (conv.floor + conv.window * window) * half
    if groups > 1 and filters.shape[1] == 1 and images.itemsize == 4:
        share = _NATIVE_BACKWARD if conv is _BACKWARD else _NATIVE
        arithmetic = flops / (work.spec.flops.fp32 * share)
        once = gradients * work.reading(images.nbytes + result.nbytes)
        return Cost(floor + max(arithmetic, once), max(1, round(conv.kernels * half)), "convolution")
    slower = max(1, min(groups, 8 if cores else _SIMT_COLUMNS / filters.shape[1]))
    seconds = floor + flops / (speed / slower)
    if not (cores and _lie_last(images, filters)):
        passes = half if cores else half / 4  # other kernels take images and filters as they lie
        seconds += passes * work.reading(conv.filters * filters.nbytes)
        seconds += half * work.reading(conv.images * (images.nbytes + result.nbytes))
    return Cost(seconds, max(1, round(conv.kernels * half)), "convolution")


def _lie_last(images: Operand, filters: Operand) -> bool:
    """cuDNN's choice of an order: channels last if either operand has them last."""
    return images.channels_last or filters.channels_last


def _in_tiles(images: Operand, filters: Operand, result: Operand, backward: bool, gradients: int) -> float:
    """Operations of whole tiles: columns of channels that are not full cost as much as full ones."""
    taps, pixels = prod(filters.shape[2:]), prod(result.shape) / result.shape[1]
    out, into = filters.shape[0], filters.shape[1]
    if not backward:
        return 2 * pixels * taps * into * _rounded_up(out, _COLUMNS)
    columns = taps * _rounded_up(into, _WIDE) if into >= _NARROW else _rounded_up(taps * into, _NARROW)
    flops = 2 * pixels * _rounded_up(out, _COLUMNS) * columns
    return flops + (2 * pixels * taps * out * _rounded_up(into, _COLUMNS) if gradients > 1 else 0)


def _rounded_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit


# ---- in two bytes on tensor cores ------------------------------------------------------------------------------------


def _in_two_bytes(work, conv: _Conv, images: Operand, filters: Operand, result: Operand, gradients: int) -> Cost:
    if result.shape[1] != filters.shape[0]:  # transposed: the gradient of one from the result to the images
        images, result = result, images
    backward, last = conv is _BACKWARD, _lie_last(images, filters)
    into, taps = filters.shape[1], prod(filters.shape[2:])
    groups = max(1, images.shape[1] // into)
    if into == 1 < groups:
        seconds = gradients * _depthwise(work, backward, last, images, filters, result)
        return Cost(3 * work.kernel + seconds, gradients, "convolution")
    if backward and last and groups > 1 and (into not in _FAST_WIDTHS or groups % _FAST_GROUPS):
        flops = 2 * gradients * prod(result.shape) * taps * into
        return Cost(flops / (work.spec.flops.fp32 * _SLOW_GROUPS * into**0.5), gradients, "convolution")
    out, pixels = filters.shape[0] // groups, prod(result.shape) // result.shape[1]
    channels = into if groups > 1 else _rounded_up(into, _CHANNELS)
    products = [(pixels, out, taps * channels)]
    if backward:
        before = max(1, prod(images.shape) // images.shape[1])
        products = [(out, taps * channels, pixels), (before, channels, max(1, taps * out * pixels // before))]
    once = work.reading(images.nbytes + filters.nbytes + result.nbytes)
    reached = work.spec.reached
    slower = reached.tensor / reached.conv_in_two_bytes
    arithmetic = [slower * in_tiles(work.spec, *sizes, groups, work.precision, tiles=_TILES)[0] for sizes in products]
    seconds = sum(max(each, once) for each in arithmetic[:gradients])
    if last:
        return Cost(seconds, gradients, "convolution")
    half, flow = gradients / 2 if backward else 1, images.nbytes + result.nbytes
    held = min(flow, work.spec.l2_bytes)
    seconds += half * work.kernel * (conv.floor + conv.window * (taps > 1))
    seconds += half * work.reading(conv.filters * filters.nbytes + conv.images * held)
    seconds += gradients * work.reading(_REWRITTEN * (flow - held))
    return Cost(seconds, max(1, round(conv.kernels * half)), "convolution")


def _depthwise(work: Work, backward: bool, last: bool, images: Operand, filters: Operand, result: Operand) -> float:
    """Each channel has its own filter, which is no work for tensor cores: mostly reading and writing."""
    flops = 2 * prod(result.shape) * prod(filters.shape[2:])
    share = (_DEPTHWISE_BACKWARD if backward else 1.0) if last else _DEPTHWISE_FIRST
    return max(flops / (work.spec.flops.fp32 * _DEPTHWISE), work.reading(images.nbytes + result.nbytes)) / share
