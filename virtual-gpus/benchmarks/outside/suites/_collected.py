"""A pytest plugin: with --collect-only, one line for each test that would not be skipped.

pytest itself does not say before a test runs whether it will be skipped, and a skipped test ends with exit code 0.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from os import environ, pathsep
from pathlib import Path

import pytest
from _pytest.skipping import evaluate_skip_marks

from benchmarks.outside.suites import virtual

NAME = __name__
_MARK = "would run: "


def pytest_collection_finish(session: pytest.Session) -> None:
    """Print the tests, after everything that leaves some of them out."""
    for item in session.items:
        if evaluate_skip_marks(item) is None:
            print(f"\n{_MARK}{item.nodeid}")


def collected(files: Sequence[str], folder: Path, gpus: int, settings: Mapping[str, str]) -> list[str]:
    """The names of the tests of `files` that run on so many GPUs."""
    root = str(Path(__file__).parents[3])
    paths = pathsep.join(filter(None, (settings.get("PYTHONPATH", environ.get("PYTHONPATH", "")), root)))
    command = virtual(gpus, "-m", "pytest", "-p", NAME, "-p", "no:cacheprovider")
    found = subprocess.run([*command, "--collect-only", "-q", *files], cwd=folder, text=True, capture_output=True,
                           env=environ | dict(settings) | {"PYTHONPATH": paths})  # fmt: skip
    if found.returncode:
        raise SystemExit(f"pytest could not collect these tests:\n{found.stdout}{found.stderr}")
    lines = found.stdout.splitlines()
    return [line.removeprefix(_MARK) for line in lines if line.startswith(_MARK)]
