"""What a program that is started with `subprocess` inherits of virtual GPUs, where its parent asks for it.

Environment variables carry it. VIRTUAL_GPUS_CHILDREN has the settings as JSON; set it to 0 to switch all of this off.
PYTHONPATH begins with the folder `children`, whose `sitecustomize` switches the GPUs on when the child imports torch.
PATH begins with `children/bin`, which has a program `nvidia-smi`, and VIRTUAL_GPUS_PYTHON is the Python that runs it.
Other programs are not touched. Python programs that are started with the options -I, -E or -S inherit nothing, nor do
those of another Python installation. Nothing is written to the disk. When the GPUs go off, the variables are as they
were. No torch is imported.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

VARIABLE = "VIRTUAL_GPUS_CHILDREN"
_FOLDER = Path(__file__).parents[1] / "children"
_PYTHON = "VIRTUAL_GPUS_PYTHON"
_ENTRIES = {"PYTHONPATH": str(_FOLDER), "PATH": str(_FOLDER / "bin")}

_offers: list[dict[str, Any]] = []  # of the machines that are on and offer themselves, the newest last
_outside: dict[str, str | None] = {}  # what the environment said before the first of them


def are_switched_off() -> bool:
    """True if the user said VIRTUAL_GPUS_CHILDREN=0."""
    return os.environ.get(VARIABLE) == "0"


def offer(facts: dict[str, Any]) -> None:
    """Let children that start from now on have the GPUs of `facts`, see `view.from_environment`."""
    if are_switched_off():
        return
    if not _offers:
        _outside.update({name: os.environ.get(name) for name in (VARIABLE, _PYTHON, *_ENTRIES)})
    _offers.append({**facts, "prefix": sys.prefix})
    os.environ[VARIABLE], os.environ[_PYTHON] = json.dumps(_offers[-1]), sys.executable
    for name, entry in _ENTRIES.items():
        before = os.environ.get(name, "").split(os.pathsep) if os.environ.get(name) else []
        os.environ[name] = os.pathsep.join([entry, *(part for part in before if part != entry)])


def withdraw(facts: dict[str, Any]) -> None:
    """Take an offer back. With the last one, the environment is as it was, but for what others changed in it."""
    mine = [made for made in _offers if {**made, **facts} == made]
    if not mine:
        return
    _offers.remove(mine[-1])
    if _offers:
        os.environ[VARIABLE] = json.dumps(_offers[-1])
        return
    for name in (VARIABLE, _PYTHON):
        restore(name, _outside[name])
    for name, entry in _ENTRIES.items():
        if entry not in (_outside[name] or "").split(os.pathsep):
            rest = [part for part in os.environ.get(name, "").split(os.pathsep) if part != entry]
            restore(name, os.pathsep.join(rest) or _outside[name])


def restore(name: str, value: str | None) -> None:
    """Give a variable of the environment a value, or take it out (None)."""
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value
