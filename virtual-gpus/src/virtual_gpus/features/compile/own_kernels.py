"""A program's own kernels, which are compiled for the GPU: those of Triton and CUDA are refused by name.

Triton is refused wherever it looks for its driver. With TRITON_INTERPRET=1, it runs kernels on the CPU and asks for
none. That works. Of CUDA, it is the compilation by torch.utils.cpp_extension that is refused: a compiler would take
minutes, and what it makes could not run. Sources in C++ alone are compiled.

Both modules are often imported after the GPUs went on, so a finder waits for them.
"""

import functools
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from virtual_gpus import errors
from virtual_gpus.patches.table import Patch, put_in

_TRITON = "triton.runtime.driver"
_EXTENSIONS = "torch.utils.cpp_extension"


def _create_driver() -> None:
    raise errors.not_modelled("kernels of Triton", "With TRITON_INTERPRET=1, Triton runs them on the CPU.")


def _no_cuda(module: ModuleType) -> Callable[..., Any]:
    original = module._jit_compile

    @functools.wraps(original)
    def jit_compile(name: str, sources: Sequence[str], *args: Any, **kwargs: Any) -> Any:
        if any(map(module._is_cuda_file, sources)):
            raise errors.not_modelled(f"kernels in CUDA (those of the extension {name})")
        return original(name, sources, *args, **kwargs)

    return jit_compile


class _Finder:
    """Finds the modules as Python would, and puts the patches in once one has been loaded."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        if name not in (_TRITON, _EXTENSIONS):
            return None
        spec = PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            vars(spec.loader)["exec_module"] = _then_patch(spec.loader.exec_module)
        return spec


_finder = _Finder()


def _then_patch(load: Callable[[ModuleType], None]) -> Callable[[ModuleType], None]:
    def exec_module(module: ModuleType) -> None:
        load(module)
        if _finder in sys.meta_path:  # the GPUs are still on
            put_in(_patch(module))

    return exec_module


def prepare() -> None:
    """Wait for the modules. Called when the first virtual GPUs go on."""
    sys.meta_path.insert(0, _finder)


def forget() -> None:
    """Wait no more."""
    if _finder in sys.meta_path:
        sys.meta_path.remove(_finder)


def _patch(module: ModuleType) -> list[Patch]:
    if module.__name__ == _TRITON:
        return [(module, "_create_driver", _create_driver)] if hasattr(module, "_create_driver") else []
    return [(module, "_jit_compile", _no_cuda(module))] if hasattr(module, "_jit_compile") else []


def patches() -> list[Patch]:
    """See `features`. None for a module that is not imported yet."""
    modules = (sys.modules.get(name) for name in (_TRITON, _EXTENSIONS))
    return [patch for module in modules if module is not None for patch in _patch(module)]
