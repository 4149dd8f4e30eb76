"""Reductions over many elements, scans and comparisons on CUDA: temporary buffers in GPU memory, and time.

Sources: `memory_model.reduction_scratch`; aten/src/ATen/native/ReduceOpsUtils.h for casts.
"""

from collections.abc import Callable
from functools import partial
from math import prod

import torch

from virtual_gpus import figures
from virtual_gpus.clock.cost import CHARGED_ELSEWHERE, READS_AND_WRITES, REDUCTION, OperatorClass, moves
from virtual_gpus.clock.work import Cost, Operation
from virtual_gpus.dispatch.half_precision import HALVES
from virtual_gpus.dispatch.operators import OpCall, Row
from virtual_gpus.dispatch.recipes import channels_first_copy, take_buffers
from virtual_gpus.threads import seen

_FITTED = figures.beside(__file__)


def after_cast(call: OpCall, widens: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """The result, then what is added up, in its type: a copy, unless the kernel itself widens halves to fp32
    (ReduceOps{.cpp,Utils.h})."""
    result, tensor = call.run(), call["self"]
    if result.dtype == tensor.dtype:
        return result, tensor
    kernel_takes = (tensor.dtype.to_real(), torch.float32 if widens and tensor.dtype in HALVES else None)
    if result.dtype not in kernel_takes:
        with seen():
            tensor = call.read_instead(torch.ops.aten._to_copy.default(tensor, dtype=result.dtype))
    return result, tensor


def total(call: OpCall, of_norm: bool = False) -> torch.Tensor:
    """`sum` and its like: partial results are floats for halves. of_norm: they are real for complex numbers."""
    result, tensor = after_cast(call)
    dtype, real = tensor.dtype, tensor.dtype.to_real()
    size = (real if of_norm else dtype).itemsize * (2 if real in HALVES else 1)
    take_buffers(call, tensor, size)
    return result


def reduction(call: OpCall, numbers: int = 1, least: int = 0) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """numbers: of the tensor's type, in a partial result (`arg_t` of cuda/Reduce*Kernel.cu). least: bytes of one."""
    result, tensor = call.run(), call["self"]
    take_buffers(call, tensor, max(numbers * tensor.itemsize, least))
    return result


def extreme(call: OpCall) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """`max` and `min`; along a dimension a number and its index have 16 bytes."""
    return reduction(call, least=16 if "dim" in call.op.positions else 0)


def index_of_largest(call: OpCall) -> torch.Tensor:
    """`argmax` and `argmin`: of all numbers in a row, if along no dimension."""
    result, tensor = call.run(), call["self"]
    if call["dim"] is None and not tensor.is_contiguous():
        with seen():
            tensor = tensor.reshape(-1)
    take_buffers(call, tensor, 16)
    return result


def scan(call: OpCall) -> torch.Tensor:
    """The kernel reads a packed copy in the result's type (cuda/ScanUtils.cuh)."""
    result, tensor = after_cast(call, widens=False)
    with call.scratch(channels_first_copy(tensor)):
        return result


def count_nonzero(call: OpCall) -> torch.Tensor:
    """CUDA runs it as several operators (count_nonzero_cuda in TensorAdvancedIndexing.cpp)."""
    with seen():
        tensor = call["self"]
        return torch.sum(tensor if tensor.dtype == torch.bool else tensor != 0, call["dim"], **call.kwargs)


def trace(call: OpCall) -> torch.Tensor:
    """CUDA adds up a view of the diagonal (cuda/TriangularOps.cu)."""
    with seen():
        return call["self"].diagonal().sum() if not call.op.outputs else call.run()


def logsumexp(call: OpCall) -> torch.Tensor:
    """CUDA runs it as several operators (ReduceOps.cpp). One result is as large as the tensor."""
    tensor, dims, keepdim = call["self"], call["dim"], call["keepdim"]
    if not tensor.numel():
        return call.run()
    with seen():
        if not (tensor.is_floating_point() or tensor.is_complex()):
            tensor = tensor.to(torch.get_default_dtype())
        largest = torch.amax(tensor.real if tensor.is_complex() else tensor, dims, True)
        added = largest if keepdim else largest.squeeze(tuple(dims))
        added.masked_fill_(added.abs() == torch.inf, 0)
        return torch.sum((tensor - largest).exp_(), dims, keepdim, **call.kwargs).log_().add_(added)


def compared(elements: Callable[..., torch.Tensor], call: OpCall) -> bool:
    """CUDA runs several operators (Equal.cpp, TensorCompare.cpp). `equal` needs none for other shapes or one tensor."""
    one, other = call.args[:2]
    if call.op.base == "equal" and (one.shape != other.shape or one.is_set_to(other)):
        return call.run()
    with seen():
        return bool(elements(*call.args, **call.kwargs).all().item())


def _reduction_cost(operation: Operation) -> Cost:
    """Few results of many numbers: threads leave partial sums, and the last block adds them up."""
    inputs, results = (sum(prod(p.shape) for p in parts) for parts in (operation.inputs, operation.outputs))
    far = inputs > REDUCTION["numbers_per_result"] * max(1, results) and inputs > REDUCTION["numbers"]
    floor = REDUCTION["floor_of_many" if far else "floor"] * operation.kernel
    return Cost(floor + operation.reading(operation.nbytes, REDUCTION["share"]), 2 if far else 1)


_REDUCES, _SCAN = OperatorClass(_reduction_cost), moves(**_FITTED["scan"])
OPERATORS = {
    **dict.fromkeys(("sum", "mean", "prod", "nansum"), Row(_REDUCES, total)),
    **dict.fromkeys(("linalg_vector_norm", "linalg__powsum", "norm"), Row(_REDUCES, partial(total, of_norm=True))),
    **dict.fromkeys(("amax", "amin", "all", "any"), Row(_REDUCES, reduction)),
    **dict.fromkeys(("max", "min"), Row(_REDUCES, extreme, refuses_more=True)),
    **dict.fromkeys(("argmax", "argmin"), Row(_REDUCES, index_of_largest)),
    # Welford's mean, squares and twice the count, and the smallest number beside the largest.
    **dict.fromkeys(("var", "std", "var_mean", "std_mean"), Row(_REDUCES, partial(reduction, numbers=4, least=16))),
    "aminmax": Row(READS_AND_WRITES, partial(reduction, numbers=2)),
    "logsumexp": Row(CHARGED_ELSEWHERE, logsumexp),
    "trace": Row(CHARGED_ELSEWHERE, trace),
    "count_nonzero": Row(CHARGED_ELSEWHERE, count_nonzero),
    **dict.fromkeys(("cumsum", "cumprod"), Row(_SCAN, scan)),
    "equal": Row(CHARGED_ELSEWHERE, partial(compared, torch.eq), waits=True),
    "allclose": Row(CHARGED_ELSEWHERE, partial(compared, torch.isclose), waits=True),
}
