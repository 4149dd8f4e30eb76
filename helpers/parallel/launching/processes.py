"""The processes that become ranks, and the three ways to start them.

"fork" copies the notebook's process, which takes milliseconds. It is not safe once PyTorch has threads that a copy
would lack, on real GPUs above all, and macOS and Windows do not offer it or advise against it.

"forkserver" copies a process of its own that has imported PyTorch and done nothing else. Only the first launch waits
for that import. It was tried on Linux.

"spawn" starts new processes. Each imports PyTorch, which takes seconds. Later launches therefore use them again, unless
their rank failed or has left PyTorch in another state (see `reuse`). In a notebook, new ones are started in place of
those that have ended.

A process has the environment variables of the moment at which it was started. PyTorch reads some of them when it is
imported. A launch after another variable has changed therefore takes new processes.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import pickle
import sys
import time
import warnings
from contextlib import suppress
from multiprocessing.context import SpawnProcess
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from helpers.gpus import is_virtual
from helpers.parallel.launching.rank import Job, run_rank, wait_for_jobs

_PRELOADED = ["cloudpickle", "GPUtil", "torch.nn.parallel", "virtual_gpus.switch", "helpers.parallel.launching.rank"]
_PRELOADED_FOR_DTENSORS = ["torch._dynamo", "torch.distributed.fsdp"]  # their first use imports the compiler, for 2 s
_SHARED = "VIRTUAL_GPUS_FOLDER"  # changes with each set of virtual GPUs, and is read when they are switched on
_METHODS = multiprocessing.get_all_start_methods()

_server_environment: dict[str, str] | None = None  # of the moment at which the fork server was started
_free: list[_Waiting] = []


def start_method() -> str:
    """The fastest way to start ranks that is safe here."""
    if sys.platform != "linux":
        return "spawn"
    has_real_gpus = torch.cuda.device_count() > 0 and not is_virtual()
    return "forkserver" if has_real_gpus or _has_autograd_threads() else "fork"


def _has_autograd_threads() -> bool:
    """Whether backward() has run on a machine with real GPUs. A forked process would lack the threads of autograd."""
    for file in Path("/proc/self/task").glob("*/comm"):  # the names of all threads, those of C++ too
        with suppress(OSError):  # the thread has ended meanwhile
            if file.read_text(encoding="utf-8", errors="replace").startswith("pt_autograd_"):
                return True
    return False


class Ranks:
    """The processes of one launch. `processes` has those that were started, also if `start` was interrupted."""

    def __init__(self, job: Job, method: str):
        if method not in _METHODS:
            raise ValueError(f"start must be one of {', '.join(_METHODS)}, not {method!r}.")
        if method == "forkserver" and not _server_is_up_to_date():
            method = "spawn"
        self._job, self._method = job, method
        self._waiting: list[_Waiting] = []
        self.processes: list[BaseProcess] = []

    def start(self) -> None:
        """Start a process for each rank, or take processes that are free."""
        if self._method == "fork":
            fork = multiprocessing.get_context("fork").Process
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
                for rank in range(self._job.ranks):
                    self.processes.append(fork(target=run_rank, args=(rank, self._job)))
                    self.processes[-1].start()
            return
        file = self._job.file("all", "job")
        file.write_bytes(pickle.dumps(self._job))
        for _ in range(self._job.ranks):
            self._waiting.append((self._method == "spawn" and _take()) or _Waiting(self._method))
            self.processes.append(self._waiting[-1].process)
            self._waiting[-1].start()
        for rank, each in enumerate(self._waiting):
            with suppress(OSError):  # it has died, which the launcher sees
                each.way.send((rank, file))

    def leave(self, seconds: float) -> None:
        """Wait until the ranks, which are done, have ended or are free again."""
        ends = time.monotonic() + seconds
        for process in self.processes if self._method != "spawn" else ():
            process.join(max(ends - time.monotonic(), 0))
        for each in self._waiting if self._method == "spawn" else ():
            if each.is_free(max(ends - time.monotonic(), 0)):
                _free.append(each)
                self.processes.remove(each.process)

    def prepare_the_next(self) -> None:
        """In a notebook, start processes for the next launch in place of those that have ended."""
        if self._method != "spawn" or "IPython" not in sys.modules or not sys.modules["IPython"].get_ipython():
            return
        while len(_free) < self._job.ranks:
            _free.append(_Waiting("spawn"))
            _free[-1].start()


# ---- processes that wait ---------------------------------------------------------------------------------------------


class _Bare:
    """Pickles a process as Python does. Virtual GPUs would add their settings, but the job brings those of its time."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return object.__reduce_ex__(self, protocol)


class _Spawned(_Bare, SpawnProcess):
    pass


if "forkserver" in _METHODS:
    from multiprocessing.context import ForkServerProcess

    class _Forked(_Bare, ForkServerProcess):
        pass


class _Waiting:
    """A process that waits for jobs, and the way by which they come."""

    def __init__(self, method: str):
        theirs, self.way = multiprocessing.Pipe()
        kind = _Forked if method == "forkserver" else _Spawned
        self.process: BaseProcess = kind(target=wait_for_jobs, args=(theirs, method == "forkserver"))
        self.environment = _environment()

    def start(self) -> None:
        """Start the process, unless it runs already."""
        if self.process.pid is None:
            self.process.start()
            atexit.unregister(end_free)
            atexit.register(end_free)  # before multiprocessing waits for its processes to end

    def is_free(self, seconds: float) -> bool:
        """Whether the process says within this time that it can be used again. Returns sooner if it ends."""
        with suppress(EOFError, OSError):  # it has ended
            return self.way.poll(seconds) and self.way.recv()
        self.process.join(seconds)
        return False

    def end(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.join()
        self.way.close()


def _take() -> _Waiting | None:
    """A free process that fits."""
    while _free:
        each = _free.pop(0)
        if each.process.is_alive() and each.environment == _environment():
            return each
        each.end()
    return None


def end_free() -> None:
    """End the processes that wait for jobs."""
    while _free:
        _free.pop().end()


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != _SHARED}


def _server_is_up_to_date() -> bool:
    """Start the fork server if need be. False if it has other environment variables than this process now has."""
    global _server_environment
    if _server_environment is None:
        _server_environment = _environment()
        context = multiprocessing.get_context("forkserver")
        uses_dtensors = "torch.distributed.tensor" in sys.modules
        context.set_forkserver_preload(_PRELOADED + (_PRELOADED_FOR_DTENSORS if uses_dtensors else []))
    return _server_environment == _environment()
