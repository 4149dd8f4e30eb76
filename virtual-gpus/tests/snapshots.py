"""A picture of everything in the process that virtual GPUs touch, to compare before and after."""

import multiprocessing.queues
import random
import sys
from types import FunctionType, ModuleType

import torch
import torch.utils._device
from torch.utils import _python_dispatch
from virtual_gpus import active_machine, features
from virtual_gpus.threads import this_thread

if sys.version_info < (3, 12):
    import GPUtil.GPUtil  # noqa: F401 - a patch takes its names where it is imported

_rows = [(owner, name) for owner, name, _ in features.patches()]
_ABSENT = "absent"
_at_import = [vars(owner).get(name, _ABSENT) for owner, name in _rows]  # before any virtual GPU was on
_OWNERS = {repr(owner): owner for owner, _ in _rows}  # and what a patch could take by mistake:
_OWNERS |= {"autocast": torch.amp.autocast_mode.autocast, "Queue": multiprocessing.queues.Queue,
            "comm": sys.modules["torch.nn.parallel.comm"],
            "_functions": sys.modules["torch.nn.parallel._functions"]}  # fmt: skip


def names() -> dict:
    """Every name that a patch takes, and every other name beside it, with what it stands for."""
    found = {(repr(owner), name): vars(owner).get(name, _ABSENT) for owner, name in _rows}
    for title, owner in _OWNERS.items():
        for name, value in vars(owner).items():
            if not name.startswith("__") and not issubclass(type(value), ModuleType):  # which may be imported meanwhile
                found[title, name] = value
    return found


def state() -> dict:
    """Modes, flags and default values of this thread and of the process."""
    return {
        "machine": active_machine(),
        "dispatch modes": _python_dispatch._len_torch_dispatch_stack(),
        "in a mode": _python_dispatch._is_in_torch_dispatch_mode,
        "in a user mode": _python_dispatch._is_in_non_infra_torch_dispatch_mode,
        "our mode": this_thread.mode,
        "function modes": torch._C._len_torch_function_stack(),
        "inside": this_thread.in_kernel,
        "default device": torch.get_default_device(),
        "default dtype": torch.get_default_dtype(),
        "constructors": {id(f) for f in torch.utils._device._device_constructors()},
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")),
        "python random": random.getstate(),
        "a tensor": (torch.ones(2) + 1).device,
    }


def _is_as_it_was(was, now) -> bool:
    """True also for what the import of PyTorch's compiler, or its first use, has wrapped for good."""
    if was is now:
        return True
    # By `torch._disable_dynamo`, which wraps before it knows what it wraps.
    lazily = isinstance(now, FunctionType) and now.__code__.co_filename == torch._compile.__file__
    return was is getattr(now, "__wrapped__" if lazily else "_torchdynamo_orig_callable", now)


def stayed() -> list[str]:
    """What a patch takes and is not as it was before any virtual GPU was on, in words; the empty list if all is."""
    found = []
    for (owner, name), was in zip(_rows, _at_import, strict=True):
        if not _is_as_it_was(was, vars(owner).get(name, _ABSENT)):
            found.append(f"{name} of {owner!r} stayed")
    return found


def differences(before: tuple[dict, dict]) -> list[str]:
    """What is not as it was when `picture` was taken, in words; the empty list if all is."""
    found = stayed()
    for old, new in zip(before, picture(), strict=True):
        for key in old.keys() | new.keys():
            was, now = old.get(key, _ABSENT), new.get(key, _ABSENT)
            if not _is_as_it_was(was, now) and not (isinstance(key, str) and was == now):
                found.append(f"{key}: {was!r} became {now!r}")
    return found


def picture() -> tuple[dict, dict]:
    """Everything at once. Owners are compared by identity, states by value."""
    return names(), state()
