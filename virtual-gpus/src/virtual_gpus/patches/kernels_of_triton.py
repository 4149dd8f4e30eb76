"""Triton, which compiles a program's own kernels for the GPU: refused by name, wherever it looks for its driver.

Triton is often imported after the GPUs went on, so a finder waits for its module. With TRITON_INTERPRET=1, Triton runs
kernels on the CPU and asks for no driver. That works.
"""

from __future__ import annotations

import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from virtual_gpus import errors
from virtual_gpus.patches import table

_NAME = "triton.runtime.driver"


def _create_driver() -> None:
    raise errors.not_modelled("kernels of Triton", "With TRITON_INTERPRET=1, Triton runs them on the CPU.")


class _Finder:
    """Finds Triton's module as Python would, and puts the patch in once it has been loaded."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        found = importlib.machinery.PathFinder.find_spec(name, path) if name == _NAME else None
        if found is not None and found.loader is not None:
            vars(found.loader)["exec_module"] = _then_patch(found.loader.exec_module)
        return found


_finder = _Finder()


def _then_patch(load: Callable[[ModuleType], None]) -> Callable[[ModuleType], None]:
    def exec_module(module: ModuleType) -> None:
        load(module)
        if _finder in sys.meta_path:  # the GPUs are still on
            table.put_in(patches())

    return exec_module


def watch() -> None:
    """Wait for Triton. Called when the first virtual GPUs go on."""
    sys.meta_path.insert(0, _finder)


def forget() -> None:
    """Wait no more."""
    if _finder in sys.meta_path:
        sys.meta_path.remove(_finder)


def patches() -> list[table.Patch]:
    """See `patches`. None before Triton is imported."""
    module = sys.modules.get(_NAME)
    return [(module, "_create_driver", _create_driver)] if hasattr(module, "_create_driver") else []
