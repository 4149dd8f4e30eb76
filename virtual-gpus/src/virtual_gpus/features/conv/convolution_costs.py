"""Seconds of a convolution as cuDNN computes it: as products of matrices that are not stored. No torch here.
In fp16 and bf16 on tensor cores, a convolution is the product of (pixels, window x channels in) and (window x channels
in, channels out), in tiles as `in_tiles` cuts them, or takes as long as its images, filters and results need to be read
and written once. cuDNN's kernels want channels last. Images in another order are rewritten before and after, which
takes a reading and a writing for all that the L2 cache does not hold. figures.toml says what the constants rest on."""

from math import prod

from virtual_gpus import figures
from virtual_gpus.arithmetic import rounded_up
from virtual_gpus.clock.cost import REDUCTION
from virtual_gpus.clock.work import Cost, Operand, Operation
from virtual_gpus.features.blas import in_tiles
from virtual_gpus.features.conv.convolution_choice import DECIDING, choose, is_depthwise
from virtual_gpus.features.conv.workspaces import tiles_of_window

_FITTED = figures.beside(__file__)["time"]
_TILES, _HOST = tuple(map(tuple, _FITTED["tiles"])), _FITTED["host"]


class _Convolution:
    """What is asked for. wanted: of a backward pass, whose `result` is a gradient, if it wants images', if filters'."""

    def __init__(self, operation: Operation, images: Operand, filters: Operand, result: Operand, *wanted: bool):
        self.operation, self.images, self.filters, self.result = operation, images, filters, result
        self.wanted, self.calls = wanted, sum(wanted) or 1  # a call of cuDNN for each
        self.fitted = _FITTED["backward" if wanted else "forward"]  # backward: of both gradients
        self.part = sum(wanted) / 2 or 1  # of that
        self.taps = prod(filters.shape[2:])  # pixels of a filter
        how = [operation.arguments[name] for name in DECIDING]
        self.is_transposed, self.groups = how[:2]
        _, self.channels_last = choose(images, filters, *how, operation.flag)
        self.is_depthwise = is_depthwise(self.groups, self.groups * filters.shape[1])
        summed = images if self.is_transposed else result
        self.flops = 2 * prod(summed.shape) * prod(filters.shape[1:]) * self.calls  # without padding
        # The least seconds of all kernels, and how many there are, where some reorder images and filters.
        self.start = operation.kernel * (self.fitted["floor"] + self.fitted["window"] * (self.taps > 1)) * self.part
        self.kernels = max(1, round(self.fitted["kernels"] * self.part))


def forward(operation: Operation) -> Cost:
    """If there is a bias, another kernel adds it to the result (aten/src/ATen/native/cudnn/ConvShared.cpp)."""
    (images, filters, *bias), result = operation.inputs, operation.outputs[0]
    cost = _cost(_Convolution(operation, images, filters, result))
    added = operation.kernel + operation.reading(2 * result.nbytes)
    return Cost(cost.seconds + added, cost.kernels + 1, cost.host) if bias else cost


def backward(operation: Operation) -> Cost:
    """The gradient of a bias is a sum, by another kernel."""
    gradient, images, filters = operation.inputs[:3]
    *wanted, has_bias = operation.arguments["output_mask"]
    cost = _cost(_Convolution(operation, images, filters, gradient, *wanted)) if any(wanted) else Cost(0.0, 0, _HOST)
    seconds = REDUCTION["floor_of_many"] * operation.kernel
    seconds += operation.reading(gradient.nbytes, REDUCTION["share"])
    return Cost(cost.seconds + seconds, cost.kernels + 1, cost.host) if has_bias else cost


def _cost(conv: _Convolution) -> Cost:
    if not conv.flops:  # no channel, no image
        return Cost(conv.operation.kernel, 1, _HOST)
    cores = conv.operation.precision in conv.operation.spec.tensor_cores
    if cores and conv.images.itemsize == 2:
        return _in_two_bytes(conv)
    if conv.is_depthwise and not conv.is_transposed and conv.images.itemsize == 4:  # cuDNN's were not measured
        return Cost(conv.start + _depthwise(conv, conv.fitted["own_kernels"]), conv.kernels, _HOST)
    return _in_four_bytes(conv, cores)


def _depthwise(conv: _Convolution, arithmetic: float) -> float:
    """Each channel has its own filter, which is no work for tensor cores. arithmetic: share of the fp32 peak."""
    once = conv.calls * conv.operation.reading(conv.images.nbytes + conv.result.nbytes)
    return max(conv.flops / (conv.operation.spec.flops.fp32 * arithmetic), once)


# ---- in four bytes, and without tensor cores -------------------------------------------------------------------------


