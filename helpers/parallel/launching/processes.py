"""The parent's side of a run: start the ranks, wait for them, show what they print, end them all, whatever happens."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import socket
import sys
import threading
import time
import warnings
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import wait

import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, MultiprocessContext

from helpers.parallel.launching.errors import Failure, is_whole, rank_error, time_limit
from helpers.parallel.launching.output import Output
from helpers.parallel.launching.rank import Job, flush_c, run_rank

_GRACE_S = 2.0  # after a failure: gloo tells the others at once, who then end by themselves and name no other cause
_LEAVE_S = 5.0  # a rank has returned; what is left is its process's end
_KILLED_S = 60.0  # a killed process is gone at once, unless it gets no core
_STACKS_S = 5.0  # for the ranks to write where they are
_LOOK_S = 0.02  # between two looks at the files
_one_at_a_time = threading.Lock()  # threads that launch take turns


class _Ranks(MultiprocessContext):
    """PyTorch's elastic launcher of functions, without its signal handlers (Ctrl-C stays the notebook's) and its wait.

    Its own wait kills the others when the first failure shows, which need not be the cause, and has no time limit.
    """

    def begin(self) -> None:
        """Start the processes; if not all start, end those that did."""
        before = set(multiprocessing.active_children())
        try:
            self._start()
        except BaseException:
            end(set(multiprocessing.active_children()) - before)
            raise

    @property
    def processes(self) -> list:
        """Rank 0's process first."""
        return self._pc.processes

    def let_go(self) -> None:
        """Ranks that have returned wait for this before their processes end. In a thread: it hangs if one has died."""
        threading.Thread(target=self._worker_finished_event.set, daemon=True).start()


def run(job: Job, start: str, environments: list[dict[str, str]], door: socket.socket, show: bool) -> list:
    """Start the ranks, give back what they returned, rank 0's first. Raises what `launch` says; leaves no process.

    `door`: a listening socket, at the address that the environments name. The ranks knock; the store opens later.
    """
    with _one_at_a_time:
        failures = _supervise(job, start, environments, door, Output(job, show))
    if failures:
        finished = [rank for rank in range(job.ranks) if job.file(rank, "result").exists()]
        raise rank_error(failures, job.ranks, finished)
    # Written a moment ago by our own process into a folder of ours: as trustworthy as the program itself.
    files = [job.file(rank, "result") for rank in range(job.ranks)]
    return [torch.load(file, map_location="cpu", weights_only=False) for file in files]


def _supervise(job: Job, start: str, environments: list, door: socket.socket, output: Output) -> list[Failure]:
    """Start the ranks, wait for them, and end what is left of them in any case."""
    processes, store, done = [], None, False
    try:
        with _interrupts_wait():
            ranks = _start(job, start, environments)
            processes = ranks.processes
        store = _open(door)
        failures = _wait(job, processes, output)
        if not failures:
            _leave(ranks)
        done = not failures
        return failures
    finally:
        with _interrupts_wait():
            end(processes)
            del store  # now, and not when a traceback lets go of it: the next launch forks, see `_open`
        output.finish(failed=not done)


def _start(job: Job, start: str, environments: list[dict[str, str]]) -> _Ranks:
    if start == "spawn":
        job.pickled_work.write_bytes(job.work)
        job = replace(job, work=None)
    ranks = _Ranks(
        name="rank",
        entrypoint=run_rank,
        args={rank: (rank, job) for rank in range(job.ranks)},
        envs=dict(enumerate(environments)),
        start_method=start,
        logs_specs=DefaultLogsSpecs(log_dir=str(job.folder / "elastic")),
    )
    flush_c()  # what the parent has printed and not yet shown would be shown by every fork as well
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
        ranks.begin()
    return ranks


def _open(door: socket.socket) -> torch.distributed.TCPStore:
    """The store at which the ranks find each other.

    It comes after the forks and goes before the next launch. For each rank that connects, its thread looks a name up
    under a lock of C's resolver. A process forked at that moment would wait for that lock for ever.
    """
    host, port = door.getsockname()
    return torch.distributed.TCPStore(
        host, port, is_master=True, wait_for_workers=False, master_listen_fd=door.detach()
    )


# ---- waiting --------------------------------------------------------------------------------------------------------


def _wait(job: Job, processes: list, output: Output) -> list[Failure]:
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
            raise _too_late(job, processes)
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


def _too_late(job: Job, processes: list) -> TimeoutError:
    """The ranks write where they are by themselves, at this moment."""
    running = _still_running(job, processes, {})
    patience = time.monotonic() + _STACKS_S
    while time.monotonic() < patience and not all(is_whole(_stack(job, rank)) for rank in running):
        time.sleep(_LOOK_S)
    stacks = {rank: _stack(job, rank) if rank in running else None for rank in range(job.ranks)}
    return time_limit(stacks, job.limit_s, job.ranks, {name: label for name, (label, _) in job.cells.items()})


def _stack(job: Job, rank: int) -> str:
    try:
        return job.file(rank, "stack").read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return ""  # it has not come so far


# ---- ending ---------------------------------------------------------------------------------------------------------


def _leave(ranks: _Ranks) -> None:
    """Let the ranks' processes end by themselves; threads that they left running do not hold them up for ever."""
    ranks.let_go()
    patience = time.monotonic() + _LEAVE_S
    for process in ranks.processes:
        process.join(max(patience - time.monotonic(), 0))


def end(processes) -> None:
    """End what still runs, with the processes that it has started. Returns when it has ended."""
    for process in processes:
        if process.is_alive():
            _kill_group(process)
            process.kill()
    for process in processes:
        process.join(_KILLED_S)


def _kill_group(process) -> None:
    if hasattr(os, "killpg"):
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass  # it was about to make its group; then it has started nothing yet


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
