"""Seconds of an operator on a GPU, from its sizes and the GPU's data sheet. No torch here.

    cost("add", (Operand((1024, 1024), 4),) * 2, (Operand((1024, 1024), 4),), spec("H200"), "fp32").seconds

An operator takes the longer of what its arithmetic and its bytes need, and no less than a kernel takes at all. What
matters is what CUDA runs, not what the CPU runs: fused kernels, several kernels per operator, reductions that too few
threads can share. Operators are in classes; each has constants, fitted to a real H200 (see `clock.calibration`).
One that is in no class reads its inputs and writes its results once, as most do.
"""

from __future__ import annotations

from math import ceil, prod
from typing import NamedTuple

from virtual_gpus.clock.calibration import calibration
from virtual_gpus.clock.cost_matmul import peak, product, tensor_cores
from virtual_gpus.gpus import GPUSpec


class Operand(NamedTuple):
    """A tensor among the arguments or results: its shape and the bytes of an element."""

    shape: tuple[int, ...]
    itemsize: int

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return prod(self.shape) * self.itemsize


class Cost(NamedTuple):
    """seconds: of all its kernels on the GPU. kernels: how many the host starts. kind: "product", "convolution", ..."""

    seconds: float
    kernels: int
    kind: str = "operator"


class Work(NamedTuple):
    """One operator: name, arguments, results, the GPU, the precision of its products ("fp32", "tf32", ...), and how
    many tensors its first list has."""

    name: str
    inputs: tuple[Operand, ...]
    outputs: tuple[Operand, ...]
    spec: GPUSpec
    precision: str
    first: int = 0

    def reading(self, nbytes: float, share: float = 1.0) -> float:
        """Seconds to read or write bytes in GPU memory, at a share of the speed of an addition."""
        return nbytes / (self.spec.bandwidth * calibration(self.spec.kind).memory * share)

    @property
    def kernel(self) -> float:
        """Seconds of the shortest kernel."""
        return calibration(self.spec.kind).kernel

    @property
    def nbytes(self) -> int:
        """Bytes of all arguments and results."""
        return sum(part.nbytes for part in (*self.inputs, *self.outputs))


def cost(name, inputs, outputs, spec, precision: str = "fp32", first: int = 0) -> Cost:
    """What the ATen operator `name` (no overload) takes on a GPU of `spec`. first: the length of its first list."""
    work = Work(name, tuple(inputs), tuple(outputs), spec, precision, first)
    if name.startswith(("_foreach_", "_fused_")):
        return _lists(work)
    return _CLASSES.get(name, _plain)(work)


def _plain(work: Work) -> Cost:
    return Cost(work.kernel + work.reading(work.nbytes), 1)


def _lists(work: Work) -> Cost:
    """Optimizers: a kernel for some 45 tensors, in chunks of 64 Ki elements, of which a launch takes at most 320."""
    inputs, first = work.inputs, work.inputs[: work.first]
    if work.name.startswith("_foreach_addcmul"):
        inputs = inputs[: 2 * work.first]  # both factors are the gradient, in every optimizer
    written = work.outputs or first * (3 if work.name.startswith("_fused_adam") else 1)
    elements = sum(prod(part.shape) for part in first)
    kernels = max(1, ceil(work.first / 45)) + elements // (320 * 65536)
    share = 0.57 if work.outputs else 0.74
    return Cost(
        kernels * work.kernel + work.reading(sum(p.nbytes for p in (*inputs, *written)), share), kernels, "list"
    )


# ---- matrices --------------------------------------------------------------------------------------------------------


def _mm(work: Work) -> Cost:
    first, second = work.inputs[-2:]
    with_bias = work.name.startswith(("addmm", "_addmm")) and len(work.inputs) > 2
    seconds, kernels = product(
        work.spec, first.shape[-2], second.shape[-1], first.shape[-1], prod(first.shape[:-2]), work.precision, with_bias
    )
    return Cost(seconds, kernels, "product")


def _mv(work: Work) -> Cost:
    return Cost(work.kernel * 2 + work.reading(work.nbytes), 1, "product")


# ---- convolutions: floors in microseconds of an H200, passes over filters and images ---------------------------------


class _Conv(NamedTuple):
    floor: float  # in shortest kernels
    window: float  # more where the window is larger than a pixel
    share: float  # of the speed that the forward pass reaches
    filters: float  # passes over the filters, to bring them into the kernel's order
    images: float
    kernels: int


_FORWARD = _Conv(4.9, 7.4, 1.0, 9.3, 0.8, 3)
# Convolutions in fp16 and bf16 reach two thirds of the share of their peak that those in TF32 reach of theirs. Fitted
# to one figure: a ResNet-50 step in bf16 on the H200, whose seconds were not kept, was a third too fast without it.
_TWO_BYTES = 0.67
_COLUMNS, _WIDE, _NARROW = 64, 128, 32  # of a tile on tensor cores: numbers of channels
CONVOLUTIONS_BACKWARD = 0.83  # share of the forward pass's speed
_BACKWARD = _Conv(15.1, 18.0, CONVOLUTIONS_BACKWARD, 24.0, 1.0, 7)


