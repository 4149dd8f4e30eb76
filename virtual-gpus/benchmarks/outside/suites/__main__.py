"""python -m benchmarks.outside.suites NAME [FOLDER] [--only TEXT]: run the tests of a library on virtual GPUs."""

from __future__ import annotations

import argparse
import importlib
import sys
import tempfile
from pathlib import Path

from benchmarks.outside.suites import SUITES, keep, run


def main() -> int:
    """The command. Its exit code is 1 if a test fails for no known reason. With --only, the page is not written."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.outside.suites", description=__doc__)
    parser.add_argument("name", choices=SUITES)
    parser.add_argument("folder", nargs="?", type=Path, help="a checkout of the library")
    parser.add_argument("--only", default="", help="only the tests whose name contains this text")
    parser.add_argument("--logs", type=Path, default=Path("suite-logs"), help="a folder for what the tests print")
    args = parser.parse_args()
    suite = importlib.import_module(f"benchmarks.outside.suites.{args.name}")
    logs = args.logs.resolve()
    logs.mkdir(parents=True, exist_ok=True)
    reasons, unknown = {}, 0
    with tempfile.TemporaryDirectory() as work:
        for case in suite.cases(args.folder and args.folder.resolve(), Path(work)):
            if args.only in case.name:
                error = run(case, logs / f"{case.name.replace('/', '_')}.log")
                reasons[case.name] = error and suite.KNOWN.get(case.name, error)
                unknown += bool(error) and case.name not in suite.KNOWN
                print(f"{case.name}: {error or 'passes'}", flush=True)
    if not args.only:
        keep(args.name, suite.about(), reasons)
    return bool(unknown)


if __name__ == "__main__":
    sys.exit(main())
