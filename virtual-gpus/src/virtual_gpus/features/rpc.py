"""torch.distributed.rpc: functions that arrive see the virtual GPUs, and GPU tensors do not travel.

TensorPipe sends GPU tensors only where a device map says from which GPU to which. That is not modelled: a device map is
refused, and so is a GPU tensor, which would arrive as a CPU tensor. Objects on GPUs may be made and used remotely.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from virtual_gpus import errors
from virtual_gpus.dispatch.mode import in_mode
from virtual_gpus.patches.table import Patch, wrapped
from virtual_gpus.placement.storages import gpu_of, place, tensors_in


def _refuse(values: Sequence[Any]) -> None:
    if any(gpu_of(tensor) is not None for tensor in tensors_in(values)):
        raise errors.not_modelled("sending a GPU tensor by torch.distributed.rpc (send x.cpu() instead)")


def _sending(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A function of C++ that sends the tensors among its arguments, after a look at them."""
    _refuse((*args, *kwargs.values()))
    return function(*args, **kwargs)


def _without_devices(function: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """A method of `TensorPipeRpcBackendOptions`: an agent that knows GPUs would look for CUDA's driver in C++."""
    if args or kwargs.get("device_maps") or kwargs.get("devices"):
        raise errors.not_modelled("device maps of torch.distributed.rpc (send x.cpu() instead)")
    return function(self, *args, **kwargs)


def _serialize(function: Callable[..., Any], self: Any, obj: Any) -> tuple[bytes, list[torch.Tensor]]:
    data, tensors = function(self, obj)
    _refuse(tensors)
    return data, tensors


def _calling_back(function: Callable[..., Any], self: Any, callback: Callable[..., Any]) -> Any:
    """`then` and `add_done_callback` of a future: the thread that completes it calls the function."""
    return function(self, in_mode()(callback))


def _get_gradients(function: Callable[..., Any], context_id: int) -> dict[torch.Tensor, torch.Tensor]:
    """`torch.distributed.autograd.get_gradients`: C++ made the gradients, and each belongs on the GPU of its tensor.

    A backward pass that another process started runs in such a thread, where no operator is seen.
    """
    gradients = function(context_id)
    for tensor, gradient in gradients.items():
        target = gpu_of(tensor)
        if target is not None:
            place(gradient, target)
    return gradients


def patches() -> list[Patch]:
    # Also of what C++ makes, for example in `Work.get_future`.
    rows = wrapped(torch._C.Future, then=_calling_back, add_done_callback=_calling_back)
    internal, api = (sys.modules.get(f"torch.distributed.rpc.{name}") for name in ("internal", "api"))
    if internal is None or not hasattr(api, "_invoke_rpc_builtin"):  # of builds without RPC
        return rows
    rows += wrapped(internal._InternalRPCPickler, serialize=_serialize)
    rows += wrapped(sys.modules["torch.distributed.autograd"], get_gradients=_get_gradients)
    options = sys.modules["torch.distributed.rpc.options"].TensorPipeRpcBackendOptions
    rows += wrapped(options, __init__=_without_devices, set_device_map=_without_devices, set_devices=_without_devices)
    rows += wrapped(api, _invoke_rpc_builtin=_sending, _invoke_remote_builtin=_sending)
    return [*rows, (internal, "_run_function", in_mode()(internal._run_function))]
