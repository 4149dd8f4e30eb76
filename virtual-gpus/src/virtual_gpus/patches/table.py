"""Small helpers for the rows of the table of stand-ins."""

from __future__ import annotations

import sys


def in_package(package: str, *functions) -> list[tuple[object, str, object]]:
    """Rows for functions that carry the name of what they stand for, wherever `package` has that name.

    PyTorch imports names from module to module (torch.cuda.memory.empty_cache is torch.cuda.empty_cache as well), so
    the same stand-in must go into each. Names that this PyTorch version lacks give no row.
    """
    modules = [m for n, m in list(sys.modules.items()) if m and (n == package or n.startswith(f"{package}."))]
    found = []
    for function in functions:
        originals = {id(vars(m)[function.__name__]) for m in modules[:1] if function.__name__ in vars(m)}
        for module in modules:
            original = vars(module).get(function.__name__)
            if original is not None and (not originals or id(original) in originals):
                found.append((module, function.__name__, function))
    return found
