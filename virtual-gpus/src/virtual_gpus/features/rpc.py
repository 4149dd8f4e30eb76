"""torch.distributed.rpc: functions that arrive see the virtual GPUs, and GPU tensors do not travel.

TensorPipe sends GPU tensors only where a device map says from which GPU to which. That is not modelled: a device map is
refused, and so is a GPU tensor, which would arrive as a CPU tensor. Objects on GPUs may be made and used remotely.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch

from virtual_gpus import errors
from virtual_gpus.dispatch.mode import enter_thread, leave_thread
from virtual_gpus.patches.table import Patch
from virtual_gpus.placement.storages import gpu_of, place

_NAMING_DEVICES = ("__init__", "set_device_map", "set_devices")


def _refuse(values: Iterable[Any]) -> None:
    for value in values:
        if isinstance(value, torch.Tensor) and gpu_of(value) is not None:
            raise errors.not_modelled("sending a GPU tensor by torch.distributed.rpc (send x.cpu() instead)")
        if isinstance(value, (list, tuple)):
            _refuse(value)


def _sending(function: Callable) -> Callable:
    """A function of C++ that sends the tensors among its arguments, after a look at them."""

    @functools.wraps(function)
    def send(*args, **kwargs):
        _refuse((*args, *kwargs.values()))
        return function(*args, **kwargs)

    return send


def _without_devices(function: Callable) -> Callable:
    """A method of `TensorPipeRpcBackendOptions`: an agent that knows GPUs would look for CUDA's driver in C++."""

    @functools.wraps(function)
    def method(self, *args, **kwargs):
        if args or kwargs.get("device_maps") or kwargs.get("devices"):
            raise errors.not_modelled("device maps of torch.distributed.rpc (send x.cpu() instead)")
        return function(self, *args, **kwargs)

    return method


def _serialize(function: Callable) -> Callable:
    @functools.wraps(function)
    def serialize(self, obj):
        data, tensors = function(self, obj)
        _refuse(tensors)
        return data, tensors

    return serialize


def in_mode(function: Callable) -> Callable:
    """`function`, which a thread of C++ calls, with this thread's operators visible; afterwards it is as it was."""

    @functools.wraps(function)
    def visibly(*args, **kwargs):
        entered = enter_thread()
        try:
            return function(*args, **kwargs)
        finally:
            if entered:
                leave_thread()

    return visibly


def _calling_back(function: Callable) -> Callable:
    """`then` and `add_done_callback` of a future: the thread that completes it calls the function."""

    @functools.wraps(function)
    def register(self, callback):
        return function(self, in_mode(callback))

    return register


def _get_gradients(function: Callable) -> Callable:
    """`torch.distributed.autograd.get_gradients`: C++ made the gradients, and each belongs on the GPU of its tensor.

    A backward pass that another process started runs in such a thread, where no operator is seen.
    """

    @functools.wraps(function)
    def get_gradients(context_id: int) -> dict[torch.Tensor, torch.Tensor]:
        found = function(context_id)
        for tensor, gradient in found.items():
            target = gpu_of(tensor)
            if target is not None:
                place(gradient, target)
        return found

    return get_gradients


def patches() -> list[Patch]:
    """See `features`."""
    future = torch._C.Future  # also of what C++ makes, for example in `Work.get_future`
    found: list[Patch] = [(future, name, _calling_back(vars(future)[name])) for name in ("then", "add_done_callback")]
    internal, api = (sys.modules.get(f"torch.distributed.rpc.{name}") for name in ("internal", "api"))
    if internal is None or not hasattr(api, "_invoke_rpc_builtin"):  # of builds without RPC
        return found
    pickler = internal._InternalRPCPickler
    found += [(pickler, "serialize", _serialize(pickler.serialize)),
              (internal, "_run_function", in_mode(internal._run_function))]  # fmt: skip
    autograd = sys.modules["torch.distributed.autograd"]
    found.append((autograd, "get_gradients", _get_gradients(autograd.get_gradients)))
    options = sys.modules["torch.distributed.rpc.options"].TensorPipeRpcBackendOptions
    found += [(options, name, _without_devices(getattr(options, name))) for name in _NAMING_DEVICES]
    builtin = ("_invoke_rpc_builtin", "_invoke_remote_builtin")
    return found + [(api, name, _sending(getattr(api, name))) for name in builtin]
