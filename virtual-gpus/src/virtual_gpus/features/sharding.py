"""The copies of `fully_shard` into and out of its flat buffers, which one kernel each does for a list of tensors.

The kernels read where each tensor is from a packed list of 64-bit numbers in GPU memory, which PyTorch takes for the
call (pack_vecs in aten/src/ATen/native/cuda/TensorShape.cu; torch/csrc/distributed/fsdp/ChunkCat.cu for gradients of
several types). It has some numbers per tensor and one per block of threads.
"""

import math
from collections.abc import Sequence
from types import FrameType

import torch

from virtual_gpus.arithmetic import ceil_div, rounded_up
from virtual_gpus.clock.cost import COPIES, READS_AND_WRITES, moves
from virtual_gpus.dispatch.operators import OpCall, Row
from virtual_gpus.placement.storages import ScratchBlock
from virtual_gpus.timeline.peak import BUFFERS, GATHERED, GRADIENTS, PARAMETERS

_THREADS, _BYTES = 128, 128 * 16  # of one block: its threads, and what it copies at a time
_NUMBER = 8  # bytes; their block is free at once for the next request of this stream, whose work comes later
_is_dense = torch.ops.aten.is_non_overlapping_and_dense
_CAST = torch.bfloat16, torch.float32  # the types between which chunk_cat casts on the way


def split_with_sizes_copy(call: OpCall) -> list[torch.Tensor] | None:
    """The gathered buffer, into the tensors of the layer: split_with_sizes_copy_out_cuda."""
    if "out" not in call.op.positions:
        return call.run()
    source, sizes, outputs = call.args[0], call.args[1], call["out"]
    if not all(_is_dense(t) and t.dtype == source.dtype for t in (source, *outputs)):
        return call.run()
    dim = call["dim"] % source.dim()
    chunks = math.prod(source.shape[:dim])
    per_chunk = [size * source.stride(dim) * source.element_size() for size in sizes]
    blocks = sum(ceil_div(nbytes, _BYTES) for nbytes in per_chunk)
    at_once = call.gpu.spec.multi_processor_count * call.gpu.spec.threads // _THREADS * 2
    factor = ceil_div(blocks * chunks, at_once)
    repeats = ceil_div(factor, min(math.ceil(math.sqrt(factor)), chunks)) if factor else 1
    blocks = sum(ceil_div(nbytes, _BYTES * repeats) for nbytes in per_chunk)
    ScratchBlock(call.gpu, _NUMBER * (4 * len(sizes) + 1 + blocks))
    return call.run()


def chunk_cat(call: OpCall) -> torch.Tensor:
    """The gradients of the layer, into the buffer that is scattered: _chunk_cat_out_cuda, fsdp::chunk_cat_mixed_dtype.

    Where their types do not allow for the one kernel, gradients are cast and padded first.
    """
    tensors, dim, chunks = call.args[0], call["dim"] % call.args[0][0].dim(), call["num_chunks"]
    out = call["out"] if "out" in call.op.positions else None
    wanted = tensors[0].dtype if out is None else out.dtype
    mixed = len({tensor.dtype for tensor in tensors}) > 1
    fits = all(_is_dense(t) and (t.dtype == wanted or (t.dtype, wanted) == _CAST) for t in tensors)
    if fits and (out is not None or not mixed):
        rows = [_padded_shape(tensor.shape, dim, chunks) for tensor in tensors]
        blocks = sum(ceil_div(math.prod(shape[dim:]) // chunks * wanted.itemsize, _BYTES) for shape in rows)
        ScratchBlock(call.gpu, _NUMBER * (6 * len(tensors) + 2 + blocks))
        return call.run()
    copies = [tensor.numel() * wanted.itemsize for tensor in tensors if mixed and tensor.dtype != wanted]
    for tensor in tensors:
        padded = math.prod(_padded_shape(tensor.shape, dim, chunks))
        if padded != tensor.numel():
            copies.append(padded * (wanted if mixed else tensor.dtype).itemsize)
    return call.run_with(*copies)


def _padded_shape(shape: Sequence[int], dim: int, chunks: int) -> list[int]:
    return [*shape[:dim], rounded_up(shape[dim], chunks), *shape[dim + 1 :]]


def _whole_gradients(foreach_reduce: FrameType) -> list[tuple[str, torch.Tensor]]:
    """Those before they are scattered, which no optimizer sees."""
    return [(GRADIENTS, tensor) for tensor in foreach_reduce.f_locals.get("unsharded_grads") or ()]


# Each byte is read once and written once: of a gathered tensor, of gradients, and of a rank's own part, the first
# result, which is copied into the tensor that is to be gathered, the second.
OPERATORS = {
    "split_with_sizes_copy": Row(
        moves(lambda operation: 2 * operation.inputs[0].nbytes, is_fusible=False), split_with_sizes_copy),
    "_chunk_cat": Row(READS_AND_WRITES, chunk_cat),
    **dict.fromkeys(("chunk_cat", "chunk_cat_mixed_dtype"), Row(moves(is_fusible=False), chunk_cat)),
    "all_gather_copy_in": Row(COPIES._replace(is_fusible=False)),
}  # fmt: skip
ALLOCATES = [("fsdp/_fully_shard/_fsdp_collectives.py", ("foreach_reduce",), BUFFERS, _whole_gradients),
             ("fsdp/_fully_shard/_fsdp_collectives.py", None, GATHERED),
             ("fsdp/_fully_shard/_fsdp_param.py", ("_init_sharded_param", "reset_sharded_param"), PARAMETERS),
             ("fsdp/_fully_shard/_fsdp_param.py", None, GATHERED),
             ("fsdp/_flat_param.py", None, GATHERED),
             ("fsdp/_runtime_utils.py", None, BUFFERS)]  # fmt: skip
