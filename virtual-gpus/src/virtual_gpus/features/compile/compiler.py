"""torch.compile: what it returns is PyTorch's own, and calling that runs the program operator by operator.

Nothing is compiled, since there is no GPU to compile for, and since Dynamo, which reads tensors in C++, would find them
on the CPU and put that into its graphs. PyTorch has a switch for exactly this, `torch.compiler.set_stance`, and while
virtual GPUs are on it is at "force_eager". It also holds for what was compiled before. Arguments are checked by
PyTorch, modules become OptimizedModules with their `_orig_mod`, and without GPUs the same objects compile.
"""

import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any

import torch

from virtual_gpus.features.compile.fusion import fused
from virtual_gpus.machine import active
from virtual_gpus.patches.table import Patch, around
from virtual_gpus.threads import this_thread

_stance_before: list[Any] = []  # the stance that the program had, while "force_eager" is in force


def run_eagerly() -> None:
    """Set the switch, which imports torch._dynamo. Does nothing without GPUs."""
    if _stance_before or active() is None:
        return
    frames = importlib.import_module("torch._dynamo.eval_frame")  # the first import calls this function
    if not _stance_before:
        _stance_before.append(frames._stance)  # before the switch moves: Ctrl-C may come between any two lines
        frames._set_stance(frames.DynamoStance("force_eager"))


def forget() -> None:
    """Put the switch back to where the program had it."""
    if _stance_before:
        sys.modules["torch._dynamo.eval_frame"]._set_stance(_stance_before[0])
        _stance_before.clear()


def set_stance(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The arguments are checked, and all stays eager, also after a `with` block of this stance."""
    run_eagerly()
    stance: Any = function(*args, **kwargs)
    stance.stance = stance.prev
    stance.__enter__()
    return stance


def compile(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """As PyTorch. Says once that nothing is compiled, where something would have been."""
    compiled = function(*args, **kwargs)
    run_eagerly()
    backend = kwargs.get("backend", "inductor")
    is_pytorch_s = getattr(backend, "__module__", "").startswith("torch.")  # flex_attention compiles for itself
    if not (kwargs.get("disable") or backend == "eager" or is_pytorch_s or torch._dynamo.config.disable):
        _say_once()
        machine = active()
        if machine is not None and machine.settings.compile == "modelled":
            if isinstance(compiled, torch.nn.Module):
                compiled.forward = around(compiled.forward, _fused)
            elif args or "model" in kwargs:  # no decorator, which calls this function
                compiled = around(compiled, _fused)
    return compiled


def _fused(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`function`, whose operators are fused while GPUs with `compile="modelled"` are on."""
    machine = active()
    if machine is None or machine.settings.compile != "modelled":
        return function(*args, **kwargs)
    return fused(function, machine)(*args, **kwargs)


@functools.cache
def _say_once() -> None:
    is_a_rank = torch.distributed.is_available() and torch.distributed.is_initialized()
    if not (is_a_rank and torch.distributed.get_rank()):
        print("virtual GPUs: torch.compile compiles nothing for a GPU; the program runs as it is", flush=True)


def _mode_of_program(function: Callable[..., Any]) -> object:
    """None for this package's own, since some operators of higher order refuse to run under any mode."""
    mode = function()
    return None if mode is this_thread.mode else mode


def patches() -> list[Patch]:
    name = "_get_current_dispatch_mode"
    users = (sys.modules.get(f"torch._higher_order_ops.{user}") for user in ("cond", "scan", "strict_mode", "switch"))
    rows = [(user, name, around(vars(user)[name], _mode_of_program)) for user in users if hasattr(user, name)]
    rows.append((torch.compiler, "set_stance", around(torch.compiler.set_stance, set_stance)))
    return [*rows, (torch, "compile", around(torch.compile, compile))]
