"""`python -m virtual_gpus plan train.py`: does a job fit? The last line is the verdict, and the exit code says it too.

The program runs as one rank of the job, with sizes only, until it ends. Its memory is exact as far as the package's is
(docs/accuracy.md). The time is modelled.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch

from virtual_gpus.entrance import is_of_program
from virtual_gpus.errors import NeedsValues
from virtual_gpus.files import write_whole
from virtual_gpus.gpus import format_bytes, parse_bytes
from virtual_gpus.timeline.training import TrainingReport, record_training

FITS, ERROR, USAGE, DOES_NOT_FIT, INCOMPLETE = 0, 1, 2, 3, 4  # exit codes; argparse exits with 2
_PLACE = "{}"  # of the numbers that a search tries
_MOST_MODULES = 5
KNOWN_ERROR = "Of 36 published jobs, half are off by more than 7 % in time (docs/accuracy.md)."
_WORDS = {FITS: "FITS", ERROR: "ERROR", DOES_NOT_FIT: "DOES NOT FIT", INCOMPLETE: "INCOMPLETE"}


@dataclass(frozen=True)
class Verdict:
    """Whether a job fits. exit_code: one of the numbers above. why: in one line. margin: limit minus peak, in bytes.

    limit: bytes, of --max-peak or of the GPU.
    """

    exit_code: int
    why: str
    limit: int
    margin: int

    def __str__(self) -> str:
        return f"{_WORDS[self.exit_code]}: {self.why}"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options that only `plan` has."""
    parser.add_argument("--max-peak", help="the most memory that the job may need, such as 36GiB (default: the GPU's)")
    parser.add_argument("--json", type=Path, help="a file for verdict and report")
    parser.add_argument(
        "--search",
        metavar="LOW:HIGH",
        help="the largest number that fits in place of {} in the program's arguments; with --of {} or --gpus {}, the "
        "smallest one of LOW, 2 LOW, 4 LOW, ...",
    )
    parser.add_argument("--values", action="store_true", help="keep values, for a program that looks at its numbers")


def number_or_place(text: str) -> int | str:
    """The type of --gpus and --of: a number, or {} in a search."""
    return text if text == _PLACE else int(text)


def prepare(options: argparse.Namespace) -> None:
    """Make the options those of rank 0 of a job of --of ranks, or of --gpus. Raises ValueError for a bad --max-peak."""
    options.shapes_only = not options.values
    options.seeks_gpus = _PLACE in (options.count, options.world_size)
    if options.search is not None:
        options.search = _range(options)
    elif options.seeks_gpus:
        raise ValueError("The number of GPUs is {}. Write --search LOW:HIGH as well, for example --search 8:512.")
    for name in ("count", "world_size"):
        if getattr(options, name) == _PLACE:
            setattr(options, name, options.search[0])
    if options.world_size is None and options.rank is None:
        options.world_size = options.count
    if options.rank is None:
        options.rank = 0
    options.limit = None if options.max_peak is None else parse_bytes(options.max_peak)


def _range(options: argparse.Namespace) -> tuple[int, int]:
    bounds = re.fullmatch(r"(\d+):(\d+)", options.search)
    if bounds is None or not 0 < int(bounds[1]) <= int(bounds[2]):
        raise ValueError(f"--search is {options.search!r}. Write two numbers above 0, for example --search 1:512.")
    if options.seeks_gpus == any(_PLACE in argument for argument in options.arguments):
        raise ValueError(
            "--search needs {} either among the program's arguments, for example: train.py --batch-size {}, or as "
            "--of {} or --gpus {}."
        )
    return int(bounds[1]), int(bounds[2])


def search(arguments: list[str], options: argparse.Namespace) -> None:
    """Try numbers in place of {}, each in a process of its own, and exit with a verdict of the largest that fits, or of
    the smallest number of GPUs.

    arguments: all of the command line after "plan". A number that fits is taken to mean that all smaller ones do.
    """
    low, high = options.search
    tried: dict[int, dict[str, Any]] = {}

    def fits(number: int) -> bool:
        if number not in tried:
            tried[number] = outcome = _try(arguments, options, number)
            print(f"{number}: {outcome['verdict']}: {outcome['why']}", flush=True)
            if outcome["exit_code"] not in (FITS, DOES_NOT_FIT):
                raise SystemExit(outcome["exit_code"])
        return tried[number]["exit_code"] == FITS

    best, number = 0, low
    if options.seeks_gpus:
        while number <= high and not fits(number):
            number *= 2
        _end(options, number if number <= high else 0, tried, "smallest", f"even {number // 2} GPUs are too few")
    while number <= high and fits(number):  # doubles, so that a wide range takes few tries
        best, number = number, min(2 * number, high) if number < high else high + 1
    first_without = min(number, high + 1)
    while best and first_without - best > 1:
        middle = (best + first_without) // 2
        best, first_without = (middle, first_without) if fits(middle) else (best, middle)
    _end(options, best, tried, "largest", f"even {low} does not fit")


