"""The checks, each a function that returns a Finding, in the order in which they are made."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import io
import os
import platform
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

COURSE = Path(__file__).resolve().parents[2]
GIB = 2**30
LESSON_GIB = 3  # of memory; lesson 08 and its ranks take 2.8
SLOW_S = 15
TORCHRUN_PORT = 29500
# Lesson 10 needs more.
PACKAGES = ("numpy", "torchvision", "matplotlib", "cloudpickle", "ipykernel", "ipywidgets", "GPUtil")
INSTALL = (
    "Use the Python of the course: `python3 -m uv run python -m notebooks.doctor`, or "
    "`.venv/bin/python -m notebooks.doctor`. To install what is missing, run "
    "`python -m pip install -e ./virtual-gpus -e .` with that Python. docs/setup.md has the commands for other systems."
)


class Finding(NamedTuple):
    """What a check found, as a sentence and as words for the instructor's line.

    mark: "ok", "warning" or "problem". advice: what to do.
    """

    found: str
    short: str
    mark: str = "ok"
    advice: str = ""


# ---- what is installed -----------------------------------------------------------------------------------------------


def python() -> Finding:
    found, short = f"This is Python {platform.python_version()}.", f"Python {platform.python_version()}"
    if (3, 11) <= sys.version_info[:2] <= (3, 15):
        return Finding(found, short)
    advice = "The lessons need 3.11 to 3.15. uv brings one: `python3 -m uv run --python 3.13 jupyter lab notebooks`."
    return Finding(found, short, "problem", advice)


def pytorch() -> Finding:
    if error := import_error("torch"):
        return Finding(f"PyTorch cannot be imported. {error}", "no torch", "problem", repair("torch"))
    version = importlib.import_module("torch").__version__
    found, short, number = f"This is PyTorch {version}.", f"torch {version}", tuple(map(int, version.split(".")[:2]))
    if number < (2, 11):
        return Finding(f"{found} The lessons need 2.11 to 2.15.", short, "problem", INSTALL)
    if number > (2, 15):
        return Finding(found, short, "warning", "The lessons were tested with 2.11 to 2.15. Take 2.15 if one fails.")
    return Finding(found, short)


def packages() -> Finding:
    """torchvision, for example, raises an error at its import if it was built for another PyTorch."""
    errors = {name: error for name in PACKAGES if (error := import_error(name))}
    if errors:
        words = (
            name if f"No module named '{name}'" in error else f"{name} ({error})" for name, error in errors.items()
        )
        found, short = f"These packages cannot be imported: {', '.join(words)}.", f"no {', '.join(errors)}"
        advice = repair(*errors)
        if "torchvision::" in errors.get("torchvision", ""):  # PyTorch's words for compiled parts that do not fit
            advice += " This torchvision was built for another PyTorch: both must come from the same package index."
        return Finding(found, short, "problem", advice)
    return Finding("The other packages can be imported.", "packages")


def repair(*names: str) -> str:
    """What to do about packages that are missing or damaged. Without PyTorch, nothing else can be judged."""
    if Path(sys.prefix) != COURSE / ".venv":
        return INSTALL
    names = ("torch",) if import_error("torch") else names
    # `uv run` takes a damaged package for an installed one.
    again = " ".join(f"--reinstall-package {name.lower()}" for name in names)
    return f"Run `python3 -m uv sync {again}` in the course's folder."


def import_error(name: str) -> str:
    """The error's words if the package cannot be imported, and "" if it can."""
    try:
        importlib.import_module(name)
    except (ImportError, OSError, RuntimeError, AttributeError) as error:  # the last three: compiled parts do not match
        return f"{type(error).__name__}: {one_line(error)}."
    return ""


def one_line(error: object) -> str:
    return " ".join(str(error).split())[:300].rstrip(".")


