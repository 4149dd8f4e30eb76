"""Sorting, searching and counting on CUDA, and choosing at random: buffers in GPU memory, time, what is refused.

Sources: in aten/src/ATen/native/cuda, SortStable.cu and those at each function. What CUDA's libraries sort with is the
second copy of numbers and positions of cub's radix sort.
"""

from math import log
from typing import Any

import torch

from virtual_gpus import figures
from virtual_gpus.clock.cost import CHARGED_ELSEWHERE, READS_AND_WRITES, SORT, OperatorClass, moves
from virtual_gpus.clock.work import Cost, Operation
from virtual_gpus.dispatch.operators import OpCall, Row
from virtual_gpus.dispatch.recipes import channels_first_copy, not_deterministic, packed_copies
from virtual_gpus.dispatch.timing import charge_read, launch
from virtual_gpus.placement.storages import StorageAllocation, nbytes, put
from virtual_gpus.threads import below, seen

_FITTED = figures.beside(__file__)
# Rows that are sorted in shared memory; that fill a GPU one by one; so many that all are segments (SortStable.cu).
_SHORT, _LONG, _MANY = 4096, 1_000_000, 128
_IN_A_BLOCK, _INDEXED = 2048, 2**31 - 1  # rows, and numbers, that one kernel finds modes of (TensorModeKernel.cpp)


def _sort_buffers(tensor: torch.Tensor, dim: int) -> list[int]:
    """Sizes of a packed copy, with results if it has another order, of positions, and of cub's second copies of both
    numbers and positions, for a sort along `dim`. Cub's counters are left out (cuda/Sort.cpp, SortStable.cu)."""
    if (length := tensor.shape[dim]) <= _SHORT:
        return [8 * length]
    numbers, positions = tensor.nbytes, 8 * tensor.numel()
    copy: list[int] = [] if tensor.is_contiguous() or torch.ops.aten.is_non_overlapping_and_dense(tensor) else [numbers]
    if tensor.stride(dim) > 1:
        copy = [numbers, numbers, positions]
    if positions == 8 * length or length >= _LONG:  # row by row
        return [*copy, 8 * length, length * (tensor.itemsize + 8)]
    if positions >= 8 * length * _MANY:
        return [*copy, positions, numbers + positions]
    return [*copy, positions, positions, numbers, numbers + positions]


def sort(call: OpCall) -> Any:
    """After the results come the values that `argsort` drops, and what the sort takes."""
    tensor = call.args[0]
    buffers = _sort_buffers(tensor, call["dim"]) if tensor.dim() and tensor.numel() else ()
    return call.run(nbytes(tensor), *buffers) if call.op.base == "argsort" else call.run(*buffers)


def topk(call: OpCall) -> Any:
    """The kernel reads a packed copy. If the results are very many, they are then sorted (cuda/TensorTopK.cpp)."""
    values, indices = result = call.run(*packed_copies(call, ("self",), channels_first_copy))
    if call["sorted"] and values.dim() and values.shape[call["dim"]] > _SHORT:
        call.scratch(nbytes(indices), nbytes(values), *_sort_buffers(values, call["dim"]))
    return result


def selected(call: OpCall) -> Any:
    """The packed copy that the kernel reads comes before the results. A median of all numbers comes from a sort
    (cuda/Sorting.cpp)."""
    tensor, copy = call["self"], channels_first_copy(call["self"])
    if "dim" in call.op.positions or not (count := tensor.numel()):
        return call.run_with(copy) if copy else call.run()
    buffers = _sort_buffers(tensor.new_empty(count, device="meta"), 0)
    call.scratch(copy, nbytes(tensor), 8 * count, *buffers)
    return call.run()


def mode(call: OpCall) -> Any:
    """One kernel for short rows, from a packed copy. Long ones are always copied, and thrust sorts one by one with the
    positions; the host waits for each (cuda/TensorModeKernel.cpp and .cu). Left out: the different numbers and their
    counts, since values decide how many, and they fit into what the sort gave back; and what the reductions take."""
    tensor, size, spec = call["self"], nbytes(call["self"]), call.gpu.spec
    rows = tensor.transpose(call["dim"], -1) if tensor.dim() else tensor[None]
    length, count = rows.shape[-1], rows.numel()
    if one_kernel := length < 2 or (length <= _IN_A_BLOCK and count < _INDEXED):
        result, times, figure = call.run(channels_first_copy(rows) if length > 1 else 0), 1, _FITTED["mode"]
    else:
        sorts = [8 * length, length * (8 + tensor.itemsize)] if tensor.dtype != torch.bool else []  # of two, no sort
        result, times, figure = call.run(size, *sorts), count // length, _FITTED["mode_by_row"]
    seconds = times * figure["floor"] * spec.reached.kernel + spec.seconds_to_move(size, figure["share"])
    launch(call.gpu, "mode", Cost(seconds, times * figure["kernels"], times * figure["host"]), [tensor], call=call)
    if not one_kernel:
        charge_read(call)
    return result


