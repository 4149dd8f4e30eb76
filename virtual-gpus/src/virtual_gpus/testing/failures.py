"""What a rank writes down when it fails, and the error of the whole run, which names the rank that was first."""

from __future__ import annotations

import itertools
import os
import re
import signal
import sys
import sysconfig
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch.distributed as dist

from virtual_gpus.features.distributed.agreement import CollectiveMismatch

_MOST_OF_TORCH = 3  # frames of PyTorch in a row that are shown when time runs out
_TESTING = str(Path(__file__).resolve().parent) + os.sep
_ENGINE = str(Path(__file__).resolve().parents[1]) + os.sep
_PLUGIN = str(Path(__file__).resolve().parents[2] / "pytest_virtual_gpus.py")
# How gloo and the system say that another rank is gone. NCCL and the store have error classes of their own.
_LOST = re.compile(r"Connection (was )?(closed|reset|refused)|Broken pipe|Socket closed|Timed out waiting")


class RankError(RuntimeError):
    """A rank raised an error or died. The text names the rank that was first, and has its traceback.

    rank: that rank. of: the name of its error's class, or "" if it died. said: the error's text.
    """

    def __init__(self, text: str, rank: int = 0, of: str = "", said: str = ""):
        super().__init__(text)
        self.rank, self.of, self.said = rank, of, said


@dataclass(frozen=True)
class Failure:
    """Why a rank did not return.

    kind: "error" for an error of its own, "lost" if it only lost its connection, "late" if it ran into a time limit.
    what: the failure in one line. when: by time.monotonic(). of, said: the error's class and text, of an error.
    """

    rank: int
    kind: str
    what: str
    traceback: str
    when: float
    of: str = ""
    said: str = ""

    @classmethod
    def of_error(cls, error: BaseException, rank: int, labels: dict[str, str]) -> Failure:
        """From an exception, in the rank. labels: the names of a notebook's cells, by their file names."""
        lines = "".join(traceback.format_exception_only(error)).strip().split("\n")
        line = lines[0].rstrip()
        is_misuse = isinstance(error, dist.DistBackendError) and "ncclInvalidUsage" in str(error)
        if is_misuse:  # nccl says in its last line what is wrong
            line = f"{line.partition(':')[0]}: {lines[-1]}"
        lost = isinstance(error, (dist.DistError, ConnectionError)) or (
            isinstance(error, RuntimeError) and _LOST.search(str(error)) is not None
        )
        kind = "lost" if lost and not is_misuse and not isinstance(error, CollectiveMismatch) else "error"
        explained = getattr(error, "explained", None) or _traceback(error, labels)  # the pytest plugin's words
        return cls(rank, kind, f"raised {line}", explained, time.monotonic(), type(error).__name__, str(error))

    @classmethod
    def of_exit(cls, exit_code: int, rank: int) -> Failure:
        """From the exit code of a process that ended without writing anything."""
        how = f"died with exit code {exit_code}."
        if exit_code < 0:
            how = f"was ended by signal {-exit_code} ({signal.strsignal(-exit_code)})."
        if exit_code == -9:  # SIGKILL, a name that Windows lacks
            how += " The system sends this signal when memory runs out."
        if exit_code > 0xFFFF:  # a status of Windows, whose lists have it in hexadecimal
            how = f"died with exit code 0x{exit_code:08X}."
        return cls(rank, "error", how, "", time.monotonic())

    @classmethod
    def of_time_limit(cls, frame: FrameType, rank: int, labels: dict[str, str]) -> Failure:
        """From the stack of a rank that is not done at the time limit."""
        stack = traceback.extract_stack(frame)
        del stack[: 1 + max(number for number, part in enumerate(stack) if part.filename.startswith(_TESTING))]
        while stack and _is_of_python(stack[0].filename):  # this package looks for a file, say
            del stack[0]
        _shorten(stack, labels)
        where = "had reached:\n" + _without_middle(stack).rstrip() if stack else "had not started the function."
        return cls(rank, "late", where, "", time.monotonic())


