"""What runs in a rank's process: the set-up, the function, and how its result or its error gets home.

A rank writes to files of its own in the run's folder: `out` and `err` (what it prints), `ready` (it is connected),
`stack` (where it was at the time limit), and at the end `result` or `failure`. Files keep what was written by a rank
that is killed, never fill up as a pipe does, and cannot mix two ranks.
"""

from __future__ import annotations

import ctypes
import faulthandler
import io
import linecache
import multiprocessing
import os
import pickle
import random
import signal
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from helpers.gpus import renew_gpus
from helpers.parallel.launching.errors import Failure

_kept = []  # files that must stay open as long as the rank lives


@dataclass(frozen=True)
class Job:
    """What every rank is told.

    `work`: the function and its arguments, in the parent their pickle for ranks that are spawned, which get None.
    `ends`: by time.monotonic(). `cells`: see `cells`.
    """

    folder: Path
    ranks: int
    gpus: bool
    backend: str
    threads: int
    seed: int
    work: tuple | bytes | None
    limit_s: float | None
    ends: float | None
    cells: dict

    def file(self, rank: int, what: str) -> Path:
        """Where `rank` writes "out", "err", "ready", "stack", "result" or "failure"."""
        return self.folder / f"{rank}.{what}"

    @property
    def pickled_work(self) -> Path:
        """Where the function lies for ranks that are spawned."""
        return self.folder / "work"


# ---- the way in -----------------------------------------------------------------------------------------------------


def cells() -> dict:
    """Source of the notebook's cells: file name -> (what to call it, linecache's entry), for tracebacks."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    found = {}
    for name, entry in list(linecache.cache.items()):
        if len(entry) == 4 and entry[1] is None:  # text that came from no file
            label = shell.compile.format_code_name(name) if shell else None
            found[name] = (" ".join(label) if label else name, entry)
    return found


def pack(fn, args: tuple, spawned: bool) -> tuple | bytes:
    """The function and its arguments, pickled for spawned ranks: with cloudpickle, which takes functions of cells."""
    if not spawned:
        return fn, args
    pickler = _pickler()
    if pickler is pickle and not _can_be_imported(fn):
        raise RuntimeError(
            f"{getattr(fn, '__name__', fn)} is not in a module that spawned ranks could import, so it has to be sent "
            "to them: install cloudpickle (pip install cloudpickle), or move the function into a .py file."
        )
    return pickler.dumps((fn, args))


def _can_be_imported(fn) -> bool:
    main = fn.__module__ == "__main__" and not hasattr(sys.modules["__main__"], "__file__")
    return not main and "<" not in getattr(fn, "__qualname__", "")


def _pickler():
    """cloudpickle where it is installed: pickle cannot take what is defined in a cell to another process."""
    try:
        import cloudpickle
    except ImportError:
        return pickle
    return cloudpickle


# ---- in the rank ----------------------------------------------------------------------------------------------------


def run_rank(rank: int, job: Job) -> None:
    """The whole life of a rank. Returns when its result is written; ends the process itself after an error."""
    _leave_the_notebook()
    _print_into(job.file(rank, "out"), job.file(rank, "err"))
    _say_where_at_the_end(rank, job)
    try:
        result = _work(rank, job)
    except BaseException as error:  # SystemExit and KeyboardInterrupt too: the parent must hear of any way out
        failure = Failure.of(error, rank, {name: label for name, (label, _) in job.cells.items()})
        _write(job.file(rank, "failure"), pickle.dumps(failure))
        _flush()
        os._exit(1)  # at once, so that the others see a closed connection and do not wait
    faulthandler.cancel_dump_traceback_later()
    _flush()
    _write(job.file(rank, "result"), result)
    if torch.distributed.is_initialized():
        # Not ranks.disconnect, which keeps the connections: a rank that still waits for this one must see them close.
        torch.distributed.destroy_process_group()


def _work(rank: int, job: Job) -> bytes:
    """Set up, call the function, and pickle what it returned."""
    for name, (_, entry) in job.cells.items():
        linecache.cache.setdefault(name, entry)
    fn, args = job.work or pickle.loads(job.pickled_work.read_bytes())
    _set_up(rank, job)
    return _pickled(fn(rank, *args), rank, _pickler() if job.work is None else pickle)


def _set_up(rank: int, job: Job) -> None:
    renew_gpus()
    torch.set_num_threads(job.threads)
    seed = (job.seed + rank) % 2**63
    torch.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)
    nccl = {}
    if job.gpus:
        torch.cuda.set_device(rank)
        nccl = {"device_id": torch.device("cuda", rank)} if job.backend == "nccl" else {}
    torch.distributed.init_process_group(job.backend, **nccl)
    _write(job.file(rank, "ready"), b"")
    while not all(job.file(other, "ready").exists() for other in range(job.ranks)):
        time.sleep(0.002)  # a rank that is done at once must not hang up on one that is still connecting


def _pickled(result, rank: int, pickler) -> bytes:
    buffer = io.BytesIO()
    try:
        torch.save(result, buffer, pickle_module=pickler)
    except Exception as error:
        raise TypeError(
            f"what rank {rank} returned, a {type(result).__name__}, cannot be sent to the parent ({error}): return "
            "tensors, numbers, text, lists or dicts of them; of a model its state_dict()"
        ) from None
    return buffer.getvalue()


# ---- signals, output, time limit ------------------------------------------------------------------------------------


def _leave_the_notebook() -> None:
    """Ctrl-C is for the parent, which ends the ranks. If the parent dies, so do they."""
    if hasattr(os, "setpgrp"):
        os.setpgrp()  # Jupyter interrupts a whole process group
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)  # PyTorch asks Linux for a SIGINT when the parent dies
    if sys.platform != "linux":
        threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)


def _print_into(out: Path, err: Path) -> None:
    """Send what Python, C and child processes print to the rank's files, unbuffered: a killed rank's lines are kept."""
    for name, number, path in (("stdout", 1, out), ("stderr", 2, err)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
        raw = open(number, "wb", buffering=0, closefd=False)
        stream = io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", write_through=True)
        setattr(sys, name, stream)
    faulthandler.enable(sys.stderr)  # a crash in C++ says at which line of Python


def _say_where_at_the_end(rank: int, job: Job) -> None:
    """At the time limit this rank's stack is written, by a thread that no lock can hold up."""
    if job.ends is not None:
        file = open(job.file(rank, "stack"), "wb")
        _kept.append(file)
        faulthandler.dump_traceback_later(max(job.ends - time.monotonic(), 0.01), file=file)


def _flush() -> None:
    """What C has printed may still be in a buffer of C's."""
    sys.stdout.flush()
    sys.stderr.flush()
    flush_c()


def flush_c() -> None:
    """Empty the buffers of C's stdio."""
    (ctypes.cdll.ucrtbase if sys.platform == "win32" else ctypes.CDLL(None)).fflush(None)


def _write(path: Path, content: bytes) -> None:
    """In one step: a file that is there is whole."""
    unfinished = path.with_suffix(path.suffix + ".part")
    unfinished.write_bytes(content)
    os.replace(unfinished, path)
