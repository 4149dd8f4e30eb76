"""Runs a function on several ranks, one process each, from a notebook cell, and returns what each of them returned.

    def train(rank):
        model = DistributedDataParallel(Net().to("cuda"))
        ...
        return loss

    losses = launch(train, ranks=4)        # [rank 0's loss, rank 1's, ...]

In each rank torch.distributed is ready: with nccl on real GPUs, with gloo on virtual GPUs and on the CPU. The
environment is that of torchrun (RANK, LOCAL_RANK, WORLD_SIZE, ...), so a function that reads it works under both.

Started by    where it is the default          what is special
fork          Linux without real GPUs          0.2 s for 4 ranks; functions of cells as they are
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
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from helpers.gpus import is_virtual
from helpers.parallel.launching.errors import RankError
from helpers.parallel.launching.processes import run
from helpers.parallel.launching.rank import HOST, Job, cells, pickle_work

__all__ = ["RankError", "launch"]


def launch(fn: Callable, *args: Any, ranks: int, gpus: bool = True, timeout: float | None = 60,
           start: str | None = None, show: bool = True) -> list:  # fmt: skip
    """Call `fn(rank, *args)` in `ranks` processes that form a process group. Returns their results, rank 0's first.

    gpus     True uses the GPUs that PyTorch sees, one per rank, and the CPU where there is none; False uses the CPU
    timeout  seconds for the whole run; None for as long as it takes
    start    "fork" or "spawn"; None picks one, see above
    show     print what the ranks print, each line with its rank: rank 0's lines as they come, and the lines of the
             others after it, in order

    Results are pickled, and tensors arrive on the CPU. Every rank begins with its own seed, torch.initial_seed() of
    the parent plus its rank, with one thread, and with virtual GPUs that are empty. Draw figures in the parent: a rank
    has no notebook to show them in.

    Raises RankError when a rank raises or dies, with the rank that was first, its traceback, and what it was. Raises
    TimeoutError after `timeout`, with the line at which each rank was. No process is left then. Raises ValueError or
    TypeError for bad arguments, and RuntimeError where starting would hang.
    """
    _check_arguments(fn, args, ranks, timeout)
    _check_process()
    on_gpus = gpus and _are_enough_gpus(ranks)
    start = _start_method(start, on_gpus)
    backend = "nccl" if on_gpus and not is_virtual() and torch.distributed.is_nccl_available() else "gloo"
    # A port that is free, since it is taken from now on. The store in which the ranks meet will answer there.
    with (
        tempfile.TemporaryDirectory(prefix="ranks-", ignore_cleanup_errors=True) as folder,
        socket.create_server((HOST, 0)) as door,
    ):
        job = Job(
            folder=Path(folder), ranks=ranks, gpus=on_gpus, backend=backend, port=door.getsockname()[1],
            seed=torch.initial_seed(), work=(fn, args) if start == "fork" else None, cells=cells(), limit_s=timeout,
            ends=None if timeout is None else time.monotonic() + timeout,
        )  # fmt: skip
        if start == "spawn":
            job.file("all", "work").write_bytes(pickle_work(fn, args))
        if show:
            print(_what_runs(job), flush=True)
        return run(job, start, door, show)


def _what_runs(job: Job) -> str:
    ranks = f"{job.ranks} rank{'s' if job.ranks > 1 else ''}"
    if not job.gpus:
        return f"{ranks} on the CPU, backend {job.backend}"
    gpus = f"{job.ranks} {'virtual' if is_virtual() else 'real'} GPU{'s' if job.ranks > 1 else ''}"
    return f"{ranks} on {gpus}, backend {job.backend}{' in place of nccl' if is_virtual() else ''}"


# ---- what is refused ------------------------------------------------------------------------------------------------


def _check_arguments(fn: Callable, args: tuple, ranks: int, timeout: float | None) -> None:
    if not callable(fn):
        raise TypeError(f"launch needs a function to run on each rank, not {fn!r}: launch(train, ranks=4).")
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
        raise ValueError(f"ranks must be an integer of at least 1, not {ranks!r}.")
    if timeout is not None and not timeout > 0:
        raise ValueError(f"timeout must be a time in seconds, more than 0, or None, not {timeout!r}.")
    try:
        inspect.signature(fn).bind(0, *args)
    except TypeError as error:
        name = getattr(fn, "__name__", "the function")
        raise TypeError(
            f"launch calls {name}(rank, *args), here with the rank and {len(args)} more: {error}. Give what it needs "
            f"behind the function, launch({name}, 0.1, ranks={ranks}), and make the rank its first parameter."
        ) from None
    except ValueError:
        pass  # a function of C that does not tell what it takes


def _check_process() -> None:
    if not torch.distributed.is_available():
        raise RuntimeError("This PyTorch was built without torch.distributed. Install one from pytorch.org.")
    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise RuntimeError(
            "This process is a rank already, started by launch() or torchrun. Call the function itself, not launch()."
        )
    if torch.distributed.is_initialized():
        raise RuntimeError(
            "This process has a process group already, which ranks must not inherit. Call "
            "torch.distributed.destroy_process_group() first."
        )
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise RuntimeError(
            "A spawned rank imports this script to find its functions, and so comes to launch() again. Put the call "
            'under  if __name__ == "__main__":'
        )


def _are_enough_gpus(ranks: int) -> bool:
    """False where there is none at all."""
    seen = torch.cuda.device_count()  # asks the driver without starting CUDA
    if 0 < seen < ranks:
        raise ValueError(
            f"{ranks} ranks need {ranks} GPUs, because two ranks on one GPU hang in nccl, and PyTorch sees {seen}. Ask "
            f"for fewer ranks, for more GPUs with use_gpus({ranks}), or for ranks on the CPU with gpus=False."
        )
    return seen > 0


def _start_method(start: str | None, on_gpus: bool) -> str:
    known = [method for method in ("fork", "spawn") if method in multiprocessing.get_all_start_methods()]
    if start not in (None, *known):
        raise ValueError(f"start must be one of {', '.join(map(repr, known))} on this system, or None, not {start!r}.")
    danger = _danger_of_fork()
    if start == "fork" and danger:
        raise RuntimeError(f'start="fork" would fail: {danger}. Leave start out, or restart the kernel first.')
    if start is None:
        can_fork = sys.platform == "linux" and not danger and (is_virtual() or not on_gpus)
        return "fork" if can_fork else "spawn"
    return start


def _danger_of_fork() -> str | None:
    """Why a forked process could not work, or None. Both reasons come with real GPUs only."""
    if not is_virtual() and torch.cuda.is_initialized():
        return "this process has used CUDA, which does not work in a forked process"
    # Names of threads, those of C++ too. On Linux only: elsewhere nothing forks unasked.
    for file in Path("/proc/self/task").glob("*/comm"):
        try:
            if file.read_text(encoding="utf-8", errors="replace").startswith("pt_autograd_"):
                return "backward() has run on a machine with GPUs, and its threads do not live on in a forked process"
        except OSError:
            pass  # the thread has ended meanwhile
    return None
