"""Distances between vectors, `torch.cdist` and `pdist` (aten/src/ATen/native/Distance.cpp, cuda/DistanceKernel.cu)."""

from collections.abc import Sequence
from math import prod

import torch

from virtual_gpus import figures
from virtual_gpus.clock.cost import CHARGED_ELSEWHERE, moves
from virtual_gpus.clock.work import Operand
from virtual_gpus.dispatch.operators import OpCall, Row
from virtual_gpus.threads import seen


def euclidean(call: OpCall) -> torch.Tensor:
    """CUDA runs several operators: the distances come from a product of the vectors, their squares and ones."""
    if call.op.outputs:
        return call.run()
    one, other = call["x1"], call["x2"]
    with seen():
        squares = [part.pow(2).sum(-1, True) for part in (one, other)]
        ones = [torch.ones_like(part) for part in squares]
        first, second = (one.mul(-2), squares[0], ones[0]), (other, ones[1], squares[1])
        return torch.cat(first, -1).matmul(torch.cat(second, -1).mT).clamp_min_(0).sqrt_()


def _buffer(parts: Sequence[torch.Tensor] | Sequence[Operand]) -> int:
    """Bytes of the gradients of all pairs of vectors, which are then added up. A distance of `pdist` stands for two."""
    vectors, distances = parts[1], parts[-1]
    return prod(distances.shape) * (1 if len(parts) > 3 else 2) * vectors.shape[-1] * vectors.itemsize


def gradient(call: OpCall) -> torch.Tensor:
    """Only distances of norm 0 have no gradient to add up."""
    return call.run(_buffer(call.tensors)) if call["p"] != 0 else call.run()


_FITTED = figures.beside(__file__)["gradients"]
_SUMS = moves(lambda operation: operation.nbytes + 2 * _buffer(operation.inputs), **_FITTED)
OPERATORS = {
    "_euclidean_dist": Row(CHARGED_ELSEWHERE, euclidean),
    **dict.fromkeys(("_cdist_backward", "_pdist_backward"), Row(_SUMS, gradient)),
}
