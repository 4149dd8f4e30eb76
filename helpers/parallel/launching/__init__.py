"""Runs a function on several ranks, one process each, from a notebook cell, and returns what each of them returned.

    def train(rank):
        model = DistributedDataParallel(Net().to("cuda"))
        ...
        return loss

    losses = launch(train, ranks=4)        # [rank 0's loss, rank 1's, ...]

In each rank, torch.distributed is ready. It uses nccl on GPUs, and gloo on the CPU. On virtual GPUs, gloo carries the
messages, and nccl's rules hold: collectives take no CPU tensors, and each rank needs a GPU of its own. The environment
is that of torchrun (RANK, LOCAL_RANK, WORLD_SIZE, ...), so a function that reads it works with both.

On Linux without real GPUs, the processes are forked, which takes 0.2 s for 4 ranks. On Linux with real GPUs, they are
forked from a process that has only imported PyTorch. On macOS and Windows they are spawned, and used again by the next
launch. There, and with real GPUs, the first launch takes seconds, functions of cells travel by cloudpickle, and a
script must guard its call with __name__ == "__main__".
"""

from __future__ import annotations

import math
import os
import pickle
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch

from helpers.gpus import is_virtual
from helpers.parallel.launching.errors import Failure, RankError, run_error
from helpers.parallel.launching.processes import Ranks, start_method
from helpers.parallel.launching.rank import Job, Surroundings, cells
from helpers.parallel.network import HOST, has_libuv

__all__ = ["RankError", "launch"]

_START_S = 300.0  # for all ranks to start and to connect, which takes long on a busy machine
_GRACE_S = 2.0  # after a failure, in which the other ranks say what happened to them
_SILENT_S = 5.0  # after the time limit, in which the ranks say where they are
_LEAVE_S = 5.0  # for a process to end after its function has returned
_KILLED_S = 60.0  # for a killed process to end, which takes long only if it gets no core
_LOOK_S = 0.02  # between two looks at the files
_one_at_a_time = threading.Lock()  # threads that launch take turns


def launch(fn: Callable, *args: Any, ranks: int, gpus: bool = True, timeout: float | None = 60,
           start: str | None = None, show: bool = True) -> list:  # fmt: skip
    """Calls `fn(rank, *args)` in `ranks` processes that form a process group. Returns their results, rank 0's first.

    gpus     True uses the GPUs that PyTorch sees, one per rank, or the CPU if there is none. False uses the CPU
    timeout  the time limit in seconds, from the moment at which all ranks are connected; None for no limit
    start    "fork", "forkserver" or "spawn"; by default the fastest that is safe here
    show     prints what the ranks print, each line with its rank: rank 0's lines at once, and the lines of the others
             after them, in rank order

    Results are pickled, and tensors arrive on the CPU. Every rank starts with its own seed (torch.initial_seed() of the
    parent plus its rank), with one thread, and with empty virtual GPUs. Draw figures in the parent, because a rank has
    no notebook to show them in.

    Raises RankError if a rank raises an error or dies, with the rank that was first and its traceback. Raises
    TimeoutError after `timeout`, or if the ranks do not start within 5 minutes, with the line at which each rank was.
    No rank is left in either case.
    """
    _check(ranks, timeout)
    on_gpus = gpus and _are_enough_gpus(ranks)
    start = start or start_method()
    backend = "nccl" if on_gpus and torch.distributed.is_nccl_available() else "gloo"  # Windows has no nccl
    with (
        _one_at_a_time,
        tempfile.TemporaryDirectory(prefix="ranks-", ignore_cleanup_errors=True) as folder,
        # A free port, which nobody else can take from now on. The store in which the ranks meet will answer there.
        socket.create_server((HOST, 0)) as door,
    ):
        job = Job(
            folder=Path(folder), ranks=ranks, gpus=on_gpus, backend=backend, port=door.getsockname()[1],
            seed=torch.initial_seed(), work=(fn, args) if start == "fork" else None, cells=cells(), limit=timeout,
            start_by=time.monotonic() + _START_S,
            surroundings=None if start == "fork" else Surroundings.of_this_process(),
        )  # fmt: skip
        started = Ranks(job, start)
        if start != "fork":
            import cloudpickle  # pickle cannot send what is defined in a cell to another process

            job.file("all", "work").write_bytes(cloudpickle.dumps((fn, args)))
        if show:
            print(_what_runs(job), flush=True)
        try:
            failures = _supervise(job, started, door, _Output(job, show))
        except KeyboardInterrupt:
            ended = f"its {ranks} ranks were" if ranks > 1 else "its rank was"
            raise KeyboardInterrupt(f"launch was interrupted, and {ended} ended.") from None
        finally:
            started.prepare_the_next()
        finished = [rank for rank in range(ranks) if job.file(rank, "result").exists()]
        if len(finished) < ranks:
            raise run_error(failures, ranks, finished, _time_limit(job))
        # Our own processes have just written these files into a folder of ours, so they can be trusted.
        return [torch.load(job.file(rank, "result"), map_location="cpu", weights_only=False) for rank in finished]


