"""Runs a function on several ranks, one process each, from a notebook cell, and gives back what each of them returned.

    def train(rank):
        model = DistributedDataParallel(Net().to("cuda"))
        ...
        return loss

    losses = launch(train, ranks=4)        # [rank 0's loss, rank 1's, ...]

In the rank torch.distributed is ready: on real GPUs with nccl, on virtual GPUs and on the CPU with gloo. The
environment is that of torchrun (RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, ...), so a function that reads it works
under both. Underneath is PyTorch's elastic launcher, which starts the processes; their meeting point is a store of the
parent's, at a port that the system picks while it opens it.

Started by    where it is the default          what is special
fork          Linux without real GPUs          0.2 s for 4 ranks; functions of cells as they are; one thread per rank
spawn         real GPUs, macOS, Windows        seconds, since each rank imports PyTorch; functions of cells travel by
                                               cloudpickle; a script must guard its call with __name__ == "__main__"

macOS has fork too (start="fork"), but its system libraries may crash in a forked process. Neither macOS nor Windows is
among the systems that the tests run on.
"""

from __future__ import annotations

import inspect
import multiprocessing
import os
import socket
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch

from helpers.gpus import is_virtual
from helpers.parallel.launching.errors import RankError
from helpers.parallel.launching.processes import run
from helpers.parallel.launching.rank import Job, cells, pack

__all__ = ["RankError", "launch"]

_MEETS_AT = "127.0.0.1"


def launch(fn, *args, ranks: int, gpus: bool | None = None, timeout: float | None = 60, start: str | None = None,
           threads: int = 1, show: bool = True) -> list:  # fmt: skip
    """Call `fn(rank, *args)` in `ranks` processes that form a process group. Returns their results, rank 0's first.

    gpus: None uses the GPUs that PyTorch sees, one per rank, else the CPU; False the CPU in any case; True insists.
    timeout: seconds for the whole run, None for as long as it takes. start: "fork" or "spawn"; None picks, see above.
    threads: of PyTorch on the CPU, per rank; more than 1 needs "spawn". show: print what the ranks print, each line
    with its rank, rank 0's lines as they come, the others' after it in order; False prints nothing.

    Results are pickled; tensors arrive on the CPU. Every rank begins with a seed of its own, torch.initial_seed() of
    the parent plus its rank, and with virtual GPUs that are empty. Figures are drawn in the parent: a rank has no
    notebook to show them in.

    Raises RankError when a rank raises or dies, with the rank that was first, its traceback, and what it was; no
    process is left then. TimeoutError after `timeout`, with the line at which each rank was. ValueError or TypeError
    for bad arguments, RuntimeError where starting would hang.
    """
    _check(fn, args, ranks, timeout, threads)
    _refuse_inside_a_group()
    on_gpus = _use_gpus(gpus, ranks)
    start = _start_method(start, on_gpus, threads)
    backend = "nccl" if on_gpus and not is_virtual() and torch.distributed.is_nccl_available() else "gloo"
    with tempfile.TemporaryDirectory(prefix="ranks-", ignore_cleanup_errors=True) as folder, _door() as door:
        job = Job(
            folder=Path(folder), ranks=ranks, gpus=on_gpus, backend=backend, threads=threads, cells=cells(),
            work=pack(fn, args, start == "spawn"), seed=torch.initial_seed(), limit_s=timeout,
            ends=None if timeout is None else time.monotonic() + timeout,
        )  # fmt: skip
        if show:
            print(_what_runs(ranks, on_gpus, backend), flush=True)
        port = door.getsockname()[1]
        return run(job, start, [_environment(rank, ranks, port) for rank in range(ranks)], door, show)


def _door() -> socket.socket:
    """Where the ranks meet: a port that is free, since it is taken now, and that the store answers at later."""
    return socket.create_server((_MEETS_AT, 0))


# ---- what is refused ------------------------------------------------------------------------------------------------


def _check(fn, args, ranks, timeout, threads) -> None:
    if not callable(fn):
        raise TypeError(f"launch needs a function to run on each rank, not {fn!r}: launch(train, ranks=4)")
    for name, number in (("ranks", ranks), ("threads", threads)):
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise ValueError(f"{name} is a whole number of at least 1, not {number!r}")
    if timeout is not None and not timeout > 0:
        raise ValueError(f"timeout is a time in seconds, more than 0, or None; not {timeout!r}")
    try:
        inspect.signature(fn).bind(0, *args)
    except TypeError as error:
        name = getattr(fn, "__name__", "the function")
        raise TypeError(
            f"launch calls {name}(rank, *args), here with the rank and {len(args)} more: {error}. Give what it needs "
            f"behind the function, launch({name}, 0.1, ranks={ranks}), and make the rank its first parameter."
        ) from None
    except ValueError:
        pass  # a function of C, which does not tell what it takes


