"""What runs in the process of a rank: the set-up, the function, and how its result or its error reaches the parent.

A rank writes files of its own into the folder of the run: `out` and `err` (what it prints), `ready` (it is connected),
and at the end `result` or `failure`. Files keep what a killed rank has printed, and they never fill up as a pipe does.

The time limit counts from the moment at which all ranks are connected. The start has a limit of its own.
"""

import importlib
import io
import linecache
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed

from virtual_gpus.files import write_whole
from virtual_gpus.switch import active_machine, renew_inherited
from virtual_gpus.testing.child import HOST, has_libuv, interface, leave_the_parent, print_into
from virtual_gpus.testing.failures import Failure
from virtual_gpus.threads import OWN_THREAD

_STORE_TIMEOUT = timedelta(minutes=30)  # that of a process group, which init_process_group would give to the store


@dataclass(frozen=True)
class Job:
    """What every rank is told.

    work: the function and its arguments; pickled, unless the ranks are forked. limit: the time limit in seconds.
    start_by: the end of the start by time.monotonic(). cells: see `cells`.
    """

    folder: Path
    ranks: int
    gpus: bool
    backend: str
    port: int
    seed: int
    work: tuple[Callable[..., Any], tuple[Any, ...]] | bytes
    cells: dict[str, tuple[str, Any]]
    limit: float | None
    start_by: float

    def file(self, rank: int, what: str) -> Path:
        """Where `rank` writes "out", "err", "ready", "result" or "failure"."""
        return self.folder / f"{rank}.{what}"

    def who_has(self, what: str) -> list[int]:
        """The ranks that have written this file."""
        return [rank for rank in range(self.ranks) if self.file(rank, what).exists()]

    def is_connected(self) -> bool:
        """Whether all ranks are."""
        return len(self.who_has("ready")) == self.ranks

    @property
    def labels(self) -> dict[str, str]:
        """The names of a notebook's cells, by their file names."""
        return {name: label for name, (label, _) in self.cells.items()}


def cells() -> dict[str, tuple[str, Any]]:
    """The source of a notebook's cells for tracebacks: file name -> (name of the cell, linecache's entry)."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    sources: dict[str, tuple[str, Any]] = {}
    for name, entry in linecache.cache.copy().items():
        if len(entry) == 4 and entry[1] is None:  # a text that was not read from a file
            label = shell.compile.format_code_name(name) if shell else None
            sources[name] = (" ".join(label) if label else name, entry)
    return sources


def cloudpickle() -> ModuleType:
    """The package that sends functions of tests and cells to another process, which Python's pickle cannot."""
    try:
        return importlib.import_module("cloudpickle")
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "Ranks that are not forked get their function by the package cloudpickle, which is not installed. "
            "Run: pip install 'virtual-gpus[testing]'",
            name="cloudpickle",
        ) from None


# ---- in the rank ----------------------------------------------------------------------------------------------------


def run_rank(rank: int, job: Job) -> None:
    """The whole life of a rank. Returns when its result is written. Ends the process after an error."""
    leave_the_parent()
    os.environ.update(_environment(rank, job))
    print_into(job.file(rank, "out"), job.file(rank, "err"))
    timer = _report_after(job.start_by - time.monotonic(), rank, job)
    try:
        for name, (_, entry) in job.cells.items():
            linecache.cache.setdefault(name, entry)
        # A forked rank has its classes from the parent. Another one sends the classes of cells with their objects.
        pickler, work = (cloudpickle(), pickle.loads(job.work)) if isinstance(job.work, bytes) else (pickle, job.work)
        function, args = work
        _set_up(rank, job)
        _stop(timer)
        if job.limit is not None:
            timer = _report_after(job.limit, rank, job)
        result = io.BytesIO()
        torch.save(function(rank, *args), result, pickle_module=pickler)
        _stop(timer)
    except BaseException as error:  # SystemExit and KeyboardInterrupt too, because the parent must hear of any end
        write_whole(job.file(rank, "failure"), pickle.dumps(Failure.of_error(error, rank, job.labels)))
        if hasattr(os, "killpg") and os.getpgrp() == os.getpid():
            os.killpg(0, signal.SIGKILL)  # what this rank has started too
        os._exit(1)  # at once, so that the other ranks see a closed connection and do not wait
    write_whole(job.file(rank, "result"), result.getvalue())
    if torch.distributed.is_initialized():
        # Without this, connections would stay open. A rank that still waits for this one must see them close.
        torch.distributed.destroy_process_group()


def _set_up(rank: int, job: Job) -> None:
    renew_inherited()
    torch.set_num_threads(1)
    torch.manual_seed((job.seed + rank) % 2**63)
    device = None
    if job.gpus:
        torch.cuda.set_device(rank)
        device = torch.device("cuda", rank) if job.backend == "nccl" else None
    store = torch.distributed.TCPStore(  # PyTorch's own rendezvous would ask for libuv here, which Windows lacks
        HOST, job.port, job.ranks, is_master=False, timeout=_STORE_TIMEOUT, use_libuv=has_libuv()
    )
    with redirect_stdout(io.StringIO()) if active_machine() else nullcontext():  # run_ranks says who carries messages
        torch.distributed.init_process_group(
            job.backend, store=store, rank=rank, world_size=job.ranks, device_id=device
        )
    write_whole(job.file(rank, "ready"), b"")
    while not job.is_connected():
        time.sleep(0.002)  # a rank that is done at once must not close the connection to one that still connects


def _environment(rank: int, job: Job) -> dict[str, str]:
    """What torchrun would set on one machine. The parent owns the store, so no rank opens one."""
    variables = {
        "RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "WORLD_SIZE": job.ranks, "LOCAL_WORLD_SIZE": job.ranks,
        "MASTER_ADDR": HOST, "MASTER_PORT": job.port, "TORCHELASTIC_RUN_ID": f"ranks-{os.getppid()}",
        "TORCHELASTIC_RESTART_COUNT": 0, "TORCHELASTIC_MAX_RESTARTS": 0, "TORCHELASTIC_USE_AGENT_STORE": True,
    }  # fmt: skip
    return {name: str(value) for name, value in variables.items()} | interface()


def _report_after(seconds: float, rank: int, job: Job) -> threading.Timer:
    timer = threading.Timer(max(seconds, 0), _report_time_limit, (rank, job))
    timer.daemon, timer.name = True, f"{OWN_THREAD}: time limit"
    timer.start()
    return timer


def _stop(timer: threading.Timer) -> None:
    timer.cancel()
    timer.join()


def _report_time_limit(rank: int, job: Job) -> None:
    frame = sys._current_frames()[threading.main_thread().ident or 0]
    write_whole(job.file(rank, "failure"), pickle.dumps(Failure.of_time_limit(frame, rank, job.labels)))
