"""Embeddings and bags of them, which look rows up: memory, time, and what is refused.

In gradients indices are sorted, rows added up in two passes, all with temporaries. Up to 3,072 indices take one kernel
without temporaries. The sizes give the H200's figures to the byte. Sources: Embedding.cu, EmbeddingBackwardKernel.cu
and EmbeddingBag.cu in aten/src/ATen/native/cuda.
"""

from math import prod

import torch

from virtual_gpus import figures
from virtual_gpus.clock.cost import ROWS_TAKEN, TAKES, OperatorClass, moves, named_bytes
from virtual_gpus.clock.work import Cost, Operation
from virtual_gpus.dispatch.operators import OpCall, Row
from virtual_gpus.dispatch.recipes import not_deterministic, packed, packed_copies, radix_sort
from virtual_gpus.placement.storages import StorageAllocation, nbytes, put

_FITTED = figures.beside(__file__)["backward"]
_INDICES_WALKED = 3072  # by one block of threads; more are sorted
_ROWS_PER_THREAD = 10
_MAX = 2  # as C++ counts EmbeddingBag's modes


def embedding_backward(call: OpCall) -> torch.Tensor:
    """The dense gradient of an embedding's weight, or of a table of bags, for whose sums all indices are sorted."""
    (gradient, indices), bags = call.tensors[:2], "mode" in call.op.positions
    count, size = indices.numel(), indices.element_size()
    by_frequency, copies = call["scale_grad_by_freq"], packed_copies(call, (next(iter(call.op.positions)), "indices"))
    if "sparse" in call.op.positions and call["sparse"]:
        return call.run()
    if call["mode"] == _MAX if bags else count <= _INDICES_WALKED and not by_frequency:
        return call.run_with(*copies)
    sorted_indices = places = nbytes(indices)
    with call.scratch(*copies, sorted_indices, places, nbytes(indices) if by_frequency else 0):
        radix_sort(call, count, size)
        partial = count // _ROWS_PER_THREAD + (segments := min(count, call["num_weights"]))
        row = gradient.shape[-1] * max(4, gradient.element_size())
        return call.run(count * size, 8, segments * size, segments * size, 8, partial * size, partial * row)


def embedding_bag(call: OpCall) -> tuple[torch.Tensor, ...]:
    """CUDA makes the size of each bag, the bag of each index, the result, and where the largest were, in this order."""
    result = output, bags, sizes, largest = call.compute()
    size = max(call["indices"].itemsize, call["offsets"].itemsize)
    put(sizes, StorageAllocation(call.gpu, call["offsets"].numel() * size))
    put(bags, StorageAllocation(call.gpu, call["indices"].numel() * size))
    call.place(output)
    put(largest, StorageAllocation(call.gpu, output.numel() * size if call["mode"] == _MAX else 0))
    return result


def _embedding_backward_cost(operation: Operation) -> Cost:
    numbers, fitted = prod(operation.inputs[1].shape), _FITTED
    written = operation.outputs[0].nbytes + operation.inputs[0].nbytes
    floor = fitted["floor"] + fitted["per_number"] * min(numbers, _INDICES_WALKED)
    kernels = fitted["kernels" if numbers <= _INDICES_WALKED else "kernels_of_many"]
    return Cost(operation.kernel * floor + operation.reading(written), kernels)


_BAGS = moves(lambda operation: named_bytes(operation) + operation.nbytes - operation.inputs[0].nbytes, **ROWS_TAKEN)
_BACK = OperatorClass(_embedding_backward_cost, is_fusible=False)
_OF_BAGS = not_deterministic("embedding_bag_backward_cuda_max", lambda call: call["mode"] == _MAX)
OPERATORS = {
    "embedding": Row(TAKES, packed("indices"), refuses_more=True),
    "embedding_dense_backward": Row(_BACK, embedding_backward),
    **dict.fromkeys(("_embedding_bag", "_embedding_bag_forward_only"), Row(_BAGS, embedding_bag)),
    **dict.fromkeys(
        ("_embedding_bag_backward", "_embedding_bag_dense_backward"), Row(_BACK, embedding_backward, _OF_BAGS)
    ),
}
