"""Indexing, gathers and scatters: memory, time, and what is refused or waited for.

What is added up by indices that may repeat is sorted by them first, with temporaries.
"""

import functools
from contextlib import nullcontext
from itertools import zip_longest
from math import prod
from weakref import WeakKeyDictionary

import torch

from virtual_gpus import figures
from virtual_gpus.clock import cost
from virtual_gpus.clock.cost import CHARGED_ELSEWHERE, READS_AND_WRITES, Bytes, OperatorClass, Parts, bytes_of, moves
from virtual_gpus.clock.work import Cost, Operation
from virtual_gpus.dispatch.operators import OpCall, Row
from virtual_gpus.dispatch.recipes import channels_first_copy, not_deterministic, radix_sort
from virtual_gpus.dispatch.timing import charge_read, send
from virtual_gpus.dispatch.valueless import assuming
from virtual_gpus.entrance import calling_frame
from virtual_gpus.machine import VirtualGPU
from virtual_gpus.patches.table import Patch
from virtual_gpus.placement.creation_sites import calling_site
from virtual_gpus.placement.storages import UNRECORDED, HostStorage, Record, gpu_of, is_pinned, nbytes, place, storages
from virtual_gpus.threads import seen, this_thread

_FITTED = figures.beside(__file__)
_SORTED = 2 * (8 + 8)  # bytes that a sort reads and writes: an int64 and where it was
_MASKS = (torch.bool, torch.uint8)  # types of indices that choose elements by their values
_raw_one_hot = torch._C._nn.one_hot
_made_at: WeakKeyDictionary[Record, object] = WeakKeyDictionary()  # the code, and where in it C++ made tensors


def _lift(tensor: torch.Tensor) -> torch.Tensor:
    """`lift_fresh`: C++ passes through it what it makes of numbers, such as the index of `x[[0, 1]]`."""
    for storage in () if tensor.is_floating_point() else storages(tensor):
        if storage._record is UNRECORDED:
            storage._record = HostStorage()
            _made_at[storage._record] = calling_frame().f_code, calling_site()
    return tensor


def _gpu_of_index(call: OpCall, index: torch.Tensor) -> VirtualGPU | None:
    """The list of `x[[0, 1]]` becomes a tensor on the GPU of `x` first, which autograd may keep (sequenceToVariable in
    torch/csrc/autograd/python_variable_indexing.cpp)."""
    if _made_at.get(index.untyped_storage()._record) == (calling_frame().f_code, call.site):  # type: ignore
        send(nbytes(index), None, call.gpu, pinned=False, blocking=True)
        place(index, call.gpu)
    return gpu_of(index)


def index(call: OpCall) -> torch.Tensor:
    """CUDA makes copies of the indices before the result."""
    return call.run_with(*_make_indices(call))


def index_put(call: OpCall) -> torch.Tensor:
    """x[i] += ... with repeated indices sorts all that they broadcast to, and copies values that are fewer
    (index_put_with_sort_kernel in cuda/Indexing.cu). In a backward pass CUDA writes into the zeros that it is given.
    PyTorch's formula copies them only because a dispatch mode is on: the result takes their block over."""
    made = _make_indices(call)
    if not call["accumulate"]:
        return call.run(*made)
    target, values, indices = call["self"], call["values"], call["indices"]
    count = prod(torch.broadcast_shapes(*(index.shape for index in indices if index is not None)))
    whole = count * prod(size for size, index in zip_longest(target.shape, indices) if index is None)
    copy = channels_first_copy(values) if values.numel() >= whole else whole * values.itemsize
    in_place = this_thread.in_backward and call.op.base == "index_put"
    with call.scratch(*made, 8 * count, copy, 8 * count, 8 * count):
        radix_sort(call, count, 8)
        return call.compute_into(target) if in_place else call.run()


def masked_scatter(call: OpCall) -> torch.Tensor:
    """The number of chosen places before each one, and packed copies (masked_scatter__cuda in cuda/IndexKernel.cpp)."""
    result = call.run()
    mask, count = call["mask"], result.numel()
    mask_copy = count if mask.shape != result.shape else channels_first_copy(mask)
    with call.scratch(8 * count, mask_copy, channels_first_copy(call["source"])):
        return result


def repeat_interleave(call: OpCall) -> torch.Tensor:
    """CUDA first computes where the copies of each element end (aten/src/ATen/native/Repeat.h)."""
    return call.run_with(8 * call["repeats"].numel())


