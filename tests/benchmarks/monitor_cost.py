"""What `MemoryMonitor` costs: a training step under it against the same step without, as ratios.

    python -m tests.benchmarks.monitor_cost               # about 3 minutes on two cores
    python -m tests.benchmarks.monitor_cost --rounds 1    # a quick look

The first column is the step alone, hooks and marks included; the second adds entering and leaving the monitor, where
the history is read and played back, shared among the steps of one run. Each round times all columns one after the
other; the median of the rounds' ratios is shown, with the smallest and the largest.
"""

from __future__ import annotations

import argparse
import time

import torch

from helpers.monitor import MemoryMonitor
from helpers.virtual import virtual_gpus
from tests.benchmarks.jobs import JOBS, resnet18_b64
from tests.benchmarks.step_cost import ratios, seconds, show

ROWS = {  # name -> (job, GPUs, shapes only)
    **{name: (job, 1, False) for name, job in JOBS.items()},
    "ResNet-18, batch 64, DataParallel on 4": (resnet18_b64, 4, False),
    "ResNet-18, batch 64, shapes only": (resnet18_b64, 1, True),
}


def without(job, gpus: int, shapes_only: bool, steps: int) -> float:
    """Seconds of a step on virtual GPUs, the fastest of `steps`."""
    with virtual_gpus(gpus, shapes_only=shapes_only):
        return seconds(job("cuda", gpus)[0], steps)


def under(job, gpus: int, shapes_only: bool, steps: int) -> float:
    """The same under the monitor."""
    with virtual_gpus(gpus, shapes_only=shapes_only):
        step, net, optimizer = job("cuda", gpus)
        with MemoryMonitor() as monitor:
            monitor.watch(net, optimizer)
            return seconds(step, steps)


def with_reading(job, gpus: int, shapes_only: bool, steps: int) -> float:
    """The same with a share of entering and leaving, and the peak."""
    with virtual_gpus(gpus, shapes_only=shapes_only):
        step, net, optimizer = job("cuda", gpus)
        step()
        start = time.perf_counter()
        with MemoryMonitor() as monitor:
            entered = time.perf_counter()
            monitor.watch(net, optimizer)
            fastest = seconds(step, steps)
            left = time.perf_counter()
        monitor.at_peak(0)
        return fastest + (entered - start + time.perf_counter() - left) / (steps + 1)  # one of them warms up


def table(rounds: int, steps: int) -> list[str]:
    """A row per job."""
    lines = ["| training step on virtual GPUs | monitored / not | with entering, leaving, peak |", "|---|---|---|"]
    for name, row in ROWS.items():
        others = [lambda row=row: under(*row, steps), lambda row=row: with_reading(*row, steps)]
        plain, read = ratios(lambda row=row: without(*row, steps), others, rounds)
        lines.append(f"| {name} | {show(plain)} | {show(read)} |")
    return lines


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5, help="how often each column is timed (default 5)")
    parser.add_argument("--steps", type=int, default=5, help="steps per timing (default 5)")
    parser.add_argument("--threads", type=int, default=2, help="threads of PyTorch (default 2)")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"torch {torch.__version__}, {options.threads} threads, {options.rounds} rounds\n")
    print("\n".join(table(options.rounds, options.steps)))


if __name__ == "__main__":
    main()
