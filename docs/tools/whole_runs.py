"""Run all tests several times in a row, and log the names of what failed: how often do tests fail by chance?

    python -m docs.tools.whole_runs 10                       # quiet: one run after the other
    python -m docs.tools.whole_runs 10 --load 8              # each beside eight processes that compute all the time
    python -m docs.tools.whole_runs 10 --at-once 2           # two at a time, each the load of the other: 16 GiB in all

build/whole_runs/log.txt has the commit, seconds, load of the machine, counts and failures of each run, and what a run
printed is beside it. The exit code is 1 if anything failed. All runs test the folder as it is, so leave it alone.
"""

import argparse
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

COURSE = Path(__file__).resolve().parents[2]
FOLDER = COURSE / "build" / "whole_runs"
LIMIT_S = 3600


def whole_run(number: int, pytest_arguments: list[str]) -> bool:
    """One run of all tests, logged. True if nothing failed."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=COURSE, capture_output=True, text=True)
    printed, start = FOLDER / f"run_{number}.txt", time.monotonic()
    with open(printed, "w", encoding="utf-8") as file:
        command = [sys.executable, "-m", "pytest", "-q", "-rfE", *pytest_arguments]
        try:
            code = subprocess.run(command, cwd=COURSE, stdout=file, stderr=file, timeout=LIMIT_S).returncode
        except subprocess.TimeoutExpired:
            code = f"none after {LIMIT_S} s"
    text = printed.read_text(encoding="utf-8", errors="replace")
    counts = re.findall(r"^=*\s*((?:\d+ \w+(?:, )?)+) in [\d.]+s", text, re.MULTILINE)
    failed = re.findall(r"^(?:FAILED|ERROR) .*", text, re.MULTILINE)
    seconds, load = time.monotonic() - start, os.getloadavg()[1]
    words = [f"run {number}", commit.stdout.strip(), f"{seconds:.0f} s", f"load {load:.1f}", *(counts or ["no counts"])]
    with open(FOLDER / "log.txt", "a", encoding="utf-8") as log:
        print("  ".join([*words, f"exit code {code}"]), *failed, sep="\n    ", file=log)
    return code == 0


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=int)
    parser.add_argument("--load", type=int, default=0, help="so many processes compute beside the tests")
    parser.add_argument("--at-once", type=int, default=1, help="so many runs at a time")
    options, pytest_arguments = parser.parse_known_args(arguments)
    FOLDER.mkdir(parents=True, exist_ok=True)
    first = 1 + max((int(path.stem[4:]) for path in FOLDER.glob("run_*.txt")), default=0)
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(options.load)]
    try:
        with ThreadPoolExecutor(options.at_once) as pool:
            numbers = range(first, first + options.runs)
            good = list(pool.map(lambda number: whole_run(number, pytest_arguments), numbers))
    finally:
        for process in busy:
            process.kill()
            process.wait()
    print(f"{good.count(True)} of {len(good)} runs without a failure; see {FOLDER / 'log.txt'}")
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
