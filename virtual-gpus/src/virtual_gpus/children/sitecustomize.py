"""Python runs this file at its start in a process that inherits virtual GPUs (see virtual_gpus/processes/children.py).

It switches them on when the program imports torch, in the Python installation of the parent only. A program that does
not import torch loses no time. It runs the `sitecustomize` that would have run without this file, too.
"""

import importlib.machinery
import importlib.util
import json
import os
import sys
import types

_HERE = os.path.dirname(os.path.abspath(__file__))
_PACKAGE = os.path.dirname(_HERE)


def _run_the_next() -> None:
    sys.path[:] = [entry for entry in sys.path if entry != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize")
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


def _import_package() -> None:
    if importlib.util.find_spec("virtual_gpus") is None:  # the parent had it from a path of its own
        file = os.path.join(_PACKAGE, "__init__.py")
        spec = importlib.util.spec_from_file_location("virtual_gpus", file, submodule_search_locations=[_PACKAGE])
        assert spec is not None and spec.loader is not None
        sys.modules["virtual_gpus"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["virtual_gpus"])


def _switch_on() -> None:
    assert _facts is not None
    # While the package itself imports torch, the program switches GPUs on, or multiprocessing does, which begins with
    # unpickling a name in `patches`.
    ours = [module for name, module in sys.modules.copy().items() if name.startswith("virtual_gpus.")]
    if not any(getattr(module.__spec__, "_initializing", False) for module in ours):
        from virtual_gpus.switch import start

        start(**_facts["settings"])


class _AfterTorch:
    """Finds torch as Python would, and switches the GPUs on once it has been imported."""

    def __init__(self):
        self._searching = self._is_done = False

    def find_spec(self, name: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:
        if self._searching or name != "torch" or self._is_done:
            return None
        self._searching = True  # by the other finders
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._searching = False
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module: types.ModuleType) -> None:  # specs are asked for without an import too
                del vars(spec.loader)["exec_module"]
                _import_package()
                from virtual_gpus.collector import passing_over_torch

                with passing_over_torch():
                    run(module)
                    if not self._is_done:
                        self._is_done = True
                        _switch_on()

            vars(spec.loader)["exec_module"] = exec_module
        return spec


def _read():
    try:
        facts = json.loads(os.environ.get("VIRTUAL_GPUS_CHILDREN", "null"))
    except ValueError:
        facts = None
    return facts if isinstance(facts, dict) and facts.get("prefix") == sys.prefix else None


_facts = _read()
if _facts is not None:
    sys.meta_path.insert(0, _AfterTorch())
_run_the_next()
