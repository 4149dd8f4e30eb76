"""What the cost of an operator is found from, and what it is. No torch here."""

from collections.abc import Mapping
from math import prod
from types import MappingProxyType
from typing import Any, NamedTuple

from virtual_gpus.gpus import GPUSpec, Precision

BYTES: dict[Precision, int] = {"fp64": 8, "fp32": 4, "tf32": 4, "fp16": 2, "bf16": 2}  # of a number, by precision


class Operand(NamedTuple):
    """A tensor among the arguments or results: its shape, the bytes of an element, and its strides (none: in order)."""

    shape: tuple[int, ...]
    itemsize: int
    strides: tuple[int, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return prod(self.shape) * self.itemsize

    @property
    def channels_last(self) -> bool:
        """What C++ calls `suggest_memory_format`: True if the strides of images say so beyond doubt."""
        least, order = 0, (1, *range(len(self.strides) - 1, 1, -1), 0)
        for d in order if len(order) in (4, 5) and self.strides[1] else ():
            if self.shape[d] == 0 or self.strides[d] < least or (d == 0 and least == self.strides[1]):
                return False
            least = self.strides[d] * self.shape[d]
        return least > 0

    @property
    def leading(self) -> int:
        """Elements from one row of a matrix to the next (its columns, if those lie one after the other)."""
        return max(self.strides[-2:]) if len(self.strides) > 1 else self.shape[-1]


class Cost(NamedTuple):
    """seconds: of all its kernels on the GPU. kernels: how many the host starts.

    host: seconds that it takes on the host beyond other operators. None: the feature charges for it.
    """

    seconds: float
    kernels: float
    host: float | None = 0.0


class Operation(NamedTuple):
    """One operator: name, tensors, results, the GPU, the precision of its products ("fp32", ...), parts of a number
    (2: complex), lengths of its lists (the first's tensors come first, those of one given twice once), if in place,
    arguments that its class names, if it has them (a tensor is True, a list a tuple), and what its `flag` says."""

    name: str
    inputs: tuple[Operand, ...]
    outputs: tuple[Operand, ...]
    spec: GPUSpec
    precision: Precision = "fp32"
    parts: int = 1
    lists: tuple[int, ...] = ()
    in_place: bool = False
    arguments: Mapping[str, Any] = MappingProxyType({})
    flag: bool = True

    def reading(self, nbytes: float, share: float = 1.0) -> float:
        """See `GPUSpec.seconds_to_move`."""
        return self.spec.seconds_to_move(nbytes, share)

    @property
    def kernel(self) -> float:
        """Seconds of the shortest kernel."""
        return self.spec.reached.kernel

    @property
    def nbytes(self) -> int:
        """Bytes of all arguments and results."""
        return sum(part.nbytes for part in (*self.inputs, *self.outputs))
