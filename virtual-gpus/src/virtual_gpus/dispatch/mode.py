"""The dispatch mode: it sees every ATen operator, forward and backward, and hands each to its route (`routes`)."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode, _push_mode

from virtual_gpus.dispatch.operators import OpCall
from virtual_gpus.entrance import entrance_of_dispatch, seen_from_outside
from virtual_gpus.follower import NO_FOLLOWER
from virtual_gpus.machine import active
from virtual_gpus.placement.storages import is_fake, is_hollow, tensors_in
from virtual_gpus.threads import this_thread

_FAKE = torch._C._TorchDispatchModeKey.FAKE
_active_mode = torch._C._get_dispatch_mode


class VirtualGPUMode(TorchDispatchMode):
    """One instance per thread, entered while virtual GPUs are on; it does nothing when none are."""

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # the wrapper that this would add costs a microsecond per operator

    @entrance_of_dispatch
    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        try:
            machine = active()
            if types and any(map(is_hollow, tensors_in((*args, *(kwargs or {}).values())))):
                return NotImplemented  # a wrapper's own rules take it apart, and this mode sees the parts
            if machine is None or this_thread.in_kernel:
                return func(*args, **(kwargs or {}))
            if _active_mode(_FAKE) is not None or (types and any(map(is_fake, types))):
                return _run_fake(func, args, kwargs or {})
            call = OpCall(func, args, kwargs or {})
            return (call.op.route if machine.follower is NO_FOLLOWER else machine.follower.follow)(call)
        except BaseException as error:
            args, kwargs = (), None
            text = seen_from_outside(error)
            if text is None:
                raise
        raise torch.OutOfMemoryError(text)


def _run_fake(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An operator under FakeTensorMode, whose tensors have no data: they take neither memory nor time.

    They stay on the CPU, since C++ would ask the driver for the GPU of a fake tensor (in `copy_`, and in backward).
    """
    device = kwargs.get("device")
    if device is not None and device.type == "cuda":
        kwargs = {**kwargs, "device": torch.device("cpu")}
    return func(*args, **kwargs)


# ---- entering and leaving, per thread ------------------------------------------------------------------------------

# Pushed and popped rather than entered and left: TorchDispatchMode.__enter__ keeps flags for the whole process, and
# threads that come and go in another order would leave them wrong for ever.


def enter_thread() -> bool:
    """Make this thread's operators visible. False if they are already."""
    if this_thread.mode is not None:
        return False
    mode = VirtualGPUMode()
    _push_mode(mode)
    this_thread.mode = mode
    return True


def leave_thread() -> None:
    """Take the mode off this thread again, from under the modes that were entered since and still stand."""
    mode, this_thread.mode = this_thread.mode, None
    if mode is None:
        return
    above: list[Any] = []
    while (top := _pop_mode()) is not mode:
        above.append(top)
    for other in reversed(above):
        _push_mode(other)


@contextmanager
def in_mode() -> Iterator[None]:
    """Within it, or a function that it decorates, this thread's operators are visible; then the thread is as it was."""
    entered = enter_thread()
    try:
        yield
    finally:
        if entered:
            leave_thread()
