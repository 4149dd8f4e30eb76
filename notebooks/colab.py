"""Make the course ready in Google Colab, which has PyTorch but not this course. Run it in the first cell of a lesson:

    !git clone --quiet --depth 1 ADDRESS /content/course
    %run /content/course/notebooks/colab.py

It uses Colab's own PyTorch and installs only what Colab lacks. docs/setup.md says more.
"""

import importlib.util
import os
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

from packaging.requirements import Requirement

COURSE = Path(__file__).resolve().parent.parent
NEEDS = {
    "GPUtil": "gputil",
    "cloudpickle": "cloudpickle",
    "ipywidgets": "ipywidgets",
    "psutil": "psutil",
}  # import -> package


def check_torch() -> None:
    """Raise RuntimeError if the engine does not know the installed version of PyTorch."""
    settings = tomllib.loads((COURSE / "virtual-gpus" / "pyproject.toml").read_text(encoding="utf-8"))
    (known,) = (Requirement(text) for text in settings["project"]["dependencies"] if text.startswith("torch"))
    if not known.specifier.contains(version("torch"), prereleases=True):
        raise RuntimeError(
            f"This course needs a PyTorch of {known.specifier}, and this machine has {version('torch')}. "
            "Choose another runtime version in the menu Runtime, or use the course on your own machine."
        )


def main() -> None:
    """Install what is missing, and let this notebook and the programs that it starts find the course."""
    check_torch()
    missing = [package for name, package in NEEDS.items() if not importlib.util.find_spec(name)]
    if missing:  # without their dependencies, so that nothing of the machine changes
        subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", *missing], check=True)
        importlib.invalidate_caches()
    for folder in map(str, (COURSE, COURSE / "virtual-gpus" / "src")):
        if folder not in sys.path:
            sys.path.insert(0, folder)
        found = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        os.environ["PYTHONPATH"] = os.pathsep.join([folder, *(path for path in found if path not in ("", folder))])
    os.chdir(COURSE / "notebooks")
    print(f"The course is ready with PyTorch {version('torch')}. Run the lesson's cells now.")


if __name__ == "__main__":
    main()
