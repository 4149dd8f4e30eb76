"""Errors of ranks: what a rank writes down when it fails, and the text of the run's error."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch

from helpers.gpus import ENGINE_FOLDER

_LAUNCH = str(Path(__file__).resolve().parent) + os.sep
# What other ranks say when one is gone: gloo's words, nccl's, the store's, and the system's.
_LOST = re.compile(
    r"Connection (was )?(closed|reset|refused)|Broken pipe|Socket closed|Timed out waiting|NCCL error|"
    r"remote process exited|recvValue failed|sendBytes failed|recvBytes|failed to (recv|send)",
    re.IGNORECASE,
)
# Gloo has several ways to say it, with a port: which one comes is chance, and lessons are stored as they ran.
_GLOO = re.compile(r"\[[^\]\n]*pair\.cc:\d+\] [^\n]*")


class RankError(RuntimeError):
    """A rank raised or died."""


@dataclass(frozen=True)
class Failure:
    """One rank's error: `what` in a line, the traceback, when (time.monotonic), and if it only lost its connection."""

    rank: int
    what: str
    traceback: str
    when: float
    lost: bool = False

    @classmethod
    def of(cls, error: BaseException, rank: int, labels: dict[str, str]) -> Failure:
        """From an exception, in the rank. `labels`: names of the notebook's cells."""
        what, text = f"raised {_in_a_line(error)}", _traceback(error, labels)
        lost = _has_lost_connection(error)
        if lost:
            what, text = (_GLOO.sub("Connection closed by peer", part) for part in (what, text))
        return cls(rank, what, text, time.monotonic(), lost)

    @classmethod
    def of_exit(cls, exit_code: int, rank: int) -> Failure:
        """From the exit code of a process that ended without writing anything."""
        return cls(rank, f"died: {_how(exit_code)}", "", time.monotonic())


def _has_lost_connection(error: BaseException | None) -> bool:
    """Whether it, or what it came from, says that another rank is gone."""
    if error is None:
        return False
    if isinstance(error, (torch.distributed.DistNetworkError, torch.distributed.DistStoreError, ConnectionError)):
        return True
    own = isinstance(error, RuntimeError) and _LOST.search(str(error)) is not None
    return own or _has_lost_connection(error.__cause__ or error.__context__)


def _in_a_line(error: BaseException) -> str:
    """Its name and the first line of what it says, as a traceback ends."""
    return "".join(traceback.format_exception_only(error)).strip().split("\n")[0].rstrip()


def _how(exit_code: int) -> str:
    if exit_code >= 0:
        return f"its process ended with exit code {exit_code} before its function returned (os._exit?)"
    if exit_code == -signal.SIGKILL:
        return "killed by SIGKILL; the system does that when memory runs out"
    return f"killed by signal {-exit_code} ({signal.strsignal(-exit_code)}); see what it printed"


# ---- which one was the cause ----------------------------------------------------------------------------------------


def rank_error(failures: list[Failure], ranks: int, finished: list[int]) -> RankError:
    """The error of a run: the earliest that is not a lost connection, as the lowest rank with the same words had it."""
    own = [failure for failure in failures if not failure.lost] or failures
    first = min(own, key=lambda failure: failure.when)
    same = sorted((failure for failure in own if failure.what == first.what), key=lambda failure: failure.rank)
    cause = same[0]
    lines = [f"{_names([failure.rank for failure in same])} of {ranks} {cause.what}"]
    if cause.lost and finished:
        lines.append(f"{_names(finished)} had returned by then, and did not take part in this any more.")
    if cause.traceback:
        lines += ["", f"In rank {cause.rank}:", cause.traceback.rstrip()]
    return RankError("\n".join(lines))


def _names(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else "ranks " + ", ".join(map(str, ranks))


# ---- tracebacks -----------------------------------------------------------------------------------------------------


def _traceback(error: BaseException, labels: dict[str, str]) -> str:
    """Python's own text, from the rank's function on, with short names of files."""
    told = traceback.TracebackException.from_exception(error)
    _shorten(told, labels)
    return "".join(told.format())


def place_of(frame: FrameType, labels: dict[str, str]) -> str:
    """Where a rank is, as a traceback of its stack from its function on."""
    stack = traceback.extract_stack(frame)
    begins = max(number for number, part in enumerate(stack) if part.filename.startswith(_LAUNCH)) + 1
    del stack[:begins]
    _shorten_stack(stack, labels)
    return "at:\n" + "".join(stack.format()).rstrip() if stack else "had not started its function yet."


def _shorten(told: traceback.TracebackException, labels: dict[str, str]) -> None:
    for part in (told.__cause__, told.__context__, *(getattr(told, "exceptions", None) or ())):
        if part is not None:
            _shorten(part, labels)
    _shorten_stack(told.stack, labels)


def _shorten_stack(stack: traceback.StackSummary, labels: dict[str, str]) -> None:
    """Without the frames of the launcher and of what stands in for GPUs, which real GPUs' errors do not have."""
    stack[:] = [frame for frame in stack if not frame.filename.startswith((_LAUNCH, ENGINE_FOLDER))]
    for frame in stack:
        frame.filename = _short(frame.filename, labels)


def _short(file: str, labels: dict[str, str]) -> str:
    """ "Cell In[3]" for a cell; else the path below the folder from which it was imported."""
    if file in labels:
        return labels[file]
    folders = [os.path.join(os.path.abspath(folder), "") for folder in sys.path]
    below = [folder for folder in folders if file.startswith(folder)]
    return file[len(max(below, key=len)) :] if below else file


def time_limit(places: list[str], limit_s: float) -> TimeoutError:
    """The error of a run that took too long, with the place of each rank."""
    found: dict[str, list[int]] = {}
    for rank, place in enumerate(places):
        found.setdefault(place, []).append(rank)
    limit = f"the time limit of {limit_s:g} s (timeout={limit_s:g})"
    lines = [f"{len(places)} ranks were not done within {limit}. Where they were:"]
    return TimeoutError("\n".join(lines + [f"\n{_names(ranks)} {place}" for place, ranks in found.items()]))
