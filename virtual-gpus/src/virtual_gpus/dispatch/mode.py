"""The dispatch mode: it sees every ATen operator, forward and backward, and keeps each tensor on its GPU.

For each operator: find the GPU of the inputs, refuse mixed devices in PyTorch's own words, run the operator as it is,
and give the new storages a block on that GPU.
"""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode, _push_mode

from virtual_gpus import errors
from virtual_gpus.dispatch import foreach_ops
from virtual_gpus.dispatch.call import Call
from virtual_gpus.dispatch.creation import create
from virtual_gpus.dispatch.devices import adopt_destination, refuse_on_gpu, settle
from virtual_gpus.dispatch.kernels import refuse_gpu_generator, run_kernel
from virtual_gpus.dispatch.timing import charge, charge_crossing, charge_value
from virtual_gpus.machine import VirtualMachine, active
from virtual_gpus.memory.allocator import OutOfMemory
from virtual_gpus.operators import operator
from virtual_gpus.placement.storages import (
    caller,
    gpu_of,
    home_of,
    is_wrapper,
    local,
    place_all,
    remember_birth,
    resized,
    storages,
)
from virtual_gpus.shapes import valueless

_AUTOCAST = torch._C.DispatchKey.AutocastCUDA
_exclude_key = torch._C._dispatch_tls_set_dispatch_key_excluded


class Placement(TorchDispatchMode):
    """One instance per thread, entered while virtual GPUs are on; it does nothing when none are."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # the wrapper that this would add costs a microsecond per operator

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        machine = active()
        if types and any(map(is_wrapper, types)):
            return NotImplemented  # a wrapper's own rules take it apart, and this mode sees the parts
        if machine is None or getattr(local, "inside", False):
            return func(*args, **(kwargs or {}))
        try:
            return _run(machine, func, args, kwargs or {})
        except OutOfMemory as error:
            text = errors.out_of_memory_text(error, error.gpu)
            error.__traceback__ = error.__context__ = None  # they hold the frames, and those the tensors
        except BaseException as error:
            error.__traceback__ = errors.beyond_this_package(error.__traceback__)
            args = kwargs = None
            raise
        # Raised from here, with the inputs let go, the traceback keeps no tensor alive: what the learner frees is free.
        args = kwargs = None
        raise torch.OutOfMemoryError(text)


def _run(machine: VirtualMachine, func, args, kwargs):
    op = operator(func)
    if op.is_composite:
        return _decompose(func, args, kwargs)
    found: list[torch.Tensor] = []
    _collect(args, found)
    if kwargs:
        _collect(kwargs.values(), found)
    gpu, mixed, dense = None, False, True
    for tensor in found:
        try:
            home = tensor.untyped_storage()._home  # `home_of`, without its call: this line runs for every input
        except (NotImplementedError, RuntimeError):
            home, dense = home_of(tensor), False
        if home is None or not home.gpu.machine.on:
            mixed = True
        elif gpu is None:
            gpu = home.gpu
        elif home.gpu is not gpu:
            mixed = True
    if op.has_device:
        return create(machine, func, op, gpu, args, kwargs)
    if gpu is None:
        if op.has_generator:
            refuse_gpu_generator(op, args, kwargs)
        result = func(*args, **kwargs)
        _pass_birth_on(found, result)
        return result
    if gpu.machine is not machine:
        machine = gpu.machine
    if op.by_element:
        return foreach_ops.run(machine, func, op, args, kwargs)
    if mixed and not op.crosses:
        gpu = settle(op, gpu, args, kwargs)
    elif op.crosses:
        adopt_destination(op, gpu, args, caller(3))
    if op.host_only is not None:
        refuse_on_gpu(op, args, kwargs)
    if not op.on_cuda:
        raise errors.no_cuda_kernel(f"aten::{op.name}")
    given = args
    if machine.shapes_only:
        args, kwargs = valueless.prepare(op, args, kwargs, mixed)
        if op.needs_values and not valueless.size_is_known(op, args):
            charge_value(gpu, found)
            return valueless.value(op, args)
        if op.base == "copy_" and gpu_of(args[0]) is None:
            charge_crossing(op, given)
            return valueless.copy_to_host(args[0], args[1])
    recipe = op.recipe
    if recipe is not None and dense:  # CUDA has other kernels for sparse tensors
        result = recipe(Call(func, op, gpu, args, kwargs))
    else:
        result = run_kernel(func, op, gpu, args, kwargs)
    if op.crosses:
        charge_crossing(op, given)
        return result
    if op.needs_values:
        charge_value(gpu, found)
    else:
        charge(gpu, func, op, found, result)
    place_all(result if op.host_result is None else result[: op.host_result], gpu)
    if op.changes_size:
        for _, tensor in op.named(args, kwargs):
            resized(tensor)
    return result


def _decompose(func, args, kwargs):
    """Take a composite operator apart, which inference mode does not do: its parts are what uses memory.

    The parts follow autocast's lists if the composite was called under autocast, whose key is off by now.
    """
    _push_mode(local.mode)  # for the parts: while a mode works it is off
    try:
        if not getattr(local, "autocast", False):
            return func.decompose(*args, **kwargs)
        _exclude_key(_AUTOCAST, False)
        try:
            return func.decompose(*args, **kwargs)
        finally:
            _exclude_key(_AUTOCAST, True)
    finally:
        _pop_mode()


def _collect(values, found: list[torch.Tensor]) -> None:
    """All tensors among arguments, lists within lists included (collectives take those)."""
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            _collect(value, found)


def _pass_birth_on(inputs: list[torch.Tensor], result) -> None:
    """What C++ computes from a helper tensor of its own, in the same call, is such a helper too."""
    births = {storage._born for tensor in inputs for storage in storages(tensor)} - {None}
    if births and isinstance(result, torch.Tensor):
        key = caller(4)
        if key in births or getattr(local, "backward", False):
            remember_birth(result, key)


# ---- entering and leaving, per thread ------------------------------------------------------------------------------


# Pushed and popped rather than entered and left: TorchDispatchMode.__enter__ keeps flags for the whole process, and
# threads that come and go in another order would leave them wrong for ever.


def enter_thread() -> bool:
    """Make this thread's operators visible. False if they are already."""
    if getattr(local, "mode", None) is not None:
        return False
    mode = Placement()
    _push_mode(mode)
    local.mode = mode
    return True


def leave_thread() -> None:
    """Take the mode off this thread again, from under the modes that were entered since and still stand."""
    mode, local.mode = getattr(local, "mode", None), None
    if mode is None:
        return
    above = []
    while (top := _pop_mode()) is not mode:
        above.append(top)
    for other in reversed(above):
        _push_mode(other)
