"""Operators on lists of tensors (`_foreach_*`, `_fused_*`), and the optimizers, clipping and averages that call them.

Element i of a list stays on its own GPU. PyTorch groups by what C++ calls a device, so they may come in one call.
"""

import sys
from collections.abc import Sequence
from itertools import chain, compress
from math import ceil, inf, prod
from operator import attrgetter, methodcaller, mul
from typing import Any

import torch
from torch.utils._foreach_utils import Indices, TensorListList

from virtual_gpus import errors, figures
from virtual_gpus.arithmetic import ceil_div
from virtual_gpus.clock.cost import OperatorClass, bytes_of
from virtual_gpus.clock.work import Cost, Operation
from virtual_gpus.dispatch import timing, valueless
from virtual_gpus.dispatch.copies import lie_alike
from virtual_gpus.dispatch.operators import OpCall, Row
from virtual_gpus.dispatch.routes import on_host
from virtual_gpus.entrance import entrance
from virtual_gpus.machine import VirtualGPU
from virtual_gpus.patches.table import Patch
from virtual_gpus.placement.storages import device_of, gpu_of, place, place_all, tensors_in

_CHUNK, _CHUNKS = 65536, 320  # elements, and chunks of a launch (aten/src/ATen/native/cuda/MultiTensorApply.cuh)
_FITTED = figures.beside(__file__)["lists"]
_storage, _gpu = methodcaller("untyped_storage"), attrgetter("_record.gpu")
_elements, _itemsize = torch.Tensor.numel, torch.Tensor.element_size
_raw_group = torch.utils._foreach_utils._group_tensors_by_device_and_dtype
_Groups = dict[tuple[torch.device, torch.dtype], tuple[TensorListList, Indices]]


@entrance
def _group_tensors_by_device_and_dtype(tensorlistlist: TensorListList, with_indices: bool = False) -> _Groups:
    """PyTorch's grouping, split by virtual GPU: for C++, all tensors are on one CPU. Raises RuntimeError as it does if
    tensors of the same index are on different devices (aten/src/ATen/native/ForeachUtils.h)."""
    groups: _Groups = {}
    for (_, dtype), (lists, indices) in _raw_group(tensorlistlist, True).items():
        leaders: list[Any] = lists[0]  # only the further lists may have gaps
        gpus = _gpus_of(leaders)
        for tensors in filter(None, lists[1:]):
            if _gpus_of(tensors) != gpus and any(map(_are_apart, leaders, tensors)):
                _raw_group([[torch.empty(0)], [torch.empty(0, dtype=torch.bool)]])  # PyTorch words its own error
        places = gpus if len(set(gpus)) == 1 and gpus[0] else list(map(device_of, leaders))
        for shared in dict.fromkeys(places):
            is_there = [where == shared for where in places]
            columns: list[list[Any]] = [list(compress(tensors, is_there)) for tensors in lists]
            groups[device_of(columns[0][0]), dtype] = columns, list(compress(indices, is_there)) if with_indices else []
    return groups


def _gpus_of(tensors: Sequence[torch.Tensor | None]) -> list[VirtualGPU | None]:
    """The GPU of each, asked without a call into Python. Empty if one has no storage of its own."""
    try:
        return list(map(_gpu, map(_storage, tensors)))
    except (AttributeError, NotImplementedError, RuntimeError):  # None; sparse ones
        return []


def _are_apart(leader: Any, tensor: Any) -> bool:
    """True for tensors on different devices, except a gap, and numbers of steps on the CPU, in fp32 or fp64."""
    is_allowed = tensor is None or (tensor.dtype in (torch.float32, torch.float64) and gpu_of(tensor) is None)
    return not is_allowed and device_of(tensor) != device_of(leader)


def run(call: OpCall) -> Any:
    """The route of lists: element i of the result belongs where element i of the first list is."""
    op = call.op
    if call.gpu is None:
        return on_host(call)
    if op.row.crosses and not _is_one_kernel(call):
        return _copy_pairs(call)
    columns, gpus = _columns(call)
    if not call.on_one_gpu:
        for row in zip(*columns, strict=False):  # a 0-dim CPU tensor counts as a number
            by_gpu = {gpu: tensor for tensor in row if (gpu := gpu_of(tensor)) is not None or tensor.dim()}
            if len(by_gpu) > 1:
                raise errors.two_devices(*sorted(map(device_of, [*by_gpu.values()][:2]), key=str, reverse=True))
    valueless.prepare(call)
    result = None  # fused ones change numbers in place, of which there may be none; not all have a meta kernel
    if not (call.gpu.machine.shapes_only and op.in_place and op.base.startswith("_fused_")):
        result = call.compute() if op.row.recipe is None else op.row.recipe(call)
        if call.on_one_gpu:
            place_all(result, call.gpu)
        else:
            _place_rows(columns, gpus, result)
    _charge(call, columns, gpus, result)
    return result


def _columns(call: OpCall) -> tuple[list[Sequence[torch.Tensor]], list[VirtualGPU | None]]:
    """The lists of tensors among the arguments, and the GPUs of the first. `_foreach_pow` may begin with a number."""
    lists = [value for value in (*call.args, *call.kwargs.values()) if isinstance(value, (list, tuple)) and value]
    columns: list[Sequence[torch.Tensor]] = [value for value in lists if isinstance(value[0], torch.Tensor)]
    first: Sequence[torch.Tensor] = next(iter(columns), ())
    return columns, [call.gpu] * len(first) if call.on_one_gpu else list(map(gpu_of, first))


