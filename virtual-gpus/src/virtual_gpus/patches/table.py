"""Replacing names in modules and classes, and putting back what stood there.

A patch is (module or class, name, what answers there). Names that were inherited are put back as such.
"""

import functools
import sys
from collections.abc import Callable, Iterable
from types import FunctionType, ModuleType
from typing import Any

import torch

Patch = tuple[Any, str, Any]
_ABSENT = object()
_replaced: list[Patch] = []
_scripted: list[tuple[int, object]] = []  # (id, patch): the ids stay taken while they are in TorchScript's table


def put_in(patches: Iterable[Patch]) -> None:
    """Replace the names, and remember what stood there."""
    stands_for: dict[int, object] = {}  # id of a replacement -> what it replaces
    for owner, name, replacement in patches:
        _replaced.append((owner, name, vars(owner).get(name, _ABSENT)))
        original = _static(owner, name, replacement)  # torch._VF finds functions by `__getattr__`
        first = original if original is replacement else stands_for.setdefault(id(replacement), original)
        if first is not original and isinstance(replacement, FunctionType):
            replacement = _copy(replacement)
        _tell_torchscript(_replaced[-1][2], replacement)
        setattr(owner, name, replacement)


def _static(owner: Any, name: str, default: Any) -> Any:
    """What `inspect.getattr_static` finds in a module or class, in a tenth of its time: this runs a thousand times."""
    for holder in (*getattr(owner, "__mro__", (owner,)), *type(owner).__mro__):
        if name in vars(holder):
            return vars(holder)[name]
    return default


def _copy(function: FunctionType) -> FunctionType:
    """Another function that does the same: PyTorch's two must stay two, as keys of torch._dynamo's tables."""
    parts = function.__globals__, function.__name__, function.__defaults__, function.__closure__
    copied = FunctionType(function.__code__, *parts)
    copied.__kwdefaults__, copied.__qualname__ = function.__kwdefaults__, function.__qualname__
    vars(copied).update(vars(function))
    return copied


def _tell_torchscript(original: object, replacement: object) -> None:
    """torch.jit.script, which forward-mode differentiation uses too, knows PyTorch's operators by their Python id."""
    known = torch.jit._builtins._get_builtin_table()
    if id(original) in known and id(replacement) not in known:
        known[id(replacement)] = known[id(original)]
        _scripted.append((id(replacement), replacement))


def take_out() -> dict[int, tuple[Any, Any]]:
    """Put everything back, in the reverse order. Returns what stood in for what: id of the replacement -> it and the
    original. An id is taken only as long as its object is held."""
    while _scripted:
        torch.jit._builtins._get_builtin_table().pop(_scripted.pop()[0], None)
    originals: dict[int, tuple[Any, Any]] = {}
    while _replaced:
        owner, name, original = _replaced.pop()
        replacement = vars(owner).get(name)
        if original is not _ABSENT:
            setattr(owner, name, original)
        elif name in vars(owner):  # else Ctrl-C came before the patch
            delattr(owner, name)
            original = _static(owner, name, original)
        if callable(replacement) or isinstance(replacement, property):
            stood_in = _function(replacement)
            originals[id(stood_in)] = stood_in, _function(original)
    return originals


def _function(attribute: Any) -> Any:
    return attribute.__func__ if isinstance(attribute, staticmethod) else attribute


def around(original: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """What answers for `original` by `function(original, ...)`."""

    @functools.wraps(original)
    def answer(*args: Any, **kwargs: Any) -> Any:
        return function(original, *args, **kwargs)

    return answer


def wrapped(owner: Any, *functions: Callable[..., Any], **by_name: Callable[..., Any]) -> list[Patch]:
    """Patches for functions `around` what `owner` has under their names, or under those that they are given by.

    Names that this PyTorch version lacks give none.
    """
    named = {function.__name__: function for function in functions} | by_name
    return [(owner, name, around(getattr(owner, name), f)) for name, f in named.items() if hasattr(owner, name)]


def in_package(package: str, *functions: Any, **by_name: Any) -> list[Patch]:
    """Patches for functions that carry the name of what they stand for, wherever `package` has that name.

    A function with another name is given by the name that it stands for.

    PyTorch imports names from module to module (torch.cuda.memory.empty_cache is torch.cuda.empty_cache as well), so
    the same function must go into each. Names that this PyTorch version lacks give none.
    """
    patches: list[Patch] = []
    for name, function in [*((function.__name__, function) for function in functions), *by_name.items()]:
        main = vars(sys.modules[package]).get(name)
        for module in modules_of(package):
            original = vars(module).get(name)
            if original is not None and (main is None or original is main):
                patches.append((module, name, function))
    return patches


@functools.cache
def modules_of(package: str) -> list[ModuleType]:
    """The package and its modules, as far as they are imported. `cache_clear` makes the next call look again.

    Through a copy, which Python makes in one piece: a list of pairs calls the garbage collector, and what a finalizer
    then imports ends in "dictionary changed size during iteration".
    """
    below, there = f"{package}.", sys.modules.copy()
    return [m for n, m in there.items() if n.startswith(package) and m and f"{n}.".startswith(below)]
