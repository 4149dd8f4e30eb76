"""What a process does first that another one has started: it leaves its parent's terminal, prints into files, and
talks with the others over the network of this machine alone."""

import faulthandler
import io
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from virtual_gpus.threads import OWN_THREAD

HOST = "127.0.0.1"
# The interface of that address, as gloo calls it: on macOS and Windows by libuv's names (gloo/transport/uv/device.cc).
_LOOPBACK = {"darwin": "lo0", "win32": "Loopback Pseudo-Interface 1"}


def leave_the_parent(end: Callable[[], object] = lambda: os._exit(1)) -> None:
    """Leave Ctrl-C to the parent, which ends this process. If the parent dies, call `end`."""
    if hasattr(os, "setpgrp"):
        os.setpgrp()  # a terminal and Jupyter interrupt a whole process group
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)

    def end_with_parent() -> None:
        if parent := multiprocessing.parent_process():
            parent.join()
        end()

    threading.Thread(target=end_with_parent, name=f"{OWN_THREAD}: end with parent", daemon=True).start()


def print_into(out: Path, err: Path) -> None:
    """Redirect what Python, C and child processes print. Nothing is buffered, so a killed process's lines are kept."""
    for name, number, path in (("stdout", 1, out), ("stderr", 2, err)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
        raw = open(number, "wb", buffering=0, closefd=False)
        stream = io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", write_through=True)
        setattr(sys, name, stream)
    faulthandler.disable()  # or it would not put in its handlers again, which another library may have replaced
    faulthandler.enable(sys.stderr)  # a crash in C++ prints the line of Python


def interface() -> dict[str, str]:
    """The variable that keeps gloo on this machine, unless the user set it: looking up the host's name may fail."""
    return {} if "GLOO_SOCKET_IFNAME" in os.environ else {"GLOO_SOCKET_IFNAME": _LOOPBACK.get(sys.platform, "lo")}


def has_libuv() -> bool:
    """Whether a TCPStore may use libuv, as torch/distributed/rendezvous.py decides it. PyTorch for Windows cannot."""
    return os.environ.get("USE_LIBUV", "0" if sys.platform == "win32" else "1") == "1"
