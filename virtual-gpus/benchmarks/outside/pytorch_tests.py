"""PyTorch's own tests on virtual GPUs; writes docs/pytorchs_tests.md. Nothing is downloaded.

    python -m benchmarks.outside.pytorch_tests FOLDER/test_torch.py --of 2.15         # all tests of a file
    python -m benchmarks.outside.pytorch_tests FOLDER/test_torch.py --only cumsum     # some of them again
    python -m benchmarks.outside.pytorch_tests                                        # only write the page

The files are in PyTorch's repository, in the folder `test`, best under the tag of the installed version. They need
expecttest, hypothesis, psutil and NumPy. A file of an earlier version runs too: decorators that its version had and the
installed one has not do nothing. The exit code is 1 if a test failed for a reason that is not known.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import importlib.util
import io
import json
import os
import re
import signal
import sys
import unittest
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from benchmarks.outside.pytorch_reasons import AGE, GRAPHS, INSIDES, OTHERS, reason

RESULTS = Path(__file__).with_suffix(".json")
DOCS = Path(__file__).parents[2] / "docs" / "pytorchs_tests.md"
# Where the file holds tests of the CPU as well: the part of Class.test that all tests of GPUs have.
DEVICE_PART = {"test_torch.py": "CUDA.test"}
GROUPS = {
    "Tests of CUDA's internals": INSIDES,
    "Tests of other versions, which fail on a real GPU too": AGE,
    "Tests of CUDA graphs": GRAPHS,
    "Other tests that fail": OTHERS,
}
INTRODUCTION = """
# PyTorch's own tests on virtual GPUs

`python -m benchmarks.outside.pytorch_tests` writes this page from its latest run of each test, under PyTorch 2.15.
`--help` says where to get the files. The files of 2.4 are the copies in MetaX-MACA/mcPytorch at b3db5ee.
`test_torch.py` is the copy in intel/torch-xpu-ops at ab84f92, changed back to CUDA. Only its tests of a device are
counted. [distributed_tests.md](distributed_tests.md) has the tests of torch.distributed.
"""
NOTE = """
The last column is the share of the tests that pass. It leaves out skipped tests, and the tests of the first three
sections below. Skipped tests need other hardware or libraries, or more memory than the 8 GiB of these GPUs.
"""


class TooSlow(Exception):
    """A test took longer than it may."""


def add_missing_names(path: Path) -> list[str]:
    """Give PyTorch's test harness the decorators that the file imports and the installed version lacks."""
    added = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch.testing."):
            module = importlib.import_module(node.module)
            for name in (alias.name for alias in node.names if not hasattr(module, alias.name)):
                setattr(module, name, lambda *args, **_: args[0] if args and callable(args[0]) else lambda test: test)
                added.append(name)
    return added


