"""What PyTorch does with CUDA, feature by feature.

A feature that fits in one module is NAME.py, with its figures in NAME.toml and its limits in NAME.limits.md. One of
several modules is a folder NAME with figures.toml and limits.md in it. So you remove a feature by deleting what has its
name, since no list names it and nothing below this folder imports it. Each of its modules may have these names, and its
figures these tables, which are all that the package knows of it:

    patches()        what answers for PyTorch's names while virtual GPUs are on, as `patches.table` wants it
    OPERATORS        by the base name of an operator ("mm"), or "_foreach_*" for all of these: its `operators.Row`
    KINDS            by namespace of operators: the kind that they are, if it is one of their own
    ROUTES           by kind of operator (`operators.Operator.kind`): what is done with one
    ALLOCATES        functions that ask for GPU memory of one kind, each as a `timeline.peak.Allocator`
    TIMED            by the name in a row of `clock.measured` that is no operator: given its positional arguments, its
                     named ones and a device, what `measure` times
    [rows]           by the base name of an operator: its row, if it needs no code, see `dispatch.recipes.row`
    [words]          by a regular expression for what errors of the CPU's kernels say: what CUDA's say, see errors.toml
    [autocast]       by what autocast does with them: names of operators, see autocast.toml
    check_settings(settings)  called when settings are made, to raise an error for one of the feature's
    prepare()        called before the patches go in, when the first virtual GPUs go on
    forget()         called before the patches are taken out, when the last ones go off
    start(machine)   called before the GPUs of a machine go on
    stop(machine)    called before they go off

`start(machine)` may set what a machine has for features: its `follower`, `charger`, `around_backward`, `first_options`
and `variables`, and each GPU's `late`. What a feature keeps for a machine or a GPU is in a `machine.Kept`.

`python -m virtual_gpus` and `switch` see to the rest. A feature may import another one, as long as no cycle of features
comes of it (`tests/test_layers.py`).
"""

import dataclasses
import importlib
import pkgutil
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any

from virtual_gpus import errors, figures, settings
from virtual_gpus.dispatch import operators, recipes, routes
from virtual_gpus.machine import VirtualMachine
from virtual_gpus.patches import captured, table
from virtual_gpus.timeline import peak

_found = pkgutil.walk_packages(__path__, f"{__name__}.")
MODULES: list[ModuleType] = [importlib.import_module(module.name) for module in _found]
_FILES = [figures.read(str(path)) for path in sorted(Path(__file__).parent.rglob("*.toml"))]


def _offered(name: str) -> list[Any]:
    """What the modules have under a name of the protocol."""
    return [vars(module)[name] for module in MODULES if name in vars(module)]


def _beside(name: str) -> list[dict[str, str]]:
    """The tables of that name in the figures of the features."""
    return [file[name] for file in _FILES if name in file]


def _merged(tables: list[dict[Any, Any]]) -> dict[Any, Any]:
    """Those tables as one. Raises ValueError if two features have the same key."""
    keys = Counter(key for table in tables for key in table)
    if twice := [key for key, number in keys.items() if number > 1]:
        raise ValueError(f"Two features have the same keys: {twice}.")
    return {key: value for table in tables for key, value in table.items()}


_rows = [{name: recipes.row(file, **row) for name, row in file.get("rows", {}).items()} for file in _FILES]
operators.ROWS.update(_merged([*_offered("OPERATORS"), *_rows]))
operators.KINDS.update(_merged(_offered("KINDS")))
operators.ROUTES.update(routes.ROUTES | _merged(_offered("ROUTES")))
errors.WORDS.update(_merged(_beside("words")))
_by_policy = [(policy, names.split()) for lists in _beside("autocast") for policy, names in lists.items()]
operators.AUTOCAST.update(_merged([dict.fromkeys(names, policy) for policy, names in _by_policy]))
TIMED = _merged(_offered("TIMED"))
settings.CHECKS += _offered("check_settings")
peak.ALLOCATORS += [peak.Allocator(*row) for rows in _offered("ALLOCATES") for row in rows]


def patches() -> list[table.Patch]:
    """Every patch of this PyTorch version."""
    table.modules_of.cache_clear()  # once for all of the features: there are thousands of modules in sys.modules
    return [patch for of_module in _offered("patches") for patch in of_module()]


def start(machine: VirtualMachine) -> None:
    """The GPUs of a machine are about to go on. Raises ValueError for a setting whose feature is not there."""
    names = {module.__name__ for module in MODULES}
    for field in dataclasses.fields(machine.settings):
        feature, value = settings.FACTS[field.name].get("feature"), getattr(machine.settings, field.name)
        if feature is not None and value != field.default and f"{__name__}.{feature}" not in names:
            raise ValueError(f"{field.name}={value!r} needs the feature {feature!r}, which is not in {__path__[0]}.")
    for start in _offered("start"):
        start(machine)


def stop(machine: VirtualMachine) -> None:
    """The GPUs of a machine are about to go off."""
    for stop in _offered("stop"):
        stop(machine)


def install() -> None:
    """Put all patches in. Called when the first virtual GPUs go on. After an error, `uninstall` has to follow."""
    captured.watch()
    for prepare in _offered("prepare"):
        prepare()
    table.put_in(patches())


def uninstall() -> None:
    """Put everything back, also where a feature fails to. Called when the last virtual GPUs go off."""
    with ExitStack() as last_first:
        last_first.callback(lambda: captured.give_back(table.take_out()))
        for forget in reversed(_offered("forget")):
            last_first.callback(forget)
