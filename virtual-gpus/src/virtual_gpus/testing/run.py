"""`run_ranks`: starts the processes of the ranks, shows what they print, keeps the time limit and ends them.

There are three ways to start a process. "fork" copies this one, which takes milliseconds. It is not safe once PyTorch
has threads that a copy would lack, on real GPUs above all, and macOS and Windows do not offer it or advise against it.
"forkserver" copies a process that has imported PyTorch and done nothing else; it was tried on Linux only. "spawn"
starts new processes, each of which imports PyTorch, for seconds.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TextIO, TypeVar

import torch

from virtual_gpus.switch import active_machine
from virtual_gpus.testing.child import HOST, has_libuv
from virtual_gpus.testing.failures import Failure, run_error
from virtual_gpus.testing.rank import Job, cells, cloudpickle, run_rank

_START_S = 300.0  # for all ranks to start and to connect, which takes long on a busy machine
_GRACE_S = 2.0  # after a failure, in which the other ranks say what happened to them
_SILENT_S = 5.0  # after the time limit, in which the ranks say where they are
_LEAVE_S = 5.0  # for a process to end after its function has returned
_KILLED_S = 60.0  # for a killed process to end, which takes long only if it gets no core
_LOOK_S = 0.02  # between two looks at the files
_METHODS = multiprocessing.get_all_start_methods()
_PRELOADED = ["cloudpickle", "torch.nn.parallel", "virtual_gpus.testing"]  # by a fork server
_PRELOADED_FOR_DTENSORS = ["torch._dynamo", "torch.distributed.fsdp"]  # their first use imports the compiler, for 2 s

_one_at_a_time = threading.Lock()  # threads that start ranks take turns
_server_environment: dict[str, str] | None = None  # of the moment at which the fork server was started

Result = TypeVar("Result")


def run_ranks(
    function: Callable[..., Result],
    ranks: int = 2,
    args: Sequence[Any] = (),
    *,
    gpus: bool = True,
    timeout: float | None = 60,
    start: str | None = None,
    show: bool = True,
) -> list[Result]:
    """Call `function(rank, *args)` in `ranks` processes that form a process group, and return their results in order.

    gpus: True uses the GPUs that PyTorch sees, virtual or real, one per rank, or the CPU if there is none. False uses
    the CPU. timeout: the time limit in seconds, from the moment at which all ranks are connected; None for no limit.
    start: "fork", "forkserver" or "spawn"; by default the fastest that is safe here. show: print what the ranks print,
    each line with its rank: rank 0's lines at once, and the lines of the others after them, in rank order.

    In each rank, torch.distributed is ready: with nccl on GPUs (gloo carries the messages of virtual GPUs, and nccl's
    rules hold), and with gloo on the CPU. The environment is that of torchrun (RANK, LOCAL_RANK, WORLD_SIZE, ...). A
    rank starts with its own seed (torch.initial_seed() of this process plus its rank), one thread, and empty virtual
    GPUs. Results are pickled, and tensors arrive on the CPU.

    On Linux without real GPUs, the processes are forked, which takes 0.2 s for 4 ranks. Elsewhere functions travel by
    cloudpickle (the extra `virtual-gpus[testing]`), and a script must guard its call with __name__ == "__main__".

    Raises RankError if a rank raises an error or dies, with the rank that was first and its traceback. Raises
    TimeoutError after `timeout`, or if the ranks do not start within 5 minutes, with the line at which each rank was.
    No process is left in either case.
    """
    __tracebackhide__ = True  # pytest shows the line of the test
    _check(ranks, args, timeout, start)
    on_gpus = gpus and _are_enough_gpus(ranks)
    start = start or start_method()
    backend = "nccl" if on_gpus and torch.distributed.is_nccl_available() else "gloo"  # Windows has no nccl
    work: Any = (function, tuple(args))
    with (
        _one_at_a_time,
        tempfile.TemporaryDirectory(prefix="ranks-", ignore_cleanup_errors=True) as folder,
        # A free port, which no other process can take from now on. The store in which the ranks meet will answer there.
        socket.create_server((HOST, 0)) as door,
    ):
        job = Job(
            folder=Path(folder), ranks=ranks, gpus=on_gpus, backend=backend, port=door.getsockname()[1],
            seed=torch.initial_seed(), work=work if start == "fork" else cloudpickle().dumps(work), cells=cells(),
            limit=timeout, start_by=time.monotonic() + _START_S,
        )  # fmt: skip
        if show:
            print(_what_runs(job), flush=True)
        try:
            failures = _supervise(job, start, door, _Output(job, show))
        except KeyboardInterrupt:
            ended = f"The {ranks} ranks were" if ranks > 1 else "The rank was"
            raise KeyboardInterrupt(f"{ended} interrupted and ended.") from None
        finished = job.who_has("result")
        if len(finished) < ranks:
            raise run_error(failures, ranks, finished, _time_limit(job))
        # Our own processes have just written these files into a folder of ours, so they can be trusted.
        return [torch.load(job.file(rank, "result"), map_location="cpu", weights_only=False) for rank in finished]


def _check(ranks: int, args: Sequence[Any], timeout: float | None, start: str | None) -> None:
    if isinstance(args, str):
        raise TypeError(f"args must be a list of arguments, so write args=[{args!r}], not args={args!r}.")
    if not isinstance(ranks, int) or ranks < 1:
        raise ValueError(f"ranks must be an integer of at least 1, not {ranks!r}.")
    if timeout is not None and not timeout > 0:
        raise ValueError(f"timeout must be a time in seconds above 0, or None, not {timeout!r}.")
    if start is not None and start not in _METHODS:
        raise ValueError(f"start must be one of {', '.join(_METHODS)}, not {start!r}.")
    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise RuntimeError(
            "This process is already a rank, so it cannot start ranks of its own. Call the function itself."
        )


def _are_enough_gpus(ranks: int) -> bool:
    """False if there is no GPU at all."""
    count = torch.cuda.device_count()  # asks the driver without starting CUDA
    if 0 < count < ranks:
        raise ValueError(
            f'{ranks} ranks need {ranks} GPUs, but PyTorch sees {count}. nccl refuses two ranks on one GPU ("Duplicate '
            f'GPU detected"). Use fewer ranks, {ranks} GPUs, or the CPU with gpus=False.'
        )
    return count > 0


def _what_runs(job: Job) -> str:
    ranks = f"{job.ranks} rank{'s' if job.ranks > 1 else ''}"
    if not job.gpus:
        return f"{ranks} on the CPU, backend {job.backend}"
    kind, backend = ("virtual", "gloo in place of nccl") if active_machine() else ("real", job.backend)
    return f"{ranks} on {job.ranks} {kind} GPU{'s' if job.ranks > 1 else ''}, backend {backend}"


def _time_limit(job: Job) -> str:
    """What is said if time has run out."""
    if job.is_connected():
        limit = f"within the time limit of {job.limit:g} s (timeout={job.limit:g})" if job.limit else ""
        return f"The {job.ranks} ranks were not done {limit}."
    return (
        f"The {job.ranks} ranks did not start within {_START_S:g} s. The time limit of the function "
        f"(timeout={job.limit}) begins after the start. Close other programs, or use fewer ranks. If that does not "
        "help, a firewall may block connections between processes of this machine."
    )


# ---- start ----------------------------------------------------------------------------------------------------------


def start_method() -> str:
    """The fastest way to start ranks that is safe here."""
    if sys.platform != "linux":
        return "spawn"
    has_real_gpus = torch.cuda.device_count() > 0 and not active_machine()
    return "forkserver" if has_real_gpus or _has_autograd_threads() else "fork"


def _has_autograd_threads() -> bool:
    """Whether backward() has run on a machine with real GPUs. A forked process would lack the threads of autograd."""
    for file in Path("/proc/self/task").glob("*/comm"):  # the names of all threads, those of C++ too
        with suppress(OSError):  # the thread has ended meanwhile
            if file.read_text(encoding="utf-8", errors="replace").startswith("pt_autograd_"):
                return True
    return False


def _start(job: Job, method: str, processes: list[BaseProcess]) -> None:
    """Starts a process for each rank and appends it to `processes`, before its start so that it can be ended."""
    if method == "forkserver" and not _server_is_up_to_date():
        method = "spawn"
    context: Any = multiprocessing.get_context(method)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
        for rank in range(job.ranks):
            processes.append(context.Process(target=run_rank, args=(rank, job)))
            processes[-1].start()


def _server_is_up_to_date() -> bool:
    """Prepare the fork server once. False if its environment is another, some of which PyTorch's import reads."""
    global _server_environment
    # The folder changes with each set of virtual GPUs, and a process is told of it when it switches them on.
    now = {name: value for name, value in os.environ.items() if name != "VIRTUAL_GPUS_FOLDER"}
    if _server_environment is None:
        _server_environment = now
        uses_dtensors = "torch.distributed.tensor" in sys.modules
        preloaded = _PRELOADED + (_PRELOADED_FOR_DTENSORS if uses_dtensors else [])
        multiprocessing.get_context("forkserver").set_forkserver_preload(preloaded)
    return _server_environment == now


