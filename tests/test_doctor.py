"""The doctor finds what is wrong with a machine, says what to do, and tells nothing personal."""

import io
import os
import platform
import shutil
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace
from unittest.mock import Mock

import psutil
import pytest

from helpers import gpus as devices
from notebooks.doctor import __main__ as doctor
from notebooks.doctor import checks, lab
from tests.programs import ROOT


def says(finding, mark, *words):
    """The finding has this mark and says these words. What is not right comes with advice."""
    assert finding.mark == mark and (mark == "ok" or finding.advice), finding
    for word in words:
        assert word in finding.found + finding.advice, finding
    assert "/" not in finding.short and platform.node() not in finding.short
    return True


def test_versions(monkeypatch):
    assert says(checks.python(), "ok", platform.python_version())
    for version in ((3, 10, 4), (3, 16, 0)):
        with monkeypatch.context() as patch:
            patch.setattr(checks, "sys", SimpleNamespace(version_info=version))
            assert says(checks.python(), "problem", "3.11 to 3.15")
    for version, mark in {"2.10.1": "problem", "2.11.0+cpu": "ok", "2.15.1": "ok", "2.16.0.dev2": "warning"}.items():
        monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(__version__=version))
        assert says(checks.pytorch(), mark, version)


def test_packages(monkeypatch, tmp_path):
    assert says(checks.packages(), "ok")
    # torchvision says this where it was built for another PyTorch.
    (tmp_path / "torchvision.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torchvision", raising=False)
    assert says(checks.packages(), "problem", "torchvision (RuntimeError", "nms does not exist", "same package index")


def test_no_pytorch_is_a_finding_and_the_advice_is_for_the_python_that_runs(monkeypatch):
    """In a program of its own, to which nothing must bring PyTorch. What follows from one cause is said once."""
    code = f"""
import sys
sys.modules["torch"] = sys.modules["torchvision"] = None
sys.prefix = {str(ROOT / ".venv")!r}
from notebooks.doctor import __main__, checks
checks.ALL = (checks.pytorch, checks.packages, checks.gpus, checks.ranks)
sys.exit(__main__.main())
"""
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 1 and run.stdout.count("problem  ") == 4, run
    assert " ".join(run.stdout.split()).count("uv sync --reinstall-package torch`") == 1
    assert run.stdout.count("Do the same as above.") == 3
    assert run.stdout.splitlines()[-1].endswith("no torch | no torchvision | no GPUs | no launch")
    monkeypatch.setitem(sys.modules, "GPUtil", None)
    monkeypatch.setattr(sys, "prefix", str(ROOT / ".venv"))
    assert says(checks.packages(), "problem", "`python3 -m uv sync --reinstall-package gputil`")
    monkeypatch.setattr(sys, "prefix", "/usr")
    assert says(checks.packages(), "problem", "GPUtil", "pip install -e ./virtual-gpus -e .")


def test_the_course_and_its_data(monkeypatch, tmp_path):
    assert says(checks.course(), "ok") and says(checks.data(), "ok", "All 5")
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", shutil.which("true"))  # a Python that finds nothing
        assert says(checks.course(), "problem", "pip install")
    monkeypatch.setattr(checks, "COURSE", tmp_path)
    assert says(checks.course(), "warning", "another copy")
    assert says(checks.data(), "problem", "SHA256SUMS", "git checkout data")
    shutil.copytree(ROOT / "data", tmp_path / "data")
    assert says(checks.data(), "ok")
    (tmp_path / "data" / "pride_and_prejudice.txt").write_text("It is a truth")
    assert says(checks.data(), "problem", "pride_and_prejudice.txt")


def test_memory_and_disk(monkeypatch):
    room = SimpleNamespace(total=8 * 2**30, available=4 * 2**30)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: room)
    monkeypatch.setattr(checks, "_limit", {}.get)
    assert says(checks.memory(), "ok", "4.0 of 8.0 GiB")
    room.available = 2**30
    assert says(checks.memory(), "warning", "1.0 of 8.0 GiB", "Close")
    room.available = room.total
    monkeypatch.setattr(checks, "_limit", {"memory.max": 2 * 2**30}.get)  # a container
    assert says(checks.memory(), "warning", "2.0 of 2.0 GiB")
    monkeypatch.setitem(sys.modules, "psutil", None)
    assert says(checks.memory(), "warning", "not known")
    assert says(checks.disk(), "ok", "GiB")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=2**29))
    assert says(checks.disk(), "warning", "0.5 GiB", "Make room")


