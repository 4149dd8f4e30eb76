"""`shapes_only`: tensors on virtual GPUs are meta tensors, with sizes and no values.

A floating-point value read from such a tensor is nan, which says "not known" and keeps a training loop going. A whole
number or a truth value has no such word, so reading one raises.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

import torch
from torch.fx.experimental import _config

from virtual_gpus import errors
from virtual_gpus.dispatch.operators import OpCall
from virtual_gpus.placement.storages import gpu_of, is_pinned, pin
from virtual_gpus.threads import OfEachThread

truth = OfEachThread[bool | None](None)  # see `assuming`


def prepare(call: OpCall) -> None:
    """Turn the CPU tensors that a copy or a list may have beside those of a GPU into meta tensors, except 0-dim ones.

    An argument that other operators take from the CPU (`Row.on_host`) keeps its values, because the host reads them.
    """
    if not call.on_one_gpu and call.gpu.machine.shapes_only:
        call.args = tuple(_as_shape(a) for a in call.args)
        call.kwargs = {k: _as_shape(v) for k, v in call.kwargs.items()}


def _as_shape(value: object) -> object:
    if isinstance(value, torch.Tensor) and value.device.type == "cpu" and value.dim() and gpu_of(value) is None:
        return pin(value.to("meta")) if is_pinned(value) else value.to("meta")
    if isinstance(value, (list, tuple)) and any(isinstance(v, torch.Tensor) for v in value):
        return type(value)(_as_shape(v) for v in value)
    return value


@contextmanager
def assuming(answer: bool) -> Iterator[None]:
    """Within it, as in checks of PyTorch's own, truth values that are not known are `answer`, those of a mask too."""
    before, truth.value = truth.value, answer
    try:
        with _config.patch(meta_nonzero_assume_all_nonzero=answer):  # type: ignore  # PyTorch adds `patch` to the module
            yield
    finally:
        truth.value = before


def value(call: OpCall) -> float:
    """The answer to `.item()` and its like: nan for a float, what is assumed, or an error for everything else."""
    if truth.value is not None and call.args[0].dtype is torch.bool:
        return truth.value
    is_item = call.func._schema.returns[0].type.kind() == "NumberType"  # others give tensors and truth values
    if is_item and _has_nan(call.args[0]):
        return float("nan")
    raise errors.needs_values("item()" if is_item else call.op.base)


class NotKept(float):
    """What `.item()` gives: nan in arithmetic, and in words where it is printed, so that it is not taken for a loss."""

    WORDS = "(values are not kept)"

    def __repr__(self) -> str:
        return self.WORDS

    def __format__(self, spec: str) -> str:
        return self.WORDS

    def _result(self, *_: object) -> Self:
        return self

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _result
    __neg__ = __abs__ = __pow__ = __rpow__ = __round__ = _result


def copy_to_host(target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """`target.copy_(source)` of a tensor without values to the CPU: nan, or an error for integers."""
    if not _has_nan(source):
        raise errors.needs_values("copying a tensor of integers to the CPU")
    return target.fill_(float("nan"))


def _has_nan(tensor: torch.Tensor) -> bool:
    """True for the dtypes that have a word for "not known"."""
    return tensor.is_floating_point() or tensor.is_complex()