# ---- wait, end ------------------------------------------------------------------------------------------------------


def _supervise(job: Job, start: str, door: socket.socket, output: _Output) -> list[Failure]:
    """Runs the ranks and returns their failures. Ends what is left of the ranks in any case."""
    processes: list[BaseProcess] = []
    store, done = None, False
    try:
        _start(job, start, processes)
        # After the forks, and closed before the next run. For each rank that connects, the thread of the store looks
        # up a name under a lock of the C library. A process forked at that moment would wait for that lock forever.
        store = torch.distributed.TCPStore(
            HOST, job.port, is_master=True, wait_for_workers=False, master_listen_fd=door.detach(),
            use_libuv=has_libuv(),
        )  # fmt: skip
        failures = _wait(job, processes, output)
        done = len(job.who_has("result")) == job.ranks
        ends = time.monotonic() + _LEAVE_S
        for process in processes if done else ():
            process.join(max(ends - time.monotonic(), 0))  # a rank may have left a thread running
        return failures
    finally:
        _end([process for process in processes if process.pid])  # Ctrl-C may have come before all were started
        del store  # now, and not when a traceback releases it
        output.finish(failed=not done)


def _wait(job: Job, processes: list[BaseProcess], output: _Output) -> list[Failure]:
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


def _still_running(job: Job, processes: list[BaseProcess], failures: dict[int, Failure]) -> list[int]:
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


