"""Libraries' own tests for several GPUs, unmodified, on virtual GPUs: the commands, and the page docs/suites.md.

Each module of this package is a suite. NEEDS: what must be installed. `about()`: a sentence for the page.
`cases(folder, work)`: the commands, where `folder` is a checkout of the library and `work` an empty folder. KNOWN: the
reason for each case that does not pass.
"""

from __future__ import annotations

import json
import os
import pkgutil
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from textwrap import fill
from typing import NamedTuple

import torch

RESULTS = Path(__file__).parents[1] / "suites.json"
PAGE = Path(__file__).parents[3] / "docs" / "suites.md"
SUITES = sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_"))
LIMIT_S = 900
HEAD = """# Libraries' own tests on virtual GPUs

`python -m benchmarks.outside.suites NAME FOLDER` runs the tests of a library and writes this page. It downloads
nothing. FOLDER is a checkout of the library, where its package does not contain the tests. The tests are not modified.
"""
_ERROR = re.compile(
    r"^(?:\[(?:rank|default)\d+\]:)? *(?:E +)?((?:\w+\.)*\w*(?:Error|Modelled|Refused)\b: .*)", re.MULTILINE
)


class Case(NamedTuple):
    """A command that passes if its exit code is 0. settings: environment variables beside those of this process."""

    name: str
    command: list[str]
    folder: Path
    settings: Mapping[str, str] = {}


def python_path(*folders: str | Path) -> str:
    """PYTHONPATH with these folders before those that it has."""
    return os.pathsep.join([*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])])


def virtual(gpus: int, *program: str | Path) -> list[str]:
    """The command that runs `program`, a file or "-m" and a module, on so many virtual GPUs."""
    return [sys.executable, "-m", "virtual_gpus", "--gpus", str(gpus), *map(str, program)]


def torchrun(ranks: int, *program: str | Path) -> list[str]:
    """The command that starts `program` as so many ranks, each with its own virtual GPU."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return [*launcher, *virtual(ranks, *program)[1:]]


def run(case: Case, log: Path) -> str:
    """Run a case. Returns "" if it passes, and otherwise the first error that it names, or what became of it.

    Its processes form a group, which is ended after `LIMIT_S` seconds.
    """
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | dict(case.settings)
    with log.open("w") as output:
        process = subprocess.Popen(case.command, cwd=case.folder, env=environment, stdout=output,
                                   stderr=subprocess.STDOUT, start_new_session=True)  # fmt: skip
        try:
            code = process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            return f"It did not end within {LIMIT_S} s."
        finally:
            _end(process)
    if code == 0:
        return ""
    errors = _ERROR.findall(log.read_text(errors="replace"))
    return errors[0][:160] if errors else f"exit code {code}"


def _end(process: subprocess.Popen) -> None:
    """End a group of processes. The ranks of torchrun are in groups of their own, which it ends if it is asked to."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        for _ in range(80):  # torchrun gives its ranks 30 s
            time.sleep(0.5)
            process.poll()  # else its entry stays, and with it the group
            os.killpg(process.pid, 0)
        os.killpg(process.pid, signal.SIGKILL)


def keep(name: str, about: str, reasons: Mapping[str, str]) -> None:
    """Keep a suite's results, by case why it does not pass, and write the page."""
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    results[name] = {"about": about, "torch": torch.__version__.partition("+")[0], "cases": dict(reasons)}
    RESULTS.write_text(json.dumps(dict(sorted(results.items())), indent=1) + "\n")
    PAGE.write_text(page(results), encoding="utf-8")


def page(results: Mapping[str, Mapping[str, object]]) -> str:
    """The page, made from the results."""
    text = HEAD
    for name, suite in results.items():
        cases = suite["cases"]
        assert isinstance(cases, dict)
        passed = sum(not why for why in cases.values())
        about = fill(f"{suite['about']} PyTorch {suite['torch']}: {passed} of {len(cases)} pass.", 120)
        text += f"\n## {name}\n\n{about}\n\n"
        text += "| test | passes | reason |\n|---|---|---|\n"
        for case, why in cases.items():
            text += f"| {case} | {'no' if why else 'yes'} | {why.replace('|', '/')} |\n"
    return text
