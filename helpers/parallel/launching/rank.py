"""What runs in the process of a rank: the set-up, the function, and how its result or its error reaches the parent.

A rank writes files of its own into the folder of the run: `out` and `err` (what it prints), `ready` (it is connected),
and at the end `result` or `failure`. Files keep what a killed rank has printed, and they never fill up as a pipe does.

The time limit counts from the moment at which all ranks are connected. The start has a limit of its own.
"""

from __future__ import annotations

import faulthandler
import importlib
import io
import linecache
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import warnings
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from helpers.gpus import inherit_gpus, inheritable_gpus, is_virtual, renew_gpus
from helpers.parallel.launching.errors import Failure
from helpers.parallel.launching.reuse import Fresh
from helpers.parallel.network import HOST, has_libuv, interface

_STORE_TIMEOUT = timedelta(minutes=30)  # that of a process group, which init_process_group would give to the store


@dataclass(frozen=True)
class Surroundings:
    """What a rank that is no copy of its parent takes over from it. gpus: see `helpers.gpus.inheritable_gpus`."""

    environment: dict[str, str]
    folder: str
    path: list[str]
    gpus: dict[str, Any] | None

    @classmethod
    def of_this_process(cls) -> Surroundings:
        """Those that the ranks of this process should have."""
        return cls(dict(os.environ), os.getcwd(), list(sys.path), inheritable_gpus())

    def enter(self) -> Any:
        """Make them those of this process. Returns the virtual GPUs, if there are some, so that they can be stopped."""
        for name in os.environ.keys() - self.environment.keys():
            del os.environ[name]
        os.environ.update(self.environment)
        os.chdir(self.folder)
        sys.path[:] = self.path
        return None if self.gpus is None else inherit_gpus(self.gpus)


@dataclass(frozen=True)
class Job:
    """What every rank is told.

    work: the function and its arguments, or None if they are pickled in a file. limit: the time limit in seconds.
    start_by: the end of the start by time.monotonic(). cells: see `cells`. surroundings: see `Surroundings`; None in
    forked ranks, which have those of the parent.
    """

    folder: Path
    ranks: int
    gpus: bool
    backend: str
    port: int
    seed: int
    work: tuple | None
    cells: dict
    limit: float | None
    start_by: float
    surroundings: Surroundings | None

    def file(self, rank: int | str, what: str) -> Path:
        """Where `rank` writes "out", "err", "ready", "result" or "failure"."""
        return self.folder / f"{rank}.{what}"

    def is_connected(self) -> bool:
        """Whether all ranks are."""
        return all(self.file(rank, "ready").exists() for rank in range(self.ranks))

    @property
    def labels(self) -> dict[str, str]:
        """The names of the notebook's cells, by their file names."""
        return {name: label for name, (label, _) in self.cells.items()}


