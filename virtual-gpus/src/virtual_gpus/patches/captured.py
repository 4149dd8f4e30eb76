"""Names that PyTorch's own modules captured because they were imported while virtual GPUs were on.

torch._dynamo, torch.distributed.tensor and others put functions of torch.cuda, torch.distributed and Tensor into
tables, class attributes and closures when they are imported. Importing them before the GPUs go on would cost every
process two seconds, so they are imported when the program asks for them, with the patches in. When the last GPUs go
off, `give_back` puts PyTorch's functions into what these modules hold. They are then as if imported without any GPU.

Taking the patches out during such an import would be shorter, but other threads use their GPUs meanwhile.
"""

import functools
import operator
import sys
from types import FunctionType, MethodWrapperType
from typing import Any

import torch

_modules_before: set[str] = set()  # names of the modules that were there when the first GPUs went on


def watch() -> None:
    """Remember which modules are there. Called before the patches go in."""
    _modules_before.update(sys.modules)
    torch.overrides.get_default_nowrap_functions()  # it keeps its first answer, with the getter of `Tensor.grad`


def give_back(originals: dict[int, tuple[Any, Any]]) -> None:
    """Put PyTorch's own functions into its modules that came since `watch`. Called after the patches are out.

    originals: the id of each function, class or property that stood in for PyTorch's -> it and PyTorch's.
    """
    modules = {name: sys.modules[name] for name in sys.modules.keys() - _modules_before if name.startswith("torch.")}
    _modules_before.clear()
    walk = _Walk(originals, set(modules))
    for module in modules.values():
        walk.corrected(vars(module))
    if "torch._dynamo.trace_rules" in sys.modules:
        sys.modules["torch._dynamo.trace_rules"].clear_lru_cache()  # tables of functions, made at their first use


class _Walk:
    """Goes through what some modules hold: containers, their own functions and classes, and closures."""

    def __init__(self, originals: dict[int, tuple[Any, Any]], modules: set[str]):
        self._originals = originals
        self._modules = modules
        self._seen: set[int] = set()  # everything stays alive while its module is in sys.modules

    def corrected(self, value: Any) -> Any:
        """`value`, or what belongs in its place. Whatever can be changed is corrected in place."""
        if id(value) in self._originals:
            return self._originals[id(value)][1]
        kind = type(value)  # rather than isinstance, which asks the object, and some answer for others
        if kind is MethodWrapperType:  # Tensor.device.__get__
            owner = self.corrected(value.__self__)
            return value if owner is value.__self__ else getattr(owner, value.__name__)
        if kind in (staticmethod, classmethod):
            function = self.corrected(value.__func__)
            return value if function is value.__func__ else kind(function)
        if kind in (tuple, frozenset):
            parts = list(map(self.corrected, value))
            return value if all(map(operator.is_, parts, value)) else kind(parts)
        if id(value) not in self._seen:
            self._seen.add(id(value))
            self._correct(value, kind)
        return value

    def _correct(self, value: Any, kind: type) -> None:
        if issubclass(kind, dict):
            self._correct_dict(value)
        elif issubclass(kind, list):
            for index, part in enumerate(value):
                right = self.corrected(part)
                if right is not part:
                    value[index] = right
        elif issubclass(kind, set):
            for part in list(value):
                right = self.corrected(part)
                if right is not part:
                    value.add(right)
                    value.discard(part)
                    value.add(right)  # again, if the two are equal (`factories._Factory`)
        elif kind is functools.partial:
            function, arguments = self.corrected(value.func), self.corrected(value.args)
            self._correct_dict(value.keywords)
            if function is not value.func or arguments is not value.args:
                vars(kind)["__setstate__"](value, (function, arguments, value.keywords, vars(value)))
        elif not issubclass(kind, (FunctionType, type)) or value.__module__ not in self._modules:
            return
        elif kind is FunctionType:
            self._correct_dict(vars(value))
            value.__defaults__ = self.corrected(value.__defaults__)
            for cell in value.__closure__ or ():
                self._correct_cell(cell)
        else:
            for name, attribute in vars(value).copy().items():
                right = self.corrected(attribute)
                if right is not attribute:
                    setattr(value, name, right)

    def _correct_dict(self, value: dict[Any, Any]) -> None:
        # Of a copy, as in `table.modules_of`: a list of pairs calls the garbage collector, and so finalizers.
        for key, content in dict.copy(value).items():
            right_key, right = self.corrected(key), self.corrected(content)
            if right_key is not key or right is not content:
                value[right_key] = right  # before the old key goes: Ctrl-C may come between any two lines
            if right_key is not key:
                del value[key]
                value[right_key] = right  # again, if the two are equal (`factories._Factory`)

    def _correct_cell(self, cell: Any) -> None:
        try:
            content = cell.cell_contents
        except ValueError:  # empty
            return
        right = self.corrected(content)
        if right is not content:
            cell.cell_contents = right
