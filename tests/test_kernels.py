"""Kernels that are forked behave as those of JupyterLab do, and none outlives the process that asked for it."""

import sys

import nbval.kernel
import psutil
import pytest
import run_all

from tests import kernels
from tests.programs import until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="kernels are forked on Linux alone")


@pytest.fixture
def kernel():
    running = nbval.kernel.RunningKernel(nbval.kernel.CURRENT_ENV_KERNEL_NAME, str(run_all.FOLDER))
    yield running
    running.stop()


def printed(kernel, code):
    """What a cell prints, or the name of its error."""
    ask = kernel.kc.execute_interactive
    found = []
    ask(code, output_hook=lambda message: found.append(message["content"]), timeout=60)
    return "".join(content.get("text", "") + content.get("ename", "") for content in found).strip()


def process_of(kernel):
    started = kernel.km.provisioner.process
    assert isinstance(started, kernels.Forked)
    return psutil.Process(started.pid)


SEEN = """import gc, os, signal, sys, threading
own = "JPY_PARENT_PID", "MPLBACKEND"
print({name: value for name, value in os.environ.items() if name not in own})
print(sys.path, sys.argv[:2], os.getcwd(), __name__, os.getppid() == int(os.environ[own[0]]))
print(os.getsid(0) == os.getpid(), signal.getsignal(signal.SIGINT), gc.isenabled(), threading.active_count())
print(hash("a"), sys.stdin, "helpers" in sys.modules)
import matplotlib
print(matplotlib.get_backend())"""


def test_a_kernel_sees_what_one_sees_that_is_launched(kernel, monkeypatch):
    assert process_of(kernel).ppid() != psutil.Process().pid
    monkeypatch.delenv(kernels.ADDRESS)
    launched = nbval.kernel.RunningKernel(nbval.kernel.CURRENT_ENV_KERNEL_NAME, str(run_all.FOLDER))
    try:
        assert launched.km.provisioner.process.args and printed(launched, SEEN) == printed(kernel, SEEN) != ""
    finally:
        launched.stop()


def test_a_kernel_can_be_interrupted_and_restarted(kernel):
    first = process_of(kernel)
    message = kernel.kc.execute("import signal\nprint('begun')\nsignal.pause()", stop_on_error=False)
    until(lambda: kernel.get_message("iopub", timeout=60)["content"].get("text") == "begun\n")
    kernel.interrupt()
    kernel.await_reply(message, timeout=60)
    assert printed(kernel, "print(1)") == "1" and process_of(kernel) == first
    kernel.restart()
    kernel.kc.wait_for_ready(timeout=60)
    assert process_of(kernel) != first and not first.is_running()
    assert printed(kernel, "signal") == "NameError"


def test_a_kernel_ends_with_the_process_that_asked_for_it(kernel):
    own = process_of(kernel)
    child = psutil.Process(int(printed(kernel, "import subprocess; print(subprocess.Popen(['sleep', '600']).pid)")))
    kernel.km.provisioner.process._server.shutdown(kernels.socket.SHUT_WR)  # as when that process is killed
    until(lambda: not own.is_running() and not child.is_running())
    until(lambda: not kernel.is_alive())


def test_a_kernel_that_ends_by_itself_leaves_its_code(kernel):
    started = kernel.km.provisioner.process
    kernel.kc.execute("import os; os._exit(7)")
    assert started.wait(60) == 7 and not kernel.is_alive()


def test_what_differs_from_the_others_is_launched(monkeypatch, tmp_path):
    wanted = run_all.kernel_environment()
    command, launch = [sys.executable, "-m", "ipykernel_launcher", "-f", "none"], lambda command, **options: "launched"
    monkeypatch.setattr(kernels, "Forked", lambda order: "forked")

    def asked(folder=run_all.FOLDER, **own):
        given = {"cwd": str(folder), "env": wanted | own}
        return kernels.fork_or_launch(run_all.FOLDER, wanted, launch, command, **given)

    assert asked() == asked(PYTHONSTARTUP="another") == "forked"
    assert asked(tmp_path) == asked(GPUS="real") == asked(OMP_NUM_THREADS="2") == "launched"
    monkeypatch.delenv(kernels.ADDRESS)
    assert asked() == "launched"
