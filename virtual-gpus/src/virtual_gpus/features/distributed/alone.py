"""Collectives of one rank of many (`processes.one_rank`): what arrives from ranks that do not exist.

Every other rank is taken to hold what this one holds. A mean or a maximum over the ranks is then this rank's tensor, a
sum over n of them is n times it, and what is gathered is its tensor n times. A message from another rank leaves the
tensor as it was, and so does a product. The operators are those of torch/csrc/distributed/c10d/Ops.cpp.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from virtual_gpus.dispatch.op_call import OpCall
from virtual_gpus.features.distributed.groups import is_boxed, kind_of
from virtual_gpus.machine import active
from virtual_gpus.threads import below

_MESSAGES = {"send", "recv_", "recv_any_source_"}
_operation: list[Any] = []  # of the method of a process group that runs; C++ before PyTorch 2.14 does not tell


def answers(call: OpCall) -> bool:
    """True for the collectives that this module has, if there is one rank only."""
    name = call.op.base
    is_one = call.func.namespace == "c10d" and (kind_of(name) or name in _MESSAGES)
    return bool(is_one) and active().settings.rank is not None


def collective(call: OpCall) -> Any:
    """What the operator returns. Its tensors have the values that follow from this rank's own, if they have values."""
    group = next(torch.distributed.ProcessGroup.unbox(v) for v in call.args if is_boxed(v, "ProcessGroup"))
    with below(), torch.no_grad():
        _fill(call.op.base, call.args, group.rank(), group.size())
    return answer(call)


@contextmanager
def reducing(operation: Any) -> Iterator[None]:
    """While a method of a process group runs: the operation that it was given, a ReduceOp or None."""
    _operation.append(operation)
    try:
        yield
    finally:
        _operation.pop()


def _fill(name: str, args: Sequence[Any], rank: int, ranks: int) -> None:
    kind = kind_of(name)
    if kind in ("all_reduce", "reduce"):
        for tensor in args[0]:
            _reduce(tensor, args, ranks)
    elif kind in ("all_gather", "gather"):
        for output, own in zip(_list(args[0]), _list(args[1]), strict=False):  # empty where nothing is gathered
            for part in output.view(-1).chunk(ranks) if isinstance(output, torch.Tensor) else output:
                _copy(part, own)
    elif kind in ("reduce_scatter", "scatter"):
        for output, own in zip(_list(args[0]), _list(args[1]), strict=False):
            _copy(output, (own.view(-1).chunk(ranks) if isinstance(own, torch.Tensor) else own)[rank])
            if kind == "reduce_scatter":
                _reduce(output, args, ranks)
    elif kind == "all_to_all":
        outputs, inputs = (_parts(args[i], args[i + 3] if name == "alltoall_base_" else None, ranks) for i in (0, 1))
        for output in outputs:
            _copy(output, inputs[rank])


def _reduce(tensor: torch.Tensor, args: Sequence[Any], ranks: int) -> None:
    kinds = torch.distributed.ReduceOp
    boxed = next(value for value in args if is_boxed(value, "ReduceOp"))
    operation = kinds.unbox(boxed) if hasattr(kinds, "unbox") else _operation[-1] if _operation else kinds.SUM
    if operation is None or operation == kinds.SUM:
        tensor.mul_(ranks)
    elif operation == kinds.PREMUL_SUM:
        tensor.mul_(operation.__getstate__()[1] * ranks)


def _parts(value: Any, sizes: Sequence[int] | None, ranks: int) -> Sequence[torch.Tensor]:
    if not isinstance(value, torch.Tensor):
        return value
    return value.split(list(sizes)) if sizes else value.chunk(ranks)


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """As many of the elements as both have: the ranks may send parts of different sizes."""
    count = min(target.numel(), source.numel())
    flat = target.detach().as_strided((target.numel(),), (1,), target.storage_offset())
    flat[:count].copy_(source.detach().reshape(-1)[:count])


def _list(value: Any) -> Iterable[Any]:
    return [value] if isinstance(value, torch.Tensor) else value


def answer(call: OpCall) -> Any:
    """What a collective on tensors without values returns: no numbers are sent, and it is done at once.

    The ranks still tell each other the time (`collectives`), so they wait for each other.
    """
    from torch._C._distributed_c10d import _create_work_from_future  # not in builds without distributed

    if call.func.namespace != "c10d":
        return _functional(call)
    written = call.args[0]
    tensors = list(written) if isinstance(written, (list, tuple)) else [written]
    future = torch.futures.Future()
    future.set_result(list(tensors[0]) if tensors and isinstance(tensors[0], (list, tuple)) else tensors)
    work, results = _create_work_from_future(future).boxed(), len(call.func._schema.returns)
    return (None, work, (written, work))[results]  # two results: the tensors that were written, and the work


def _functional(call: OpCall) -> Any:
    """What a functional collective returns: the tensor that it was given to write or to wait for, or else a new one.

    PyTorch's shape functions make new tensors of all, as a trace wants them. That would be a second block, which no
    collective fills, so it would never be waited for.
    """
    if call.op.base in ("wait_tensor", "wait_tensors", "irecv"):
        return call.args[0]
    if call.op.written:
        return call[next(iter(call.op.written))]
    made = call.compute()
    if call.op.base == "shard_dim_alltoall":  # its shape function may cut the result out of what all ranks have
        with below():
            made = torch.empty_like(made)
    return call.place(made)
