"""What runs in the process of a rank: the set-up, the function, and how its result or its error reaches the parent.

A rank writes files of its own into the folder of the run: `out` and `err` (what it prints), `ready` (it is connected),
and at the end `result` or `failure`. Files keep what a killed rank has printed, and they never fill up as a pipe does.
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
import socket
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from helpers.gpus import renew_gpus
from helpers.parallel.launching.errors import Failure

HOST = "127.0.0.1"


@dataclass(frozen=True)
class Job:
    """What every rank is told.

    work: the function and its arguments, or None if they are pickled in a file. ends: the time limit by
    time.monotonic(). cells: see `cells`.
    """

    folder: Path
    ranks: int
    gpus: bool
    backend: str
    port: int
    seed: int
    work: tuple | None
    cells: dict
    ends: float | None

    def file(self, rank: int | str, what: str) -> Path:
        """Where `rank` writes "out", "err", "ready", "result" or "failure"."""
        return self.folder / f"{rank}.{what}"

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
    """The whole life of a rank. Returns when its result is written. Ends the process after an error."""
    _leave_the_notebook()
    os.environ.update(_environment(rank, job))
    _print_into(job.file(rank, "out"), job.file(rank, "err"))
    if job.ends is not None:
        timer = threading.Timer(max(job.ends - time.monotonic(), 0), _report_time_limit, (rank, job))
        timer.daemon = True
        timer.start()
    try:
        for name, (_, entry) in job.cells.items():
            linecache.cache.setdefault(name, entry)
        fn, args = job.work or pickle.loads(job.file("all", "work").read_bytes())
        _set_up(rank, job)
        result = io.BytesIO()
        # A forked rank has its classes from the parent. A spawned one sends the classes of cells with their objects.
        pickler = pickle if job.work else importlib.import_module("cloudpickle")
        torch.save(fn(rank, *args), result, pickle_module=pickler)
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
    torch.distributed.init_process_group(job.backend, device_id=device)
    _write(job.file(rank, "ready"), b"")
    while not all(job.file(other, "ready").exists() for other in range(job.ranks)):
        time.sleep(0.002)  # a rank that is done at once must not close the connection to one that still connects


def _environment(rank: int, job: Job) -> dict[str, str]:
    """What torchrun would set on one machine. The launcher owns the store, so no rank opens one."""
    found = {
        "RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "WORLD_SIZE": job.ranks, "LOCAL_WORLD_SIZE": job.ranks,
        "MASTER_ADDR": HOST, "MASTER_PORT": job.port, "TORCHELASTIC_RUN_ID": f"launch-{os.getppid()}",
        "TORCHELASTIC_RESTART_COUNT": 0, "TORCHELASTIC_MAX_RESTARTS": 0, "TORCHELASTIC_USE_AGENT_STORE": True,
    }  # fmt: skip
    names = [name for _, name in socket.if_nameindex()]
    loopback = next((name for name in ("lo", "lo0") if name in names), None)
    if loopback and "GLOO_SOCKET_IFNAME" not in os.environ:
        found["GLOO_SOCKET_IFNAME"] = loopback  # otherwise gloo looks up the host name, which fails on many laptops
    return {name: str(value) for name, value in found.items()}


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
