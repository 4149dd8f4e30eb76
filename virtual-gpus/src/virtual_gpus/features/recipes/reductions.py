"""Reductions over many elements, softmax, counts and sorts: temporary buffers in GPU memory, time, what is refused.

Sources: `memory_model.reduction_scratch`; aten/src/ATen/native/cuda/SoftMax.cu.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import prod

import torch

from virtual_gpus.clock.cost import FITTED, READS_AND_WRITES, OperatorClass, moves
from virtual_gpus.clock.work import Cost, Operation
from virtual_gpus.dispatch.op_call import OpCall
from virtual_gpus.features.recipes import not_deterministic
from virtual_gpus.features.recipes.packed_inputs import channels_first_copy, packed
from virtual_gpus.memory_model import reduction_scratch
from virtual_gpus.operators import Row
from virtual_gpus.threads import below


def take_buffers(call: OpCall, tensor: torch.Tensor, dims: Sequence[int] | None, partial_bytes: int) -> None:
    """Take and give back what reducing `tensor` on the call's GPU needs, after the result was placed."""
    sizes = reduction_scratch(tensor.shape, call.gpu.spec, dims, strides=tensor.stride(), partial_bytes=partial_bytes)
    if sizes[0]:
        with call.scratch(*sizes):
            pass


def _partial_bytes(call: OpCall, tensor: torch.Tensor) -> int:
    """Sums are kept in float for half types, in the widest integer type for integers."""
    dtype = (call["dtype"] if "dtype" in call.op.names else None) or tensor.dtype
    if dtype.is_floating_point:
        return 8 if dtype == torch.float64 else 4
    return 2 * (8 if dtype == torch.complex128 else 4) if dtype.is_complex else 8


def reduction(call: OpCall, partial_bytes: int | None = None) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """`sum` and its like: a number per partial result. 16 bytes are a number and its index, as `argmax` has them."""
    tensor, dim = call.args[0], call["dim"] if "dim" in call.op.names else None
    result = call.run()
    take_buffers(call, tensor, (dim,) if isinstance(dim, int) else dim, partial_bytes or _partial_bytes(call, tensor))
    return result


def histc(call: OpCall) -> torch.Tensor:
    """Of integers as well, for which only CUDA has a kernel (aten/src/ATen/native/cuda/SummaryOps.cu)."""
    x = call["self"]
    if x.is_floating_point():
        return call.run()
    with below():
        return call.place(torch.histc(x.double(), call["bins"], call["min"], call["max"]).to(x.dtype))


def _reduction_cost(operation: Operation) -> Cost:
    """Few results of many numbers: threads leave partial sums, and the last block adds them up."""
    inputs, results = (sum(prod(p.shape) for p in parts) for parts in (operation.inputs, operation.outputs))
    fitted = FITTED["reduction"]
    far = inputs > fitted["numbers_per_result"] * max(1, results) and inputs > fitted["numbers"]
    floor = fitted["floor_of_many" if far else "floor"] * operation.kernel
    return Cost(floor + operation.reading(operation.nbytes, fitted["share"]), 2 if far else 1)


_NUMBERS = ("sum", "mean", "nansum", "prod", "amax", "amin", "linalg_vector_norm", "norm")
_PAIRS = ("argmax", "argmin", "var", "std", "var_mean", "std_mean")
_SOFTMAX, _BACKWARD = ("_softmax", "_log_softmax"), ("_softmax_backward_data", "_log_softmax_backward_data")
_MEDIAN = not_deterministic("median CUDA with indices output", lambda call: len(call.func._schema.returns) == 2)
_HISTC = not_deterministic("_histc_cuda with floating point input", lambda call: call["self"].is_floating_point())
_REDUCES, _SORTS = OperatorClass(_reduction_cost), moves("sort")
OPERATORS = {
    **dict.fromkeys(_NUMBERS, Row(_REDUCES, reduction)),
    **dict.fromkeys(_PAIRS, Row(_REDUCES, partial(reduction, partial_bytes=16))),
    **dict.fromkeys(("max", "min", "all", "any"), Row(_REDUCES)),
    **dict.fromkeys(_SOFTMAX, Row(moves("softmax"), packed("self", copy_of=channels_first_copy))),
    **dict.fromkeys(
        _BACKWARD, Row(moves("softmax_backward"), packed("grad_output", "output", copy_of=channels_first_copy))
    ),
    **dict.fromkeys(("sort", "argsort", "topk", "_unique2", "cumsum", "randperm"), Row(_SORTS)),
    **dict.fromkeys(("median", "nanmedian"), Row(READS_AND_WRITES, check=_MEDIAN)),
    "bincount": Row(
        READS_AND_WRITES, check=not_deterministic("_bincount_cuda", lambda call: call["weights"] is not None)
    ),
    "histc": Row(READS_AND_WRITES, histc, _HISTC),
}