def _what_runs(job: Job) -> str:
    ranks = f"{job.ranks} rank{'s' if job.ranks > 1 else ''}"
    if not job.gpus:
        return f"{ranks} on the CPU, backend {job.backend}"
    gpus = f"{job.ranks} {'virtual' if is_virtual() else 'real'} GPU{'s' if job.ranks > 1 else ''}"
    return f"{ranks} on {gpus}, backend {'gloo in place of nccl' if is_virtual() else job.backend}"


def _time_limit(job: Job) -> str:
    """What is said if time has run out."""
    if job.is_connected():
        limit = f"within the time limit of {job.limit:g} s (timeout={job.limit:g})" if job.limit else ""
        return f"The {job.ranks} ranks were not done {limit}."
    return (
        f"The {job.ranks} ranks did not start within {_START_S:g} s. The time limit of launch (timeout={job.limit}) "
        "begins after the start. Close other programs, or use fewer ranks. If that does not help, a firewall may block "
        "connections between processes of this machine."
    )


def _check(ranks: int, timeout: float | None) -> None:
    if not isinstance(ranks, int) or ranks < 1:
        raise ValueError(f"ranks must be an integer of at least 1, not {ranks!r}.")
    if timeout is not None and not timeout > 0:
        raise ValueError(f"timeout must be a time in seconds above 0, or None, not {timeout!r}.")
    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise RuntimeError(
            "This process is already a rank, started by launch() or torchrun. Call the function itself, not launch()."
        )


def _are_enough_gpus(ranks: int) -> bool:
    """False if there is no GPU at all."""
    seen = torch.cuda.device_count()  # asks the driver without starting CUDA
    if 0 < seen < ranks:
        raise ValueError(
            f'{ranks} ranks need {ranks} GPUs, but PyTorch sees {seen}. nccl refuses two ranks on one GPU ("Duplicate '
            f'GPU detected"). Use fewer ranks, more GPUs with use_gpus({ranks}), or the CPU with gpus=False.'
        )
    return seen > 0


# ---- start, wait, end -----------------------------------------------------------------------------------------------


def _supervise(job: Job, started: Ranks, door: socket.socket, output: _Output) -> list[Failure]:
    """Runs the ranks and returns their failures. Ends what is left of the ranks in any case."""
    processes, store, done = started.processes, None, False
    try:
        started.start()
        # After the forks, and closed before the next launch. For each rank that connects, the thread of the store looks
        # up a name under a lock of the C library. A process forked at that moment would wait for that lock forever.
        store = torch.distributed.TCPStore(
            HOST, job.port, is_master=True, wait_for_workers=False, master_listen_fd=door.detach(),
            use_libuv=has_libuv(),
        )  # fmt: skip
        failures = _wait(job, processes, output)
        done = all(job.file(rank, "result").exists() for rank in range(job.ranks))
        if done:
            started.leave(_LEAVE_S)  # a rank may have left a thread running
        return failures
    finally:
        _end([process for process in processes if process.pid])  # Ctrl-C may have come before all were started
        del store  # now, and not when a traceback releases it
        output.finish(failed=not done)


def _wait(job: Job, processes: list, output: _Output) -> list[Failure]:
    """Waits until every rank has returned or failed. After the first failure the others get a short time."""
    failures: dict[int, Failure] = {}
    patience, is_connected = job.start_by + _SILENT_S, False
    while running := _still_running(job, processes, failures):
        output.follow()
        now = time.monotonic()
        if failures:
            patience = min(patience, now + _GRACE_S)
        elif not is_connected and job.is_connected():
            is_connected = True
            patience = math.inf if job.limit is None else now + job.limit + _SILENT_S
        if now > patience:
            break
        wait([processes[rank].sentinel for rank in running], timeout=_LOOK_S)
    return list(failures.values())


def _still_running(job: Job, processes: list, failures: dict[int, Failure]) -> list[int]:
    """The ranks that have neither returned nor failed. Adds new failures to `failures`."""
    running = []
    for rank, process in enumerate(processes):
        exit_code = process.exitcode  # read first, because a process writes its file before it ends
        if rank in failures or job.file(rank, "result").exists():
            continue
        if job.file(rank, "failure").exists():
            failures[rank] = pickle.loads(job.file(rank, "failure").read_bytes())
        elif exit_code is not None:
            failures[rank] = Failure.of_exit(exit_code, rank)
        else:
            running.append(rank)
    return running


def _end(processes: list) -> None:
    """Ends what still runs, with the processes that it has started. Returns when it has ended."""
    for process in processes:
        if process.is_alive():
            # Windows has no groups, and a rank that is about to make its own group has started nothing yet.
            if hasattr(os, "killpg"):
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
            process.kill()
    for process in processes:
        process.join(_KILLED_S)


class _Output:
    """Shows what the ranks print: rank 0's lines at once, so that you can watch a long run, and then the others'."""

    def __init__(self, job: Job, show: bool):
        self._job, self._show = job, show
        self._shown = 0  # bytes of rank 0's lines

    def follow(self) -> None:
        """Shows the lines that rank 0 has completed since the last call."""
        new = self._read(0, "out", self._shown)
        whole = new[: new.rfind(b"\n") + 1]
        self._shown += len(whole)
        self._print(0, whole, sys.stdout)

    def finish(self, failed: bool) -> None:
        """Shows the rest: rank 0's lines, then the other ranks' lines, then stderr. Always, if the run failed."""
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
            stream.write("".join(f"[rank {rank}] {line}\n" for line in lines))
            stream.flush()