def _make_indices(call: OpCall) -> list[int]:
    """Send integers of the CPU, and put for a mask the places that it names (expandTensors): the host waits for both.
    It stays where one number of the CPU goes to all of them (canDispatchToMaskedFill in TensorAdvancedIndexing.cpp).
    Without values, a mask counts as if it named all places, as it does for the clock.
    Returns the bytes of the int64 indices made of those of the CPU, and of int32 (TensorAdvancedIndexingUtils.h)."""
    tensor, given, *others = call.args
    fills = bool(others) and others[0].numel() == 1 and gpu_of(others[0]) is None
    indices: list[torch.Tensor | None] = []
    made: list[int] = []
    for index in given:
        if index is None or (call.on_one_gpu and index.dtype is torch.int64):
            indices.append(index)
            continue
        at, expanded = len(indices), [index]
        where = call.gpu if call.on_one_gpu else _gpu_of_index(call, index)
        if index.dtype not in _MASKS:
            if where is None:
                send(nbytes(index), None, call.gpu, is_pinned(index), blocking=True)
            if where is None or index.dtype != torch.int64:
                made.append(8 * index.numel())
        elif where is call.gpu and not fills:
            fits = index.dtype == torch.bool and index.shape == tensor.shape[at:][: index.dim()]
            if not fits:  # C++ warns of bytes, refuses shapes
                charge_read(call)
            else:
                with seen(), assuming(True) if call.gpu.machine.shapes_only else nullcontext():
                    expanded = index.nonzero().unbind(1)
        indices += expanded
    call.args = (tensor, indices, *others)
    return made


def _are_integers(call: OpCall) -> bool:
    """True if the indices say the size, not their values, or the host has these."""
    return not any([part is not None and part.dtype in _MASKS and gpu_of(part) is not None for part in call.args[1]])


def masked_select(call: OpCall) -> torch.Tensor:
    """CUDA runs it as indexing by the mask (cuda/IndexKernel.cpp)."""
    if call["mask"].dtype != torch.bool:
        return call.run()
    shape = torch._C._infer_size(call["mask"].shape, call["self"].shape) or (1,)
    with seen():
        tensor, mask = (part.expand(shape) for part in call.args)
        return getattr(torch.ops.aten.index, "Tensor_out" if call.kwargs else "Tensor")(tensor, [mask], **call.kwargs)


