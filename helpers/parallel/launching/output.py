"""Shows what the ranks print: each line with its rank, in rank order, the same in every run."""

from __future__ import annotations

import re
import sys

from helpers.parallel.launching.rank import Job

# The time and the process's number in what PyTorch's C++ and its loggers say; and their own "[rank0]:".
_LOG = re.compile(r"^(?:\[rank\d+\]:)?(\[?[IWEF])\d{4} \d\d:\d\d:\d\d\.\d+ (?:\d+ )?")


class Output:
    """Reads the ranks' files. Rank 0's lines are shown as they come, so that a long run can be watched."""

    def __init__(self, job: Job, show: bool):
        self._job, self._show = job, show
        self._read = 0  # bytes of rank 0's lines that were shown

    def follow(self) -> None:
        """Show the lines that rank 0 has completed since."""
        new = self._of(0, "out", self._read)
        whole = new[: new.rfind(b"\n") + 1]
        self._read += len(whole)
        self._print(0, whole, sys.stdout)

    def finish(self, failed: bool = False) -> None:
        """Show the rest: rank 0's, then the other ranks' lines, then all that went to stderr. If it failed: always."""
        self._show |= failed
        for rank in range(self._job.ranks):
            self._print(rank, self._of(rank, "out", self._read if rank == 0 else 0), sys.stdout)
        sys.stdout.flush()
        for rank in range(self._job.ranks):
            self._print(rank, self._of(rank, "err"), sys.stderr)
        sys.stderr.flush()

    def _of(self, rank: int, what: str, start: int = 0) -> bytes:
        path = self._job.file(rank, what)
        if not self._show or not path.exists():  # it may not have come so far
            return b""
        with path.open("rb") as file:
            file.seek(start)
            return file.read()

    def _print(self, rank: int, text: bytes, stream) -> None:
        if text:
            lines = text.decode("utf-8", errors="backslashreplace").removesuffix("\n").split("\n")
            stream.write("".join(f"[rank {rank}] {_without_time(line)}\n" for line in lines))
            stream.flush()


def _without_time(line: str) -> str:
    return _LOG.sub(r"\1 ", line)
