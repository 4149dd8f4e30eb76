"""Seconds of a convolution as cuDNN computes it: as products of matrices that are not stored. No torch here.

In fp16 and bf16 on tensor cores, a convolution is the product of (pixels, window x channels in) and (window x channels
in, channels out), in tiles as `cost_matmul` cuts them, or takes as long as its images, filters and results need to be
read and written once. cuDNN's kernels want channels last. Images in another order are rewritten before and after, which
takes a reading and a writing for all that the L2 cache does not hold.

The constants are in `figures/operators.toml`, with what they were fitted to.
"""

from __future__ import annotations

from math import prod

from virtual_gpus import figures
from virtual_gpus.arithmetic import rounded_up
from virtual_gpus.clock.cost_matmul import in_tiles
from virtual_gpus.clock.work import Cost, Operand, Operation, added_on_host

_FIGURES = figures.read("operators.toml")
_FITTED, _SUM = _FIGURES["convolutions"], _FIGURES["formulas"]["reduction"]
_TILES, _HOST = tuple(map(tuple, _FITTED["tiles"])), added_on_host("convolution")


def forward(operation: Operation) -> Cost:
    """With a bias, which a kernel of its own adds to the result (aten/src/ATen/native/cudnn/ConvShared.cpp)."""
    cost = _conv(operation, False, operation.inputs[0], operation.inputs[1], operation.outputs[0], 1)
    seconds = operation.kernel + operation.reading(2 * operation.outputs[0].nbytes)
    return _and(cost, seconds) if len(operation.inputs) > 2 else cost


def backward(operation: Operation) -> Cost:
    """With the gradient of a bias, which is a sum of its own."""
    gradient, images, filters = operation.inputs[:3]
    halves = sum(part.shape in (images.shape, filters.shape) for part in operation.outputs[:2])
    cost = _conv(operation, True, images, filters, gradient, max(1, halves))
    has_bias = len(filters.shape) > 2 and any(len(part.shape) == 1 for part in operation.outputs)
    seconds = _SUM["floor_of_many"] * operation.kernel + operation.reading(gradient.nbytes, _SUM["share"])
    return _and(cost, seconds) if has_bias else cost


def _and(cost: Cost, seconds: float) -> Cost:
    """One kernel more."""
    return cost._replace(seconds=cost.seconds + seconds, kernels=cost.kernels + 1)


