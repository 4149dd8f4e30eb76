"""The parent's side of a run: start the ranks, wait for them, show what they print, end them all, whatever happens."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import re
import signal
import socket
import sys
import threading
import time
import warnings
from contextlib import contextmanager
from multiprocessing.connection import wait

import torch

from helpers.parallel.launching.errors import Failure, is_whole, rank_error, time_limit
from helpers.parallel.launching.rank import HOST, Job, run_rank

_GRACE_S = 2.0  # after a failure: gloo tells the others at once, who then end by themselves and name no other cause
_LEAVE_S = 5.0  # a rank has returned; what is left is its process's end
_KILLED_S = 60.0  # a killed process is gone at once, unless it gets no core
_STACKS_S = 5.0  # for the ranks to write where they are
_LOOK_S = 0.02  # between two looks at the files
_one_at_a_time = threading.Lock()  # threads that launch take turns
# The time and the process's number in what PyTorch's C++ and its loggers say; and their own "[rank0]:".
_LOG = re.compile(r"^(?:\[rank\d+\]:)?(\[?[IWEF])\d{4} \d\d:\d\d:\d\d\.\d+ (?:\d+ )?")


def run(job: Job, start: str, door: socket.socket, show: bool) -> list:
    """Start the ranks, and return what they returned, rank 0's first. Raises what `launch` says; leaves no process."""
    with _one_at_a_time:
        failures = _supervise(job, start, door, _Output(job, show))
    files = [job.file(rank, "result") for rank in range(job.ranks)]
    if failures:
        raise rank_error(failures, job.ranks, [rank for rank, file in enumerate(files) if file.exists()])
    # Written a moment ago by our own process into a folder of ours: as trustworthy as the program itself.
    return [torch.load(file, map_location="cpu", weights_only=False) for file in files]


def _supervise(job: Job, start: str, door: socket.socket, output: _Output) -> list[Failure]:
    """The failures of a run, if any. Ends what is left of the ranks in any case."""
    processes, store, done = [], None, False
    try:
        with _interrupts_wait(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
            for rank in range(job.ranks):
                process = multiprocessing.get_context(start).Process(target=run_rank, args=(rank, job))
                process.start()
                processes.append(process)
        # After the forks, and closed before the next launch: for each rank that connects, the store's thread looks a
        # name up under a lock of C's resolver. A process forked at that moment would wait for that lock forever.
        store = torch.distributed.TCPStore(
            HOST, job.port, is_master=True, wait_for_workers=False, master_listen_fd=door.detach()
        )
        failures = _wait(job, processes, output)
        done = not failures
        if done:
            patience = time.monotonic() + _LEAVE_S  # threads that a rank left running do not hold the run up
            for process in processes:
                process.join(max(patience - time.monotonic(), 0))
        return failures
    finally:
        with _interrupts_wait():
            _end(processes)
            del store  # now, and not when a traceback lets go of it
        output.finish(failed=not done)


def _wait(job: Job, processes: list, output: _Output) -> list[Failure]:
    """Until every rank has returned or failed; after a failure the others have a moment. Raises TimeoutError."""
    failures: dict[int, Failure] = {}
    first = None
    while running := _still_running(job, processes, failures):
        output.follow()
        now = time.monotonic()
        if failures:
            first = now if first is None else first
            if now > first + _GRACE_S:
                break
        elif job.ends is not None and now > job.ends:
            raise _too_late(job, running)
        wait([processes[rank].sentinel for rank in running], timeout=_LOOK_S)
    return list(failures.values())


def _still_running(job: Job, processes: list, failures: dict[int, Failure]) -> list[int]:
    """The ranks that have neither returned nor failed; notes the failures."""
    running = []
    for rank, process in enumerate(processes):
        exit_code = process.exitcode  # first: files are written before a process ends
        if rank in failures or job.file(rank, "result").exists():
            continue
        if job.file(rank, "failure").exists():
            failures[rank] = pickle.loads(job.file(rank, "failure").read_bytes())
        elif exit_code is not None:
            failures[rank] = Failure.of_exit(exit_code, rank)
        else:
            running.append(rank)
    return running


def _too_late(job: Job, running: list[int]) -> TimeoutError:
    """The ranks write where they are by themselves, at this moment."""
    patience = time.monotonic() + _STACKS_S
    while time.monotonic() < patience and not all(is_whole(_stack(job, rank)) for rank in running):
        time.sleep(_LOOK_S)
    stacks = {rank: _stack(job, rank) if rank in running else None for rank in range(job.ranks)}
    return time_limit(stacks, job.limit_s, job.labels)


def _stack(job: Job, rank: int) -> str:
    file = job.file(rank, "stack")
    return file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""


def _end(processes: list) -> None:
    """End what still runs, with the processes that it has started. Returns when it has ended."""
    for process in processes:
        if process.is_alive():
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except (AttributeError, ProcessLookupError, PermissionError):
                pass  # Windows has no groups; or the rank was about to make its own, and has started nothing yet
            process.kill()
    for process in processes:
        process.join(_KILLED_S)


@contextmanager
def _interrupts_wait():
    """Ctrl-C is held back to the end of the block: a process that has just been started must not be lost."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    came = []
    signal.signal(signal.SIGINT, lambda *signal_and_frame: came.append(signal_and_frame))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if came and sys.exc_info()[0] is None:
            before(*came[0])


class _Output:
    """Shows what the ranks print: rank 0's lines as they come, so that a long run can be watched, then the others'."""

    def __init__(self, job: Job, show: bool):
        self._job, self._show = job, show
        self._shown = 0  # bytes of rank 0's lines

    def follow(self) -> None:
        """Show the lines that rank 0 has completed since."""
        new = self._read(0, "out", self._shown)
        whole = new[: new.rfind(b"\n") + 1]
        self._shown += len(whole)
        self._print(0, whole, sys.stdout)

    def finish(self, failed: bool) -> None:
        """Show the rest: rank 0's, then the other ranks' lines, then all that went to stderr. If it failed: always."""
        self._show |= failed
        for rank in range(self._job.ranks):
            self._print(rank, self._read(rank, "out", 0 if rank else self._shown), sys.stdout)
        for rank in range(self._job.ranks):
            self._print(rank, self._read(rank, "err", 0), sys.stderr)

    def _read(self, rank: int, what: str, start: int) -> bytes:
        path = self._job.file(rank, what)
        if not self._show or not path.exists():
            return b""
        with path.open("rb") as file:
            file.seek(start)
            return file.read()

    def _print(self, rank: int, text: bytes, stream) -> None:
        if text:
            lines = text.decode("utf-8", errors="backslashreplace").removesuffix("\n").split("\n")
            lines = [_LOG.sub(r"\1 ", line) for line in lines]
            stream.write("".join(f"[rank {rank}] {line}\n" for line in lines))
            stream.flush()
