"""`python -m virtual_gpus plan train.py`: does a job fit? The last line is the verdict, and the exit code says it too.

The program runs as one rank of the job, with sizes only, until it ends. Its memory is exact as far as the package's is
(docs/accuracy.md). The time is modelled.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from virtual_gpus.errors import NeedsValues
from virtual_gpus.gpus import format_bytes, parse_bytes
from virtual_gpus.timeline.training import TrainingReport, record_training

FITS, ERROR, USAGE, DOES_NOT_FIT, INCOMPLETE = 0, 1, 2, 3, 4  # exit codes; argparse exits with 2
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
    parser.add_argument("--values", action="store_true", help="keep values, for a program that looks at its numbers")


def prepare(options: argparse.Namespace) -> None:
    """Make the options those of rank 0 of a job of --of ranks, or of --gpus. Raises ValueError for a bad --max-peak."""
    options.shapes_only = not options.values
    if options.world_size is None and options.rank is None:
        options.world_size = options.gpus
    if options.rank is None:
        options.rank = 0
    options.limit = None if options.max_peak is None else parse_bytes(options.max_peak)


def run(program: Callable[[], None], options: argparse.Namespace) -> None:
    """Run the program, print its report and the verdict, and exit with its code."""
    recorded = record_training()
    error: BaseException | None = None
    try:
        with recorded:
            program()
    except SystemExit as left:
        error = None if left.code in (None, 0) else left
    except BaseException as raised:  # KeyboardInterrupt too: a verdict comes last in any case
        error = raised
        traceback.print_exception(raised)
    report = recorded.report(tokens=options.tokens, samples=options.samples)
    verdict = judge(report, error, options.limit)
    sys.stderr.flush()
    print(f"\n{report}\n{verdict}", flush=True)
    if options.json is not None:
        _write(options.json, report, verdict)
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


def _line(error: BaseException) -> str:
    """The program's line in a traceback: the innermost one outside Python, PyTorch and this package."""
    beside = (str(Path(torch.__file__).parent) + os.sep, str(Path(__file__).parent) + os.sep, "<frozen")
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(beside)] or list(frames)
    return f"{Path(own[-1].filename).name}:{own[-1].lineno}" if own else "an unknown line"


def _write(path: Path, report: TrainingReport, verdict: Verdict) -> None:
    found: dict[str, Any] = {"verdict": _WORDS[verdict.exit_code], **asdict(verdict), "report": asdict(report)}
    unfinished = path.with_name(path.name + ".part")
    unfinished.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    os.replace(unfinished, path)
