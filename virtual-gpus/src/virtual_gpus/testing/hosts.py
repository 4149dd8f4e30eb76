"""torchrun on one machine, as one host or as several. Needs psutil."""

from __future__ import annotations

import functools
import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING

from virtual_gpus.switch import active_machine
from virtual_gpus.testing.child import has_libuv, interface, leave_the_parent, print_into

if TYPE_CHECKING:
    import psutil

TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


def run_hosts(commands: Mapping[str, Sequence[object]], timeout: float = 240, leave_s: float = 20) -> dict[str, str]:
    """Run torchrun once per host, all at the same time on this machine. Returns what each of them printed.

    commands: by host, `[sys.executable, "-m", "torch.distributed.run", ...]`. On Linux, the torchruns are forked from
    this process, so that they need not import PyTorch again. Their ranks use the loopback interface, and the CPU unless
    the GPUs are virtual. leave_s: how long a torchrun that is asked to end may take to end its ranks.

    Raises ValueError for another command, and TimeoutError after `timeout` seconds, with all that was printed. No
    process is left behind in any case.
    """
    import torch.distributed.run  # noqa: F401 (for the hosts; here, because it takes a third of a second)

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
                processes.append(context.Process(target=_host, args=(command[len(TORCHRUN) :], logs[name])))
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


def _host(arguments: list[str], log: Path) -> None:
    """torchrun, in the process of a host."""
    import torch.distributed as dist
    from torch.distributed.elastic.rendezvous import c10d_rendezvous_backend, static_tcp_rendezvous
    from torch.distributed.run import main

    leave_the_parent(_ask_to_end)
    print_into(log, log)
    tempfile.tempdir = str(log.parent)  # torchrun makes a folder for logs and leaves it
    for logger in [logging.root, *logging.root.manager.loggerDict.values()]:
        for handler in getattr(logger, "handlers", []):
            if type(handler) is logging.StreamHandler:
                handler.setStream(sys.stderr)  # and not into the notebook
    settings = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
    os.environ.update(settings | interface() | ({} if active_machine() else {"CUDA_VISIBLE_DEVICES": ""}))
    if not has_libuv():  # torchrun asks for libuv on every system (pytorch/pytorch, issue 178600)
        for module in (dist, c10d_rendezvous_backend, static_tcp_rendezvous):
            module.TCPStore = functools.partial(module.TCPStore, use_libuv=False)  # type: ignore[assignment, misc]
    main(arguments)


def _ask_to_end() -> None:
    """torchrun then ends its ranks. On Windows, os.kill would end this process at once."""
    signal.raise_signal(signal.SIGTERM) if sys.platform == "win32" else os.kill(os.getpid(), signal.SIGTERM)


def _end(processes: Sequence[BaseProcess], leave_s: float) -> None:
    """End what still runs, and the processes that it has started, which have sessions of their own."""
    import psutil

    started = [child for process in processes for child in _descendants(process)]
    for process in processes:
        process.terminate()
    ends = time.monotonic() + leave_s
    for process in processes:
        process.join(max(ends - time.monotonic(), 0))
        started += _descendants(process)
        process.kill()
        process.join()
    for process in started:
        with suppress(psutil.NoSuchProcess):  # raised as well if another process has got the number meanwhile
            process.kill()


def _descendants(process: BaseProcess) -> list[psutil.Process]:
    """The children of a process that runs, their children, and so on."""
    import psutil

    with suppress(psutil.NoSuchProcess):
        return psutil.Process(process.pid).children(recursive=True) if process.is_alive() else []
    return []