def course() -> Finding:
    """Whether a lesson, which starts in `notebooks`, finds the course's packages, and those of this folder."""
    names = ("helpers", "virtual_gpus")
    code = f"from importlib.util import find_spec\nfor name in {names}: print(getattr(find_spec(name), 'origin', ''))"
    start = COURSE / "notebooks" if (COURSE / "notebooks").is_dir() else COURSE
    found = subprocess.run([sys.executable, "-c", code], cwd=start, capture_output=True, text=True).stdout.splitlines()
    if len(found) < len(names) or not all(found):
        return Finding("The lessons do not find the packages of the course.", "not installed", "problem", INSTALL)
    if not all(Path(place).resolve().is_relative_to(COURSE) for place in found):
        return Finding(f"The lessons use another copy of the course: {found}.", "other copy", "warning", INSTALL)
    return Finding("The lessons find the packages of the course in this folder.", "course")


def data() -> Finding:
    sums = COURSE / "data" / "SHA256SUMS"
    lines = sums.read_text(encoding="utf-8").splitlines() if sums.is_file() else ["- SHA256SUMS"]
    wrong = [name for checksum, name in map(str.split, lines) if checksum != _checksum(sums.parent / name)]
    if wrong:
        advice = "Run `git checkout data` in the course's folder, or copy the folder again."
        return Finding(f"Missing or changed in the folder `data`: {', '.join(wrong)}.", "no data", "problem", advice)
    return Finding(f"All {len(lines)} data files are complete.", "data")


