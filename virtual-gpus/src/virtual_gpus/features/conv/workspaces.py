"""Workspaces of cuDNN's convolutions: sizes from shapes, no torch.
cuDNN picks one of its kernels by a heuristic that is not published; a workspace holds what that kernel needs. So the
rules below are an estimate. Their kinds of buffers (layout copies, partial sums, tiles of Winograd's and of Fourier's
transform, tables of offsets) follow from how such kernels work; when which is used, and all constants, were chosen on
cases measured on an H200. figures.toml tells which, what each rule rests on, and what is known to be off."""

from collections.abc import Callable
from math import prod
from typing import NamedTuple

from virtual_gpus import figures
from virtual_gpus.arithmetic import ceil_div, rounded_up
from virtual_gpus.features.conv.convolution_choice import is_depthwise

_WINOGRAD_TILE = 4  # outputs per side; 6x6 numbers each, once transformed
_FOURIER_TILE = 32  # numbers per side
_FOURIER_FILTER = 5  # pixels per side of the smallest filter
FITTED, _TILES = (figures.beside(__file__)[part] for part in ("memory", "tiles"))  # `leave_one_out` tries other FITTED
_TILE, _NARROW = _TILES["wide"], _TILES["narrow"]  # rows and columns of the output, columns of the narrowest


class Shape(NamedTuple):
    """One convolution as cuDNN sees it. A transposed one has its input and output swapped.

    channels, filters: of the input and the output, over all groups. image, kernel, output: spatial sizes.
    itemsize: bytes per number. channels_last: True if all tensors are NHWC already. sms: multiprocessors of the GPU.
    """

    batch: int
    channels: int
    filters: int
    groups: int
    image: tuple[int, ...]
    kernel: tuple[int, ...]
    output: tuple[int, ...]
    strided: bool
    itemsize: int
    channels_last: bool
    tensor_cores: bool
    sms: int

    @property
    def pixels(self) -> int:
        """Output pixels of the whole batch."""
        return self.batch * prod(self.output)


Step = Callable[[Shape], int]  # of a convolution: gives the bytes of its workspace


def forward(shape: Shape) -> int:
    """Bytes of the forward's workspace (the input gradient's, of a transposed convolution)."""
    if is_depthwise(shape.groups, shape.channels):
        return 0
    if not shape.tensor_cores:
        return _offsets(shape)
    padded = _whole_vectors(shape) if shape.itemsize < 4 else shape.channels
    return _total(_input(shape, padded), _filters(shape, padded), _output(shape) if _turns_output(shape) else 0)


def _turns_output(shape: Shape) -> bool:
    """Whether the forward's kernel writes channels last."""
    taps = prod(shape.kernel)
    if taps == 1:
        return shape.strided
    fills = ceil_div(shape.pixels, _TILE) * ceil_div(shape.filters, _TILE) >= shape.sms
    return fills or shape.channels < 4 or shape.channels // shape.groups * taps >= FITTED["deep_sum"]


def data_gradient(shape: Shape) -> int:
    """Bytes of the input gradient's workspace (the forward's, of a transposed convolution)."""
    if is_depthwise(shape.groups, shape.channels) or not shape.tensor_cores:
        return 0
    pointwise, to_one_pixel = prod(shape.kernel) == 1, prod(shape.output) == 1
    if pointwise and not shape.strided:
        return _total(_output(shape))
    padded = max(shape.channels, 8) if shape.groups == 1 and not pointwise else shape.channels
    images, filters = _input(shape, padded) + _output(shape), _filters(shape, shape.channels)
    if not to_one_pixel and (pointwise or filters > 2 * images > 0):
        return 0
    return _total(images, filters, _sums_of_one_pixel(shape) if prod(shape.image) == 1 and to_one_pixel else 0)