def cells() -> dict:
    """The source of the notebook's cells for tracebacks: file name -> (name of the cell, linecache's entry)."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    found = {}
    for name, entry in list(linecache.cache.items()):
        if len(entry) == 4 and entry[1] is None:  # a text that was not read from a file
            label = shell.compile.format_code_name(name) if shell else None
            found[name] = (" ".join(label) if label else name, entry)
    return found


# ---- in the rank ----------------------------------------------------------------------------------------------------


def run_rank(rank: int, job: Job) -> None:
    """The whole life of a forked rank. Returns when its result is written. Ends the process after an error."""
    _leave_the_notebook()
    _run(rank, job)


def wait_for_jobs(way: Connection, once: bool) -> None:
    """The life of a process that is told which rank of which job it is. Ends if it cannot be used again.

    way: brings the rank and the file of the job, and takes True after each job when the process is free again. once:
    end after the first job. The process also ends if the parent ends or closes the way.
    """
    _leave_the_notebook()
    fresh = None if once else Fresh()
    while True:
        try:
            rank, file = way.recv()
        except EOFError:
            return
        job = pickle.loads(file.read_bytes())
        gpus = job.surroundings.enter()
        torch.distributed.set_debug_level_from_env()  # PyTorch read the environment when it was imported
        with warnings.catch_warnings():  # which forgets what has been shown
            _run(rank, job)
        if fresh is None or (job.gpus and not is_virtual()):
            return  # the memory of a real GPU is free again only when the process has ended
        if gpus is not None:
            gpus.stop()
        _print_into(Path(os.devnull), Path(os.devnull))  # Windows cannot remove files that are open
        if not fresh.restore():
            return
        way.send(True)


def _run(rank: int, job: Job) -> None:
    os.environ.update(_environment(rank, job))
    _print_into(job.file(rank, "out"), job.file(rank, "err"))
    timer = _report_after(job.start_by - time.monotonic(), rank, job)
    try:
        for name, (_, entry) in job.cells.items():
            linecache.cache.setdefault(name, entry)
        fn, args = job.work or pickle.loads(job.file("all", "work").read_bytes())
        _set_up(rank, job)
        _stop(timer)
        if job.limit is not None:
            timer = _report_after(job.limit, rank, job)
        result = io.BytesIO()
        # A forked rank has its classes from the parent. A spawned one sends the classes of cells with their objects.
        pickler = pickle if job.work else importlib.import_module("cloudpickle")
        torch.save(fn(rank, *args), result, pickle_module=pickler)
        _stop(timer)
    except BaseException as error:  # SystemExit and KeyboardInterrupt too, because the parent must hear of any end
        _write(job.file(rank, "failure"), pickle.dumps(Failure.of_error(error, rank, job.labels)))
        os._exit(1)  # at once, so that the other ranks see a closed connection and do not wait
    _write(job.file(rank, "result"), result.getvalue())
    if torch.distributed.is_initialized():
        # ranks.disconnect would keep the connections open. A rank that still waits for this one must see them close.
        torch.distributed.destroy_process_group()


def _set_up(rank: int, job: Job) -> None:
    renew_gpus()
    torch.set_num_threads(1)
    torch.manual_seed((job.seed + rank) % 2**63)
    device = None
    if job.gpus:
        torch.cuda.set_device(rank)
        device = torch.device("cuda", rank) if job.backend == "nccl" else None
    store = torch.distributed.TCPStore(  # PyTorch's own rendezvous would ask for libuv here, which Windows lacks
        HOST, job.port, job.ranks, is_master=False, timeout=_STORE_TIMEOUT, use_libuv=has_libuv()
    )
    with redirect_stdout(io.StringIO()) if is_virtual() else nullcontext():  # launch has said who carries the messages
        torch.distributed.init_process_group(
            job.backend, store=store, rank=rank, world_size=job.ranks, device_id=device
        )
    _write(job.file(rank, "ready"), b"")
    while not job.is_connected():
        time.sleep(0.002)  # a rank that is done at once must not close the connection to one that still connects


def _environment(rank: int, job: Job) -> dict[str, str]:
    """What torchrun would set on one machine. The launcher owns the store, so no rank opens one."""
    found = {
        "RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "WORLD_SIZE": job.ranks, "LOCAL_WORLD_SIZE": job.ranks,
        "MASTER_ADDR": HOST, "MASTER_PORT": job.port, "TORCHELASTIC_RUN_ID": f"launch-{os.getppid()}",
        "TORCHELASTIC_RESTART_COUNT": 0, "TORCHELASTIC_MAX_RESTARTS": 0, "TORCHELASTIC_USE_AGENT_STORE": True,
    }  # fmt: skip
    return {name: str(value) for name, value in found.items()} | interface()


def _report_after(seconds: float, rank: int, job: Job) -> threading.Timer:
    timer = threading.Timer(max(seconds, 0), _report_time_limit, (rank, job))
    timer.daemon = True
    timer.start()
    return timer


def _stop(timer: threading.Timer) -> None:
    timer.cancel()
    timer.join()  # its thread must not count as one that the function has left


def _report_time_limit(rank: int, job: Job) -> None:
    frame = sys._current_frames()[threading.main_thread().ident]
    _write(job.file(rank, "failure"), pickle.dumps(Failure.of_time_limit(frame, rank, job.labels)))


def _leave_the_notebook() -> None:
    """Ctrl-C is for the parent, which ends the ranks. If the parent dies, the ranks end too."""
    if hasattr(os, "setpgrp"):
        os.setpgrp()  # Jupyter interrupts a whole process group
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)

    def end_with_parent() -> None:
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()


def _print_into(out: Path, err: Path) -> None:
    """Redirects what Python, C and child processes print. Nothing is buffered, so a killed rank's lines are kept."""
    for name, number, path in (("stdout", 1, out), ("stderr", 2, err)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
        raw = open(number, "wb", buffering=0, closefd=False)
        stream = io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", write_through=True)
        setattr(sys, name, stream)
    faulthandler.enable(sys.stderr)  # a crash in C++ prints the line of Python


def _write(path: Path, content: bytes) -> None:
    """Writes in one step: a file that exists is complete."""
    unfinished = path.with_suffix(path.suffix + ".part")
    unfinished.write_bytes(content)
    os.replace(unfinished, path)
