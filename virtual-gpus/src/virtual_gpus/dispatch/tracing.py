"""Operators under `torch.jit.trace`, which turns every size that is read while it traces into a tensor of its graph.

The accounting needs integers, so it runs with the tracer off. The tracer records most operators before they come here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from virtual_gpus import errors
from virtual_gpus.dispatch.call import OpCall
from virtual_gpus.machine import active

_TRACER = torch._C._dispatch_key_parse("Tracer")
# What the tracer records by its parts, which the operator's own kernel calls (DONT_RECORD_TRACE in PyTorch's
# tools/autograd/gen_trace_type.py). All but the first are composite and come here only in inference mode.
_RECORDED_BY_PARTS = {
    "convolution", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d",
    "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell",
}  # fmt: skip


def run_traced(call_and_place: Callable[[OpCall], Any], func: torch._ops.OpOverload, args, kwargs) -> Any:
    """What `call_and_place` makes of the operator, computed with the tracer off."""
    with _tracing(None, excluded=True) as state:
        call = OpCall(func, args, kwargs)
        if call.op.base not in _RECORDED_BY_PARTS:
            return call_and_place(call)
        if call.op.is_composite:
            with _tracing(state, excluded=False):
                return call_and_place(call)
        if active().shapes_only:  # PyTorch's meta kernels are Python, and the tracer sees into them
            raise errors.not_modelled("torch.jit.trace of a convolution with shapes_only")
        made: list = []

        @functools.wraps(func)
        def recorded(*args, **kwargs):
            with _tracing(state, excluded=False):
                made.append(func(*args, **kwargs))
                return made[0]

        call.kernel = recorded
        result = call_and_place(call)
    value = torch._C._get_value_trace(made[0])  # a recipe may have laid the numbers out in another order
    torch._C._set_value_trace(result, value)
    return result


def tensors_of_numbers(call: OpCall) -> tuple:
    """The arguments of an operator that got numbers alone, as tensors where its schema wants tensors.

    Graphs of TorchScript hold sizes as tensors that count as numbers. PyTorch hands those to a dispatch mode as Python
    numbers and takes them back for arithmetic only, not for `equal` and `view`, with which it compares and prints
    graphs (torch/csrc/jit/python/pybind_utils.h, should_allow_numbers_as_tensors).
    """
    wanted = (argument.type.kind() == "TensorType" for argument in call.func._schema.arguments)
    return tuple(
        torch.asarray(value, dtype=torch.float64 if isinstance(value, float) else None, device="cpu")
        if wants and isinstance(value, (bool, int, float, complex))
        else value
        for value, wants in zip(call.args, wanted, strict=False)
    )


@contextmanager
def _tracing(state, excluded: bool) -> Iterator[Any]:
    """Give this thread another tracing state (None: the tracer is off), and yield the one that it had.

    The state may only change while the tracer's dispatch key is not excluded (aten/src/ATen/TracerMode.h). While a
    dispatch mode works it is.
    """
    before, was_excluded = torch._C._get_tracing_state(), torch._C._dispatch_tls_is_dispatch_key_excluded(_TRACER)
    _set_state(state, excluded)
    try:
        yield before
    finally:
        _set_state(before, was_excluded)


def _set_state(state, excluded: bool) -> None:
    torch._C._dispatch_tls_set_dispatch_key_excluded(_TRACER, False)
    torch._C._set_tracing_state(state)
    torch._C._dispatch_tls_set_dispatch_key_excluded(_TRACER, excluded)