def _sums_of_one_pixel(shape: Shape) -> int:
    """Partial sums of the input gradient's whole tiles."""
    tiles = shape.groups * ceil_div(shape.batch, _TILE) * ceil_div(shape.channels // shape.groups, _TILE)
    parts = min(shape.sms // tiles, shape.filters // shape.groups * prod(shape.kernel) // FITTED["shortest_sum"])
    return parts * tiles * _TILE**2 * 4 if parts > 1 else 0


def weight_gradient(shape: Shape) -> int:
    """Bytes of the filter gradient's workspace."""
    if is_depthwise(shape.groups, shape.channels):
        return 0
    if not shape.tensor_cores or prod(shape.output) == 1 < prod(shape.kernel):
        return _offsets(shape)
    for takes, nbytes in ((_takes_winograd, _winograd), (_takes_fourier, _fourier), (_takes_sums, _sums)):
        if takes(shape):
            return nbytes(shape)
    padded = _whole_vectors(shape)
    parts = _parts(shape, padded)
    filters = shape.filters * padded // shape.groups * prod(shape.kernel)
    sums = parts * filters * 4 + FITTED["split"] if parts > 1 else 0
    in_order = sums and shape.itemsize < 4  # rounding the sums to 2 bytes puts them in order as well
    return _total(_input(shape, padded), _output(shape), 0 if in_order else _filters(shape, padded), sums)


def largest(step: Step, shape: Shape) -> int:
    """Bytes of the largest workspace among a step's kernels: its own, or Winograd's of a 3x3 convolution."""
    own = step(shape)
    return max(own, _winograd(shape)) if _knows_winograd(shape) else own


def _total(*sizes: int) -> int:
    return sum(sizes) + FITTED["copy"] if any(sizes) else 0


def _input(shape: Shape, padded: int) -> int:
    """A copy of the input, unless it is in order already."""
    is_ready = padded == shape.channels and (shape.channels_last or prod(shape.image) == 1)
    return 0 if is_ready else shape.batch * padded * prod(shape.image) * shape.itemsize


def _output(shape: Shape) -> int:
    is_ready = shape.channels_last or prod(shape.output) == 1
    return 0 if is_ready else shape.pixels * shape.filters * shape.itemsize


def _filters(shape: Shape, padded: int) -> int:
    is_ready = padded == shape.channels and (shape.channels_last or prod(shape.kernel) == 1)
    return 0 if is_ready else shape.filters * padded // shape.groups * prod(shape.kernel) * shape.itemsize


def _whole_vectors(shape: Shape) -> int:
    """Channels in whole vectors of 16 bytes, as tensor cores want them; groups are left as they are."""
    return shape.channels if shape.groups > 1 else rounded_up(shape.channels, 16 // shape.itemsize)


def _parts(shape: Shape, padded: int) -> int:
    """Into how many parts the sum over pixels is split."""
    across, _ = tiles_of_window(padded // shape.groups, prod(shape.kernel))
    tiles = shape.groups * ceil_div(shape.filters // shape.groups, _TILE) * across
    return max(1, min(shape.sms // tiles, shape.pixels // FITTED["shortest_part"]))


def tiles_of_window(channels: int, taps: int) -> tuple[int, int]:
    """(tiles, columns of each) across a filter's gradient. One covers channels of one filter tap, if they fill it."""
    if channels < _NARROW:
        return ceil_div(taps * channels, _NARROW), _NARROW
    return taps * ceil_div(channels, _TILE), _TILE


def _is_plain(shape: Shape) -> bool:
    """What the three ways below can do: fp32 as PyTorch lays it out, without groups and strides."""
    return shape.groups == 1 and not shape.strided and not shape.channels_last and shape.itemsize == 4


def _knows_winograd(shape: Shape) -> bool:
    return _is_plain(shape) and shape.kernel == (3, 3)


def _takes_winograd(shape: Shape) -> bool:
    """It must pay to transform all filters for the few tiles that use them."""
    products = shape.channels * shape.filters * shape.pixels
    enough = max(shape.channels, shape.filters) <= shape.pixels <= FITTED["winograd_pixels"]
    return _knows_winograd(shape) and enough and products <= FITTED["winograd_products"]


def _winograd(shape: Shape) -> int:
    """The input's tiles, the gradient's tiles and their products, transformed."""
    tiles = shape.batch * prod(ceil_div(side, _WINOGRAD_TILE) for side in shape.output)
    numbers = tiles * (shape.channels + shape.filters) + shape.channels * shape.filters
    return (_WINOGRAD_TILE + 2) ** 2 * 4 * numbers


def _takes_fourier(shape: Shape) -> bool:
    """Filters of 5x5 and more on images that fit into one tile with their margin, if channels share the transforms."""
    taps, sides = shape.kernel, [o + k - 1 for o, k in zip(shape.output, shape.kernel, strict=True)]
    pays = min(shape.channels, shape.filters) >= FITTED["fourier_channels"] and min(taps) >= _FOURIER_FILTER
    return _is_plain(shape) and len(taps) == 2 and pays and max(sides) <= FITTED["fourier_side"]


def _fourier(shape: Shape) -> int:
    """Tiles of images and gradients, before and after they are put in order, and those of the filters."""
    planes = 2 * shape.batch * (shape.channels + shape.filters) + shape.channels * shape.filters
    return _FOURIER_TILE**2 * 4 * planes


def _takes_sums(shape: Shape) -> bool:
    """1x1 filters on images of two to four pixels: a matrix product for each image, whose results are added up."""
    few = prod(shape.kernel) == 1 < prod(shape.image) <= FITTED["few_pixels"]
    return _is_plain(shape) and few and _sums(shape) <= FITTED["largest_sums"]


def _sums(shape: Shape) -> int:
    """One set of filters in fp32 for each image."""
    return shape.batch * shape.filters * shape.channels * 4


def _offsets(shape: Shape) -> int:
    """A table with the offset of each element of a filter."""
    return shape.channels // shape.groups * prod(shape.kernel) * 4
