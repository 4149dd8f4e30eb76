"""Starts ranks from a notebook cell, one process each: a function with `launch`, a program with `run_hosts`.

    def train(rank):
        model = DistributedDataParallel(Net().to("cuda"))
        ...
        return loss

    losses = launch(train, ranks=4)        # [rank 0's loss, rank 1's, ...]

The package of the virtual GPUs starts the processes, on real GPUs too.
"""

from collections.abc import Callable
from typing import Any, TypeVar

from helpers.engine import RankError, run_hosts, run_ranks

__all__ = ["RankError", "launch", "run_hosts"]

_Result = TypeVar("_Result")


def launch(
    fn: Callable[..., _Result], *args: Any, ranks: int, gpus: bool = True, timeout: float | None = 60, show: bool = True
) -> list[_Result]:
    """Call `fn(rank, *args)` in `ranks` processes that form a process group. Return their results, rank 0's first.

    gpus: True uses one GPU per rank, or the CPU if there is no GPU. False uses the CPU. timeout: the time limit in
    seconds, from the moment at which all ranks are connected, or None for no limit. show: print what the ranks print,
    with their numbers.

    In each rank, torch.distributed is ready, and the environment is that of torchrun. Results are pickled, and tensors
    arrive on the CPU. Draw figures in the parent, because a rank has no notebook to show them in. On macOS, on Windows
    and with real GPUs, each launch takes seconds. `virtual_gpus.testing.run_ranks` says more.

    Raises RankError if a rank raises an error or dies, with the rank that was first and its traceback. Raises
    TimeoutError after `timeout`, or if the ranks do not start within 5 minutes, with the line at which each rank was.
    No rank is left in either case. Raises ValueError for invalid arguments and if there are fewer GPUs than ranks, and
    RuntimeError inside a rank.
    """
    __tracebackhide__ = True  # IPython shows the line of the cell
    return run_ranks(fn, ranks, args, gpus=gpus, timeout=timeout, show=show)