def _place_rows(columns: list[Sequence[torch.Tensor]], gpus: Sequence[VirtualGPU | None], result: Any) -> None:
    """Give each result its block on the GPU of its row."""
    for tensor, gpu in zip(next(iter(columns), ()), gpus, strict=True):
        if gpu is not None and tensor.layout != torch.strided:
            place(tensor, gpu)  # an in-place operator gives a sparse tensor new storages
    for gpu, part in zip(gpus, result or (), strict=False):
        if gpu is not None:
            place_all(part, gpu)


def _charge(call: OpCall, columns: list[Sequence[torch.Tensor]], gpus: list[VirtualGPU | None], result: Any) -> None:
    """Put it on the clock: for each GPU among them, one call with its elements. gpus: of the first list."""
    op, arguments = call.op, tuple(map(timing.plain, map(call.__getitem__, call.op.arguments)))
    dtype = getattr(result[0], "dtype", None) if result else None
    for gpu in filter(None, dict.fromkeys(gpus)):
        rows = columns
        if gpus.count(gpu) < len(gpus):
            rows = [[part for part, where in zip(column, gpus, strict=False) if where is gpu] for column in columns]
        # A list that is given twice is read once: `addcmul` squares the gradient in every optimizer.
        reads = {(id(row[0]), id(row[-1])): row for row in rows}.values()
        # How long lists take depends on their elements and bytes (`_lists`), which are found faster than all shapes.
        lists, elements = tuple(map(len, rows)), sum(map(_elements, rows[0]))
        key = gpu.spec.kind, op, lists, elements, *map(_nbytes, reads), arguments, dtype
        needs = timing.launch_times.get(key)
        if needs is None:
            written = timing.operands(t for t in tensors_in(result) or timing.filled(call) if gpu_of(t) is gpu)
            given = dict(zip(op.arguments, arguments, strict=True))
            operation = Operation(op.base, timing.operands(chain(*reads)), written, gpu.spec, lists=lists,
                                  in_place=op.in_place, arguments=given)  # fmt: skip
            needs = timing.keep(key, gpu, op, operation)
        timing.issue(gpu, op.base, chain(*rows), needs, call if len(rows[0]) == len(gpus) else None, trains=False)


def _nbytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum(map(mul, map(_elements, tensors), map(_itemsize, tensors)))


def _is_one_kernel(call: OpCall) -> bool:
    """True for `_foreach_copy_` of lists whose pairs lie alike on one GPU (native/cuda/ForeachBinaryOpList.cu)."""
    targets, sources = call["self"], call["src"]
    one_type = call.on_one_gpu and len(targets) == len(sources) and len({part.dtype for part in sources}) == 1
    return one_type and all(map(lie_alike, sources, targets))


def _copy_pairs(call: OpCall) -> None:
    targets, sources = call["self"], call["src"]
    if len(targets) != len(sources):
        on_host(call)  # which refuses it
    for pair in zip(targets, sources, strict=True):
        copy = OpCall(torch.ops.aten.copy_.default, (*pair, call["non_blocking"]), {})
        copy.op.route(copy)


def _lists(operation: Operation) -> Cost:
    """Optimizers: a kernel for some tensors, in chunks of which a launch takes a number at most. A fused one writes on
    the second list, the gradients, only if it unscales them (aten/src/ATen/native/cuda/fused_adam_utils.cuh)."""
    fitted, first = _FITTED, next(iter(operation.lists), 0)
    elements = sum(prod(part.shape) for part in operation.inputs[:first])
    kernels = max(1, ceil(first / fitted["tensors"])) + elements // (_CHUNKS * _CHUNK)
    is_kept = operation.in_place and not operation.arguments.get("grad_scale", True)
    nbytes = operation.nbytes - (bytes_of(operation.outputs[first : 2 * first]) if is_kept else 0)
    seconds = operation.reading(nbytes, fitted["share_in_place" if operation.in_place else "share"])
    return Cost(kernels * operation.kernel + seconds, kernels, fitted["host"] * sum(operation.lists))


def norms(call: OpCall) -> Any:
    """A partial norm of each chunk, for each tensor as many as the largest has, then the norms (ForeachReduceOp.cu)."""
    tensors, dtype = call["self"], call["dtype"] or call["self"][0].dtype
    if not (call.on_one_gpu and call["ord"] in (1, 2, inf) and all(part.is_floating_point() for part in tensors)):
        return call.compute()
    chunks = ceil_div(max(part.numel() for part in tensors), _CHUNK)
    return call.run_with(len(tensors) * chunks * max(4, dtype.itemsize))


_LISTS = OperatorClass(_lists, False, arguments=("grad_scale",))
OPERATORS = {
    **dict.fromkeys(("_foreach_*", "_fused_*"), Row(_LISTS, by_element=True)),
    "_foreach_norm": Row(_LISTS, norms, by_element=True),
    "_foreach_copy_": Row(_LISTS, by_element=True, crosses=True),
}
ROUTES = {"list": run}


def patches() -> list[Patch]:
    """See `features`. Some of these modules are imported only where a program asks for them."""
    group = _group_tensors_by_device_and_dtype
    users = ("torch.utils._foreach_utils", "torch.optim.optimizer", "torch.nn.utils.clip_grad", "torch.optim.swa_utils")
    return [(sys.modules[m], group.__name__, group) for m in users if hasattr(sys.modules.get(m), group.__name__)]
