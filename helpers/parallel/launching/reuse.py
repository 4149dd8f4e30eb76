"""Whether a process that was a rank may be a rank again.

A rank is a new process, for all that its function can see. A process is therefore used again only if the function has
left PyTorch as it was. Checked are the things that functions of a lesson do change: PyTorch's settings, functions that
were replaced by others, threads, and virtual GPUs. Not everything can be checked: warnings that PyTorch's C++ shows
once are not shown again.
"""

from __future__ import annotations

import gc
import importlib
import os
import site
import sys
import sysconfig
import threading
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
import torch.distributed

from helpers.gpus import is_virtual

_OWNERS = (torch, torch.Tensor, torch.autograd, torch.cuda, torch.distributed, torch.nn, torch.nn.Module,
           torch.nn.functional, torch.optim, torch.optim.Optimizer)  # fmt: skip
_TORCH = os.path.join(os.path.dirname(torch.__file__), "")
_INSTALLED = tuple({*site.getsitepackages(), sysconfig.get_path("stdlib"), sysconfig.get_path("purelib")})


class Fresh:
    """What a process is like before it becomes a rank."""

    def __init__(self) -> None:
        self._modules = set(sys.modules)
        self._threads = threading.active_count()
        self._settings, self._functions = _settings(), _functions()
        gc.freeze()  # so that `restore` collects quickly: PyTorch's objects stay

    def restore(self) -> bool:
        """Forget the job of this process. False if the process must not be used again."""
        now = _functions()
        if (
            self._settings != _settings()
            or any(_is_replaced(function, now.get(name)) for name, function in self._functions.items())
            or threading.active_count() > self._threads
            or torch.distributed.is_initialized()
            or is_virtual()
            # Variables of PyTorch's own can make it keep records, for example those of the flight recorder.
            or any(name.startswith("TORCH_") for name in os.environ)
        ):
            return False
        known = {name.partition(".")[0] for name in self._modules}
        for name, module in list(sys.modules.items()):  # files of the user's may have changed at the next launch
            file = getattr(module, "__file__", None)
            if name.partition(".")[0] not in known and file and not file.startswith(_INSTALLED):
                del sys.modules[name]
        importlib.invalidate_caches()
        gc.collect()
        return True


def _settings() -> tuple:
    return (
        torch.get_default_dtype(), torch.get_default_device(), torch.is_grad_enabled(), torch.is_anomaly_enabled(),
        torch.get_float32_matmul_precision(), torch.get_deterministic_debug_mode(), torch.is_autocast_enabled("cpu"),
        torch.is_autocast_enabled("cuda"),
    )  # fmt: skip


def _is_replaced(before: Any, now: Any) -> bool:
    """Whether a function was replaced by another. PyTorch's compiler replaces some of PyTorch's when it is imported."""
    code = getattr(now, "__code__", None)
    return now is not before and not (code and code.co_filename.startswith(_TORCH))


def _functions() -> dict[tuple[str, str], Any]:
    return {
        (owner.__name__, name): value
        for owner in _OWNERS
        for name, value in list(vars(owner).items())
        if type(value) in (FunctionType, BuiltinFunctionType)
    }