def _end(options: argparse.Namespace, best: int, tried: dict[int, dict[str, Any]], which: str, none: str) -> NoReturn:
    """Say what a search has found, and exit. best: 0 if nothing fits. none: what is said then."""
    low, high = options.search
    if options.json is not None:
        outcome = {which: best or None, "tried": {str(key): tried[key] for key in sorted(tried)}}
        write_whole(options.json, json.dumps(outcome, indent=2) + "\n")
    if not best:
        print(f"{_WORDS[DOES_NOT_FIT]}: {none}.")
        raise SystemExit(DOES_NOT_FIT)
    what = f"{which} number {'of GPUs tried ' if options.seeks_gpus else ''}from {low} to {high}"
    print(f"{_WORDS[FITS]}: {best} is the {what} that fits.")
    raise SystemExit(FITS)


def _try(arguments: list[str], options: argparse.Namespace, number: int) -> dict[str, Any]:
    """What `plan` says with this number. Raises SystemExit if it ends without a verdict."""
    options_before = len(arguments) - len(options.arguments)
    ours, theirs = arguments[:options_before], options.arguments
    ours, theirs = ([word.replace(_PLACE, str(number)) for word in words] for words in (ours, theirs))
    for name in ("--search", "--json"):
        ours = _without(ours, name)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "plan.json"
        command = [sys.executable, "-m", "virtual_gpus", "plan", "--json", str(file), *ours, *theirs]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if not file.exists():
            print(done.stdout)
            raise SystemExit(ERROR)
        if done.returncode == ERROR:
            print(done.stdout)
        return json.loads(file.read_text(encoding="utf-8"))


def _without(arguments: list[str], name: str) -> list[str]:
    """Without an option and its value, "--name value" or "--name=value"."""
    others = [argument for argument in arguments if not argument.startswith(f"{name}=")]
    if name in others:
        index = others.index(name)
        del others[index : index + 2]
    return others


def run(program: Callable[[], None], options: argparse.Namespace) -> None:
    """Run the program, print its report and the verdict, and exit with its code."""
    error: BaseException | None = None
    with record_training() as recorded:
        try:
            program()
        except SystemExit as left:
            error = None if left.code in (None, 0) else left
        except BaseException as raised:  # KeyboardInterrupt too: a verdict comes last in any case
            error = raised
            traceback.print_exception(raised)
    report = recorded.report(tokens=options.tokens, samples=options.samples)
    verdict = judge(report, error, options.limit)
    sys.stderr.flush()
    error_of_time = [KNOWN_ERROR] if report.step_seconds is not None else []
    print("\n".join(["", str(report), *_activations(report), *error_of_time, str(verdict)]), flush=True)
    if options.json is not None:
        outcome: dict[str, Any] = {"verdict": _WORDS[verdict.exit_code], **asdict(verdict), "report": asdict(report)}
        write_whole(options.json, json.dumps(outcome, indent=2) + "\n")
    raise SystemExit(verdict.exit_code)


def judge(report: TrainingReport, error: BaseException | None, limit: int | None) -> Verdict:
    """What a run says about the job. limit: the bytes that it may need at its peak; None for those of the GPU."""
    allowed = report.capacity if limit is None else min(limit, report.capacity)
    margin = allowed - report.peak_bytes
    peak = f"the peak is {format_bytes(report.peak_bytes)} of {format_bytes(allowed)}"
    done = report.step_seconds is not None
    if isinstance(error, torch.OutOfMemoryError):
        asked = re.search(r"Tried to allocate (.*?)\. GPU (\d+) .*? of which (.*?) is free", str(error))
        what = "GPU {1} has {2} free and was asked for {0}".format(*asked.groups()) if asked else str(error)
        return Verdict(DOES_NOT_FIT, f"{what}, at {_line(error)}.", allowed, min(margin, 0))
    if margin < 0:
        return Verdict(DOES_NOT_FIT, f"{peak}, {format_bytes(-margin)} too much.", allowed, margin)
    if isinstance(error, NeedsValues) and not done:
        return Verdict(INCOMPLETE, f"the program looked at numbers, at {_line(error)}. Try --values.", allowed, margin)
    if error is not None and not (isinstance(error, NeedsValues) and done):
        what = (
            f"exit code {error.code}" if isinstance(error, SystemExit) else f"{type(error).__name__}, at {_line(error)}"
        )
        return Verdict(ERROR, f"the program ended with {what}.", allowed, margin)
    if not done:
        why = "fewer than two optimizer steps were taken, and the second has the highest peak"
        return Verdict(INCOMPLETE, f"{why}. So far, {peak}.", allowed, margin)
    after = f" After its steps, it looked at numbers, at {_line(error)}." if error is not None else ""
    return Verdict(FITS, f"{peak}, {format_bytes(margin)} are left.{after}", allowed, margin)


def _activations(report: TrainingReport) -> list[str]:
    """The modules that hold most activations at the peak. Empty if none does."""
    modules = list(report.by_module.items())
    others = sum(size for _, size in modules[_MOST_MODULES:])
    rows = [(name, format_bytes(size)) for name, size in modules[:_MOST_MODULES] + [("others", others)] * bool(others)]
    width = max((len(name) for name, _ in rows), default=0)
    return ["activations, by module"][: len(rows)] + [f"    {name:<{width}}  {size}" for name, size in rows]


def _line(error: BaseException) -> str:
    """The program's line in a traceback."""
    steps = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    if not steps:
        return "an unknown line"
    file, line = next((step for step in reversed(steps) if is_of_program(step[0])), steps[0])
    return f"{Path(file).name}:{line}"
