"""What a program that is started with `subprocess` inherits of virtual GPUs, where its parent asks for it.

Environment variables carry it. VIRTUAL_GPUS_CHILDREN has the settings as JSON; set it to 0 to switch all of this off.
PYTHONPATH begins with the folder `children`, whose `sitecustomize` switches the GPUs on when the child imports torch.
PATH begins with `children/bin`, which has a program `nvidia-smi`, and VIRTUAL_GPUS_PYTHON is the Python that runs it.
Other programs are not touched. Python programs that are started with -I, -E or -S inherit nothing, nor do those of
another installation. Nothing is written to the disk. When the GPUs go off, the variables are as they were. No torch.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

VARIABLE = "VIRTUAL_GPUS_CHILDREN"
_FOLDER = Path(__file__).parents[1] / "children"
_PYTHON = "VIRTUAL_GPUS_PYTHON"
_ENTRIES = {"PYTHONPATH": str(_FOLDER), "PATH": str(_FOLDER / "bin")}


def variables(facts: dict[str, Any]) -> dict[str, str]:
    """What children need for the GPUs of `facts`: nothing if the user said VIRTUAL_GPUS_CHILDREN=0."""
    if os.environ.get(VARIABLE) == "0":
        return {}
    environment = {VARIABLE: json.dumps({**facts, "prefix": sys.prefix}), _PYTHON: sys.executable}
    for name, entry in _ENTRIES.items():
        before = os.environ.get(name, "").split(os.pathsep) if os.environ.get(name) else []
        environment[name] = os.pathsep.join([entry, *(part for part in before if part != entry)])
    return environment
