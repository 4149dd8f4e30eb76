"""Lesson 09: several hosts on one machine, and the pictures."""

import logging
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure
from torch.distributed.run import main

from helpers.gpus import is_virtual
from helpers.show.style import COLOURS, WIDTH, open_frame, set_alt_text

__all__ = ["failures_picture", "free_port", "run_hosts", "waste_picture"]

TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


def free_port() -> int:
    """Return a port of this machine that nobody uses at the moment."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def run_hosts(commands: Mapping[str, Sequence], timeout: float = 240, leave_s: float = 20) -> dict[str, str]:
    """Run torchrun once per host, all at the same time on this machine. Returns what each of them printed.

    commands: by host, `[sys.executable, "-m", "torch.distributed.run", ...]`. On Linux, the torchruns are forked from
    this process, so that they need not import PyTorch again. Their ranks use the loopback interface. They use no real
    GPUs, because all hosts share this machine, and with it its GPUs. leave_s: how long a torchrun that is asked to
    end may take to end its ranks.

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
                arguments = command[len(TORCHRUN) :], logs[name]
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


def _host(arguments: list[str], log: Path) -> None:
    """torchrun, in the process of a host."""
    os.setsid()  # Jupyter interrupts a whole process group
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    tempfile.tempdir = str(log.parent)  # torchrun makes a folder for logs and leaves it
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stdout, sys.stderr = open(1, "w", buffering=1, closefd=False), open(2, "w", buffering=1, closefd=False)
    for logger in [logging.root, *logging.root.manager.loggerDict.values()]:
        for handler in getattr(logger, "handlers", []):
            if type(handler) is logging.StreamHandler:
                handler.setStream(sys.stderr)  # and not into the notebook
    names = [name for _, name in socket.if_nameindex()]
    loopback = next((name for name in ("lo", "lo0") if name in names), None)
    settings = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
    settings |= {"GLOO_SOCKET_IFNAME": loopback} if loopback else {}
    os.environ.update(settings | ({} if is_virtual() else {"CUDA_VISIBLE_DEVICES": ""}))
    main(arguments)


def _end_with_parent() -> None:
    multiprocessing.parent_process().join()
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
    for pid, began in started:
        if _parent_and_start(pid)[1] == began:  # and not another process that has got the number meanwhile
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _descendants(pid: int) -> list[tuple[int, str | None]]:
    """The children of a process, their children, and so on, each with the time at which it was started."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):  # elsewhere than on Linux, torchrun alone ends its ranks
        parent, began = _parent_and_start(int(entry.name))
        if parent == pid:
            found += [(int(entry.name), began), *_descendants(int(entry.name))]
    return found


def _parent_and_start(pid: int) -> tuple[int, str] | tuple[None, None]:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None, None
    return int(fields[1]), fields[19]


# ---- pictures -------------------------------------------------------------------------------------------------------


def failures_picture(first: Mapping[int, float], attempts: Sequence[Mapping[int, float]]) -> Figure:
    """Draw the losses of a run without failures, and below it the steps that each attempt did. {step: loss}"""
    figure, (above, below) = plt.subplots(
        2, 1, figsize=(WIDTH, 3.6), sharex=True, layout="constrained", height_ratios=(2, 1)
    )
    above.plot(list(first), list(first.values()), color="black", label="without failures")
    for number, losses in enumerate(attempts):
        look = {"color": COLOURS[number % len(COLOURS)], "marker": "os^Dv"[number % 5], "markersize": 5}
        above.plot(list(losses), list(losses.values()), linestyle="", label=f"attempt {number}", **look)
        below.plot(list(losses), [number] * len(losses), **look)
    above.set(ylabel="loss")
    above.legend(frameon=False, ncols=2)
    below.set(xlabel="step", ylabel="attempt", yticks=range(len(attempts)), ylim=(len(attempts) - 0.5, -0.5))
    open_frame(above, "both")
    open_frame(below, "x")
    set_alt_text(figure, "All attempts lie on the curve of the run without failures. Each begins at the last snapshot.")
    return figure


def waste_picture(
    waste: Callable[[float], float], intervals: Sequence[float], best: float, simulated: Mapping[float, float]
) -> Figure:
    """Draw the share of the time that is lost against the interval in minutes, from a formula and from simulations."""
    figure, ax = plt.subplots(figsize=(WIDTH, 3.0), layout="constrained")
    ax.plot(intervals, [100 * waste(each) for each in intervals], color=COLOURS[0], label="formula")
    ax.plot(list(simulated), 100 * np.array(list(simulated.values())), "o", color=COLOURS[4], label="simulation")
    ax.axvline(best, color="black", linestyle=":", label=f"the best interval, {best:.0f} minutes")
    ax.set(xscale="log", xlabel="minutes between two snapshots", ylabel="lost, % of the time", ylim=(0, None))
    ticks = [2, 5, 10, 20, 50, 100, 200]
    ax.set_xticks(ticks, [str(tick) for tick in ticks])
    ax.minorticks_off()
    ax.legend(frameon=False)
    open_frame(ax, "both")
    set_alt_text(
        figure, "A curve that falls steeply to a flat minimum and then rises slowly. The simulations lie on it."
    )
    return figure