def _refuse_inside_a_group() -> None:
    if not torch.distributed.is_available():
        raise RuntimeError("this PyTorch was built without torch.distributed: install one from pytorch.org")
    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise RuntimeError(
            "this process is a rank already, started by launch() or torchrun: call the function itself, not launch()"
        )
    if torch.distributed.is_initialized():
        raise RuntimeError(
            "this process has a process group already, which ranks must not inherit: call "
            "torch.distributed.destroy_process_group() first"
        )
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise RuntimeError(
            "a spawned rank imports this script to find its functions, and so comes to launch() again: put the call "
            'under  if __name__ == "__main__":'
        )


def _use_gpus(gpus: bool | None, ranks: int) -> bool:
    seen = torch.cuda.device_count()  # asks the driver without starting CUDA
    if gpus and not seen:
        raise ValueError("gpus=True, but PyTorch sees no GPU: call use_gpus(...) first for virtual ones")
    if not seen or gpus is False:
        return False
    if ranks > seen:
        raise ValueError(
            f"{ranks} ranks need {ranks} GPUs, one each (two ranks on one GPU hang in nccl), and PyTorch sees {seen}: "
            f"ask for fewer ranks, for more GPUs with use_gpus({ranks}), or for ranks on the CPU with gpus=False"
        )
    return True


def _start_method(start: str | None, on_gpus: bool, threads: int) -> str:
    known = [method for method in ("fork", "spawn") if method in multiprocessing.get_all_start_methods()]
    if start not in (None, *known):
        raise ValueError(f"start is one of {', '.join(map(repr, known))} on this system, or None; not {start!r}")
    danger = _danger_of_fork()
    if start is None:
        safe = sys.platform == "linux" and not danger and threads == 1 and (is_virtual() or not on_gpus)
        return "fork" if safe else "spawn"
    if start == "fork" and danger:
        raise RuntimeError(f'start="fork" would fail: {danger}. Leave start out, or restart the kernel first.')
    if start == "fork" and threads > 1:
        raise ValueError(
            f'start="fork" with threads={threads} would hang: the threads that PyTorch has started for its operators '
            'do not live on in a forked process. Use start="spawn", or one thread per rank.'
        )
    return start


def _danger_of_fork() -> str | None:
    """Why a forked process could not work, or None. Both come with real GPUs only."""
    if not is_virtual() and torch.cuda.is_initialized():
        return "this process has used CUDA, which does not work in a forked process"
    if "pt_autograd_" in _thread_names():
        return "backward() has run on a machine with GPUs, and its threads do not live on in a forked process"
    return None


def _thread_names() -> str:
    """Names of this process's threads, those of C++ too (Linux only: elsewhere nothing forks unasked)."""
    found = ""
    for file in Path("/proc/self/task").glob("*/comm"):
        try:
            found += file.read_text(encoding="utf-8", errors="replace")
        except OSError:
            pass  # it has ended meanwhile
    return found


# ---- what the ranks are told ----------------------------------------------------------------------------------------


def _what_runs(ranks: int, on_gpus: bool, backend: str) -> str:
    number = f"{ranks} rank{'s' if ranks > 1 else ''}"
    if not on_gpus:
        return f"{number} on the CPU, backend {backend}"
    gpus = f"{ranks} {'virtual' if is_virtual() else 'real'} GPU{'s' if ranks > 1 else ''}"
    return f"{number} on {gpus}, backend {backend}{' in place of nccl' if is_virtual() else ''}"


def _environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    """What torchrun would set on one machine. The store is the launcher's, so no rank opens one."""
    found = {
        "RANK": rank, "LOCAL_RANK": rank, "ROLE_RANK": rank, "GROUP_RANK": 0,
        "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "ROLE_WORLD_SIZE": ranks, "GROUP_WORLD_SIZE": 1,
        "MASTER_ADDR": _MEETS_AT, "MASTER_PORT": port, "ROLE_NAME": "default",
        "TORCHELASTIC_RESTART_COUNT": 0, "TORCHELASTIC_MAX_RESTARTS": 0, "TORCHELASTIC_USE_AGENT_STORE": True,
        "TORCHELASTIC_RUN_ID": f"launch-{os.getpid()}-{threading.get_ident()}",
    }  # fmt: skip
    if loopback := _loopback():
        # Else gloo looks the computer's own name up, which fails or waits on many laptops.
        found["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", loopback)
    return {name: str(value) for name, value in found.items()}


def _loopback() -> str | None:
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in ("lo", "lo0") if name in names), None)
