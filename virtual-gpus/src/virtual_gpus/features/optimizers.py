"""Optimizers on several GPUs: foreach and fused ones, clipping and averages take the tensors of a GPU together."""

from __future__ import annotations

import sys
from math import ceil, prod

import torch
from torch.utils._foreach_utils import Indices, TensorListList

from virtual_gpus.clock.cost import FITTED, OperatorClass, bytes_of
from virtual_gpus.clock.work import Cost, Operation, added_on_host
from virtual_gpus.operators import Row
from virtual_gpus.patches.table import Patch
from virtual_gpus.placement.storages import device_of

_CHUNK, _CHUNKS = 65536, 320  # elements, and chunks of a launch (aten/src/ATen/native/cuda/MultiTensorApply.cuh)
_TENSOR = added_on_host("tensor")
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


def _lists(operation: Operation) -> Cost:
    """Optimizers: a kernel for some tensors, in chunks of which a launch takes a number at most."""
    inputs, first, fitted = operation.inputs, operation.inputs[: operation.first], FITTED["lists"]
    if operation.name.startswith("_foreach_addcmul"):
        inputs = inputs[: 2 * operation.first]  # both factors are the gradient, in every optimizer
    written = operation.outputs or first * (3 if operation.name.startswith("_fused_adam") else 1)
    elements = sum(prod(part.shape) for part in first)
    kernels = max(1, ceil(operation.first / fitted["tensors"])) + elements // (_CHUNKS * _CHUNK)
    share = fitted["share"] if operation.outputs else fitted["share_in_place"]
    host = _TENSOR * len(operation.inputs) if operation.first else 0.0
    return Cost(kernels * operation.kernel + operation.reading(bytes_of((*inputs, *written)), share), kernels, host)


OPERATORS = dict.fromkeys(("_foreach_*", "_fused_*"), Row(OperatorClass(_lists, is_fusible=False)))


def patches() -> list[Patch]:
    """See `features`. Some of these modules are imported only where a program asks for them."""
    group = _group_tensors_by_device_and_dtype
    users = ("torch.utils._foreach_utils", "torch.optim.optimizer", "torch.nn.utils.clip_grad", "torch.optim.swa_utils")
    return [(sys.modules[m], group.__name__, group) for m in users if hasattr(sys.modules.get(m), group.__name__)]
