"""Reductions over many elements, softmax, counts and sorts: temporary buffers in GPU memory, time, what is refused.
Sources: `memory_model.reduction_scratch`; in aten/src/ATen/native, cuda/SoftMax.cu, and for casts ReduceOpsUtils.h."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any

import torch

from virtual_gpus import figures
from virtual_gpus.clock.cost import CHARGED_ELSEWHERE, READS_AND_WRITES, OperatorClass, moves
from virtual_gpus.clock.work import Cost, Operation
from virtual_gpus.dispatch.operators import OpCall, Row
from virtual_gpus.dispatch.recipes import channels_first_copy, not_deterministic, packed, packed_copies
from virtual_gpus.dispatch.timing import charge_read
from virtual_gpus.memory_model import reduction_scratch
from virtual_gpus.patches.table import Patch
from virtual_gpus.placement.storages import StorageAllocation, gpu_of, nbytes, put
from virtual_gpus.threads import below, seen

_FITTED = figures.beside(__file__)
_THREADS = {torch.complex128: 256}  # max_reduce_threads in cuda/Reduce.cuh; 512 for others
# Rows that are sorted in shared memory; that fill a GPU one by one; so many that all are segments (SortStable.cu).
_SHORT, _LONG, _MANY = 4096, 1_000_000, 128
REDUCTION, SORT = _FITTED["reduction"], _FITTED["sort"]  # other features have a sum, or a sort, on the way


def take_buffers(call: OpCall, tensor: torch.Tensor, dims: Sequence[int] | None, partial_bytes: int) -> None:
    """Take and give back what reducing `tensor` on the call's GPU needs, after the result was placed."""
    form = {"strides": tensor.stride(), "partial_bytes": partial_bytes, "threads": _THREADS.get(tensor.dtype, 512)}
    sizes = reduction_scratch(tensor.shape, call.gpu.spec, dims, **form)
    if any(sizes):  # of few numbers there are none
        with call.scratch(*filter(None, sizes)):
            pass


def after_cast(call: OpCall) -> tuple[torch.Tensor, torch.Tensor]:
    """The result, then what is added up, in its type: a copy, but for fp32 of halves (ReduceOps{.cpp,Utils.h})."""
    result, tensor = call.run(), call["self"]
    if result.dtype == tensor.dtype:
        return result, tensor
    half, dtype = tensor.dtype in (torch.float16, torch.bfloat16) and call.op.base not in _SCANS, result.dtype
    if dtype not in (tensor.dtype.to_real(), torch.float32 if half else None):
        with seen():
            tensor = call.read_instead(torch.ops.aten._to_copy.default(tensor, dtype=dtype))
    return result, tensor


def reduction(call: OpCall, numbers: int = 0, least: int = 0) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """`sum` and its like. numbers: of the tensor's type, in a partial result (`arg_t` of cuda/Reduce*Kernel.cu); 0 for
    a sum, which is in float for half types. least: bytes of one. A number and its index have 16, as for `argmax`, which
    takes all numbers in a row. Norms of complex numbers are real."""
    result, tensor = (call.run(), call["self"]) if numbers else after_cast(call)
    dim = call["dim"] if "dim" in call.op.names else None
    indexed = dim is not None and call.op.base in ("max", "min")
    if dim is None and call.op.base.startswith("arg") and not tensor.is_contiguous():
        with seen():
            tensor = tensor.reshape(-1)
    number = tensor.itemsize // (1 + (tensor.is_complex() and "norm" in call.op.base))
    size = number * (numbers or 1 + (tensor.dtype.to_real() in (torch.float16, torch.bfloat16)))
    take_buffers(call, tensor, (dim,) if isinstance(dim, int) else dim, max(size, 16 * indexed, least))
    return result


def scan(call: OpCall) -> torch.Tensor:
    """Of a packed copy, in the result's type (cuda/ScanUtils.cuh)."""
    result, tensor = after_cast(call)
    with call.scratch(*filter(None, [channels_first_copy(tensor)])):
        return result


def all_packed(call: OpCall) -> torch.Tensor:
    """With packed copies of all tensors (cuda/Bucketization.cu)."""
    return call.run(*filter(None, map(channels_first_copy, call.tensors)))