def unique(call: OpCall) -> Any:
    """It sorts the numbers, and the places where they were. The results keep the input's length (cuda/UniqueCub.cu)."""
    tensor, result = call["self"], call.compute()
    if tensor.dtype == torch.bool or ("dim" in call.op.positions and call["dim"] is not None):
        return call.place(result)
    numbers, integers = nbytes(tensor), 8 * tensor.numel()
    places = integers if call["return_inverse"] else 0
    with call.scratch(channels_first_copy(tensor)) as held:
        if "sorted" in call.op.positions:  # `unique_consecutive` does not sort
            held.take(numbers, places)
            call.scratch(places, numbers + places)
        with call.scratch(places):
            call.place(result[1])
        put(result[0], StorageAllocation(call.gpu, numbers))
        put(result[2], StorageAllocation(call.gpu, integers if call["return_counts"] else 0))
        return result


def all_packed(call: OpCall) -> torch.Tensor:
    """The kernel reads packed copies of all tensors (cuda/Bucketization.cu)."""
    return call.run(*map(channels_first_copy, call.tensors))


def multinomial(call: OpCall) -> torch.Tensor:
    """What the weights are divided by, and the largest quotients if several are drawn (Distributions.cpp). With
    replacement, these take two copies and the sums up to each weight (cuda/MultinomialKernel.cu)."""
    number, size = call["num_samples"], nbytes(call["self"])
    if number > 1 and call["replacement"]:
        return call.run(size, size, size)
    return call.run(size, size * number // max(1, call["self"].shape[-1]) if number > 1 else 0)


def bincount(call: OpCall) -> torch.Tensor:
    """Of weights as doubles, if not floats. The host reads the smallest and the largest number (cuda/SummaryOps.cu)."""
    tensor, weights = call["self"], call["weights"]
    with seen():
        if weights is not None and weights.dtype != torch.float32:
            weights = weights.double()  # kept until the end
        if tensor.numel():
            for extreme in (torch.max,) if tensor.dtype == torch.uint8 else (torch.min, torch.max):
                extreme(tensor).item()
    return call.run()


def histc(call: OpCall) -> torch.Tensor:
    """CUDA's kernel takes integers as well, and the CPU's does not. If no range is given, the host reads the smallest
    and the largest number, after the result has its memory (aten/src/ATen/native/cuda/SummaryOps.cu)."""
    x = call["self"]
    if x.is_floating_point():
        result = call.run()
    else:
        with below():
            result = call.place(torch.histc(x.double(), call["bins"], call["min"], call["max"]).to(x.dtype))
    if call["min"] == call["max"] and x.numel():
        with seen():
            x.aminmax()
        charge_read(call)
    return result


def nonzero(call: OpCall) -> torch.Tensor:
    """A packed copy and the number of places before the result, cub's storage after it (cuda/Nonzero.cu): one block."""
    with call.scratch(*packed_copies(call, ("self",), channels_first_copy), 4):
        return call.run(1)


def randperm(call: OpCall) -> torch.Tensor:
    """Numbers in order and random keys, unsorted and sorted; cub's second copy of both (cuda/Randperm.cu)."""
    n, given = call["n"], call["out"] if call.op.outputs else None
    size = (given.dtype if given is not None else call.kwargs.get("dtype") or torch.int64).itemsize
    key = 4 if n - (6 * n * n + 1) / (12 * log(0.9)) <= 1 << 32 else 8  # of as many bits as make them differ
    own = StorageAllocation(call.gpu, n * size) if given is None else None
    call.scratch(n * size, n * key, n * key, n * (key + size))
    return call.run() if own is None else put(call.compute(), own)


def _median_cost(operation: Operation) -> Cost:
    """The median of all numbers takes as long as a sort."""
    return (READS_AND_WRITES if "dim" in operation.arguments else _SORTS).formula(operation)


_SORTS, _FINDS = moves(**SORT), moves(lambda operation: 2 * operation.nbytes, **_FITTED["nonzero"])
_MEDIANS = OperatorClass(_median_cost, arguments=("dim",))
_MEDIAN = not_deterministic("median CUDA with indices output", lambda call: len(call.func._schema.returns) == 2)
_BINCOUNT = not_deterministic("_bincount_cuda", lambda call: call["weights"] is not None)
_HISTC = not_deterministic("_histc_cuda with floating point input", lambda call: call["self"].is_floating_point())
OPERATORS = {
    **dict.fromkeys(("sort", "argsort"), Row(_SORTS, sort)),
    "topk": Row(_SORTS, topk),
    **dict.fromkeys(("median", "nanmedian"), Row(_MEDIANS, selected, _MEDIAN)),
    "kthvalue": Row(READS_AND_WRITES, selected),
    "mode": Row(CHARGED_ELSEWHERE, mode),
    **dict.fromkeys(("searchsorted", "bucketize"), Row(READS_AND_WRITES, all_packed)),
    "_unique2": Row(_SORTS, unique),
    "unique_dim": Row(_SORTS),
    "randperm": Row(_SORTS, randperm),
    "nonzero": Row(_FINDS, nonzero),
    "unique_consecutive": Row(_FINDS, unique),
    "multinomial": Row(moves(**_FITTED["multinomial"]), multinomial),
    "bincount": Row(READS_AND_WRITES, bincount, _BINCOUNT, waits=True),
    "histc": Row(READS_AND_WRITES, histc, _HISTC),
}