def one_hot(tensor: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
    """As on CUDA (aten/src/ATen/native/Onehot.cpp): the host reads no value if it is told the number of classes."""
    integers = type(tensor) is torch.Tensor and tensor.dtype is torch.int64
    if not integers or num_classes < 1 or torch._C._are_functorch_transforms_active() or gpu_of(tensor) is None:
        return _raw_one_hot(tensor, num_classes)
    zeros = torch.zeros((*tensor.shape, num_classes), dtype=tensor.dtype, device=tensor.device)
    return zeros.scatter_(-1, tensor.unsqueeze(-1), 1)


def elsewhere(call: OpCall, name: str, common: torch.device, device: torch.device) -> RuntimeError | None:
    """`x[i]` and `x.masked_fill(i, ...)`, if `i` is on a GPU that does not hold `x`: CUDA's text for the argument."""
    text: str | None = _FITTED["elsewhere"].get(name)
    return None if text is None else RuntimeError(text.format(common=common, device=device))


def _writes(nbytes: Bytes, *arguments: str) -> OperatorClass:
    """Operators that move `nbytes` where indices say. If not in place, they copy the first tensor before, but for
    gradients, which CUDA adds up in place (TensorAdvancedIndexing.cpp and cuda/Indexing.cu in aten/src/ATen/native)."""

    def moved(operation: Operation) -> float:
        is_there = operation.in_place or operation.arguments.get("accumulate", False)
        return nbytes(operation) + (0 if is_there else 2 * operation.inputs[0].nbytes)

    return moves(moved, is_fusible=False, **_FITTED["rows_added"])._replace(arguments=arguments)


def _number_of(indices: Parts) -> int:
    """The number of elements that the indices broadcast to."""
    return prod(map(max, zip_longest(*(index.shape[::-1] for index in indices), fillvalue=1)))


def _put_bytes(operation: Operation) -> int:
    """A mask, of a byte for each number, may name all of them. Other indices name as many as they broadcast to."""
    target, *indices, values = operation.inputs
    if any(index.itemsize == 1 for index in indices):
        return operation.nbytes
    rest = (size for size, given in zip_longest(target.shape, operation.arguments["indices"]) if not given)
    named = _number_of(indices) * prod(rest)
    return bytes_of((*indices, values)) + named * target.itemsize * (1 + operation.arguments["accumulate"])


def _put_cost(operation: Operation) -> Cost:
    """If values are added up, the indices are sorted first, together with the position of each."""
    parts = [_WRITES_NAMED.formula(operation)]
    if operation.arguments["accumulate"]:
        parts.append(_SORTS.formula(operation))
    return Cost(sum(part.seconds for part in parts), sum(part.kernels for part in parts))


def _scattered_bytes(operation: Operation) -> int:
    """For each index, CUDA reads it, perhaps a source and the value that was there, and writes one value."""
    target, index, *source = operation.inputs
    passes = 1 + len(source) + any(map(operation.arguments.get, ("reduce", "accumulate")))
    return prod(index.shape) * (index.itemsize + target.itemsize * passes)


_ADDS = _writes(lambda operation: 2 * operation.inputs[-1].nbytes + bytes_of(operation.inputs[1:]))
_COPIES = _writes(lambda operation: operation.inputs[-1].nbytes + bytes_of(operation.inputs[1:]))
_WRITES_NAMED, _FILLS = _writes(_put_bytes, "indices", "accumulate"), _writes(cost.named_bytes, "dim")
_SORTS = moves(lambda operation: _SORTED * _number_of(operation.inputs[1:-1]), **cost.SORT)
_PUTS = _WRITES_NAMED._replace(formula=_put_cost)
_SCATTERS = _writes(_scattered_bytes, "reduce", "accumulate")
_INTO_ZEROS = moves(lambda operation: operation.nbytes + bytes_of(operation.inputs), **_FITTED["into_zeros"])
# A scan of int64 numbers for each place, written and read, comes first.
_CHOOSES = moves(lambda operation: operation.nbytes + 16 * prod(operation.outputs[0].shape), **_FITTED["chosen"])
_REPEATS = moves(lambda operation: operation.nbytes + 16 * prod(operation.inputs[0].shape), **_FITTED["repeats"])
# `scatter(..., src, reduce="multiply")`: sums are deterministic, and so is a number in the place of src.
_OF_PRODUCTS = not_deterministic(
    "scatter_reduce_cuda_kernel", lambda call: call.op.name.endswith(".reduce") and call["reduce"] == "multiply"
)
_OF_REDUCED = not_deterministic("scatter_reduce_cuda_prod_", lambda call: call["reduce"] == "prod")
_named = functools.partial(Row, on_host={"indices"}, mixture=elsewhere, size_is_known=_are_integers, refuses_more=True)
OPERATORS = {
    **dict.fromkeys(("index", "_unsafe_index"), _named(cost.TAKES, index, waits=True)),
    **dict.fromkeys(("index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put"), _named(_PUTS, index_put)),
    "lift_fresh": Row(cost.FREE, cpu_kernel=lambda func: _lift),
    "masked_select": Row(CHARGED_ELSEWHERE, masked_select, waits=True),
    **dict.fromkeys(("masked_scatter", "masked_scatter_"), Row(_CHOOSES, masked_scatter)),
    "index_fill": Row(_FILLS, refuses_more=True),
    "index_fill_": Row(_FILLS, on_host={"index"}),  # x[i] = 5, where C++ sees CPU tensors; on CUDA it is index_put_
    "repeat_interleave": Row(_REPEATS, repeat_interleave, size_is_known=lambda call: call["output_size"] is not None),
    **dict.fromkeys(("index_select", "gather", "take"), Row(cost.TAKES, refuses_more=True)),
    "index_copy": Row(_COPIES, refuses_more=True),
    **dict.fromkeys(("index_add", "scatter_add"), Row(_ADDS, refuses_more=True)),
    **dict.fromkeys(("select_backward", "slice_backward", "unfold_backward"), Row(_INTO_ZEROS)),
    "masked_fill": Row(READS_AND_WRITES, mixture=elsewhere),
    "index_reduce": Row(_ADDS, check=not_deterministic("index_reduce_cuda"), refuses_more=True),
    # The CPU's kernel refuses the other calls of `put_` itself.
    "put": Row(_SCATTERS, check=not_deterministic("put_", lambda call: call["accumulate"]), refuses_more=True),
    "scatter": Row(_SCATTERS, check=_OF_PRODUCTS),
    "scatter_reduce": Row(_SCATTERS, check=_OF_REDUCED),
}


def patches() -> list[Patch]:
    return [(owner, "one_hot", one_hot) for owner in (torch._C._nn, torch.nn.functional)]