def _end(processes: list[BaseProcess]) -> None:
    """Ends what still runs, with the processes that it has started. Returns when it has ended."""
    for process in processes:
        if process.is_alive():
            # Windows has no groups, and a rank that is about to make its own group has started nothing yet.
            if hasattr(os, "killpg"):
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid or 0, signal.SIGKILL)
            process.kill()
    for process in processes:
        process.join(_KILLED_S)


class _Output:
    """Shows what the ranks print: rank 0's lines at once, so that you can watch a long run, and then the others'."""

    def __init__(self, job: Job, show: bool) -> None:
        self._job, self._show = job, show
        self._shown = 0  # bytes of rank 0's lines

    def follow(self) -> None:
        """Shows the lines that rank 0 has completed since the last call."""
        new = self._read(0, "out", self._shown)
        whole = new[: new.rfind(b"\n") + 1]
        self._print(0, whole, sys.stdout)
        self._shown += len(whole)  # now, so that Ctrl-C in between shows lines twice, and loses none

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

    def _print(self, rank: int, text: bytes, stream: TextIO) -> None:
        if text:
            lines = text.decode("utf-8", errors="backslashreplace").removesuffix("\n").split("\n")
            stream.write("".join(f"[rank {rank}] {line}\n" for line in lines))
            stream.flush()