def test_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8), raising=False)
    monkeypatch.setattr(checks, "_limit", {}.get)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert says(checks.cores(), "ok", "8 cores", "not set")
    monkeypatch.setattr(checks, "_limit", {"cpu.max": 200_000}.get)
    assert says(checks.cores(), "warning", "2 cores", "OMP_NUM_THREADS=2")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert says(checks.cores(), "ok", "is 2")
    monkeypatch.setenv("OMP_NUM_THREADS", "16")
    assert says(checks.cores(), "warning", "is 16")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(1))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert says(checks.cores(), "warning", "1 core,", "slow")


def test_ports(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setattr(checks, "TORCHRUN_PORT", taken.getsockname()[1])
        assert says(checks.ports(), "warning", "is taken", "--standalone")
    monkeypatch.setattr(checks, "TORCHRUN_PORT", 0)
    assert says(checks.ports(), "ok")
    monkeypatch.setattr(socket, "create_connection", Mock(side_effect=PermissionError("not permitted")))
    assert says(checks.ports(), "problem", "not permitted", "firewall")


class WithoutWebsockets(BaseHTTPRequestHandler):
    """A server that starts a kernel and refuses the websocket to it, as some proxies do."""

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(201)
        self.end_headers()
        self.wfile.write(b'{"id": "1"}')

    def do_GET(self):
        self.send_error(403, "no websockets here")


def test_jupyter(monkeypatch):
    with HTTPServer(("127.0.0.1", 0), WithoutWebsockets) as server, monkeypatch.context() as patch:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        patch.setattr(lab, "_server", lambda _: lab.contextlib.nullcontext((f"127.0.0.1:{server.server_port}", "x")))
        patch.setenv("http_proxy", "http://127.0.0.1:1")  # which must not be asked for this machine
        patch.setenv("no_proxy", "example.org")
        assert says(checks.jupyter(), "problem", "403", "firewall")
        server.shutdown()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", shutil.which("false"))  # JupyterLab ends at once
        assert says(checks.jupyter(), "problem", "did not start")
    with monkeypatch.context() as patch:
        patch.setattr(lab, "run_in_a_kernel", lambda _: os.sep)
        assert says(checks.jupyter(), "problem", "another Python", "kernelspec")
    monkeypatch.setitem(sys.modules, "jupyterlab", None)
    assert says(checks.jupyter(), "warning", "was not tried")


def test_gpus_and_ranks(monkeypatch, request):
    request.addfinalizer(devices._switch_off)
    monkeypatch.setattr(shutil, "which", lambda _: None)
    monkeypatch.setenv("GPUS", "real")
    assert says(checks.gpus(), "problem", "PyTorch sees 0 of 4 GPUs", "GPUS=virtual")
    monkeypatch.setenv("GPUS", "virtual")
    assert says(checks.gpus(), "ok", "4 virtual GPUs, because GPUS is virtual")
    assert says(checks.ranks(), "ok", "exchanged")
    with monkeypatch.context() as patch:
        patch.setattr(checks, "SLOW_S", 0)
        assert says(checks.ranks(), "warning", "Close other programs")
        patch.setattr(checks, "_all_reduce", lambda rank: 1 / rank)
        assert says(checks.ranks(), "problem", "ZeroDivisionError", "firewall")
        patch.setattr(checks, "_all_reduce", lambda rank: 1.0)
        assert says(checks.ranks(), "problem", "[1.0, 1.0]")
    monkeypatch.delenv("GPUS")
    assert says(checks.gpus(), "ok", "because PyTorch sees 0 real GPUs")
    monkeypatch.setattr(shutil, "which", lambda name: name)
    assert says(checks.gpus(), "warning", "nvidia-smi is there")


def test_warnings_do_not_fail_and_problems_do(monkeypatch, capsys):
    found = [checks.Finding("All is well.", "good"), checks.Finding("It is slow.", "slow", "warning", "Wait.")]
    monkeypatch.setattr(checks, "ALL", [lambda: found[0], lambda: found[1]])
    assert doctor.main() == 0
    printed = capsys.readouterr().out
    assert "✓ ok       All is well.\n! warning  It is slow.\n           Wait.\n" in printed
    assert printed.splitlines()[-1].startswith("multi-GPU lessons: ready | ") and printed.endswith("good | slow\n")
    monkeypatch.setattr(checks, "ALL", [lambda: checks.Finding("Über 3 ✗.", "bad", "problem", "Mend it.")])
    screen = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", screen)
    assert doctor.main() == 1
    screen.seek(0)
    assert screen.read().startswith("x problem  ?ber 3 x.\n           Mend it.\n")


@pytest.mark.outside  # starts a JupyterLab, about ten seconds
def test_the_doctor_on_this_machine():
    run = subprocess.run([sys.executable, "-m", "notebooks.doctor"], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0 and "ran a cell over a websocket" in run.stdout, run
