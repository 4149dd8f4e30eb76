"""Operators on lists of tensors (`_foreach_*`, `_fused_*`), and the optimizers, clipping and averages that call them.

Element i of a list stays on its own GPU. PyTorch groups by what C++ calls a device, so they may come in one call.
"""

import sys
from math import ceil, inf, prod
from typing import Any

import torch
from torch.utils._foreach_utils import Indices, TensorListList

from virtual_gpus import figures
from virtual_gpus.arithmetic import ceil_div
from virtual_gpus.clock.cost import OperatorClass, bytes_of
from virtual_gpus.clock.work import Cost, Operation, added_on_host
from virtual_gpus.dispatch import valueless
from virtual_gpus.dispatch.copies import lie_alike
from virtual_gpus.dispatch.lists import columns_of, place_rows
from virtual_gpus.dispatch.operators import OpCall, Row
from virtual_gpus.dispatch.routes import on_host
from virtual_gpus.dispatch.timing import charge_foreach
from virtual_gpus.patches.table import Patch
from virtual_gpus.placement.storages import device_of

_CHUNK, _CHUNKS = 65536, 320  # elements, and chunks of a launch (aten/src/ATen/native/cuda/MultiTensorApply.cuh)
_FITTED, _TENSOR = figures.beside(__file__)["lists"], added_on_host("tensor")
_raw_group = torch.utils._foreach_utils._group_tensors_by_device_and_dtype
_Groups = dict[tuple[torch.device, torch.dtype], tuple[TensorListList, Indices]]


def _group_tensors_by_device_and_dtype(tensorlistlist: TensorListList, with_indices: bool = False) -> _Groups:
    """PyTorch's grouping, split by virtual GPU: for C++, all tensors are on one CPU."""
    groups: _Groups = {}
    for (_, dtype), (lists, indices) in _raw_group(tensorlistlist, True).items():
        for row, leader in enumerate(lists[0]):
            assert leader is not None  # only the further lists may have gaps
            columns, numbers = groups.setdefault((device_of(leader), dtype), ([[] for _ in lists], []))
            for column, whole in zip(columns, lists, strict=False):
                if whole:
                    column.append(whole[row])
            numbers.append(indices[row])
    return {key: (lists, indices if with_indices else []) for key, (lists, indices) in groups.items()}


def run(call: OpCall) -> Any:
    """The route of lists: element i of the result belongs where element i of the first list is."""
    op = call.op
    if call.gpu is None:
        return on_host(call)
    if op.crosses and not _is_one_kernel(call):
        return _copy_pairs(call)
    columns, gpus = columns_of(call)
    valueless.prepare(call)
    result = None  # fused ones change numbers in place, of which there may be none; not all have a meta kernel
    if not (call.gpu.machine.shapes_only and op.in_place and op.base.startswith("_fused_")):
        result = call.compute() if op.row.recipe is None else op.row.recipe(call)
        place_rows(columns, gpus, result)
    charge_foreach(call, columns, gpus, result)
    return result


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
    return Cost(kernels * operation.kernel + seconds, kernels, _TENSOR * sum(operation.lists))


def norms(call: OpCall) -> Any:
    """A partial norm of each chunk, for each tensor as many as the largest has, then the norms (ForeachReduceOp.cu)."""
    tensors, dtype = call["self"], call["dtype"] or call["self"][0].dtype
    if not (call.on_one_gpu and call["ord"] in (1, 2, inf) and all(part.is_floating_point() for part in tensors)):
        return call.compute()
    chunks = ceil_div(max(part.numel() for part in tensors), _CHUNK)
    with call.scratch(len(tensors) * chunks * max(4, dtype.itemsize)):
        return call.place(call.compute())


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
