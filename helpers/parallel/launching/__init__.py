"""Runs a function on several ranks, one process each, from a notebook cell, and returns what each of them returned.

    def train(rank):
        model = DistributedDataParallel(Net().to("cuda"))
        ...
        return loss

    losses = launch(train, ranks=4)        # [rank 0's loss, rank 1's, ...]

In each rank torch.distributed is ready: with nccl on real GPUs, with gloo on virtual GPUs and on the CPU. The
environment is that of torchrun (RANK, LOCAL_RANK, WORLD_SIZE, ...), so a function that reads it works under both.

Started by    where it is the default          what is special
fork          Linux without real GPUs          0.2 s for 4 ranks; functions of cells as they are
spawn         real GPUs, macOS, Windows        seconds, since each rank imports PyTorch; functions of cells travel by
                                               cloudpickle; a script must guard its call with __name__ == "__main__"

macOS has fork too (start="fork"), but its system libraries may crash in a forked process. Neither macOS nor Windows is
among the systems that the tests run on.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import re
import signal
import socket
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch

from helpers.gpus import is_virtual
from helpers.parallel.launching.errors import Failure, RankError, rank_error, time_limit
from helpers.parallel.launching.rank import HOST, Job, cells, run_rank

__all__ = ["RankError", "launch"]

_GRACE_S = 2.0  # after a failure: gloo tells the others at once, who then end by themselves and name no other cause
_LEAVE_S = 5.0  # a rank has returned; what is left is its process's end
_KILLED_S = 60.0  # a killed process is gone at once, unless it gets no core
_PLACES_S = 5.0  # for the ranks to write where they are
_LOOK_S = 0.02  # between two looks at the files
_one_at_a_time = threading.Lock()  # threads that launch take turns
# The time and the process's number in what PyTorch's C++ and its loggers say; and their own "[rank0]:".
_LOG = re.compile(r"^(?:\[rank\d+\]:)?(\[?[IWEF])\d{4} \d\d:\d\d:\d\d\.\d+ (?:\d+ )?")


def launch(fn: Callable, *args: Any, ranks: int, gpus: bool = True, timeout: float | None = 60,
           start: str | None = None, show: bool = True) -> list:  # fmt: skip
    """Call `fn(rank, *args)` in `ranks` processes that form a process group. Returns their results, rank 0's first.

    gpus     True uses the GPUs that PyTorch sees, one per rank, and the CPU where there is none; False uses the CPU
    timeout  seconds for the whole run; None for as long as it takes
    start    "fork" or "spawn"; None picks one, see above
    show     print what the ranks print, each line with its rank: rank 0's lines as they come, and the lines of the
             others after it, in order

    Results are pickled, and tensors arrive on the CPU. Every rank begins with its own seed, torch.initial_seed() of
    the parent plus its rank, with one thread, and with virtual GPUs that are empty. Draw figures in the parent: a rank
    has no notebook to show them in.

    Raises RankError when a rank raises or dies, with the rank that was first and its traceback. Raises
    TimeoutError after `timeout`, with the line at which each rank was. No process is left then. Raises ValueError for
    bad arguments, and RuntimeError in a process that is a rank itself.
    """
    _check(ranks, timeout)
    on_gpus = gpus and _are_enough_gpus(ranks)
    start = _start_method(start)
    backend = "nccl" if on_gpus and not is_virtual() and torch.distributed.is_nccl_available() else "gloo"
    # A port that is free, since it is taken from now on. The store in which the ranks meet will answer there.
    with (
        tempfile.TemporaryDirectory(prefix="ranks-", ignore_cleanup_errors=True) as folder,
        socket.create_server((HOST, 0)) as door,
    ):
        job = Job(
            folder=Path(folder), ranks=ranks, gpus=on_gpus, backend=backend, port=door.getsockname()[1],
            seed=torch.initial_seed(), work=(fn, args) if start == "fork" else None, cells=cells(), limit_s=timeout,
            ends=None if timeout is None else time.monotonic() + timeout,
        )  # fmt: skip
        if start != "fork":
            import cloudpickle  # pickle cannot take what is defined in a cell to another process

            job.file("all", "work").write_bytes(cloudpickle.dumps((fn, args)))
        if show:
            print(_what_runs(job), flush=True)
        with _one_at_a_time:
            failures = _supervise(job, start, door, _Output(job, show))
        files = [job.file(rank, "result") for rank in range(ranks)]
        if failures:
            raise rank_error(failures, ranks, [rank for rank, file in enumerate(files) if file.exists()])
        # Written a moment ago by our own process into a folder of ours: as trustworthy as the program itself.
        return [torch.load(file, map_location="cpu", weights_only=False) for file in files]


def _what_runs(job: Job) -> str:
    ranks = f"{job.ranks} rank{'s' if job.ranks > 1 else ''}"
    if not job.gpus:
        return f"{ranks} on the CPU, backend {job.backend}"
    gpus = f"{job.ranks} {'virtual' if is_virtual() else 'real'} GPU{'s' if job.ranks > 1 else ''}"
    return f"{ranks} on {gpus}, backend {job.backend}{' in place of nccl' if is_virtual() else ''}"


# ---- what is refused ------------------------------------------------------------------------------------------------


def _check(ranks: int, timeout: float | None) -> None:
    if not isinstance(ranks, int) or ranks < 1:
        raise ValueError(f"ranks must be an integer of at least 1, not {ranks!r}.")
    if timeout is not None and not timeout > 0:
        raise ValueError(f"timeout must be a time in seconds, more than 0, or None, not {timeout!r}.")
    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise RuntimeError(
            "This process is a rank already, started by launch() or torchrun. Call the function itself, not launch()."
        )


def _are_enough_gpus(ranks: int) -> bool:
    """False where there is none at all."""
    seen = torch.cuda.device_count()  # asks the driver without starting CUDA
    if 0 < seen < ranks:
        raise ValueError(
            f"{ranks} ranks need {ranks} GPUs, because two ranks on one GPU hang in nccl, and PyTorch sees {seen}. Ask "
            f"for fewer ranks, for more GPUs with use_gpus({ranks}), or for ranks on the CPU with gpus=False."
        )
    return seen > 0


def _start_method(start: str | None) -> str:
    if start is not None:
        return start
    has_real_gpus = torch.cuda.device_count() > 0 and not is_virtual()
    return "spawn" if sys.platform != "linux" or has_real_gpus or _has_autograd_threads() else "fork"


def _has_autograd_threads() -> bool:
    """Whether backward() has run on a machine with real GPUs: its threads do not live on in a forked process."""
    for file in Path("/proc/self/task").glob("*/comm"):  # names of threads, those of C++ too
        try:
            if file.read_text(encoding="utf-8", errors="replace").startswith("pt_autograd_"):
                return True
        except OSError:
            pass  # the thread has ended meanwhile
    return False


# ---- start, wait, end -----------------------------------------------------------------------------------------------


def _supervise(job: Job, start: str, door: socket.socket, output: _Output) -> list[Failure]:
    """The failures of a run, if any. Ends what is left of the ranks in any case."""
    make = multiprocessing.get_context(start).Process
    processes, store, done = [make(target=run_rank, args=(rank, job)) for rank in range(job.ranks)], None, False
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
            for process in processes:
                process.start()
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
        _end([process for process in processes if process.pid])  # Ctrl-C may have come before all were started
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
    files = [job.file(rank, "place") for rank in range(job.ranks)]
    patience = time.monotonic() + _PLACES_S
    while time.monotonic() < patience and not all(files[rank].exists() for rank in running):
        time.sleep(_LOOK_S)
    places = ["had returned."] * job.ranks
    for rank in running:
        places[rank] = files[rank].read_text(encoding="utf-8") if files[rank].exists() else "did not say where it was."
    return time_limit(places, job.limit_s)


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
