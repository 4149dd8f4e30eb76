"""Gradients of look-ups on CUDA: indices are sorted, rows added up in two passes, all with temporaries.

Embedding: aten/src/ATen/native/cuda/Embedding.cu and EmbeddingBackwardKernel.cu. Up to 3,072 indices take one kernel
without temporaries. The sizes give the H200's figures to the byte.
"""

from __future__ import annotations

from contextlib import ExitStack

from virtual_gpus.dispatch.call import OpCall
from virtual_gpus.ops.contiguous import with_packed
from virtual_gpus.placement.storages import nbytes
from virtual_gpus.threads import this_thread

_FEW = 3072  # indices that the unsorted kernel takes
_ROWS_PER_THREAD = 10


def embedding_backward(call: OpCall):
    """The dense gradient of an embedding's weight."""
    return with_packed(call, ("grad_output", "indices"), _add_up_rows)


def _add_up_rows(call: OpCall):
    indices, gradient = call["indices"], call["grad_output"]
    count, size = indices.numel(), indices.element_size()
    by_frequency = call["scale_grad_by_freq"]
    if count <= _FEW and not by_frequency:
        return call.run()
    with ExitStack() as stack:
        for _ in range(3 if by_frequency else 2):  # the sorted indices, where each was, how often
            stack.enter_context(call.scratch(nbytes(indices)))
        _sort(call, count, size)
        result = call.run()
        segments = min(count, call["num_weights"])
        partial = count // _ROWS_PER_THREAD + segments
        row = gradient.shape[-1] * max(4, gradient.element_size())
        for part in (count * size, 8, segments * size, segments * size, 8, partial * size, partial * row):
            stack.enter_context(call.scratch(part))
    return result


def _sort(call: OpCall, count: int, size: int) -> None:
    """cub's radix sort of keys and values: the positions to sort along, and second copies of both."""
    with call.scratch(count * size), call.scratch(2 * count * size):
        pass


def index_put(call: OpCall):
    """x[i] += ... with repeated indices sorts them. In a backward pass CUDA writes into the zeros that it is given.

    PyTorch's formula copies them only because a dispatch mode is on: the result takes their block over.
    """
    values, indices = call["values"], [i for i in call["indices"] if i is not None]
    if not call["accumulate"]:
        return call.run()
    count = max((i.numel() for i in indices), default=0)
    in_place = this_thread.in_backward and call.op.base == "index_put"
    sizes = [8 * count] * 3 + ([] if values.is_contiguous() else [nbytes(values)])
    with call.scratches(sizes):
        _sort(call, count, 8)
        return call.run_in_place(call["self"]) if in_place else call.run()


RECIPES = {
    "embedding_dense_backward": embedding_backward,
    "index_put": index_put,
    "_index_put_impl_": index_put,
}