def _checksum(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""


# ---- the machine -----------------------------------------------------------------------------------------------------


def memory() -> Finding:
    if error := import_error("psutil"):  # which comes with ipykernel
        return Finding(f"The memory is not known. {error}", "memory unknown", "warning", INSTALL)
    now = importlib.import_module("psutil").virtual_memory()
    total = min(now.total, _limit("memory.max") or _limit("memory/memory.limit_in_bytes") or now.total) / GIB
    free = min(now.available / GIB, total)
    found, short = f"{free:.1f} of {total:.1f} GiB of memory are free.", f"memory {free:.1f} of {total:.1f} GiB"
    if free < LESSON_GIB:
        advice = f"A lesson takes up to {LESSON_GIB} GiB. Close other programs, and shut down kernels of other lessons."
        return Finding(found, short, "warning", advice)
    return Finding(found, short)


def disk() -> Finding:
    free = shutil.disk_usage(COURSE).free / GIB
    found, short = f"{free:.1f} GiB of disk space are free.", f"disk {free:.0f} GiB"
    if free < 1:
        return Finding(found, short, "warning", "Lessons write files. Make room for 1 GiB.")
    return Finding(found, short)


def cores() -> Finding:
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, threads = _limit("cpu.max"), os.environ.get("OMP_NUM_THREADS", "")
    if quota:
        count = max(1, min(count, round(quota / 100_000)))  # a quota is in microseconds of every 100,000
    found = f"{count} core{'s' * (count > 1)}, and OMP_NUM_THREADS is {threads or 'not set'}."
    if threads.isdigit() and int(threads) > count or (quota and not threads):
        return Finding(found, f"{count} cores", "warning", f"Set OMP_NUM_THREADS={count}, the number of your cores.")
    if count < 2:
        return Finding(found, "1 core", "warning", "Lessons that start several processes are slow on one core.")
    return Finding(found, f"{count} cores")


def _limit(file: str) -> int | None:
    """The number in one of the files with a container's limits (Linux), or None without a limit."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int((Path("/sys/fs/cgroup") / file).read_text(encoding="ascii").split()[0])
    return None


# ---- the network inside this machine ---------------------------------------------------------------------------------


def ports() -> Finding:
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=5).close()
    except OSError as error:
        advice = "Allow Python in the firewall to use 127.0.0.1."
        return Finding(f"Programs cannot connect inside this machine. {error}", "no ports", "problem", advice)
    try:
        socket.create_server(("127.0.0.1", TORCHRUN_PORT)).close()
    except OSError:
        advice = "Always write `torchrun --standalone`, which takes another port."
        return Finding(f"Port {TORCHRUN_PORT} of torchrun is taken.", f"{TORCHRUN_PORT} taken", "warning", advice)
    return Finding(f"Programs can connect inside this machine. Port {TORCHRUN_PORT} of torchrun is free.", "ports")


def jupyter() -> Finding:
    if error := import_error("jupyterlab") or import_error("websocket"):
        return Finding(f"JupyterLab was not tried. {error} Colab does not need it.", "no lab", "warning", INSTALL)
    from notebooks.doctor.lab import LabError, run_in_a_kernel

    start = time.perf_counter()
    try:
        prefix = run_in_a_kernel("import sys; print(sys.prefix)")
    except LabError as error:
        advice = "Allow Python in the firewall and in the virus scanner, or open the lessons with another editor."
        return Finding(f"JupyterLab could not run a cell. {one_line(error)}.", "no kernel", "problem", advice)
    seconds = time.perf_counter() - start
    if not os.path.samefile(prefix, sys.prefix):
        advice = "Remove the kernel `python3` that `jupyter kernelspec list` shows, or choose another in the lessons."
        return Finding(f"JupyterLab's kernel is another Python, in {prefix}.", "other kernel", "problem", advice)
    return Finding(f"JupyterLab ran a cell over a websocket, {seconds:.1f} s after its start.", f"lab {seconds:.1f} s")


# ---- GPUs and ranks --------------------------------------------------------------------------------------------------


def gpus() -> Finding:
    """What `use_gpus(4)` takes, as a lesson calls it. The GPUs stay on for the check of the ranks."""
    if error := import_error("torch") or import_error("virtual_gpus"):
        return Finding(f"GPUs were not tried. {error}", "no GPUs", "problem", repair("virtual-gpus"))
    import torch

    from helpers.gpus import is_virtual, use_gpus

    real, choice = 0 if is_virtual() else torch.cuda.device_count(), os.environ.get("GPUS")
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            use_gpus(4)
        torch.ones(2, device="cuda:3").sum().item()
    except (RuntimeError, ValueError) as error:
        advice = "Set GPUS=virtual in the environment, or unset GPUS."
        return Finding(f"use_gpus(4) fails. {one_line(error)}.", "no GPUs", "problem", advice)
    kind = "virtual" if is_virtual() else "real"
    why = f"GPUS is {choice}" if choice else f"PyTorch sees {real} real GPU{'s' * (real != 1)}"
    found, short = f"Lessons use 4 {kind} GPUs, because {why}.", f"4 {kind} GPUs, {real} real seen"
    if not real and shutil.which("nvidia-smi"):
        advice = "nvidia-smi is there, but PyTorch sees no GPU. docs/setup.md says what to do if you want to use it."
        return Finding(found, short, "warning", advice)
    return Finding(found, short)


def ranks() -> Finding:
    """Two processes that communicate, started as lesson 04 starts them."""
    if error := import_error("torch") or import_error("virtual_gpus"):
        found = f"Starting two processes was not tried. {error}"
        return Finding(found, "no launch", "problem", repair("virtual-gpus"))
    from helpers.parallel import launch

    start, printed = time.perf_counter(), io.StringIO()
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            sums = launch(_all_reduce, ranks=2, show=False)
    except (RuntimeError, ValueError, TimeoutError, OSError) as error:
        sums = one_line(error)
    if sums != [3.0, 3.0]:
        advice = "Lessons 04, 08 and 09 need this. Allow Python in the firewall. Disconnect from any VPN. Try again."
        return Finding(f"Two processes could not exchange a tensor: {sums}.", "no launch", "problem", advice)
    seconds = time.perf_counter() - start
    found, short = f"Two processes started and exchanged a tensor in {seconds:.1f} s.", f"launch {seconds:.1f} s"
    if seconds > SLOW_S:
        return Finding(found, short, "warning", "Lesson 04 does this 22 times. Close other programs.")
    return Finding(found, short)


def _all_reduce(rank: int) -> float:
    import torch

    value = torch.tensor(rank + 1.0, device="cuda" if torch.cuda.is_available() else "cpu")
    torch.distributed.all_reduce(value)
    return value.item()


ALL = (python, pytorch, packages, course, data, memory, disk, cores, ports, jupyter, gpus, ranks)
