"""Public bugs of programs for several GPUs, each in a few lines, as it was and as it was mended.

    python -m bugs                                   # runs all, and writes docs/bugs.md

A program has `before` and `after`, which get their rank, ERROR, which is part of the error that `before` raises on
virtual GPUs, and where they differ: ON_GPUS, what happens on real ones; RANKS, None for a program of one process;
TIMEOUT_S, the time limit of the ranks; and SETTINGS of the virtual GPUs. The code is written anew and has only what
the bug needs.
"""

import importlib
import pkgutil
from types import ModuleType

from virtual_gpus import virtual_gpus
from virtual_gpus.testing import run_ranks


def programs() -> list[ModuleType]:
    """All programs, by name."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_"))
    return [importlib.import_module(f"bugs.{name}") for name in names]


def run(program: ModuleType, part: str) -> object:
    """Call `before` or `after` of a program as two ranks, or in this process. Raises what it raises."""
    function = getattr(program, part)
    with virtual_gpus(2, **getattr(program, "SETTINGS", {})):
        if getattr(program, "RANKS", 2) is None:
            return function()
        return run_ranks(function, 2, timeout=getattr(program, "TIMEOUT_S", 60), show=False)
