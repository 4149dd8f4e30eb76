"""Kernels for the tests of lessons, forked from one process that has imported what every lesson imports.

    python tests/warm_kernels.py SOCKET TEST_RUN -f CONNECTION_FILE ...

This process stands for the kernel, as Jupyter wants a child. It asks the process behind SOCKET for the kernel, and
starts that process if there is none. That process ends when the process TEST_RUN has ended. Imports are a tenth of what
all tests together compute. `run_all.py`, which stores lessons, imports everything anew in each kernel.
"""

import contextlib
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time


def stand_for_kernel(address, test_run, arguments):
    """Have a kernel forked that writes where this process writes; pass signals on to it; end when it has ended."""
    with connect(address, test_run) as connection:
        asked = json.dumps([arguments, dict(os.environ), os.getcwd()])
        socket.send_fds(connection, [f"{asked}\n".encode()], [0, 1, 2])
        kernel = int(connection.recv(20))
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, frame: os.kill(kernel, number))
        connection.recv(1)  # returns when the kernel has ended, however it did


def connect(address, test_run):
    """The connection to the process that forks kernels, which the first who asks starts."""
    connection = socket.socket(socket.AF_UNIX)
    with open(f"{address}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with contextlib.suppress(FileNotFoundError, ConnectionRefusedError):
            connection.connect(address)
            return connection
        with contextlib.suppress(FileNotFoundError):
            os.unlink(address)  # a process that was killed has left it
        none = subprocess.DEVNULL
        process = subprocess.Popen(
            [sys.executable, __file__, address, test_run], start_new_session=True, stdin=none, stdout=none
        )
        while not os.path.exists(address):
            if process.poll() is not None:
                raise SystemExit(f"The process that forks kernels has ended with status {process.returncode}.")
            time.sleep(0.02)
        connection.connect(address)
    return connection


def fork_kernels(address, test_run):
    """Fork a kernel for each connection, until the process `test_run` has ended."""
    del sys.path[0]  # the folder of this file
    import_what_lessons_import()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system forgets at once how a kernel has ended
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(f"{address}.new")
        door.listen()
        door.settimeout(1)
        os.rename(f"{address}.new", address)
        while os.path.exists(f"/proc/{test_run}"):
            with contextlib.suppress(TimeoutError):
                connection, _ = door.accept()
                if os.fork() == 0:
                    door.close()
                    become_kernel(connection)
                connection.close()
    for name in (address, f"{address}.lock"):
        os.unlink(name)


def import_what_lessons_import():
    import ipykernel.kernelapp  # noqa: F401
    import matplotlib

    matplotlib.use("module://matplotlib_inline.backend_inline")
    import matplotlib.pyplot  # noqa: F401
    import torch  # noqa: F401
    from virtual_gpus import virtual_gpus

    with virtual_gpus(1):  # spares the import of a compiler, as in a lesson
        import torchvision  # noqa: F401

        import helpers.measure
        import helpers.parallel
        import helpers.show  # noqa: F401


def become_kernel(connection):
    """What `python -m ipykernel_launcher` does, in the place and with the environment that were asked for."""
    import runpy

    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    asked, files, *_ = socket.recv_fds(connection, 1 << 20, 3)
    while not asked.endswith(b"\n"):
        asked += connection.recv(1 << 20)
    arguments, environment, folder = json.loads(asked)
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(environment, JPY_PARENT_PID=str(os.getppid()))
    os.chdir(folder)
    sys.path.insert(0, folder)
    sys.argv[1:] = arguments
    connection.sendall(str(os.getpid()).encode())
    runpy.run_module("ipykernel_launcher", run_name="__main__", alter_sys=True)
    os._exit(0)


if __name__ == "__main__":
    _, address, test_run, *arguments = sys.argv
    if arguments:
        stand_for_kernel(address, test_run, arguments)
    else:
        fork_kernels(address, test_run)
