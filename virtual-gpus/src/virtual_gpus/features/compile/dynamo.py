"""torch._dynamo, while nothing is compiled: a module that answers what PyTorch asks of it in passing.

Every optimizer, every DistributedDataParallel and every checkpoint imports torch._dynamo, with sympy, to say that it is
not to be compiled. That takes as long as half of `import torch`, in each process. While virtual GPUs are on, a stand-in
is in `sys.modules` until more than the names below is asked for. Then the real module takes its place.
"""

import importlib
import importlib.abc
import importlib.machinery
import os
import sys
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from virtual_gpus.features.compile import compiler

_NAME = "torch._dynamo"
_UTILS = f"{_NAME}.utils"
_lock = threading.Lock()
_disabled: list[Callable[..., Any]] = []  # functions that `torch._compile` was told to call as they are


class _StandIn(ModuleType):
    """A module with a few names. Any other name is the real module's, which is imported for it."""

    def __init__(self, name: str, **names: Any):
        super().__init__(name)
        vars(self).update(names)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # asked of every module, for example by `inspect`
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return getattr(_real(self.__name__), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(_real(self.__name__), name, value)


def _graph_break(*args: Any, **kwargs: Any) -> None:
    """Outside of a compiled function this does nothing."""


def _disable(fn: Any = None, recursive: bool = True, *args: Any, wrapping: bool = True, **kwargs: Any) -> Any:
    """`torch._compile`, which keeps the answer in `fn.__dynamo_disable`, can call `fn` while Dynamo is not there.

    So can a checkpoint, whose functions do not outlive its backward pass.
    """
    if wrapping and getattr(fn, "__module__", "") == "torch.utils.checkpoint":
        return fn
    if wrapping:
        return _real(_NAME).disable(fn, recursive, *args, **kwargs)
    _disabled.append(fn)
    return fn


def _is_compile_supported(device_type: Any) -> bool:
    """torchvision imports this name for one operator."""
    return _real(_UTILS).is_compile_supported(device_type)


_utils = _StandIn(_UTILS, is_compile_supported=_is_compile_supported,
                  get_optimize_ddp_mode=lambda: "ddp_optimizer")  # the default (_dynamo/config.py)  # fmt: skip
_rules = _StandIn(f"{_NAME}.trace_rules", clear_lru_cache=lambda: None)
_config = _StandIn(f"{_NAME}.config", error_on_nested_fx_trace=True)  # the default, which every checkpoint asks for
_stand_in = _StandIn(_NAME, graph_break=_graph_break, disable=_disable, utils=_utils, trace_rules=_rules,
                     config=_config,
                     __path__=[os.path.join(folder, "_dynamo") for folder in torch.__path__])  # fmt: skip


class _Submodules(importlib.abc.Loader):
    """Finds and loads the first submodule that is asked for: after the real package, which is what its import means."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name.startswith(f"{_NAME}.") and sys.modules.get(_NAME) is _stand_in:
            return importlib.machinery.ModuleSpec(name, self)
        return None

    def exec_module(self, module: ModuleType) -> None:
        """Put the real module in the place of `module`, as the import system allows a module to do."""
        del sys.modules[module.__name__]
        _real(_NAME)
        _real(module.__name__)


_submodules = _Submodules()


def prepare() -> None:
    """Let the stand-in answer, unless torch._dynamo is there already. Called when the first virtual GPUs go on."""
    with _lock:
        if _NAME not in sys.modules:
            sys.meta_path.insert(0, _submodules)
            sys.modules.update({_NAME: _stand_in, _UTILS: _utils})
            return
    compiler.run_eagerly()


def forget() -> None:
    """Leave the place to the real module. Does nothing if it has it already."""
    with _lock:
        for stand_in in (_stand_in, _utils):
            if sys.modules.get(stand_in.__name__) is stand_in:
                del sys.modules[stand_in.__name__]
        if _submodules in sys.meta_path:
            sys.meta_path.remove(_submodules)
        while _disabled:
            vars(_disabled.pop()).pop("__dynamo_disable", None)


def _before_fork() -> None:
    """Import the real module if DTensors need it, as FSDP does, so that forked ranks have it from their parent."""
    if sys.modules.get(_NAME) is _stand_in and "torch.distributed.tensor" in sys.modules:
        _real(_NAME)


if hasattr(os, "register_at_fork"):  # not on Windows, which cannot fork
    os.register_at_fork(before=_before_fork)


def _real(name: str) -> ModuleType:
    forget()
    module = importlib.import_module(name)
    compiler.run_eagerly()
    return module