def count_nonzero(call: OpCall) -> torch.Tensor:
    """By its parts (count_nonzero_cuda in TensorAdvancedIndexing.cpp)."""
    with seen():
        tensor = call["self"]
        return torch.sum(tensor if tensor.dtype == torch.bool else tensor != 0, call["dim"], **call.kwargs)


def trace(call: OpCall) -> torch.Tensor:
    """Of the diagonal alone (cuda/TriangularOps.cu)."""
    with seen():
        return call["self"].diagonal().sum() if not call.op.outputs else call.run()


def _sort_buffers(tensor: torch.Tensor, dim: int) -> list[int]:
    """Of a sort along `dim`: a packed copy and results along it; positions; what cub has, a second copy of numbers and
    positions (cuda/Sort.cpp, SortStable.cu). Its counters are left out."""
    length, numbers, size = tensor.shape[dim], tensor.nbytes, 8 * tensor.numel()
    if length <= _SHORT:
        return [8 * length]
    is_dense = torch.ops.aten.is_non_overlapping_and_dense(tensor)
    turned = [numbers, numbers, size] if tensor.stride(dim) > 1 else [numbers] * (not is_dense)
    if size == 8 * length or length >= _LONG:
        return [*turned, 8 * length, length * (tensor.itemsize + 8)]
    found = [size] if size >= 8 * length * _MANY else [size, size, numbers]
    return [*turned, *found, numbers + size]


def sort(call: OpCall) -> Any:
    """The results, and those that `argsort` drops; buffers."""
    tensor = call["self"]
    dropped = [nbytes(tensor)] * (call.op.base == "argsort")
    return call.run(*dropped, *(_sort_buffers(tensor, call["dim"]) if tensor.dim() and tensor.numel() else ()))


def topk(call: OpCall) -> Any:
    """Of a packed copy. Very many are then sorted (cuda/TensorTopK.cpp)."""
    values, indices = result = call.run(*packed_copies(call, ("self",), channels_first_copy))
    if call["sorted"] and values.dim() and values.shape[call["dim"]] > _SHORT:
        with call.scratch(nbytes(indices), nbytes(values), *_sort_buffers(values, call["dim"])):
            pass
    return result


def median(call: OpCall) -> Any:
    """Along a dimension, of a packed copy; of all numbers, from a sort of them (cuda/Sorting.cpp)."""
    tensor, copies = call["self"], packed_copies(call, ("self",), channels_first_copy)
    if "dim" not in call.op.positions and tensor.numel():
        copies += [
            nbytes(tensor),
            8 * tensor.numel(),
            *_sort_buffers(tensor.new_empty(tensor.numel(), device="meta"), 0),
        ]
    with call.scratch(*copies):
        pass
    return call.run()


def unique(call: OpCall) -> Any:
    """A sort, where each number was, and results that keep the length of the input (cuda/UniqueCub.cu)."""
    tensor, result = call["self"], call.compute()
    if tensor.dtype == torch.bool or ("dim" in call.op.positions and call["dim"] is not None):
        return call.place(result)
    numbers, places = nbytes(tensor), [8 * tensor.numel()] * call["return_inverse"]
    sorts = "sorted" in call.op.positions
    with call.scratch(*packed_copies(call, ("self",), channels_first_copy), *[numbers, *places] * sorts):
        with call.scratch(*[*places, numbers + sum(places)] * sorts):
            pass
        with call.scratch(*places):
            call.place(result[1])
        put(result[0], StorageAllocation(call.gpu, numbers))
        put(result[2], StorageAllocation(call.gpu, 8 * tensor.numel() * call["return_counts"]))
        return result


def logsumexp(call: OpCall) -> torch.Tensor:
    """By its parts (ReduceOps.cpp), of which one is as large as the tensor."""
    tensor, dims, keepdim = call["self"], call["dim"], call["keepdim"]
    if not tensor.numel():
        return call.run()
    with seen():
        if not (tensor.is_floating_point() or tensor.is_complex()):
            tensor = tensor.to(torch.get_default_dtype())
        largest = torch.amax(tensor.real if tensor.is_complex() else tensor, dims, True)
        added = largest if keepdim else largest.squeeze(tuple(dims))
        added.masked_fill_(added.abs() == torch.inf, 0)
        return torch.sum((tensor - largest).exp_(), dims, keepdim, **call.kwargs).log_().add_(added)