def _in_four_bytes(conv: _Convolution, cores: bool) -> Cost:
    """At a share of the peak. A group that is narrower than a tile leaves a part of it idle."""
    spec, filters, groups = conv.operation.spec, conv.filters, 1 if conv.is_transposed else conv.groups
    peak = spec.flops_of(conv.operation.precision)
    speed = peak * (spec.reached.tensor_conv if cores else spec.reached.conv) * conv.fitted["share"]
    slower = max(1, min(groups, _FITTED["groups_on_cores"] if cores else _FITTED["simt_columns"] / filters.shape[1]))
    whole_tiles = cores and groups == 1 and not conv.is_transposed
    seconds = conv.start + (_flops_in_tiles(conv) if whole_tiles else conv.flops) / (speed / slower)
    if not (cores and conv.channels_last):
        passes = conv.part * (1 if cores else _FITTED["passes_without_cores"])  # other kernels take both as they lie
        seconds += passes * conv.operation.reading(conv.fitted["filters"] * filters.nbytes)
        seconds += conv.part * conv.operation.reading(conv.fitted["images"] * (conv.images.nbytes + conv.result.nbytes))
    return Cost(seconds, conv.kernels, _HOST)


def _flops_in_tiles(conv: _Convolution) -> float:
    """Operations of whole tiles: columns of channels that are not full cost as much as full ones."""
    pixels, (out, into) = prod(conv.result.shape) / conv.result.shape[1], conv.filters.shape[:2]
    rounded_out = rounded_up(out, _FITTED["columns"])
    if not conv.wanted:
        return 2 * pixels * conv.taps * into * rounded_out
    of_images, of_filters = conv.wanted
    across, columns = tiles_of_window(into, conv.taps)
    flops = of_filters * 2 * pixels * rounded_out * across * columns
    return flops + of_images * 2 * pixels * conv.taps * out * rounded_up(into, _FITTED["columns"])


# ---- in two bytes on tensor cores ------------------------------------------------------------------------------------


def _in_two_bytes(conv: _Convolution) -> Cost:
    if conv.is_transposed:  # the gradient of one from the result to the images
        conv.images, conv.result = conv.result, conv.images
    if conv.is_depthwise:
        fitted = _FITTED["depthwise"]  # mostly reading and writing, at a share of the bandwidth
        share = (fitted["share_backward"] if conv.wanted else 1.0) if conv.channels_last else fitted["share_first"]
        seconds = _depthwise(conv, fitted["arithmetic"]) / share
        return Cost(fitted["floor"] * conv.operation.kernel + seconds, conv.calls, _HOST)
    is_fast = conv.filters.shape[1] in _FITTED["fast_widths"] and conv.groups % _FITTED["fast_groups"] == 0
    if conv.wanted and conv.channels_last and conv.groups > 1 and not is_fast:  # cuDNN has no kernel on tensor cores
        speed = conv.operation.spec.flops.fp32 * _FITTED["slow_groups"] * conv.filters.shape[1] ** 0.5
        return Cost(conv.flops / speed, conv.calls, _HOST)
    seconds = _in_products(conv)
    return Cost(seconds, conv.calls, _HOST) if conv.channels_last else _reordered(conv, seconds)


def _in_products(conv: _Convolution) -> float:
    """Seconds of a product for each call, in tiles, or of reading and writing everything once."""
    images, filters, result, groups, spec = conv.images, conv.filters, conv.result, conv.groups, conv.operation.spec
    how = groups, conv.operation.precision
    out, pixels = filters.shape[0] // groups, prod(result.shape) // result.shape[1]
    into = filters.shape[1] if groups > 1 else rounded_up(filters.shape[1], _FITTED["channels"])
    products = [(pixels, out, conv.taps * into)]
    if conv.wanted:
        before = max(1, prod(images.shape) // images.shape[1])
        both = (before, into, max(1, conv.taps * out * pixels // before)), (out, conv.taps * into, pixels)
        products = [sizes for sizes, wanted in zip(both, conv.wanted, strict=True) if wanted]
    once = conv.operation.reading(images.nbytes + filters.nbytes + result.nbytes)
    slower = spec.reached.tensor / spec.reached.conv_in_two_bytes
    return sum(max(slower * in_tiles(spec, *s, *how, tiles=_TILES)[0], once) for s in products)


def _reordered(conv: _Convolution, seconds: float) -> Cost:
    """The kernels' seconds, and those that bring the channels last and back: the L2 cache holds a part of them."""
    operation, flow = conv.operation, conv.images.nbytes + conv.result.nbytes
    held = min(flow, operation.spec.l2_bytes)
    moved = conv.fitted["filters"] * conv.filters.nbytes + conv.fitted["images"] * held
    seconds = seconds + conv.start + conv.part * operation.reading(moved)
    seconds += conv.calls * operation.reading(_FITTED["rewritten"] * (flow - held))
    return Cost(seconds, conv.kernels, _HOST)