def run_error(failures: Sequence[Failure], ranks: int, finished: Sequence[int], limit: str) -> Exception:
    """The error of a run. finished: the ranks that returned. limit: what is said if time ran out."""
    errors = [failure for failure in failures if failure.kind == "error"]
    errors = errors or [failure for failure in failures if failure.kind == "lost"]
    return _rank_error(errors, ranks, finished) if errors else _time_limit(failures, ranks, finished, limit)


def _rank_error(errors: Sequence[Failure], ranks: int, finished: Sequence[int]) -> RankError:
    """Tells the earliest error, and every rank that had the same."""
    first = min(errors, key=lambda failure: failure.when)
    same = sorted((failure for failure in errors if failure.what == first.what), key=lambda failure: failure.rank)
    cause = same[0]
    what = cause.what if len(same) == 1 else re.sub("^was ", "were ", cause.what)
    lines = [f"{_names([failure.rank for failure in same])} of {ranks} {what}"]
    if cause.kind == "lost" and finished:
        lines.append(f"{_names(finished)} had returned by then and took no part in this.")
    if cause.traceback:
        lines += ["", f"In rank {cause.rank}:", cause.traceback.rstrip()]
    return RankError("\n".join(lines), cause.rank, cause.of, cause.said)


def _time_limit(failures: Sequence[Failure], ranks: int, finished: Sequence[int], limit: str) -> TimeoutError:
    """Tells where each rank was."""
    where = dict.fromkeys(range(ranks), "did not answer.")
    where |= {failure.rank: failure.what for failure in failures} | dict.fromkeys(finished, "had returned.")
    ranks_of: dict[str, list[int]] = {}
    for rank, what in where.items():
        ranks_of.setdefault(what, []).append(rank)
    return TimeoutError("\n".join([limit] + [f"\n{_names(those)} {what}" for what, those in ranks_of.items()]))


def _names(ranks: Sequence[int]) -> str:
    return f"Rank {ranks[0]}" if len(ranks) == 1 else "Ranks " + ", ".join(map(str, ranks))


# ---- tracebacks -----------------------------------------------------------------------------------------------------


def _traceback(error: BaseException, labels: dict[str, str]) -> str:
    """Python's own text, from the rank's function on, with short file names."""
    shown = traceback.TracebackException.from_exception(error)
    part: traceback.TracebackException | None = shown
    while part is not None:
        _shorten(part.stack, labels)
        part = part.__cause__ or part.__context__
    return "".join(shown.format())


def _shorten(stack: traceback.StackSummary, labels: dict[str, str]) -> None:
    """Leaves out the frames of this package, because errors on real GPUs do not have them."""
    stack[:] = [frame for frame in stack if not frame.filename.startswith((_ENGINE, _PLUGIN))]
    for frame in stack:
        frame.filename = _short(frame.filename, labels)


def _without_middle(stack: traceback.StackSummary) -> str:
    """Python's own text. Of a long way through PyTorch, only the last two frames: where it waits is what matters."""
    lines: list[str] = []
    for in_torch, group in itertools.groupby(stack, lambda frame: frame.filename.startswith("torch" + os.sep)):
        frames = list(group)
        if in_torch and len(frames) > _MOST_OF_TORCH:
            lines.append(f"  ... {len(frames) - 2} frames of PyTorch ...\n")
            frames = frames[-2:]
        lines += traceback.StackSummary.from_list(frames).format()
    return "".join(lines)


def _is_of_python(file: str) -> bool:
    return file.startswith(sysconfig.get_path("stdlib")) and "site-packages" not in file


def _short(file: str, labels: dict[str, str]) -> str:
    """ "Cell In[3]" for a cell, and otherwise the path below the folder from which the file was imported."""
    if file in labels:
        return labels[file]
    folders = [os.path.join(os.path.abspath(folder), "") for folder in sys.path]
    above = [folder for folder in folders if file.startswith(folder)]
    return file.removeprefix(max(above, key=len, default=""))