def compared(elements: Callable[..., torch.Tensor], call: OpCall) -> bool:
    """By its parts (cuda/Equal.cpp, TensorCompare.cpp). `equal` knows other shapes, and the same tensor, without."""
    one, other = call.args[:2]
    if call.op.base == "equal" and (one.shape != other.shape or one.is_set_to(other)):
        return call.run()
    with seen():
        return bool(elements(*call.args, **call.kwargs).all().item())


def multinomial(call: OpCall) -> torch.Tensor:
    """What each number is divided by, and the largest (Distributions.cpp); of many, if each may come again, two copies
    and the sums up to each (cuda/MultinomialKernel.cu)."""
    number, size = call["num_samples"], nbytes(call["self"])
    drawn = [size * number // max(1, call["self"].shape[-1])] * (number > 1)
    return call.run(*[size] * 3) if number > 1 and call["replacement"] else call.run(size, *drawn)


def histc(call: OpCall) -> torch.Tensor:
    """Of integers as well, for which only CUDA has a kernel (aten/src/ATen/native/cuda/SummaryOps.cu)."""
    x = call["self"]
    if call["min"] == call["max"]:
        charge_read(call)  # for the smallest and the largest number
    if x.is_floating_point():
        return call.run()
    with below():
        return call.place(torch.histc(x.double(), call["bins"], call["min"], call["max"]).to(x.dtype))


def _of_halves(func: torch._ops.OpOverload) -> Callable[..., torch.Tensor]:
    """What computes floats of halves, and gradients of halves from those of floats, which the CPU's kernels refuse."""

    def run(tensor: torch.Tensor, *others: Any, **out: torch.Tensor) -> torch.Tensor:
        if others[-1] is True:  # `half_to_float`
            return func._op(tensor.float(), *others[:-1], False)
        narrows = others[-1] is torch.float16 and tensor.dtype is torch.float32  # `input_dtype`
        return func._op(tensor, *others[:-1], tensor.dtype).half() if narrows else func._op(tensor, *others, **out)

    return run


def softmax_backward(call: OpCall) -> torch.Tensor:
    """The gradient times the result, then its sums (`softmax_backward_cuda_out`, also of copies)."""
    gradient, output = call["grad_output"], call["output"]
    copied = 0 in gradient.stride() or gradient.is_contiguous()
    return call.run(*[nbytes(output)] * (1 if copied else 2), *packed_copies(call, ("output",), channels_first_copy))


def one_kernel(owner: Any, name: str) -> Callable[..., torch.Tensor]:
    """`softmax` or `log_softmax` of `owner`: CUDA takes halves to floats without a copy (SoftMax.cpp)."""
    raw, fused = getattr(owner, name), getattr(torch, f"_{name}")

    def answer(input: torch.Tensor, dim: Any, dtype: torch.dtype | None = None, **out: torch.Tensor) -> torch.Tensor:
        if dtype is not torch.float32 or input.dtype is not torch.float16 or out or gpu_of(input) is None:
            return raw(input, dim, dtype=dtype, **out)
        return fused(input, dim, True)

    return answer


def _reduction_cost(operation: Operation) -> Cost:
    """Few results of many numbers: threads leave partial sums, and the last block adds them up."""
    inputs, results = (sum(prod(p.shape) for p in parts) for parts in (operation.inputs, operation.outputs))
    far = inputs > REDUCTION["numbers_per_result"] * max(1, results) and inputs > REDUCTION["numbers"]
    floor = REDUCTION["floor_of_many" if far else "floor"] * operation.kernel
    return Cost(floor + operation.reading(operation.nbytes, REDUCTION["share"]), 2 if far else 1)


def _median_cost(operation: Operation) -> Cost:
    """Of all numbers, that of a sort."""
    return (READS_AND_WRITES if "dim" in operation.arguments else _SORTS).formula(operation)


_SOFTMAX, _FINDS = moves(**_FITTED["softmax"]), moves(lambda operation: 2 * operation.nbytes, **_FITTED["nonzero"])
_SUMS = ("sum", "mean", "nansum", "prod", "linalg_vector_norm", "linalg__powsum", "norm")
_SCANS, _SCAN = ("cumsum", "cumprod"), moves(**_FITTED["scan"])
_INDEXED_SCANS = ("cummax", "cummin", "logcumsumexp", "_cummax_helper", "_cummin_helper", "_logcumsumexp")
_packed = partial(packed, copy_of=channels_first_copy)
_MEDIAN = not_deterministic("median CUDA with indices output", lambda call: len(call.func._schema.returns) == 2)
_BINCOUNT = not_deterministic("_bincount_cuda", lambda call: call["weights"] is not None)
_HISTC = not_deterministic("_histc_cuda with floating point input", lambda call: call["self"].is_floating_point())
_PAIRS = [(owner, name) for owner in (torch, torch.Tensor, torch.special) for name in ("softmax", "log_softmax")]
_PATCHES: list[Patch] = [(*pair, one_kernel(*pair)) for pair in _PAIRS]
_REDUCES, _SORTS, _BACK = OperatorClass(_reduction_cost), moves(**SORT), moves(**_FITTED["softmax_backward"])
OPERATORS = {
    **dict.fromkeys(_SUMS, Row(_REDUCES, reduction)),
    **dict.fromkeys(("amax", "amin", "max", "min", "all", "any"), Row(_REDUCES, partial(reduction, numbers=1))),
    **dict.fromkeys(("argmax", "argmin"), Row(_REDUCES, partial(reduction, numbers=1, least=16))),
    # Welford's mean, squares and twice the count, and the smallest number beside the largest.
    **dict.fromkeys(("var", "std", "var_mean", "std_mean"), Row(_REDUCES, partial(reduction, numbers=4, least=16))),
    "aminmax": Row(READS_AND_WRITES, partial(reduction, numbers=2)),
    "logsumexp": Row(CHARGED_ELSEWHERE, logsumexp),
    **dict.fromkeys(("_softmax", "_log_softmax"), Row(_SOFTMAX, _packed("self"), cpu_kernel=_of_halves)),
    "_softmax_backward_data": Row(_BACK, softmax_backward, cpu_kernel=_of_halves),
    "_log_softmax_backward_data": Row(_BACK, _packed("grad_output", "output"), cpu_kernel=_of_halves),
    "trace": Row(CHARGED_ELSEWHERE, trace),
    **dict.fromkeys(("searchsorted", "bucketize"), Row(READS_AND_WRITES, all_packed)),
    "count_nonzero": Row(CHARGED_ELSEWHERE, count_nonzero),
    **dict.fromkeys(("sort", "argsort"), Row(_SORTS, sort)),
    "topk": Row(_SORTS, topk),
    "_unique2": Row(_SORTS, unique),
    **dict.fromkeys(("unique_dim", "randperm"), Row(_SORTS)),
    "multinomial": Row(moves(**_FITTED["multinomial"]), multinomial),
    **dict.fromkeys(_SCANS, Row(_SCAN, scan)),
    **dict.fromkeys(_INDEXED_SCANS, Row(_SCAN, _packed("self"))),
    **dict.fromkeys(("median", "nanmedian"), Row(OperatorClass(_median_cost, arguments=("dim",)), median, _MEDIAN)),
    **dict.fromkeys(("kthvalue", "mode"), Row(READS_AND_WRITES, _packed("self"))),
    "bincount": Row(READS_AND_WRITES, check=_BINCOUNT),
    # Found places, with the number of them first, for which the host waits (cuda/Nonzero.cu).
    "nonzero": Row(_FINDS, _packed("self")),
    "unique_consecutive": Row(_FINDS, unique),
    "equal": Row(CHARGED_ELSEWHERE, partial(compared, torch.eq), waits=True),
    "allclose": Row(CHARGED_ELSEWHERE, partial(compared, torch.isclose), waits=True),
    "_local_scalar_dense": Row(CHARGED_ELSEWHERE),  # all that it takes is that the host waits
    "histc": Row(READS_AND_WRITES, histc, _HISTC),
}


def patches() -> list[Patch]:
    """See `features`. torch.nn.functional calls the tensor's."""
    return _PATCHES
