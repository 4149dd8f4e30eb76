"""torchrun on one machine, as one host or as several."""

import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil
import torch.distributed as dist
from torch.distributed.elastic.rendezvous import c10d_rendezvous_backend, static_tcp_rendezvous
from torch.distributed.run import main

from helpers.gpus import is_virtual
from helpers.parallel.network import free_port, has_libuv, loopback

__all__ = ["TORCHRUN", "free_port", "run_hosts"]

TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


def run_hosts(
    commands: Mapping[str, Sequence], timeout: float = 240, leave_s: float = 20, real_gpus: bool = False
) -> dict[str, str]:
    """Run torchrun once per host, all at the same time on this machine. Returns what each of them printed.

    commands: by host, `[sys.executable, "-m", "torch.distributed.run", ...]`. On Linux, the torchruns are forked from
    this process, so that they need not import PyTorch again. Their ranks use the loopback interface. real_gpus: let
    them use this machine's GPUs, which all of the hosts would share. leave_s: how long a torchrun that is asked to end
    may take to end its ranks.

    Raises ValueError for another command, and TimeoutError after `timeout` seconds, with all that was printed. No
    process is left behind in any case.
    """
    words = {name: [str(word) for word in command] for name, command in commands.items()}
    for name, command in words.items():
        if command[: len(TORCHRUN)] != TORCHRUN:
            raise ValueError(f"The command of host {name} is {command}. It must begin with {TORCHRUN}.")
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    processes = []
    with tempfile.TemporaryDirectory(prefix="hosts-", ignore_cleanup_errors=True) as folder:
        logs = {name: Path(folder) / f"{number}.log" for number, name in enumerate(words)}
        try:
            for name, command in words.items():
                arguments = command[len(TORCHRUN) :], logs[name], real_gpus or is_virtual()
                processes.append(context.Process(target=_host, args=arguments))
                with warnings.catch_warnings():
                    warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
                    processes[-1].start()
            ends = time.monotonic() + timeout
            for process in processes:
                process.join(max(ends - time.monotonic(), 0))
            late = any(process.is_alive() for process in processes)
        finally:
            _end([process for process in processes if process.pid], leave_s)
        outputs = {name: log.read_text(encoding="utf-8", errors="replace") for name, log in logs.items()}
    if late:
        said = "\n".join(f"host {name}:\n{output}" for name, output in outputs.items())
        raise TimeoutError(f"The hosts were not done within {timeout:g} s.\n{said}")
    return outputs


def _host(arguments: list[str], log: Path, has_gpus: bool) -> None:
    """torchrun, in the process of a host."""
    if hasattr(os, "setsid"):
        os.setsid()  # Jupyter interrupts a whole process group
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    tempfile.tempdir = str(log.parent)  # torchrun makes a folder for logs and leaves it
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stdout, sys.stderr = (
        open(number, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False) for number in (1, 2)
    )
    for logger in [logging.root, *logging.root.manager.loggerDict.values()]:
        for handler in getattr(logger, "handlers", []):
            if type(handler) is logging.StreamHandler:
                handler.setStream(sys.stderr)  # and not into the notebook
    settings = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
    settings |= {"GLOO_SOCKET_IFNAME": name} if (name := loopback()) else {}
    os.environ.update(settings | ({} if has_gpus else {"CUDA_VISIBLE_DEVICES": ""}))
    if not has_libuv():
        _do_without_libuv()
    main(arguments)


def _do_without_libuv() -> None:
    """Let torchrun make stores without libuv. It asks for libuv on every system (pytorch/pytorch, issue 178600)."""

    class Store(dist.TCPStore):
        def __init__(self, *args, **named):
            super().__init__(*args, **{"use_libuv": False} | named)

    for module in (dist, c10d_rendezvous_backend, static_tcp_rendezvous):
        module.TCPStore = Store


def _end_with_parent() -> None:
    multiprocessing.parent_process().join()
    if sys.platform == "win32":
        signal.raise_signal(signal.SIGTERM)  # os.kill would end this process at once
    else:
        os.kill(os.getpid(), signal.SIGTERM)  # torchrun then ends its ranks


def _end(processes: Sequence, leave_s: float) -> None:
    """End what still runs, and the processes that it has started, which have sessions of their own."""
    started = [each for process in processes if process.is_alive() for each in _descendants(process.pid)]
    for process in processes:
        process.terminate()
    ends = time.monotonic() + leave_s
    for process in processes:
        process.join(max(ends - time.monotonic(), 0))
        started += _descendants(process.pid) if process.is_alive() else []
        process.kill()
        process.join()
    for process in started:
        with suppress(psutil.NoSuchProcess):  # raised as well if another process has got the number meanwhile
            process.kill()


def _descendants(pid: int) -> list[psutil.Process]:
    """The children of a process, their children, and so on."""
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).children(recursive=True)
    return []
