"""What a process does first that another one has started: it leaves its parent's terminal and prints into files."""

from __future__ import annotations

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
