"""Programs that tests start: their output, a time limit, and none left behind."""

import io
import logging
import os
import random
import runpy
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
import torch.multiprocessing as mp
from virtual_gpus.testing.run import start_method

from helpers.data import DATA

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ROOT / "notebooks" / "scripts"


class Program:
    """A started program, in a session of its own so that it can be ended with all that it starts."""

    def __init__(self, command, log, environment=None):
        self.log = Path(log)
        path = os.pathsep.join([str(ROOT), str(ROOT / "virtual-gpus" / "src")])
        settings = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        inherited = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
        with open(self.log, "wb") as file:
            self.process = subprocess.Popen(
                [str(part) for part in command],
                stdout=file,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=inherited | settings | (environment or {}),
                cwd=ROOT,
                start_new_session=True,
            )

    def __enter__(self):
        return self

    def __exit__(self, *error):
        ended = self.process.poll() is not None
        started = [] if ended else psutil.Process(self.process.pid).children(recursive=True)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        for each in started:
            with suppress(psutil.NoSuchProcess):  # it may end by itself meanwhile
                each.kill()
        self.process.wait()

    @property
    def output(self):
        return self.log.read_text(errors="replace")

    def wait(self, seconds=300):
        """What it printed; AssertionError if it fails or takes too long."""
        code = self.end(seconds)
        assert code == 0, f"ended with {code}:\n{self.output}"
        return self.output

    def end(self, seconds=300):
        """Its exit code."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still runs after {seconds} s:\n{self.output}") from None


def torchrun(*arguments, log, environment=None):
    """torchrun of this Python."""
    return Program([sys.executable, "-m", "torch.distributed.run", *arguments], log, environment)


def printed(name, *arguments):
    """What one of the programs to take home prints, in this process."""
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()) as output:
        patch.setattr(sys, "argv", [f"{name}.py", *map(str, arguments)])
        runpy.run_path(str(SCRIPTS / f"{name}.py"), run_name="__main__")
    return output.getvalue()


def set_rank(monkeypatch, local_rank=0):
    """The environment that torchrun gives the only rank of a job."""
    place = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": local_rank, "MASTER_ADDR": "127.0.0.1"}
    for name, value in (place | {"MASTER_PORT": free_port()}).items():
        monkeypatch.setenv(name, str(value))


@contextmanager
def killed_before_it_names(name):
    """The program in the block ends as by Ctrl-C when a complete file, or folder, is about to get this name."""
    replace = os.replace

    def interrupted(old, new):
        if str(new).endswith(name):
            raise KeyboardInterrupt
        replace(old, new)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, "replace", interrupted)
        yield


def in_ranks(count, folder, program, *arguments):
    """What a program prints in `count` processes with torchrun's environment; rank 0 in folder 0, if it is there."""
    place = {"WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    place["TORCHELASTIC_RESTART_COUNT"] = 0
    logs = [Path(folder).absolute() / f"rank_{rank}.log" for rank in range(count)]
    work = place, logs, [str(part) for part in (program, *arguments)]
    mp.start_processes(_as_rank, work, nprocs=count, start_method=start_method())
    return [log.read_text() for log in logs]


def _as_rank(rank, place, logs, command):
    torch.set_num_threads(1)
    if sys.platform == "linux":
        mp.set_start_method("fork", force=True)  # a fork server's child would start loaders from the server as well
    if os.path.isdir(str(rank)):
        os.chdir(str(rank))
    place = place | {"RANK": rank, "LOCAL_RANK": rank}
    os.environ.update({name: str(value) for name, value in place.items()})
    sys.argv = command
    with open(logs[rank], "w", buffering=1) as log, redirect_stdout(log), redirect_stderr(log):
        logging.getLogger("torch").addHandler(logging.StreamHandler(log))
        runpy.run_path(command[0], run_name="__main__")
        print(f"random {torch.rand(1).item()}")


def free_port():
    """A port for a program about to start; not one that the system may give away meanwhile (from 32768 on, Linux)."""
    for port in random.SystemRandom().sample(range(15_000, 30_000), 100):  # a test's seed must not choose it
        with socket.socket() as server, suppress(OSError):
            server.bind(("", port))
            return port
    raise AssertionError("of 100 ports none is free")


def until(condition, seconds=200, every=0.005):
    """What `condition()` gives as soon as it is true."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if found := condition():
            return found
        time.sleep(every)
    raise AssertionError(f"{condition} did not become true within {seconds} s")


def write_images(folder, train, test):
    """The first of the bundled images for training and for the test, in the same format, below `folder`."""
    raw = folder / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    for name, count in {"train": train, "t10k": test}.items():
        for kind, header, each in ("images-idx3", 16, 28 * 28), ("labels-idx1", 8, 1):
            content = (DATA / "FashionMNIST" / "raw" / f"{name}-{kind}-ubyte").read_bytes()
            shorter = content[:4] + np.array(count, ">i4").tobytes() + content[8 : header + count * each]
            (raw / f"{name}-{kind}-ubyte").write_bytes(shorter)
    return folder