def _conv(
    operation: Operation, backward: bool, images: Operand, filters: Operand, result: Operand, gradients: int
) -> Cost:
    conv, spec = _FITTED["backward" if backward else "forward"], operation.spec
    cores = operation.precision in spec.tensor_cores
    if cores and images.itemsize == 2 and len(filters.shape) > 2:
        return _in_two_bytes(operation, backward, images, filters, result, gradients)
    reached, window = spec.reached, prod(filters.shape[2:]) > 1
    groups = max(1, images.shape[1] // filters.shape[1]) if len(filters.shape) > 1 else 1
    flops = 2 * prod(result.shape) * prod(filters.shape[1:]) * gradients
    if cores and groups == 1 and len(filters.shape) > 2:
        flops = _in_tiles(images, filters, result, backward, gradients)
    if len(result.shape) > 1 and result.shape[1] != filters.shape[0]:  # transposed: filters are (in, out, ...)
        flops, groups = 2 * prod(images.shape) * prod(filters.shape[1:]) * gradients, 1
    speed = getattr(spec.flops, operation.precision) * (reached.tensor_conv if cores else reached.conv) * conv["share"]
    half = gradients / 2 if backward else 1
    floor = operation.kernel * (conv["floor"] + conv["window"] * window) * half
    if groups > 1 and filters.shape[1] == 1 and images.itemsize == 4:
        arithmetic = flops / (spec.flops.fp32 * conv["own_kernels"])
        once = gradients * operation.reading(images.nbytes + result.nbytes)
        return Cost(floor + max(arithmetic, once), max(1, round(conv["kernels"] * half)), _HOST)
    slower = max(1, min(groups, _FITTED["groups_on_cores"] if cores else _FITTED["simt_columns"] / filters.shape[1]))
    seconds = floor + flops / (speed / slower)
    if not (cores and _lie_last(images, filters)):
        passes = half * (1 if cores else _FITTED["passes_without_cores"])  # other kernels take both as they lie
        seconds += passes * operation.reading(conv["filters"] * filters.nbytes)
        seconds += half * operation.reading(conv["images"] * (images.nbytes + result.nbytes))
    return Cost(seconds, max(1, round(conv["kernels"] * half)), _HOST)


def _lie_last(images: Operand, filters: Operand) -> bool:
    """cuDNN's choice of an order: channels last if either operand has them last."""
    return images.channels_last or filters.channels_last


def _in_tiles(images: Operand, filters: Operand, result: Operand, backward: bool, gradients: int) -> float:
    """Operations of whole tiles: columns of channels that are not full cost as much as full ones."""
    taps, pixels = prod(filters.shape[2:]), prod(result.shape) / result.shape[1]
    out, into = filters.shape[0], filters.shape[1]
    rounded_out = rounded_up(out, _FITTED["columns"])
    if not backward:
        return 2 * pixels * taps * into * rounded_out
    wide, narrow = _FITTED["wide"], _FITTED["narrow"]
    columns = taps * rounded_up(into, wide) if into >= narrow else rounded_up(taps * into, narrow)
    flops = 2 * pixels * rounded_out * columns
    return flops + (2 * pixels * taps * out * rounded_up(into, _FITTED["columns"]) if gradients > 1 else 0)


# ---- in two bytes on tensor cores ------------------------------------------------------------------------------------


def _in_two_bytes(
    operation: Operation, backward: bool, images: Operand, filters: Operand, result: Operand, gradients: int
) -> Cost:
    if result.shape[1] != filters.shape[0]:  # transposed: the gradient of one from the result to the images
        images, result = result, images
    conv, last = _FITTED["backward" if backward else "forward"], _lie_last(images, filters)
    into, taps = filters.shape[1], prod(filters.shape[2:])
    groups = max(1, images.shape[1] // into)
    if into == 1 < groups:
        seconds = gradients * _depthwise(operation, backward, last, images, filters, result)
        return Cost(_FITTED["depthwise"]["floor"] * operation.kernel + seconds, gradients, _HOST)
    if backward and last and groups > 1 and (into not in _FITTED["fast_widths"] or groups % _FITTED["fast_groups"]):
        flops = 2 * gradients * prod(result.shape) * taps * into
        return Cost(flops / (operation.spec.flops.fp32 * _FITTED["slow_groups"] * into**0.5), gradients, _HOST)
    out, pixels = filters.shape[0] // groups, prod(result.shape) // result.shape[1]
    channels = into if groups > 1 else rounded_up(into, _FITTED["channels"])
    products = [(pixels, out, taps * channels)]
    if backward:
        before = max(1, prod(images.shape) // images.shape[1])
        products = [(out, taps * channels, pixels), (before, channels, max(1, taps * out * pixels // before))]
    once = operation.reading(images.nbytes + filters.nbytes + result.nbytes)
    reached = operation.spec.reached
    slower = reached.tensor / reached.conv_in_two_bytes
    times = (in_tiles(operation.spec, *sizes, groups, operation.precision, tiles=_TILES) for sizes in products)
    arithmetic = [slower * seconds for seconds, _ in times]
    seconds = sum(max(computing, once) for computing in arithmetic[:gradients])
    if last:
        return Cost(seconds, gradients, _HOST)
    half, flow = gradients / 2 if backward else 1, images.nbytes + result.nbytes
    held = min(flow, operation.spec.l2_bytes)
    seconds += half * operation.kernel * (conv["floor"] + conv["window"] * (taps > 1))
    seconds += half * operation.reading(conv["filters"] * filters.nbytes + conv["images"] * held)
    seconds += gradients * operation.reading(_FITTED["rewritten"] * (flow - held))
    return Cost(seconds, max(1, round(conv["kernels"] * half)), _HOST)


def _depthwise(
    operation: Operation, backward: bool, last: bool, images: Operand, filters: Operand, result: Operand
) -> float:
    """Each channel has its own filter, which is no work for tensor cores: mostly reading and writing."""
    flops = 2 * prod(result.shape) * prod(filters.shape[2:])
    fitted = _FITTED["depthwise"]
    share = (fitted["share_backward"] if backward else 1.0) if last else fitted["share_first"]
    arithmetic = flops / (operation.spec.flops.fp32 * fitted["arithmetic"])
    return max(arithmetic, operation.reading(images.nbytes + result.nbytes)) / share
