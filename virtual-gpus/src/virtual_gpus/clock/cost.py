"""Seconds of an operator on a GPU, from its sizes and the GPU's data sheet. No torch here.

    cost("add", (Operand((1024, 1024), 4),) * 2, (Operand((1024, 1024), 4),), spec("H200"), "fp32").seconds

An operator takes the longer of what its arithmetic and its bytes need, and no less than a kernel takes at all. What
matters is what CUDA runs, not what the CPU runs: fused kernels, several kernels per operator, reductions that too few
threads can share. Operators are in classes, each with a formula. Constants were fitted to a real H200, and stand in
`figures/operators.toml`. One that is in no class reads its inputs and writes its results once, as most do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import ceil, prod
from typing import NamedTuple

from virtual_gpus import figures
from virtual_gpus.clock.cost_conv import backward, forward
from virtual_gpus.clock.cost_matmul import product
from virtual_gpus.clock.work import Cost, Operand, Work

_FIGURES = figures.read("operators.toml")
_FITTED = _FIGURES["formulas"]


class _Class(NamedTuple):
    """A class of operators: its formula, and what else follows from how CUDA computes it."""

    cost: Callable[[Work], Cost]
    is_fusible: bool = True
    tf32_setting: str = ""
    depends_on_strides: bool = False


def cost(name, inputs, outputs, spec, precision: str = "fp32", first: int = 0) -> Cost:
    """What the ATen operator `name` (no overload) takes on a GPU of `spec`. first: the length of its first list."""
    return _class_of(name).cost(Work(name, tuple(inputs), tuple(outputs), spec, precision, first))


def is_fusible(name: str) -> bool:
    """True if a compiler fuses the operator with its neighbours: it computes no products and serves no optimizer."""
    return _class_of(name).is_fusible


def tf32_setting(name: str) -> str:
    """The setting that lets the operator multiply fp32 numbers as TF32: "matmul", "conv", or "" if there is none."""
    return _class_of(name).tf32_setting


def depends_on_strides(name: str) -> bool:
    """True if how its tensors lie in memory decides how long the operator takes."""
    return _class_of(name).depends_on_strides


def _class_of(name: str) -> _Class:
    return _LISTS if name.startswith(("_foreach_", "_fused_")) else _CLASSES.get(name, _PLAIN)


def _moving(nbytes: Callable[[Work], float], floor: float, kernels: int = 1, share: float = 1.0):
    """An operator that takes its start, in shortest kernels, and as long as it moves bytes, at a share of the speed."""

    def of(work: Work) -> Cost:
        return Cost(floor * work.kernel + work.reading(nbytes(work), share), kernels)

    return of


def _sum(operands: Iterable[Operand]) -> int:
    return sum(part.nbytes for part in operands)


_CHUNK, _CHUNKS = 65536, 320  # elements, and chunks of a launch (aten/src/ATen/native/cuda/MultiTensorApply.cuh)


def _lists(work: Work) -> Cost:
    """Optimizers: a kernel for some tensors, in chunks of which a launch takes a number at most."""
    inputs, first, fitted = work.inputs, work.inputs[: work.first], _FITTED["lists"]
    if work.name.startswith("_foreach_addcmul"):
        inputs = inputs[: 2 * work.first]  # both factors are the gradient, in every optimizer
    written = work.outputs or first * (3 if work.name.startswith("_fused_adam") else 1)
    elements = sum(prod(part.shape) for part in first)
    kernels = max(1, ceil(work.first / fitted["tensors"])) + elements // (_CHUNKS * _CHUNK)
    share = fitted["share"] if work.outputs else fitted["share_in_place"]
    return Cost(kernels * work.kernel + work.reading(_sum((*inputs, *written)), share), kernels, "list")


# ---- matrices --------------------------------------------------------------------------------------------------------


def _mm(work: Work) -> Cost:
    first, second = work.inputs[-2:]
    with_bias = work.name.startswith(("addmm", "_addmm")) and len(work.inputs) > 2
    aligned = all(part.leading * part.itemsize % 16 == 0 for part in (first, second, *work.outputs[:1]))
    sizes = first.shape[-2], second.shape[-1], first.shape[-1], prod(first.shape[:-2])
    seconds, kernels = product(work.spec, *sizes, work.precision, with_bias, aligned)
    return Cost(seconds, kernels, "product")


def _mv(work: Work) -> Cost:
    return Cost(_FITTED["vector"]["floor"] * work.kernel + work.reading(work.nbytes), 1, "product")


# ---- normalization, softmax, reductions, losses ----------------------------------------------------------------------


def _batch_norm(work: Work) -> Cost:
    """A block of threads per channel: few channels leave the GPU half idle, unless the channels are last."""
    backward = not work.name.endswith("norm")
    images, fitted = work.inputs[backward], _FITTED["batch_norm"]
    channels = images.shape[1] if len(images.shape) > 1 else 1
    direction = _FITTED["batch_norm_backward" if backward else "batch_norm_forward"]
    waves = channels / work.spec.multi_processor_count
    if work.precision == "bf16" and len(images.shape) > 2 and not images.channels_last:
        # PyTorch's own kernels: a block of threads goes through the pieces of its channel one after the other
        chain = direction["chain"] + direction["per_number"] * (images.nbytes / 2 / channels)
        return Cost((fitted["chain"] + max(1.0, waves) * chain) * work.kernel + work.reading(images.nbytes), 3)
    share = direction["share_channels_last"]
    if not images.channels_last:
        busy = channels / (fitted["waves"] * work.spec.multi_processor_count)
        share = min(1.0, max(fitted["least"], busy)) * direction["share"]
    return Cost(fitted["floor"] * work.kernel + work.reading(images.nbytes * (3 if backward else 2), share), 1)


def _group_norm(work: Work) -> Cost:
    """A block of threads per sample and group, which the statistics count: few of them leave the GPU half idle."""
    fitted, blocks = _FITTED["group_norm"], prod(work.outputs[1].shape) if len(work.outputs) > 1 else 1
    busy = min(fitted["share"], blocks / (fitted["waves"] * work.spec.multi_processor_count))
    images = work.inputs[0].nbytes
    return Cost(fitted["floor"] * work.kernel + work.reading(images, busy) + work.reading(2 * images), 2)


def _pool_backward(work: Work) -> Cost:
    fitted = _FITTED["pool_backward"]
    share = fitted["share_channels_last" if work.inputs[1].channels_last else "share"]
    return Cost(fitted["floor"] * work.kernel + work.reading(work.nbytes, share), 1)


def _reduction(work: Work) -> Cost:
    """Few results of many numbers: threads leave partial sums, and the last block adds them up."""
    inputs, results = (sum(prod(p.shape) for p in parts) for parts in (work.inputs, work.outputs))
    fitted = _FITTED["reduction"]
    far = inputs > fitted["numbers_per_result"] * max(1, results) and inputs > fitted["numbers"]
    floor = fitted["floor_of_many" if far else "floor"] * work.kernel
    return Cost(floor + work.reading(work.nbytes, fitted["share"]), 2 if far else 1)


def _nll(work: Work) -> Cost:
    """The loss of classes: one thread adds up many rows."""
    fitted, forward = _FITTED["nll_loss"], work.name.endswith("forward")
    rows, per_row = work.inputs[not forward].shape[0], fitted["per_row" if forward else "per_row_backward"]
    written = 0 if forward else _sum(work.outputs)
    return Cost(work.kernel * (fitted["floor"] + per_row * rows) + work.reading(written), 1 if not written else 2)


INDICES_WALKED = 3072  # by one block of threads; more are sorted (aten/src/ATen/native/cuda/Embedding.cu)


def _embedding_backward(work: Work) -> Cost:
    numbers, fitted = prod(work.inputs[1].shape), _FITTED["embedding_backward"]
    written = work.outputs[0].nbytes + work.inputs[0].nbytes
    floor = fitted["floor"] + fitted["per_number"] * min(numbers, INDICES_WALKED)
    return Cost(work.kernel * floor + work.reading(written), 2 if numbers <= INDICES_WALKED else 8)


# What operators that only move bytes read and write, by the name of their row among the fitted figures.
_MOVED: dict[str, Callable[[Work], float]] = {
    "rows_taken": lambda work: 2 * _sum(work.outputs),  # lookups: only the rows that are asked for are read
    "rows_added": lambda work: 3 * work.inputs[-1].nbytes,  # only the rows that are named are read and written
    "zeros_and_values": lambda work: _sum(work.outputs) + 2 * _sum(work.inputs),
    "fill": lambda work: _sum(work.outputs or work.inputs[:1]),
    # FSDP2's copies out of a gathered tensor, and of gradients into one: each byte is read once and written once.
    "split": lambda work: 2 * work.inputs[0].nbytes,
    "chunked": lambda work: _sum(work.inputs),
    # FSDP2's copy of a rank's own part, the first result, into the tensor that is to be gathered, the second. A batch
    # norm with kept statistics takes as long.
    "copied_in": lambda work: 2 * work.outputs[0].nbytes,
}


def _moves(row: str, is_fusible: bool = True) -> _Class:
    return _Class(_moving(_MOVED[row], **_FITTED[row]), is_fusible)


_PLAIN = _Class(_moving(lambda work: work.nbytes, 1))
_LISTS = _Class(_lists, is_fusible=False)
_PRODUCT = _Class(_mm, is_fusible=False, tf32_setting="matmul", depends_on_strides=True)
_VECTOR = _Class(_mv, is_fusible=False)
_CONVOLUTION, _CONVOLUTION_BACKWARD = (
    _Class(formula, is_fusible=False, tf32_setting="conv", depends_on_strides=True) for formula in (forward, backward)
)
_BATCH_NORM = _Class(_batch_norm, depends_on_strides=True)
_FREE = _Class(_moving(lambda work: 0, 0, 0), is_fusible=False)

_CLASSES = {
    **{name: _Class(_moving(lambda work: work.nbytes, **row)) for name, row in _FIGURES["rows"].items()},
    **dict.fromkeys(("mm", "addmm", "bmm", "baddbmm", "addmm_", "baddbmm_", "_addmm_activation"), _PRODUCT),
    **dict.fromkeys(("mv", "addmv", "dot", "vdot", "ger", "addr"), _VECTOR),
    **dict.fromkeys(("convolution", "convolution_overrideable"), _CONVOLUTION),
    **dict.fromkeys(("convolution_backward", "convolution_backward_overrideable"), _CONVOLUTION_BACKWARD),
    **dict.fromkeys(("native_batch_norm", "native_batch_norm_backward"), _BATCH_NORM),
    "native_group_norm": _Class(_group_norm),
    "max_pool2d_with_indices_backward": _Class(_pool_backward, depends_on_strides=True),
    **dict.fromkeys(("nll_loss_forward", "nll_loss2d_forward", "nll_loss_backward", "nll_loss2d_backward"),
                    _Class(_nll)),
    **dict.fromkeys(("embedding", "index_select", "gather", "index"), _moves("rows_taken")),
    "index_add_": _moves("rows_added"),
    "embedding_dense_backward": _Class(_embedding_backward, is_fusible=False),
    **dict.fromkeys(("select_backward", "slice_backward"), _moves("zeros_and_values")),
    **dict.fromkeys(("sum", "mean", "prod", "amax", "amin", "nansum", "linalg_vector_norm", "norm", "argmax", "argmin",
                "max", "min", "var", "std", "var_mean", "std_mean", "all", "any"), _Class(_reduction)),
    **dict.fromkeys(("zero_", "fill_", "zeros", "ones", "full", "zeros_like", "ones_like", "full_like", "new_zeros",
                "new_ones", "new_full", "arange", "bernoulli_", "normal_", "uniform_", "random_", "randn", "rand",
                "randint"), _moves("fill")),
    **dict.fromkeys(("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view", "set_",
                "resize_", "lift_fresh", "record_stream", "_reshape_alias", "record_grad_output_stream"), _FREE),
    # timed where they run, because it matters whether they are causal
    **dict.fromkeys((f"_scaled_dot_product_{kernel}_attention{direction}" for kernel in ("flash", "efficient", "cudnn")
                for direction in ("", "_backward")), _FREE),
    "split_with_sizes_copy": _moves("split", is_fusible=False),
    **dict.fromkeys(("chunk_cat", "chunk_cat_mixed_dtype"), _moves("chunked", is_fusible=False)),
    **dict.fromkeys(("all_gather_copy_in", "batch_norm_elemt"), _moves("copied_in", is_fusible=False)),
}  # fmt: skip
