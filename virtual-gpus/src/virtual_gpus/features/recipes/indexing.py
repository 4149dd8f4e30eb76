"""Indexing, scatters and embeddings, which look rows up: memory, time, and what is refused or waited for.

In gradients indices are sorted, rows added up in two passes, all with temporaries. Embedding (Embedding.cu and
EmbeddingBackwardKernel.cu in aten/src/ATen/native/cuda): up to 3,072 indices take one kernel without temporaries. The
sizes give the H200's figures to the byte.
"""

from __future__ import annotations

from math import prod

import torch

from virtual_gpus import errors
from virtual_gpus.clock.cost import FITTED, OperatorClass, bytes_of, moves
from virtual_gpus.clock.work import Cost, Operation
from virtual_gpus.dispatch.op_call import OpCall
from virtual_gpus.dispatch.timing import charge_copy, charge_read
from virtual_gpus.dispatch.valueless import is_mask
from virtual_gpus.features.recipes import not_deterministic
from virtual_gpus.features.recipes.packed_inputs import packed, packed_copies
from virtual_gpus.patches.table import Patch
from virtual_gpus.placement.storages import gpu_of, nbytes
from virtual_gpus.threads import this_thread

_INDICES_WALKED = 3072  # by one block of threads; more are sorted
_ROWS_PER_THREAD = 10
_MAX = 2  # as C++ counts EmbeddingBag's modes


def embedding_backward(call: OpCall) -> torch.Tensor:
    """The dense gradient of an embedding's weight."""
    indices, gradient = call["indices"], call["grad_output"]
    count, size = indices.numel(), indices.element_size()
    by_frequency, copies = call["scale_grad_by_freq"], packed_copies(call, ("grad_output", "indices"))
    if count <= _INDICES_WALKED and not by_frequency:
        with call.scratch(*copies):
            return call.run()
    # Copies of inputs; the indices sorted, where each was, how often.
    with call.scratch(*copies, *[nbytes(indices)] * (3 if by_frequency else 2)):
        _sort(call, count, size)
        result = call.run()
        segments = min(count, call["num_weights"])
        partial = count // _ROWS_PER_THREAD + segments
        row = gradient.shape[-1] * max(4, gradient.element_size())
        with call.scratch(count * size, 8, segments * size, segments * size, 8, partial * size, partial * row):
            return result


def _sort(call: OpCall, count: int, size: int) -> None:
    """cub's radix sort of keys and values: the positions to sort along, and second copies of both."""
    with call.scratch(count * size, 2 * count * size):
        pass


def index_put(call: OpCall) -> torch.Tensor:
    """x[i] += ... with repeated indices sorts them. In a backward pass CUDA writes into the zeros that it is given.

    PyTorch's formula copies them only because a dispatch mode is on: the result takes their block over.
    """
    values, indices = call["values"], [i for i in call["indices"] if i is not None]
    if not call["accumulate"]:
        return call.run()
    count = max((i.numel() for i in indices), default=0)
    in_place = this_thread.in_backward and call.op.base == "index_put"
    sizes = [8 * count] * 3 + ([] if values.is_contiguous() else [nbytes(values)])
    with call.scratch(*sizes):
        _sort(call, count, 8)
        return call.run_in_place(call["self"]) if in_place else call.run()


def send_indices(call: OpCall) -> None:
    """The host waits while integers that lie on the CPU are copied to the GPU."""
    for index in call["indices"]:
        if index is not None and gpu_of(index) is None and not is_mask(index):
            charge_copy(None, call.gpu, index, index.dtype, blocking=True)


def send_and_count(call: OpCall) -> None:
    """As `send_indices`; and the host waits for the number of elements that a mask lets it write.

    It does not where one number of the CPU goes to all of them (canDispatchToMaskedFill, TensorAdvancedIndexing.cpp).
    """
    send_indices(call)
    values = call["values"]
    is_filled = values.numel() == 1 and gpu_of(values) is None
    if not is_filled and any(is_mask(index) and gpu_of(index) is not None for index in call["indices"]):
        charge_read(call)


_raw_one_hot = torch._C._nn.one_hot


