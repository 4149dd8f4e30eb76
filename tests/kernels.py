"""Kernels of lessons, forked from a process that has imported what most of them import. That takes each 2 s otherwise.

The conftest.py beside notebooks/ uses it, on Linux alone. The process is started once for all test processes and has
one thread. It imports when the first kernel is asked for. Each kernel has a session and an environment of its own. It
is killed when the connection that asked for it closes, and ends like any other when its parent does.
"""

import functools
import gc
import importlib.util
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

ADDRESS = "LESSONS_KERNELS"  # the variable with the path of the socket
# Of the environment, what Python and PyTorch have read by the time of the fork.
READ_EARLY = ("GPUS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "PYTHONHASHSEED", "PYTHONPATH", "MPLBACKEND")


def start_server(folder, environment):
    """Start the process for kernels in `folder`; what is returned ends it with `close()`."""
    place = tempfile.mkdtemp(prefix="kernels_")  # closed to other users; the server removes it
    address = os.path.join(place, "socket")
    backend = {"MPLBACKEND": "module://matplotlib_inline.backend_inline"}  # ipykernel's, which matplotlib reads at once
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen(64)
        server = subprocess.Popen(
            [sys.executable, __file__, place, str(listener.fileno())], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, pass_fds=[listener.fileno()], cwd=folder, env=environment | backend,
            start_new_session=True,
        )  # fmt: skip
    os.environ[ADDRESS] = address

    def close():
        os.environ.pop(ADDRESS, None)
        server.stdin.close()
        server.wait()

    return close


def fork_or_launch(folder, environment, launch, command, **options):
    """A forked kernel, or where it would not be as jupyter_client's `launch` makes it, such a one."""
    wanted = options.get("env") or {}
    same = Path(options.get("cwd") or ".").resolve() == folder
    same = same and all(wanted.get(name) == environment.get(name) for name in READ_EARLY)
    if same and ADDRESS in os.environ and command[1:3] == ["-m", "ipykernel_launcher"]:
        try:
            return Forked({"arguments": command[3:], "environment": wanted})
        except (OSError, ValueError):  # no server, or one that cannot fork
            pass
    return launch(command, **options)


class Forked:
    """A kernel, with what jupyter_client uses of subprocess.Popen."""

    stdin = stdout = stderr = returncode = None

    def __init__(self, order):
        self._server = socket.socket(socket.AF_UNIX)
        self._server.connect(os.environ[ADDRESS])
        self._answers = self._server.makefile("r")
        self._server.sendall(json.dumps(order).encode() + b"\n")
        self.pid = int(self._answers.readline())

    def poll(self):
        if self.returncode is None and select.select([self._server], [], [], 0)[0]:
            self.wait()
        return self.returncode

    def wait(self, timeout=None):
        if self.returncode is None:
            if not select.select([self._server], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("kernel", timeout)
            self.returncode = int(self._answers.readline() or -signal.SIGKILL)
            self._server.close()
        return self.returncode

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)

    terminate = functools.partialmethod(send_signal, signal.SIGTERM)
    kill = functools.partialmethod(send_signal, getattr(signal, "SIGKILL", signal.SIGTERM))


@functools.cache
def _import_all():
    gc.disable()
    # Not pyplot, which looks whether it is in a kernel, nor what imports torch._dynamo, for which the engine answers.
    for name in ("ipykernel.ipkernel", "ipykernel.kernelapp", "ipywidgets", "matplotlib.figure",
                 "matplotlib.backends.backend_agg", "torch"):  # fmt: skip
        importlib.import_module(name)
    gc.freeze()
    gc.enable()
    assert len(os.listdir("/proc/self/task")) == 1, "a fork of several threads could wait for ever"


def _serve(listener):
    """Fork a kernel for each connection, until the input ends. Returns in each kernel, with what was asked for."""
    kernels = {}  # the handle of the process: its id, and its connection
    while True:
        connections = [connection for _, connection in kernels.values()]
        ready, _, _ = select.select([0, listener, *kernels, *connections], [], [])
        for handle, (process, connection) in list(kernels.items()):
            if 0 in ready or connection in ready:
                with suppress(ProcessLookupError):
                    os.killpg(process, signal.SIGKILL)
            elif handle not in ready:
                continue
            del kernels[handle]
            os.close(handle)
            code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
            with suppress(OSError), connection:
                connection.sendall(b"%d\n" % code)
        if 0 in ready:
            return None
        if listener in ready:
            connection = listener.accept()[0]
            order = connection.makefile().readline()
            _import_all()
            if (process := os.fork()) == 0:
                os.setsid()
                connection.sendall(b"%d\n" % os.getpid())
                for handle, (_, other) in kernels.items():
                    os.close(handle)
                    other.close()
                return json.loads(order)
            kernels[os.pidfd_open(process)] = process, connection


def _main():
    del sys.path[0]  # this folder
    with socket.socket(fileno=int(sys.argv[2])) as listener:
        order = _serve(listener)
    if order is None:
        return shutil.rmtree(sys.argv[1])
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.clear()
    os.environ.update(order["environment"], JPY_PARENT_PID=str(os.getppid()))
    sys.argv = [importlib.util.find_spec("ipykernel_launcher").origin, *order["arguments"]]
    from ipykernel.kernelapp import launch_new_instance

    launch_new_instance(parent_handle=os.getppid())


if __name__ == "__main__":
    _main()
