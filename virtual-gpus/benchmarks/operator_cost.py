"""What one small operator costs while virtual GPUs are on, beside the plain CPU and other ways to watch it.

    python -m benchmarks.operator_cost                # about 20 seconds
    python -m benchmarks.operator_cost --rounds 50    # on a busy machine

Every figure is CPU time in microseconds: the fastest of the rounds, each of which goes through all columns, so that a
busy machine slows them alike. "do-nothing mode" is a TorchDispatchMode that hands every operator on, which is the least
that any such tool costs. MemTracker is PyTorch's memory tracker, which counts and does not place. FakeGPU has a column
if Python finds it: a copy of its repository (FanBB2333/FakeGPU on GitHub) in PYTHONPATH is enough, nothing is built.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from virtual_gpus import virtual_gpus

from benchmarks.reference.measure import mem_tracker

SIDE = 8  # of the square matrices: so small that the arithmetic is nearly nothing


class DoNothing(TorchDispatchMode):
    """Hands every operator on."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Run `func`."""
        return func(*args, **(kwargs or {}))


def operators(device: str) -> dict[str, Callable[[], object]]:
    """Small calls by name, on tensors of `device`."""
    x, y = (torch.ones(SIDE, SIDE, device=device) for _ in range(2))
    trained, bias = x.clone().requires_grad_(), torch.ones(SIDE, device=device, requires_grad=True)
    return {
        "add": lambda: x + y,
        "add_": lambda: x.add_(y),
        "matmul": lambda: x @ y,
        "view": lambda: x.view(-1),
        "empty": lambda: torch.empty(SIDE, SIDE, device=device),
        "x.device": lambda: x.device,
        "relu": lambda: torch.relu(x),
        "sum": lambda: x.sum(),
        "linear, recorded": lambda: torch.nn.functional.linear(x, trained, bias),
        "linear, backward": lambda: torch.nn.functional.linear(x, trained, bias).sum().backward(),
    }


COLUMNS: dict[str, tuple[Callable[[], AbstractContextManager], str]] = {
    "CPU": (nullcontext, "cpu"),
    "do-nothing mode": (DoNothing, "cpu"),
    "MemTracker": (mem_tracker, "cpu"),
    "FakeGPU": (nullcontext, "cuda"),
    "virtual GPU": (virtual_gpus, "cuda"),
    "shapes only": (lambda: virtual_gpus(shapes_only=True), "cuda"),
    "CPU tensor, GPUs on": (virtual_gpus, "cpu"),
}
if not importlib.util.find_spec("fakegpu"):
    del COLUMNS["FakeGPU"]


def _switch_fakegpu_on(threads: int) -> None:
    os.environ["FAKEGPU_TERMINAL_REPORT"] = "0"
    import fakegpu

    fakegpu.init(runtime="fakecuda")
    torch.backends.cudnn.enabled = False  # without this, an LSTM fails on FakeGPU in a PyTorch built for CUDA
    torch.set_num_threads(threads)


@contextmanager
def fakegpu_process() -> Iterator[Callable]:
    """`run(function, *args)` calls in a process where FakeGPU is on. It cannot be switched off, so not in this one."""
    spawn, threads = multiprocessing.get_context("spawn"), torch.get_num_threads()
    with ProcessPoolExecutor(1, spawn, _switch_fakegpu_on, (threads,)) as pool:
        yield lambda function, *args: pool.submit(function, *args).result()


def microseconds(call: Callable[[], object], calls: int) -> float:
    """CPU time of one call."""
    begun = time.thread_time()
    for _ in range(calls):
        call()
    return (time.thread_time() - begun) / calls * 1e6


def time_operators(column: str, calls: int) -> dict[str, float]:
    """{operator: microseconds} of one round."""
    watch, device = COLUMNS[column]
    taken = {}
    with watch():
        for name, call in operators(device).items():
            call()
            taken[name] = microseconds(call, calls)
    return taken


def measure(rounds: int, calls: int) -> dict[str, dict[str, float]]:
    """{column: {operator: microseconds of the fastest round}}."""
    best: dict[str, dict[str, float]] = {column: {} for column in COLUMNS}
    with fakegpu_process() as on_fakegpu:
        for _ in range(rounds):
            for column, found in best.items():
                time_it = partial(on_fakegpu, time_operators) if column == "FakeGPU" else time_operators
                for name, taken in time_it(column, calls).items():
                    found[name] = min(taken, found.get(name, math.inf))
    return best


def table(best: dict[str, dict[str, float]]) -> list[str]:
    """Microseconds, and in brackets how many times the do-nothing mode's."""
    lines = ["| operator | " + " | ".join(best) + " |", "|---" * (len(best) + 1) + "|"]
    for name, least in best["do-nothing mode"].items():
        cells = [f"{found[name]:.1f} ({found[name] / least:.1f})" for found in best.values()]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=20, help="how often each column is timed (default 20)")
    parser.add_argument("--calls", type=int, default=200, help="calls per timing (default 200)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, CPU time in microseconds (in brackets: times the do-nothing mode)\n")
    print("\n".join(table(measure(options.rounds, options.calls))))


if __name__ == "__main__":
    main()
