"""Sorting, searching and counting on CUDA, and choosing at random: buffers in GPU memory, time, what is refused.

Sources: in aten/src/ATen/native/cuda, SortStable.cu and those at each function. What CUDA's libraries sort with is the
second copy of numbers and positions of cub's radix sort.
"""

from math import log
from typing import Any

import torch

from virtual_gpus import figures
from virtual_gpus.clock.cost import READS_AND_WRITES, SORT, OperatorClass, moves
from virtual_gpus.clock.work import Cost, Operation
from virtual_gpus.dispatch.operators import OpCall, Row
from virtual_gpus.dispatch.recipes import channels_first, channels_first_copy, not_deterministic, packed_copies
from virtual_gpus.dispatch.timing import charge_read
from virtual_gpus.placement.storages import StorageAllocation, nbytes, put
from virtual_gpus.threads import below

_FITTED = figures.beside(__file__)
# Rows that are sorted in shared memory; that fill a GPU one by one; so many that all are segments (SortStable.cu).
_SHORT, _LONG, _MANY = 4096, 1_000_000, 128


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
    if "dim" not in call.op.positions and (count := tensor.numel()):
        copies += [nbytes(tensor), 8 * count, *_sort_buffers(tensor.new_empty(count, device="meta"), 0)]
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


def all_packed(call: OpCall) -> torch.Tensor:
    """With packed copies of all tensors (cuda/Bucketization.cu)."""
    return call.run(*filter(None, map(channels_first_copy, call.tensors)))


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
    with call.scratch(*filter(None, [n * size, n * key, n * key, n * (key + size)])):
        pass
    return call.run() if own is None else put(call.compute(), own)


def _median_cost(operation: Operation) -> Cost:
    """Of all numbers, that of a sort."""
    return (READS_AND_WRITES if "dim" in operation.arguments else _SORTS).formula(operation)


_SORTS, _FINDS = moves(**SORT), moves(lambda operation: 2 * operation.nbytes, **_FITTED["nonzero"])
_MEDIANS = OperatorClass(_median_cost, arguments=("dim",))
_MEDIAN = not_deterministic("median CUDA with indices output", lambda call: len(call.func._schema.returns) == 2)
_BINCOUNT = not_deterministic("_bincount_cuda", lambda call: call["weights"] is not None)
_HISTC = not_deterministic("_histc_cuda with floating point input", lambda call: call["self"].is_floating_point())
WORDS = _FITTED["words"]
OPERATORS = {
    **dict.fromkeys(("sort", "argsort"), Row(_SORTS, sort)),
    "topk": Row(_SORTS, topk),
    **dict.fromkeys(("median", "nanmedian"), Row(_MEDIANS, median, _MEDIAN)),
    **dict.fromkeys(("kthvalue", "mode"), Row(READS_AND_WRITES, channels_first("self"))),
    **dict.fromkeys(("searchsorted", "bucketize"), Row(READS_AND_WRITES, all_packed)),
    "_unique2": Row(_SORTS, unique),
    "unique_dim": Row(_SORTS),
    "randperm": Row(_SORTS, randperm),
    "nonzero": Row(_FINDS, nonzero),
    "unique_consecutive": Row(_FINDS, unique),
    "multinomial": Row(moves(**_FITTED["multinomial"]), multinomial),
    "bincount": Row(READS_AND_WRITES, check=_BINCOUNT),
    "histc": Row(READS_AND_WRITES, histc, _HISTC),
}
