"""What every test and every lesson that pytest runs has in common."""

import atexit
import functools
import gc
import os
import sys
import tempfile
import uuid
from pathlib import Path

# Two test processes on two cores: one thread each, and the same last digits on every machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["COURSE_PROGRESS"] = "off"  # tests leave a learner's own scores alone

import nbval.kernel
import pytest
import run_all
from jupyter_client.manager import KernelManager

WARM_KERNELS = Path(__file__).parent / "tests" / "warm_kernels.py"
OUTPUT_TIMEOUT_S = 60  # from the end of a cell until its outputs have come; nbval's 5 are short for a busy machine


class KernelWithFiles(KernelManager):
    """A kernel that is reached through files. Ports are chosen before it starts, and others can take them until then.

    If somebody takes the port of its outputs, ipykernel 7.4 neither ends nor answers.
    """

    test_run = 0  # the process that runs all tests; the kernels of its lessons share what they import

    def __init__(self, **options):
        super().__init__(transport="ipc", ip=f"{tempfile.gettempdir()}/kernel-{uuid.uuid4().hex}", **options)

    def format_kernel_cmd(self, extra_arguments=None):
        command = super().format_kernel_cmd(extra_arguments)
        if sys.platform != "linux":
            return command
        address = f"{tempfile.gettempdir()}/kernels-{self.test_run}"
        arguments = command[command.index("ipykernel_launcher") + 1 :]
        return [sys.executable, "-I", "-S", str(WARM_KERNELS), address, str(self.test_run), *arguments]


def pytest_configure(config):
    """Lessons run on virtual GPUs unless GPUS says otherwise, so that their stored outputs compare."""
    config.option.nbval_sanitize_with = str(Path(__file__).parent / "tests" / "nbval_sanitize.cfg")
    environment = run_all.kernel_environment(os.environ.get("GPUS", "virtual"))
    environment["PYTHONSTARTUP"] = str(Path(__file__).parent / "tests" / "kernel_start.py")
    nbval.kernel.start_new_kernel = functools.partial(nbval.kernel.start_new_kernel, env=environment)
    if os.name != "nt":
        nbval.kernel.KernelManager = KernelWithFiles
        KernelWithFiles.test_run = os.getppid() if hasattr(config, "workerinput") else os.getpid()
    if hasattr(config, "workerinput"):
        atexit.register(os._exit, 0)  # runs last: the system takes everything back at once, Python in two seconds
    else:
        atexit.register(gc.unfreeze)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_newgateway(gateway):
    """A test process without what jsonschema would make of rfc3987_syntax in a second: a parser of web addresses."""
    gateway.remote_exec("import sys; sys.modules['rfc3987_syntax'] = None").waitclose()


def pytest_sessionfinish():
    """pytest has gc look for errors in what it collects: five times through everything, of which one finds all."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Without gc, which would go through PyTorch's half million objects many times while they are imported."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(hookwrapper=True)
def pytest_make_collect_report(collector):
    report = (yield).get_result()
    if collector.path.suffix == ".ipynb" and report.passed:
        lacks = run_all.missing(collector.path)
        for cell in report.result:
            cell.output_timeout = OUTPUT_TIMEOUT_S
            if lacks:
                cell.add_marker(pytest.mark.skip(reason=lacks))


def pytest_runtest_setup(item):
    """Tests marked `gpu(n)` need n real GPUs, one if no number is given."""
    for marker in item.iter_markers("gpu"):
        import torch

        needed = marker.args[0] if marker.args else 1
        if torch.cuda.device_count() < needed:
            pytest.skip(f"needs {needed} real GPU(s), this machine has {torch.cuda.device_count()}")
