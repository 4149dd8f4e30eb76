"""Reductions over many elements: partial results in GPU memory (aten/src/ATen/native/cuda/Reduce.cuh).

A sum of few outputs over many inputs is cut across thread blocks. Each block leaves its partial results in a buffer,
and counts itself off on a semaphore; the last block adds them up. For the bias gradient of a linear layer, a sum over
the rows of a wide matrix, that buffer is often larger than the matrix itself. How the work is cut follows
`setReduceConfig`: it depends on shape, strides, type and the number of multiprocessors. The figures equal those in the
traces of an H200 to the byte.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod

import torch

from virtual_gpus.dispatch.call import Call

_MIN_VALUES, _MAX_VALUES = 16, 256  # values that one thread adds up
_MAX_THREADS, _WARP = 512, 32
_VECTOR = 4  # elements that a thread loads at once


def buffers(tensor: torch.Tensor, dims, spec, partial_bytes: int) -> tuple[int, int]:
    """Bytes of partial results and of semaphores for reducing `tensor` over `dims` (None: all) on a GPU of `spec`.

    partial_bytes: of one partial result, e.g. 4 for a sum of floats. (0, 0) if one thread block per output is enough.
    """
    if tensor.numel() <= _MAX_VALUES:  # far too little for more than one block
        return 0, 0
    shape, ndim = tuple(tensor.shape), tensor.dim()
    reduced = tuple(sorted({d % ndim for d in dims})) if dims else tuple(range(ndim))
    size = tensor.element_size()
    return _buffers(shape, tensor.stride(), reduced, size, partial_bytes, spec.multi_processor_count, _threads(spec))


def _threads(spec) -> int:
    """Threads that fit on one multiprocessor: 2,048 but for Turing's 1,024 (CUDA C++ programming guide, appendix)."""
    return 1024 if spec.capability == (7, 5) else 2048


@lru_cache(maxsize=4096)
def _buffers(shape, strides, reduced, size, partial_bytes, multiprocessors, threads_per_multiprocessor):
    inner, outer = _merged(shape, strides, reduced)
    inputs, outputs = prod(n for n, _ in inner), prod(n for n, _ in outer)
    if not inputs or not outputs:
        return 0, 0
    along_input = not outer or not inner or inner[0][1] < outer[0][1]
    dim0, dim1 = (inputs, outputs) if along_input else (outputs, inputs)
    fastest = (inner or [(1, 1)])[0][1] if along_input else outer[0][1]
    vector = 1
    if fastest == 1 and along_input and dim0 > 128 and len(inner) + len(outer) == 1:
        dim0 //= _VECTOR
    elif fastest == 1 and not along_input:
        vector = _output_vector(inner, outer)
        dim0 //= vector
    width, height = _block(dim0, dim1, _MAX_THREADS // vector)
    step_input, step_output = (width, 1) if along_input else (1, width)
    if -(-inputs // step_input) < min(height * 16, _MAX_VALUES):
        return 0, 0
    values = -(-inputs // (step_input * height))
    grid = -(-(outputs // vector) // step_output)
    wanted = multiprocessors * (threads_per_multiprocessor // (width * height))
    if values < _MAX_VALUES or grid > wanted:
        return 0, 0
    blocks = max(min(-(-wanted // grid), -(-values // _MIN_VALUES)), -(-values // _MAX_VALUES))
    if blocks <= 1:
        return 0, 0
    return partial_bytes * outputs * blocks * (1 if along_input else width * vector), 4 * grid


def _merged(shape, strides, reduced):
    """The reduced and the kept dimensions as (length, stride), fastest first, neighbours in memory joined."""
    both = [], []
    for dim in reversed(range(len(shape))):
        if shape[dim] != 1:
            both[dim not in reduced].append((shape[dim], strides[dim]))
    inner, outer = both
    inner.sort(key=lambda entry: entry[1])  # the output's own order decides for the others: they keep theirs
    return _joined(inner), _joined(outer)


def _joined(dims):
    found = []
    for length, stride in dims:
        if found and found[-1][0] * found[-1][1] == stride:
            found[-1] = (found[-1][0] * length, found[-1][1])
        else:
            found.append((length, stride))
    return found


def _output_vector(inner, outer) -> int:
    """How many neighbouring outputs one thread takes: 4, 2 or 1, as all strides and the length divide."""
    vector = _VECTOR
    for number in (outer[0][0], *(stride for _, stride in inner), *(stride for _, stride in outer[1:])):
        while number % vector:
            vector //= 2
    return vector


def _block(dim0: int, dim1: int, limit: int) -> tuple[int, int]:
    """Width and height of a thread block."""
    width0, height0 = (_last_power(n) if n < limit else limit for n in (dim0, dim1))
    height = min(height0, limit // min(width0, _WARP))
    return min(width0, limit // height), height


def _last_power(n: int) -> int:
    return 1 << max(n.bit_length() - 1, 0)


# ---- recipes -------------------------------------------------------------------------------------------------------


def take_buffers(call: Call, tensor: torch.Tensor, dims, partial_bytes: int) -> None:
    """Take and give back what reducing `tensor` on the call's GPU needs, after the result was placed."""
    partial, semaphores = buffers(tensor, dims, call.gpu.spec, partial_bytes)
    if partial:
        with call.scratch(partial), call.scratch(semaphores):
            pass


def _partial_bytes(call: Call, tensor: torch.Tensor) -> int:
    """Sums are kept in float for half types, in the widest whole number for whole numbers."""
    dtype = call["dtype"] if "dtype" in call.op.names else None
    dtype = dtype or tensor.dtype
    if dtype.is_floating_point:
        return 8 if dtype == torch.float64 else 4
    return 2 * (8 if dtype == torch.complex128 else 4) if dtype.is_complex else 8


def reduction(call: Call):
    """`sum`, `mean` and their like: one number per partial result."""
    tensor = call.args[0]
    result = call.run()
    if tensor.numel() > _MAX_VALUES:
        take_buffers(call, tensor, _dims(call), _partial_bytes(call, tensor))
    return result


def with_index(call: Call):
    """`argmax`, `max(dim)`, ...: a partial result is a number and its index, 16 bytes."""
    tensor = call.args[0]
    result = call.run()
    take_buffers(call, tensor, _dims(call), 16)
    return result


def _dims(call: Call):
    if "dim" not in call.op.names:
        return None
    dim = call["dim"]
    return (dim,) if isinstance(dim, int) else dim


RECIPES = {
    **dict.fromkeys(("sum", "mean", "nansum", "prod", "amax", "amin", "linalg_vector_norm", "norm"), reduction),
    **dict.fromkeys(("argmax", "argmin", "var", "std", "var_mean", "std_mean"), with_index),
}