def _convolution(work: Work) -> Cost:
    """With a bias, which a kernel of its own adds to the result (aten/src/ATen/native/cudnn/ConvShared.cpp)."""
    images, filters = work.inputs[:2]
    cost = _conv(work, _FORWARD, images, filters, work.outputs[0], 1)
    return _and(cost, work.kernel + work.reading(2 * work.outputs[0].nbytes)) if len(work.inputs) > 2 else cost


def _convolution_backward(work: Work) -> Cost:
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
    card, window = calibration(work.spec.kind), prod(filters.shape[2:]) > 1
    groups = max(1, images.shape[1] // filters.shape[1]) if len(filters.shape) > 1 else 1
    flops = 2 * prod(result.shape) * prod(filters.shape[1:]) * gradients
    if cores and groups == 1 and len(filters.shape) > 2:
        flops = _in_tiles(images, filters, result, conv is _BACKWARD, gradients)
    if len(result.shape) > 1 and result.shape[1] != filters.shape[0]:  # transposed: filters are (in, out, ...)
        flops, groups = 2 * prod(images.shape) * prod(filters.shape[1:]) * gradients, 1
    speed = peak(work.spec, work.precision) * (card.tensor_conv if cores else card.conv) * conv.share
    if cores and work.spec.capability >= (8, 0) and work.precision in ("fp16", "bf16"):
        speed *= _TWO_BYTES
    half = gradients / 2 if conv is _BACKWARD else 1
    seconds = work.kernel * (conv.floor + conv.window * window) * half + flops / (speed / min(groups, 8))
    passes = half if cores else half / 4  # other kernels take images and filters as they lie
    seconds += passes * work.reading(conv.filters * filters.nbytes)
    seconds += half * work.reading(conv.images * (images.nbytes + result.nbytes))
    return Cost(seconds, max(1, round(conv.kernels * half)), "convolution")


def _in_tiles(images: Operand, filters: Operand, result: Operand, backward: bool, gradients: int) -> float:
    """Operations of whole tiles: columns of channels that are not full cost as much as full ones."""
    taps, pixels = prod(filters.shape[2:]), prod(result.shape) / result.shape[1]
    out, into = filters.shape[0], filters.shape[1]
    if not backward:
        return 2 * pixels * taps * into * _padded(out, _COLUMNS)
    columns = taps * _padded(into, _WIDE) if into >= _NARROW else _padded(taps * into, _NARROW)
    flops = 2 * pixels * _padded(out, _COLUMNS) * columns
    return flops + (2 * pixels * taps * out * _padded(into, _COLUMNS) if gradients > 1 else 0)


def _padded(number: int, unit: int) -> int:
    return -(-number // unit) * unit


# ---- normalization, softmax, reductions, losses ----------------------------------------------------------------------


def _batch_norm(work: Work) -> Cost:
    """A block of threads per channel: few channels leave the GPU half idle."""
    images = work.inputs[0] if work.name.endswith("norm") else work.inputs[1]
    backward = not work.name.endswith("norm")
    channels = images.shape[1] if len(images.shape) > 1 else 1
    busy = min(1.0, max(0.3, channels / (1.5 * work.spec.multi_processor_count)))
    nbytes = images.nbytes * (3 if backward else 2)
    return Cost(3.2 * work.kernel + work.reading(nbytes, busy * (0.65 if backward else 1.0)), 1)


def _group_norm(work: Work) -> Cost:
    """A block of threads per sample and group, which the statistics count: few of them leave the GPU half idle."""
    blocks = prod(work.outputs[1].shape) if len(work.outputs) > 1 else 1
    busy = min(0.7, blocks / (4.8 * work.spec.multi_processor_count))
    images = work.inputs[0].nbytes
    return Cost(4.6 * work.kernel + work.reading(images, busy) + work.reading(2 * images), 2)


def _with(floor: float, share: float, kernels: int = 1):
    """A class whose constants are a floor in shortest kernels, and the share of an addition's speed."""

    def of(work: Work) -> Cost:
        return Cost(floor * work.kernel + work.reading(work.nbytes, share), kernels)

    return of


def _reduction(work: Work) -> Cost:
    """Few results of many numbers: threads leave partial sums, and the last block adds them up."""
    inputs, results = (sum(prod(p.shape) for p in parts) for parts in (work.inputs, work.outputs))
    far = inputs > 64 * max(1, results) and inputs > 32768
    return Cost((7.2 if far else 3.5) * work.kernel + work.reading(work.nbytes, 0.9), 2 if far else 1)


def _nll(per_row: float):
    def of(work: Work) -> Cost:
        rows = work.inputs[0].shape[0] if work.name.endswith("forward") else work.inputs[1].shape[0]
        written = 0 if work.name.endswith("forward") else sum(part.nbytes for part in work.outputs)
        return Cost(work.kernel * (1.5 + per_row * rows) + work.reading(written), 1 if not written else 2)

    return of


def _rows_taken(work: Work) -> Cost:
    """Lookups: only the rows that are asked for are read."""
    return Cost(1.5 * work.kernel + work.reading(2 * sum(part.nbytes for part in work.outputs)), 1)


def _embedding_backward(work: Work) -> Cost:
    """One block of threads walks through up to 3,072 numbers of words; more are sorted first."""
    numbers = prod(work.inputs[1].shape)
    written = work.outputs[0].nbytes + work.inputs[0].nbytes
    return Cost(work.kernel * (4 + 0.0245 * min(numbers, 3072)) + work.reading(written), 2 if numbers <= 3072 else 8)


def _two_kernels(work: Work) -> Cost:
    """Zeros first, then the part that has values."""
    nbytes = sum(part.nbytes for part in work.outputs) + 2 * sum(part.nbytes for part in work.inputs)
    return Cost(2 * work.kernel + work.reading(nbytes), 2)


def _fill(work: Work) -> Cost:
    nbytes = sum(part.nbytes for part in work.outputs or work.inputs[:1])
    return Cost(0.8 * work.kernel + work.reading(nbytes), 1)


def _rewritten(work: Work) -> Cost:
    """FSDP2's copies out of a gathered tensor, and of gradients into one: each byte is read once and written once."""
    nbytes = 2 * work.inputs[0].nbytes if work.name.startswith("split") else sum(part.nbytes for part in work.inputs)
    return Cost(work.kernel + work.reading(nbytes), 1)


def _copied_in(work: Work) -> Cost:
    """FSDP2's copy of a rank's own part, the first result, into the tensor that is to be gathered, the second."""
    return Cost(work.kernel + work.reading(2 * work.outputs[0].nbytes), 1)


def _free(work: Work) -> Cost:
    return Cost(0.0, 0)


_CLASSES = {
    **dict.fromkeys(("mm", "addmm", "bmm", "baddbmm", "addmm_", "baddbmm_", "_addmm_activation"), _mm),
    **dict.fromkeys(("mv", "addmv", "dot", "vdot", "ger", "addr"), _mv),
    **dict.fromkeys(("convolution", "convolution_overrideable"), _convolution),
    **dict.fromkeys(("convolution_backward", "convolution_backward_overrideable"), _convolution_backward),
    **dict.fromkeys(("native_batch_norm", "native_batch_norm_backward"), _batch_norm),
    "native_layer_norm": _with(4.6, 1.0),
    "native_layer_norm_backward": _with(9.5, 0.6, 3),
    "native_group_norm": _group_norm,
    "native_group_norm_backward": _with(9.5, 0.5, 3),
    "_log_softmax": _with(1.2, 0.57),
    "_softmax": _with(1.2, 0.57),
    "_safe_softmax": _with(4.0, 0.25, 5),
    "_log_softmax_backward_data": _with(1.0, 0.78),
    "_softmax_backward_data": _with(1.0, 0.78),
    "max_pool2d_with_indices": _with(1.5, 0.37),
    "max_pool2d_with_indices_backward": _with(2.0, 0.15),
    "nll_loss_forward": _nll(0.0074),
    "nll_loss2d_forward": _nll(0.0074),
    "nll_loss_backward": _nll(0.0033),
    "nll_loss2d_backward": _nll(0.0033),
    **dict.fromkeys(("embedding", "index_select", "gather", "index"), _rows_taken),
    "embedding_dense_backward": _embedding_backward,
    **dict.fromkeys(("select_backward", "slice_backward"), _two_kernels),
    **dict.fromkeys(("sum", "mean", "prod", "amax", "amin", "nansum", "linalg_vector_norm", "norm", "argmax", "argmin",
                     "max", "min", "var", "std", "var_mean", "std_mean", "all", "any"), _reduction),
    **dict.fromkeys(("sort", "topk", "unique", "_unique2", "argsort", "cumsum", "randperm"), _with(20.0, 0.1, 6)),
    **dict.fromkeys(("zero_", "fill_", "zeros", "ones", "full", "zeros_like", "ones_like", "full_like", "new_zeros",
                     "new_ones", "new_full", "arange", "bernoulli_", "normal_", "uniform_", "random_", "randn", "rand",
                     "randint"), _fill),
    **dict.fromkeys(("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view", "set_",
                     "resize_", "lift_fresh", "record_stream", "_reshape_alias", "record_grad_output_stream"), _free),
    **dict.fromkeys(("split_with_sizes_copy", "chunk_cat", "chunk_cat_mixed_dtype"), _rewritten),
    "all_gather_copy_in": _copied_in,
}  # fmt: skip
