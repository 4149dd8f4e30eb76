"""Names that PyTorch's own modules captured because they were imported while virtual GPUs were on.

torch._dynamo, torch.distributed.tensor and others put functions of torch.cuda, torch.distributed and Tensor into
tables, class attributes and closures when they are imported. Importing them before the GPUs go on would cost every
process two seconds, so they are imported when the program asks for them, with the patches in. When the last GPUs go
off, `give_back` puts PyTorch's functions into what these modules hold. They are then as if imported without any GPU.

Taking the patches out during such an import would be shorter, but other threads use their GPUs meanwhile.
"""

from __future__ import annotations

import functools
import sys
from types import FunctionType, MethodWrapperType
from typing import Any

import torch

_before: set[str] = set()  # names of the modules that were there when the first GPUs went on


def watch() -> None:
    """Remember which modules are there. Called before the patches go in."""
    _before.update(sys.modules)
    torch.overrides.get_default_nowrap_functions()  # it keeps its first answer, with the getter of `Tensor.grad`


def give_back(originals: dict[int, Any]) -> None:
    """Put PyTorch's own functions into its modules that came since `watch`. Called after the patches are out.

    originals: the id of each function, class or property that stood in for PyTorch's -> PyTorch's.
    """
    modules = {n: m for n, m in list(sys.modules.items()) if n.startswith("torch.") and n not in _before}
    _before.clear()
    walk = _Walk(originals, set(modules))
    for module in modules.values():
        walk.corrected(vars(module))
    if "torch._dynamo.trace_rules" in sys.modules:
        sys.modules["torch._dynamo.trace_rules"].clear_lru_cache()  # tables of functions, made at their first use


class _Walk:
    """Goes through what some modules hold: containers, their own functions and classes, and closures."""

    def __init__(self, originals: dict[int, Any], modules: set[str]):
        self._originals = originals
        self._modules = modules
        self._seen: set[int] = set()  # everything stays alive while its module is in sys.modules

    def corrected(self, value: Any) -> Any:
        """`value`, or what belongs in its place. Whatever can be changed is corrected in place."""
        if id(value) in self._originals:
            return self._originals[id(value)]
        if isinstance(value, MethodWrapperType):  # Tensor.device.__get__
            owner = self.corrected(value.__self__)
            return value if owner is value.__self__ else getattr(owner, value.__name__)
        if isinstance(value, (staticmethod, classmethod)):
            function = self.corrected(value.__func__)
            return value if function is value.__func__ else type(value)(function)
        if type(value) in (tuple, frozenset):
            parts = list(map(self.corrected, value))
            return type(value)(parts) if _differ(parts, value) else value
        if id(value) not in self._seen:
            self._seen.add(id(value))
            self._correct(value)
        return value

    def _correct(self, value: Any) -> None:
        if isinstance(value, dict):
            self._correct_dict(value)
        elif isinstance(value, list):
            for index, part in enumerate(value):
                value[index] = self.corrected(part)
        elif isinstance(value, set):
            parts = list(map(self.corrected, value))
            if _differ(parts, value):
                value.clear()
                value.update(parts)
        elif isinstance(value, functools.partial):
            function, arguments, keywords = self.corrected(value.func), self.corrected(value.args), value.keywords
            self._correct_dict(keywords)
            value.__setstate__((function, arguments, keywords, vars(value)))
        elif getattr(value, "__module__", None) not in self._modules:
            return
        elif isinstance(value, FunctionType):
            self._correct_dict(vars(value))
            value.__defaults__ = self.corrected(value.__defaults__)
            for cell in value.__closure__ or ():
                self._correct_cell(cell)
        elif isinstance(value, type):
            for name, attribute in list(vars(value).items()):
                right = self.corrected(attribute)
                if right is not attribute:
                    setattr(value, name, right)

    def _correct_dict(self, value: dict) -> None:
        before = list(value.items())
        keys = [self.corrected(key) for key, _ in before]
        if _differ(keys, value):  # all anew, in the same order
            value.clear()
        for key, (_, content) in zip(keys, before, strict=True):
            right = self.corrected(content)
            if key not in value or value[key] is not right:
                value[key] = right

    def _correct_cell(self, cell: Any) -> None:
        try:
            content = cell.cell_contents
        except ValueError:  # empty
            return
        right = self.corrected(content)
        if right is not content:
            cell.cell_contents = right


def _differ(parts, others) -> bool:
    return any(part is not other for part, other in zip(parts, others, strict=True))