def one_hot(tensor: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
    """As on CUDA (aten/src/ATen/native/Onehot.cpp): the host reads no value if it is told the number of classes."""
    integers = type(tensor) is torch.Tensor and tensor.dtype is torch.int64
    if not integers or num_classes < 1 or torch._C._are_functorch_transforms_active() or gpu_of(tensor) is None:
        return _raw_one_hot(tensor, num_classes)
    zeros = torch.zeros((*tensor.shape, num_classes), dtype=tensor.dtype, device=tensor.device)
    return zeros.scatter_(-1, tensor.unsqueeze(-1), 1)


def indices_elsewhere(call: OpCall, name: str, common: torch.device, device: torch.device) -> RuntimeError | None:
    """`x[i]` with `i` on a GPU that does not hold `x` (aten/src/ATen/native/IndexingUtils.h)."""
    if name != "indices":
        return None
    return RuntimeError(f"indices should be either on cpu or on the same device as the indexed tensor ({common})")


def embedding_elsewhere(call: OpCall, name: str, common: torch.device, device: torch.device) -> RuntimeError:
    """CUDA looks rows up with index_select, which is the one that complains."""
    return errors.argument_elsewhere("index_select", {"weight": "self", "indices": "index"}[name], device, common)


def mask_elsewhere(call: OpCall, name: str, common: torch.device, device: torch.device) -> RuntimeError | None:
    """`x.masked_fill(mask, ...)` with a mask on another device (aten/src/ATen/native/cuda/Indexing.cu)."""
    if name != "mask":
        return None
    where = f"got mask on {device} and self on {common}"
    return RuntimeError(f"expected self and mask to be on the same device, but {where}")


def _multiplies(call: OpCall) -> bool:
    """`scatter(..., src, reduce="multiply")`: sums are deterministic, and so is a number in the place of src."""
    return call.func._schema.overload_name == "reduce" and call["reduce"] == "multiply"


RECIPES = {"embedding": packed("indices"), "embedding_dense_backward": embedding_backward,
           "index_put": index_put, "_index_put_impl_": index_put}  # fmt: skip
CHECKS = dict.fromkeys(("index", "_unsafe_index"), send_indices)
CHECKS |= dict.fromkeys(("index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put"), send_and_count)
CHECKS |= dict.fromkeys(
    ("_embedding_bag_backward", "_embedding_bag_dense_backward"),
    not_deterministic("embedding_bag_backward_cuda_max", lambda call: call["mode"] == _MAX),
)
CHECKS |= dict.fromkeys(("index_reduce", "index_reduce_"), not_deterministic("index_reduce_cuda"))
# The CPU's kernel refuses the other calls of `put_` itself.
CHECKS |= dict.fromkeys(("put", "put_"), not_deterministic("put_", lambda call: call["accumulate"]))
CHECKS |= dict.fromkeys(("scatter", "scatter_"), not_deterministic("scatter_reduce_cuda_kernel", _multiplies))
CHECKS |= dict.fromkeys(
    ("scatter_reduce", "scatter_reduce_"),
    not_deterministic("scatter_reduce_cuda_prod_", lambda call: call["reduce"] == "prod"),
)
_BY_TENSORS = ("index", "_unsafe_index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put")
ON_THE_HOST = dict.fromkeys(_BY_TENSORS, {"indices"})
ON_THE_HOST["index_fill_"] = {"index"}  # x[i] = 5 ends here if x is on the CPU for C++; on CUDA it is index_put_
ON_THE_HOST["tensor_split"] = {"tensor_indices_or_sections"}
MIXTURES = dict.fromkeys(_BY_TENSORS, indices_elsewhere) | {"embedding": embedding_elsewhere}
MIXTURES |= dict.fromkeys(("masked_fill", "masked_fill_"), mask_elsewhere)


def _embedding_backward_cost(operation: Operation) -> Cost:
    numbers, fitted = prod(operation.inputs[1].shape), FITTED["embedding_backward"]
    written = operation.outputs[0].nbytes + operation.inputs[0].nbytes
    floor = fitted["floor"] + fitted["per_number"] * min(numbers, _INDICES_WALKED)
    return Cost(operation.kernel * floor + operation.reading(written), 2 if numbers <= _INDICES_WALKED else 8)


COSTS = {
    **dict.fromkeys(("embedding", "index_select", "gather", "index"),  # only the rows that are asked for are read
                    moves("rows_taken", lambda operation: 2 * bytes_of(operation.outputs))),
    "index_add_": moves("rows_added", lambda operation: 3 * operation.inputs[-1].nbytes),  # only the named rows
    "embedding_dense_backward": OperatorClass(_embedding_backward_cost, is_fusible=False),
    **dict.fromkeys(("select_backward", "slice_backward"),
                    moves("zeros_and_values", lambda operation: operation.nbytes + bytes_of(operation.inputs))),
}  # fmt: skip


def patches() -> list[Patch]:
    return [(owner, "one_hot", one_hot) for owner in (torch._C._nn, torch.nn.functional)]
