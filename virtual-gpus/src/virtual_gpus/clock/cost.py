"""Seconds of an operator on a GPU, from its sizes and the GPU's data sheet. No torch here.

    cost("add", (Operand((1024, 1024), 4),) * 2, (Operand((1024, 1024), 4),), spec("H200"), "fp32").seconds

An operator takes the longer of what its arithmetic and its bytes need, and no less than a kernel takes at all. What
matters is what CUDA runs, not what the CPU runs: fused kernels, several kernels per operator, reductions that too few
threads can share. Operators are in classes. Their constants were fitted to a real H200, and stand in
`figures/operators.toml` or beside the formulas. One that is in no class reads its inputs and writes its results once,
as most do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import ceil, prod

from virtual_gpus import figures
from virtual_gpus.clock.cost_conv import backward, forward
from virtual_gpus.clock.cost_matmul import product
from virtual_gpus.clock.work import Cost, Operand, Work


def cost(name, inputs, outputs, spec, precision: str = "fp32", first: int = 0) -> Cost:
    """What the ATen operator `name` (no overload) takes on a GPU of `spec`. first: the length of its first list."""
    work = Work(name, tuple(inputs), tuple(outputs), spec, precision, first)
    if name.startswith(("_foreach_", "_fused_")):
        return _lists(work)
    return _CLASSES.get(name, _plain)(work)


def is_fusible(name: str) -> bool:
    """True if a compiler fuses the operator with its neighbours: it computes no products and serves no optimizer."""
    return name not in _UNFUSED and not name.startswith(("_foreach_", "_fused_"))


def tf32_setting(name: str) -> str:
    """The setting that lets the operator multiply fp32 numbers as TF32: "matmul", "conv", or "" if there is none."""
    return _TF32_SETTINGS.get(_CLASSES.get(name, _plain), "")


def depends_on_strides(name: str) -> bool:
    """True if how its tensors lie in memory decides how long the operator takes."""
    return _CLASSES.get(name) in (*_TF32_SETTINGS, _batch_norm, _pool_backward)


def _moving(floor: float, nbytes: Callable[[Work], float], kernels: int = 1, share: float = 1.0):
    """An operator that takes its start, in shortest kernels, and as long as it moves bytes, at a share of the speed."""

    def of(work: Work) -> Cost:
        return Cost(floor * work.kernel + work.reading(nbytes(work), share), kernels)

    return of


def _sum(operands: Iterable[Operand]) -> int:
    return sum(part.nbytes for part in operands)


_plain = _moving(1, lambda work: work.nbytes)


def _lists(work: Work) -> Cost:
    """Optimizers: a kernel for some 45 tensors, in chunks of 64 Ki elements, of which a launch takes at most 320."""
    inputs, first = work.inputs, work.inputs[: work.first]
    if work.name.startswith("_foreach_addcmul"):
        inputs = inputs[: 2 * work.first]  # both factors are the gradient, in every optimizer
    written = work.outputs or first * (3 if work.name.startswith("_fused_adam") else 1)
    elements = sum(prod(part.shape) for part in first)
    kernels = max(1, ceil(work.first / 45)) + elements // (320 * 65536)
    share = 0.57 if work.outputs else 0.74
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
    return Cost(work.kernel * 2 + work.reading(work.nbytes), 1, "product")


# ---- normalization, softmax, reductions, losses ----------------------------------------------------------------------


def _batch_norm(work: Work) -> Cost:
    """A block of threads per channel: few channels leave the GPU half idle, unless the channels are last."""
    images = work.inputs[0] if work.name.endswith("norm") else work.inputs[1]
    backward = not work.name.endswith("norm")
    channels = images.shape[1] if len(images.shape) > 1 else 1
    share = min(1.0, max(0.3, channels / (1.5 * work.spec.multi_processor_count))) * (0.65 if backward else 1.0)
    if work.precision == "bf16" and len(images.shape) > 2 and not images.channels_last:
        # PyTorch's own kernels: a block of threads goes through the pieces of its channel one after the other
        numbers, waves = images.nbytes / 2 / channels, max(1.0, channels / work.spec.multi_processor_count)
        chain = (1.0 + 0.9e-3 * numbers) if backward else (3.5 + 0.6e-3 * numbers)
        return Cost((4 + waves * chain) * work.kernel + work.reading(images.nbytes), 3)
    if images.channels_last:
        share = 0.9 if backward else 1.0  # fitted as those of `cost_conv`
    return Cost(3.2 * work.kernel + work.reading(images.nbytes * (3 if backward else 2), share), 1)


def _group_norm(work: Work) -> Cost:
    """A block of threads per sample and group, which the statistics count: few of them leave the GPU half idle."""
    blocks = prod(work.outputs[1].shape) if len(work.outputs) > 1 else 1
    busy = min(0.7, blocks / (4.8 * work.spec.multi_processor_count))
    images = work.inputs[0].nbytes
    return Cost(4.6 * work.kernel + work.reading(images, busy) + work.reading(2 * images), 2)


def _pool_backward(work: Work) -> Cost:
    return Cost(2.0 * work.kernel + work.reading(work.nbytes, 0.3 if work.inputs[1].channels_last else 0.15), 1)


def _reduction(work: Work) -> Cost:
    """Few results of many numbers: threads leave partial sums, and the last block adds them up."""
    inputs, results = (sum(prod(p.shape) for p in parts) for parts in (work.inputs, work.outputs))
    far = inputs > 64 * max(1, results) and inputs > 32768
    return Cost((7.2 if far else 3.5) * work.kernel + work.reading(work.nbytes, 0.9), 2 if far else 1)


def _nll(per_row: float):
    def of(work: Work) -> Cost:
        rows = work.inputs[0].shape[0] if work.name.endswith("forward") else work.inputs[1].shape[0]
        written = 0 if work.name.endswith("forward") else _sum(work.outputs)
        return Cost(work.kernel * (1.5 + per_row * rows) + work.reading(written), 1 if not written else 2)

    return of


def _embedding_backward(work: Work) -> Cost:
    """One block of threads walks through up to 3,072 numbers of words; more are sorted first."""
    numbers = prod(work.inputs[1].shape)
    written = work.outputs[0].nbytes + work.inputs[0].nbytes
    return Cost(work.kernel * (4 + 0.0245 * min(numbers, 3072)) + work.reading(written), 2 if numbers <= 3072 else 8)


_rows_taken = _moving(1.5, lambda work: 2 * _sum(work.outputs))  # lookups: only the rows that are asked for are read
_two_kernels = _moving(2, lambda work: _sum(work.outputs) + 2 * _sum(work.inputs), 2)  # zeros first, then the values
_fill = _moving(0.8, lambda work: _sum(work.outputs or work.inputs[:1]))
# FSDP2's copies out of a gathered tensor, and of gradients into one: each byte is read once and written once.
_split = _moving(1, lambda work: 2 * work.inputs[0].nbytes)
_chunked = _moving(1, lambda work: _sum(work.inputs))
# FSDP2's copy of a rank's own part, the first result, into the tensor that is to be gathered, the second. A batch norm
# with kept statistics takes as long.
_copied_in = _moving(1, lambda work: 2 * work.outputs[0].nbytes)
_rows_added = _moving(1, lambda work: 3 * work.inputs[-1].nbytes)  # only the rows that are named are read and written


_free = _moving(0, lambda work: 0, 0)


_CLASSES = {
    **{name: _moving(nbytes=lambda work: work.nbytes, **row) for name, row in figures.read("operators.toml").items()},
    **dict.fromkeys(("mm", "addmm", "bmm", "baddbmm", "addmm_", "baddbmm_", "_addmm_activation"), _mm),
    **dict.fromkeys(("mv", "addmv", "dot", "vdot", "ger", "addr"), _mv),
    **dict.fromkeys(("convolution", "convolution_overrideable"), forward),
    **dict.fromkeys(("convolution_backward", "convolution_backward_overrideable"), backward),
    **dict.fromkeys(("native_batch_norm", "native_batch_norm_backward"), _batch_norm),
    "native_group_norm": _group_norm,
    "max_pool2d_with_indices_backward": _pool_backward,
    "nll_loss_forward": _nll(0.0074),
    "nll_loss2d_forward": _nll(0.0074),
    "nll_loss_backward": _nll(0.0033),
    "nll_loss2d_backward": _nll(0.0033),
    **dict.fromkeys(("embedding", "index_select", "gather", "index"), _rows_taken),
    "index_add_": _rows_added,
    "embedding_dense_backward": _embedding_backward,
    **dict.fromkeys(("select_backward", "slice_backward"), _two_kernels),
    **dict.fromkeys(("sum", "mean", "prod", "amax", "amin", "nansum", "linalg_vector_norm", "norm", "argmax", "argmin",
                     "max", "min", "var", "std", "var_mean", "std_mean", "all", "any"), _reduction),
    **dict.fromkeys(("zero_", "fill_", "zeros", "ones", "full", "zeros_like", "ones_like", "full_like", "new_zeros",
                     "new_ones", "new_full", "arange", "bernoulli_", "normal_", "uniform_", "random_", "randn", "rand",
                     "randint"), _fill),
    **dict.fromkeys(("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view", "set_",
                     "resize_", "lift_fresh", "record_stream", "_reshape_alias", "record_grad_output_stream"), _free),
    # timed where they run, because it matters whether they are causal
    **{f"_scaled_dot_product_{kernel}_attention{direction}": _free for kernel in ("flash", "efficient", "cudnn")
       for direction in ("", "_backward")},
    "split_with_sizes_copy": _split,
    **dict.fromkeys(("chunk_cat", "chunk_cat_mixed_dtype"), _chunked),
    **dict.fromkeys(("all_gather_copy_in", "batch_norm_elemt"), _copied_in),
}  # fmt: skip
_TF32_SETTINGS = {_mm: "matmul", forward: "conv", backward: "conv"}
_NEVER_FUSED = (_mm, _mv, forward, backward, _free, _split, _chunked, _copied_in, _embedding_backward)
_UNFUSED = {name for name, kind in _CLASSES.items() if kind in _NEVER_FUSED}
