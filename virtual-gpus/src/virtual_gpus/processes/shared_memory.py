"""Processes that share virtual GPUs: each process sees how much memory the others use.

    export VIRTUAL_GPUS_FOLDER=/some/folder      # for two programs that are started separately and share GPUs

Every process with virtual GPUs has a small file in a folder. The file contains the bytes that the process uses on each
GPU. Processes find the folder through the environment variable VIRTUAL_GPUS_FOLDER, which the first process sets for
the processes that it starts. The workers of one torchrun find it through their common parent. Processes see each other
only if they use the same folder and have the same number, kind and memory of GPUs. A file is locked while its process
runs. The file of a killed process is therefore not locked, so it is ignored and removed.

A forked process starts with copies of its parent's tensors, which a real GPU would refuse. They count once, for the
parent. All sizes are in bytes. This module does not import torch.
"""

import atexit
import contextlib
import os
import shutil
import struct
import tempfile
import threading
import time
from collections.abc import Collection, Iterator
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows: there an open file cannot be removed, which says the same
    fcntl = None

FOLDER = "VIRTUAL_GPUS_FOLDER"
_LOCK = ".lock"
_FOLDERS = "virtual-gpus-"  # begins the name of a user's folder of folders
_STALE_AFTER = 3600  # seconds after which a folder without living processes was left by a killed one


class SharedMemoryRegistry:
    """This process's part in a folder.

    machine: text that only machines with the same GPUs have. mine: the folders that this process made for other
    machines. It takes none of them, since machines inside one another have different GPUs.
    """

    def __init__(self, machine: str, count: int, mine: Collection[str] = ()):
        self._prefix, self._count = f"{machine}-", count
        self.made_by, self._closed = os.getpid(), False
        asked = os.environ.get(FOLDER)
        self._made_folder = asked is None or asked in mine
        self.folder = Path(_common_folder() if asked is None or asked in mine else asked)
        self._begin()
        atexit.register(self.close)

    def _begin(self) -> None:
        self._pid, self._lock, self._file = os.getpid(), threading.RLock(), None
        self._used, self._inherited = [0] * self._count, [0] * self._count

    def close(self) -> None:
        """Take this process out, and the folder with it if no other process is there. Does nothing the second time."""
        atexit.unregister(self.close)
        if self._closed or self._pid != os.getpid():  # the file is the parent's
            return
        with self._lock:
            self._closed = True  # also where the folder is missing: a thread that goes on must not make it
            if self.folder.is_dir():
                with _locked(self.folder):
                    _living(self.folder, self._prefix)
                    if self._file is not None:
                        self._file.close()
                        os.remove(self._file.name)
                    if self._made_folder and not _names(self.folder):
                        shutil.rmtree(self.folder, ignore_errors=True)

    # ---- what is in the folder

    def exchange(self, slot: int, used: int, most: int | None = None, more: int = 0) -> tuple[int, dict[int, int]]:
        """Tell what this process holds on a GPU, and hear what others hold there.

        With `most`, `more` bytes are told on top if all together then have no more than `most`. Returns the bytes that
        this process holds for its own (a fork's without its parent's), and {process id: bytes} of the others.
        """
        with self._alone():
            own = max(used - self._inherited[slot], 0)
            held = () if self._closed else _held(self.folder, self._prefix, self._count)
            others = {process: bytes_of[slot] for process, bytes_of in held if bytes_of[slot]}
            # Another thread may have switched the GPUs off. Who touched no GPU is no process of the driver's.
            if not self._closed and (used or more or self._file is not None):
                fits = most is None or own + more + sum(others.values()) <= most
                self._used[slot] = own + (more if fits else 0)
                self._write()
        return own, others

    def _write(self) -> None:
        if self._file is None:
            self._file = open(self.folder / f"{self._prefix}{os.getpid()}", "w+b", buffering=0)
            if fcntl is not None:
                fcntl.lockf(self._file, fcntl.LOCK_EX)
        self._file.seek(0)
        self._file.write(struct.pack(f"<{self._count}q", *self._used))

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Have the folder to oneself: two processes must not both take the last byte."""
        if self._pid != os.getpid():
            inherited = [a + b for a, b in zip(self._inherited, self._used, strict=True)]
            self._begin()  # a fork
            self._inherited = inherited
        with self._lock, contextlib.nullcontext() if self._closed else _locked(self.folder):
            yield


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock the folder, made if need be. A folder that goes with its last process is locked by a file beside it."""
    stays = folder.parent if folder.parent.name.startswith(_FOLDERS) else folder
    stays.mkdir(parents=True, exist_ok=True, mode=0o700)
    with open(stays / _LOCK, "w") as file:
        if fcntl is not None:
            fcntl.lockf(file, fcntl.LOCK_EX)
        folder.mkdir(exist_ok=True, mode=0o700)
        yield


def _names(folder: Path) -> list[str]:
    return [name for name in os.listdir(folder) if name != _LOCK]


def _living(folder: Path, prefix: str) -> list[tuple[int, Path]]:
    """(process id, file) of every other process that lives; files of dead ones are removed."""
    living: list[tuple[int, Path]] = []
    for name in _names(folder):
        process = int(name.rpartition("-")[2]) if name.startswith(prefix) else os.getpid()
        if process != os.getpid() and not _removed_if_dead(folder / name):
            living.append((process, folder / name))
    return sorted(living)


def _held(folder: Path, prefix: str, count: int) -> list[tuple[int, tuple[int, ...]]]:
    """(process id, bytes on each GPU) of every other process that lives."""
    numbers = [(process, path.read_bytes()[: 8 * count]) for process, path in _living(folder, prefix)]
    return [(process, struct.unpack(f"<{count}q", text)) for process, text in numbers if len(text) == 8 * count]


def held_by_processes(folder: str | None, machine: str, count: int) -> list[tuple[int, tuple[int, ...]]]:
    """(process id, bytes on each of `count` GPUs) of the processes in a folder. Without a part in it for this one."""
    if folder is None or not os.path.isdir(folder):
        return []
    with _locked(Path(folder)):
        return _held(Path(folder), f"{machine}-", count)


def _removed_if_dead(path: Path) -> bool:
    """True if the process whose file it is has ended; then the file is gone."""
    try:
        if fcntl is None:
            os.remove(path)
            return True
        with open(path, "r+b") as file:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while its process lives
            os.remove(path)
            return True
    except FileNotFoundError:
        return True
    except OSError:
        return False


def _common_folder() -> str:
    """A folder for this process and those it starts; under torchrun, for all workers of one agent."""
    user = os.getuid() if hasattr(os, "getuid") else "user"
    all_folders = Path(tempfile.gettempdir()) / f"{_FOLDERS}{user}"
    _sweep(all_folders)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return str(all_folders / f"torchrun-{os.getppid()}-{os.environ.get('MASTER_PORT', '')}")
    return str(all_folders / f"process-{os.getpid()}-{time.time_ns()}")


def _sweep(all_folders: Path) -> None:
    """Remove what killed processes left an hour ago or more."""
    for folder in all_folders.glob("*") if all_folders.is_dir() else ():
        with contextlib.suppress(OSError):  # another process is sweeping too
            if time.time() - folder.stat().st_mtime > _STALE_AFTER:
                if all([_removed_if_dead(path) for path in folder.iterdir() if path.name != _LOCK]):
                    shutil.rmtree(folder)
