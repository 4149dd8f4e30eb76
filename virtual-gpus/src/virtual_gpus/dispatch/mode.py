"""The dispatch mode: it sees every ATen operator, forward and backward, and keeps each tensor on its GPU.

For each operator: find the GPU of the inputs, refuse mixed devices in PyTorch's own words, run the operator as it is or
by a recipe of `ops`, and give the new storages a block on that GPU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode, _push_mode

from virtual_gpus import errors
from virtual_gpus.dispatch import alone, foreach_ops
from virtual_gpus.dispatch.call import OpCall
from virtual_gpus.dispatch.collectives import refuse_cpu_tensors
from virtual_gpus.dispatch.creation import create
from virtual_gpus.dispatch.devices import adopt_destination, resolve_common_device
from virtual_gpus.dispatch.kernels import refuse_gpu_generator
from virtual_gpus.dispatch.timing import record_crossing, record_op, record_read
from virtual_gpus.entrance import calling_frame, entrance_of_dispatch, seen_from_outside
from virtual_gpus.machine import VirtualMachine, active
from virtual_gpus.placement.creation_sites import record_creation_site
from virtual_gpus.placement.storages import follow_size, gpu_of, is_fake, is_wrapper, storages
from virtual_gpus.shapes import valueless
from virtual_gpus.threads import this_thread

_FAKE = torch._C._TorchDispatchModeKey.FAKE
_CUDA, _CPU = torch._C.DispatchKey.CUDA, torch._C.DispatchKey.CPU
_COMPOSITE = (torch._C.DispatchKey.CompositeExplicitAutograd, torch._C.DispatchKey.CompositeImplicitAutograd)
_active_mode = torch._C._get_dispatch_mode
_is_tracing = torch._C._is_tracing
_AUTOCAST = torch._C.DispatchKey.AutocastCUDA
_exclude_key = torch._C._dispatch_tls_set_dispatch_key_excluded


class Placement(TorchDispatchMode):
    """One instance per thread, entered while virtual GPUs are on; it does nothing when none are."""

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # the wrapper that this would add costs a microsecond per operator

    @entrance_of_dispatch
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        try:
            machine = active()
            if types and any(map(is_wrapper, types)):
                return NotImplemented  # a wrapper's own rules take it apart, and this mode sees the parts
            if machine is None or this_thread.inside:
                return func(*args, **(kwargs or {}))
            if _is_tracing():  # sizes that are read become tensors then, and the accounting needs integers
                raise errors.not_modelled("torch.jit.trace")
            if _active_mode(_FAKE) is not None or (types and any(map(is_fake, types))):
                return _run_fake(func, args, kwargs or {})
            call = OpCall(func, args, kwargs or {})
            return run(call, machine) if machine.races is None else machine.races.follow(call, run)
        except BaseException as error:
            args = kwargs = None
            text = seen_from_outside(error)
            if text is None:
                raise
        raise torch.OutOfMemoryError(text)


def run(call: OpCall, machine: VirtualMachine) -> Any:
    """What the operator returns. machine: the one that answers now."""
    op = call.op
    if op.is_composite:
        return _decompose(call)
    gpu, former, is_mixed, is_dense, is_from_cpp = None, None, False, True, False
    for tensor in call.tensors:
        try:
            record = tensor.untyped_storage()._record  # `gpu_of`, without its calls: this line runs for every input
            where = record.gpu
        except (NotImplementedError, RuntimeError):
            where, is_dense = gpu_of(tensor), False
        if where is None:
            is_mixed, is_from_cpp = True, is_from_cpp or not is_dense or record.creation_site is not None
        elif not where.machine.on:
            former, is_mixed = where, True
        elif gpu is None:
            gpu = where
        elif where is not gpu:
            is_mixed = True
    call.gpu = gpu
    if op.is_ordinary and gpu is not None and not is_mixed and is_dense:  # as most: the rest of this function, at once
        result = call.run() if op.recipe is None else op.recipe(call)
        record_op(call, result)
        return result
    if op.has_device:
        return create(call, machine)
    if gpu is None:
        if former is not None:
            errors.warn_of_gpu_that_is_off(former, calling_frame())
        return _run_on_host(call, is_from_cpp)
    if op.by_element:
        return foreach_ops.run(call, is_mixed)
    if op.check is not None:
        op.check(call)
    if op.crosses:
        adopt_destination(call)
    elif is_mixed:
        resolve_common_device(call)
    if not op.on_cuda:
        raise errors.no_cuda_kernel(f"aten::{op.name}")
    if gpu.machine.shapes_only:
        valueless.prepare(call, is_mixed)
        if op.needs_values and not valueless.size_is_known(call):
            record_read(call)
            return valueless.value(call)
        if op.base == "copy_" and gpu_of(call.args[0]) is None:
            record_crossing(call)
            return valueless.copy_to_host(*call.args[:2])
    if op.crosses:
        result = call.compute()
        record_crossing(call)
        return result
    by_recipe = op.recipe is not None and is_dense  # CUDA has other kernels for sparse tensors
    result = op.recipe(call) if by_recipe else call.run()
    if op.needs_values and not valueless.size_is_known(call):
        record_read(call)
    else:
        record_op(call, result)
    if op.changes_size:
        for _, tensor in call.named_tensors():
            follow_size(tensor)
    return result


def _run_fake(func, args, kwargs) -> Any:
    """An operator under FakeTensorMode, whose tensors have no data: they are nobody's memory, and take no time.

    They stay on the CPU, since C++ would ask the driver for the GPU of a fake tensor (in `copy_`, and in backward).
    """
    device = kwargs.get("device")
    if device is not None and device.type == "cuda":
        kwargs = {**kwargs, "device": torch.device("cpu")}
    return func(*args, **kwargs)


def _run_on_host(call: OpCall, is_from_cpp: bool) -> Any:
    """An operator on CPU tensors. What C++ computes from a helper of its own in the same call is such a helper too.

    is_from_cpp: False if surely no tensor among the inputs is such a helper.
    """
    if call.op.has_generator:
        refuse_gpu_generator(call)
    if call.op.is_collective:
        if alone.answers(call):
            return alone.collective(call)
        refuse_cpu_tensors(call)
    result = call.kernel(*call.args, **call.kwargs)
    if is_from_cpp and isinstance(result, torch.Tensor):
        site = call.site
        sites = {storage._record.creation_site for tensor in call.tensors for storage in storages(tensor)} - {None}
        if site in sites or (sites and this_thread.in_backward):
            record_creation_site(result, site)
    return result


def _decompose(call: OpCall) -> Any:
    """Take a composite operator apart, which inference mode does not do: its parts are what uses memory.

    The parts follow autocast's lists if the composite was called under autocast, whose key is off by now. Operators of
    higher order, which are given an operator or a function to run, are composite too.
    """
    _push_mode(this_thread.mode)  # for the parts: while a mode works it is off
    try:
        if call.op.kernels is not None:
            on_gpu = any(gpu_of(tensor) is not None for tensor in call.tensors)
            keys = (_CUDA, _CPU, *_COMPOSITE) if on_gpu else (_CPU, *_COMPOSITE)
            return next(call.op.kernels[key] for key in keys if key in call.op.kernels)(*call.args, **call.kwargs)
        if not this_thread.autocast:
            return call.func.decompose(*call.args, **call.kwargs)
        _exclude_key(_AUTOCAST, False)
        try:
            return call.func.decompose(*call.args, **call.kwargs)
        finally:
            _exclude_key(_AUTOCAST, True)
    finally:
        _pop_mode()


# ---- entering and leaving, per thread ------------------------------------------------------------------------------


# Pushed and popped rather than entered and left: TorchDispatchMode.__enter__ keeps flags for the whole process, and
# threads that come and go in another order would leave them wrong for ever.


def enter_thread() -> bool:
    """Make this thread's operators visible. False if they are already."""
    if this_thread.mode is not None:
        return False
    mode = Placement()
    _push_mode(mode)
    this_thread.mode = mode
    return True


def leave_thread() -> None:
    """Take the mode off this thread again, from under the modes that were entered since and still stand."""
    mode, this_thread.mode = this_thread.mode, None
    if mode is None:
        return
    above = []
    while (top := _pop_mode()) is not mode:
        above.append(top)
    for other in reversed(above):
        _push_mode(other)