def load(path: Path) -> ModuleType:
    """The test file as a module."""
    if added := add_missing_names(path):
        print("Not in the installed version, and left out:", ", ".join(added))
    os.environ["PYTORCH_DISABLE_FP32_PRECISION_LEAK_CHECK"] = "1"  # tests of earlier versions do not know this check
    sys.argv = [str(path)]  # the harness compares it with the file of each test
    sys.path.insert(0, str(path.resolve().parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def tests_of(suite: unittest.TestSuite) -> Iterator[unittest.TestCase]:
    """Every test of a suite that is about GPUs: the harness makes a class per kind of device."""
    for test in suite:
        if isinstance(test, unittest.TestSuite):
            yield from tests_of(test)
        elif not type(test).__name__.endswith(("CPU", "META", "MPS", "XPU")):
            yield test


@contextlib.contextmanager
def at_most(seconds: int) -> Iterator[None]:
    """Raise TooSlow in the block after so many seconds of processor time, or ten times as many by the clock."""

    def stop(*_) -> None:
        raise TooSlow(f"more than {seconds} s")

    signal.signal(signal.SIGALRM, stop)
    signal.signal(signal.SIGPROF, stop)
    signal.alarm(10 * seconds)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.setitimer(signal.ITIMER_PROF, 0)


def outcome(test: unittest.TestCase, seconds: int) -> tuple[str, str]:
    """("passed" | "failed" | "skipped", the last line of the error)."""
    result = unittest.TestResult()
    try:
        with at_most(seconds), contextlib.redirect_stderr(io.StringIO()):
            unittest.TestSuite([test]).run(result)
    except TooSlow as error:
        return "failed", f"TooSlow: {error}"
    if result.errors or result.failures:
        lines = (result.errors + result.failures)[0][1].strip().splitlines()
        errors = [line for line in lines if line[:1].isalpha() and ":" in line and not line.startswith("To execute")]
        return "failed", next((line for line in errors if not line.startswith("Traceback")), lines[-1])
    if result.skipped:
        return "skipped", result.skipped[0][1]
    return "passed", ""


def run(path: Path, gpus: int, memory: str, only: str, seconds: int) -> Iterator[tuple[str, str]]:
    """(Class.test, "passed" | "skipped" | "failed: the last line of its error") for the tests of a file."""
    import torch
    from virtual_gpus import virtual_gpus

    with virtual_gpus(gpus, memory=memory, children=True):
        for test in tests_of(unittest.defaultTestLoader.loadTestsFromModule(load(path))):
            name = f"{type(test).__name__}.{test._testMethodName}"
            if DEVICE_PART.get(path.name, "") not in name or not re.search(only, name):
                continue
            what, text = outcome(test, seconds)
            torch.cuda.empty_cache()  # each begins with its GPUs empty
            print(f"{what:8} {name}  {text[:300]}", flush=True)
            yield name, f"failed: {text[:200]}" if what == "failed" else what


def write(results: dict) -> None:
    """docs/pytorchs_tests.md: how many tests of each file pass, and why each of the others fails."""
    lines = [*INTRODUCTION.strip().splitlines(), "", "| file | from PyTorch | passed | failed | skipped | share |",
             "|---|---|---|---|---|---|"]  # fmt: skip
    for name, found in sorted(results.items()):
        passed, failed, skipped = (_named(found, word) for word in ("passed", "failed", "skipped"))
        share = 100 * len(passed) / (len(passed) + sum(not reason(test, INSIDES | AGE | GRAPHS) for test in failed))
        lines.append(
            f"| {name} | {found['version']} | {len(passed)} | {len(failed)} | {len(skipped)} | {share:.1f} % |"
        )
    lines += ["", *NOTE.strip().splitlines()]
    for title, reasons in GROUPS.items():
        lines += ["", f"## {title}", "", "| tests | reason for each of them |", "|---|---|"]
        tests: dict[str, list[str]] = {}
        for found in results.values():
            for test in _named(found, "failed"):
                if why := reason(test, reasons):
                    tests.setdefault(why, []).append(test.partition(".")[2])
        for why, names in sorted(tests.items(), key=lambda row: (-len(row[1]), row[0])):
            lines.append(f"| {', '.join(f'`{name}`' for name in sorted(names))} | {why} |")
    DOCS.write_text("\n".join(lines) + "\n")


def _named(found: dict, word: str) -> list[str]:
    return [test for test, what in found["tests"].items() if what.startswith(word)]


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.outside.pytorch_tests", description=__doc__.split("\n")[0]
    )
    parser.add_argument("file", type=Path, nargs="?", help="a file of PyTorch's folder `test`")
    parser.add_argument("--of", help="the version of PyTorch that the file is of; for a whole new run")
    parser.add_argument("--check", action="store_true", help="do all that passed pass again? Writes nothing")
    parser.add_argument("--gpus", type=int, default=4, help="how many virtual GPUs (4)")
    parser.add_argument("--memory", default="8 GiB", help="memory of each GPU (8 GiB)")
    parser.add_argument("--only", default="", help="a pattern for Class.test")
    parser.add_argument("--seconds", type=int, default=300, help="the most processor time of one test (300)")
    given = parser.parse_args()

    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    if given.file and given.check:
        before = results[given.file.name]["tests"]
        found = dict(run(given.file, given.gpus, given.memory, given.only, given.seconds))
        lost = [name for name, what in found.items() if before.get(name) == "passed" != what]
        print("Passed before, and do not pass now:", ", ".join(lost) or "none")
        return bool(lost)
    if given.file:
        if given.of:
            results[given.file.name] = {"version": given.of, "tests": {}}
        found = results[given.file.name]["tests"]
        for name, what in run(given.file, given.gpus, given.memory, given.only, given.seconds):
            found[name] = what
            RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
    write(results)
    failed = [test for found in results.values() for test in _named(found, "failed")]
    unknown = [test for test in failed if not reason(test, INSIDES | AGE | GRAPHS | OTHERS)]
    print("Failed for no known reason:", ", ".join(unknown) or "none")
    return bool(unknown)


if __name__ == "__main__":
    sys.exit(main())
