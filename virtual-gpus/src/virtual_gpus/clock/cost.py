"""Seconds of an operator on a GPU, from its sizes and the GPU's data sheet. No torch here.

An operator takes the longer of what its arithmetic and its bytes need, and no less than a kernel takes at all. What
matters is what CUDA runs, not what the CPU runs: fused kernels, several kernels per operator, reductions that too few
threads can share. Operators are in classes, each with a formula, which their rows name (`operators.Row`). Constants
were fitted to a real H200, and stand beside the formulas (`figures.beside`). An operator that is in no class takes as
long as its bytes: it reads its inputs and writes its results once. That is wrong for one that computes: it needs a row.
"""

from collections.abc import Callable, Iterable
from math import prod
from operator import attrgetter
from typing import NamedTuple

from virtual_gpus import figures
from virtual_gpus.clock.work import Cost, Operand, Operation

Formula, Bytes, Parts = Callable[[Operation], Cost], Callable[[Operation], float], Iterable[Operand]
_SHARED = figures.read("operators.toml")
SORT, REDUCTION, ROWS_TAKEN = (_SHARED[part] for part in ("sort", "reduction", "rows_taken"))
PRODUCT_ON_HOST: float = _SHARED["product_on_host"]  # beyond other operators
all_bytes: Bytes = attrgetter("nbytes")  # of arguments and results


class OperatorClass(NamedTuple):
    """A class of operators: its formula, and what else follows from how CUDA computes it.

    is_fusible: whether a compiler fuses them with their neighbours, so no products, and none that serves an optimizer.
    tf32_setting: what lets them multiply fp32 numbers as TF32: "matmul", "conv", or "" if there is none.
    depends_on_strides: whether how the tensors lie in memory decides how long they take.
    arguments: names of those in the schema that the formula wants, as `Operation.arguments` has them.
    is_free: whether no kernel runs, so that no memory is read or written.
    flag: reads a setting of PyTorch that the formula wants, which finds it in `Operation.flag`.
    """

    formula: Formula
    is_fusible: bool = True
    tf32_setting: str = ""
    depends_on_strides: bool = False
    arguments: tuple[str, ...] = ()
    is_free: bool = False
    flag: Callable[[], bool] = bool


def bytes_of(operands: Parts) -> int:
    return sum(part.nbytes for part in operands)


def named_bytes(operation: Operation) -> int:
    """Of the slices that an index names."""
    first, index, dim = *operation.inputs[:2], operation.arguments.get("dim", 0)
    return first.nbytes // max(1, (first.shape or (1,))[dim]) * prod(index.shape)


def moves(
    nbytes: Bytes = all_bytes, floor: float = 1, kernels: int = 1, share: float = 1.0, host: float | None = 0.0,
    is_fusible: bool = True,
) -> OperatorClass:  # fmt: skip
    """Operators that take their start, `floor` in shortest kernels, and as long as they move bytes, at a share of the
    speed. host: see `Cost`."""

    def of(operation: Operation) -> Cost:
        return Cost(floor * operation.kernel + operation.reading(nbytes(operation), share), kernels, host)

    return OperatorClass(of, is_fusible)


READS_AND_WRITES = moves()
COPIES = moves(lambda operation: 2 * operation.outputs[0].nbytes)  # reads as much as it writes
FREE = moves(lambda operation: 0, 0, 0, is_fusible=False)._replace(is_free=True)
CHARGED_ELSEWHERE = moves(lambda operation: 0, 0, 0, host=None, is_fusible=False)  # by the feature
# Only the rows that are asked for, and the indices.
TAKES = moves(lambda operation: 2 * bytes_of(operation.outputs) + bytes_of(operation.inputs[1:]), **ROWS_TAKEN)
