"""What `MemoryMonitor` costs: a training step under it against the same step without, as ratios of CPU time.

    python -m tests.benchmarks.monitor_cost               # about 5 minutes on two cores
    python -m tests.benchmarks.monitor_cost --rounds 3    # a quick look

The first column is the step alone, hooks, marks and PyTorch's history included; the second adds entering and leaving
the monitor and the peak's kinds, where the history is read and played back, shared among the steps of one run. The
third says how much there was to record: allocations and frees of a step on GPU 0.

A busy machine must not decide: what counts is the CPU time of this process, all its threads, not the time on the wall;
the same net takes turns, steps without the monitor, under it, and without it again; each round is compared with its own
neighbours; and of the rounds the median is shown, with the quartiles. The virtual GPUs' own history, in Python, is the
largest part of it. A real GPU's is kept in C++, about a microsecond per event, and has to be measured on one.

On two cores with torch 2.15, the steps take 1.01 times as long under the monitor, 1.11 in shapes only, and 1.16 where
there is hardly any arithmetic. With entering, leaving and reading the peak: 1.03, 1.27 and 1.26.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time

import torch
import torch.nn.functional as F
from benchmarks.jobs import gpt_b8, resnet18_b64
from torch import nn
from virtual_gpus import virtual_gpus

from helpers.measure.monitor import MemoryMonitor


def tiny_mlp(device: str, gpus: int = 1):
    """The worst case: a step of hardly any arithmetic, 16 samples through 3 layers of at most 64 numbers, Adam."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).to(device)
    optimizer = torch.optim.Adam(net.parameters())
    inputs, targets = torch.randn(16, 32), torch.randint(0, 10, (16,))

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(net(inputs.to(device)), targets.to(device)).backward()
        optimizer.step()

    return step, net, optimizer


ROWS = {  # name -> (job, GPUs, shapes only)
    "ResNet-18, batch 64": (resnet18_b64, 1, False),
    "ResNet-18, batch 64, DataParallel on 4": (resnet18_b64, 4, False),
    "GPT, batch 8, AdamW": (gpt_b8, 1, False),
    "ResNet-18, batch 64, shapes only": (resnet18_b64, 1, True),
    "tiny MLP, batch 16, Adam": (tiny_mlp, 1, False),
}


def cpu_seconds(step, steps: int) -> float:
    """CPU seconds of `steps` steps, all threads of this process."""
    start = time.process_time()
    for _ in range(steps):
        step()
    return time.process_time() - start


def steps_for(step, seconds: float) -> int:
    """How many steps take about `seconds` of CPU time, two at least: a shorter time could not be read well."""
    step()
    return max(2, round(seconds / max(1e-6, cpu_seconds(step, 3) / 3)))


def under_monitor(step, net, optimizer, steps: int) -> tuple[float, float, float]:
    """CPU seconds of `steps` steps under the monitor, of those with all around them, and events of a step on GPU 0."""
    start = time.process_time()
    with MemoryMonitor() as monitor:
        monitor.watch(net, optimizer)
        inside = cpu_seconds(step, steps)
    monitor.at_peak(0)
    return inside, time.process_time() - start, monitor.run(0).last / steps


def measured(job, gpus: int, shapes_only: bool, rounds: int, seconds: float) -> tuple[list[float], list[float], float]:
    """Per round the ratio of the step alone, and that with entering and leaving; events per step."""
    alone, whole, events = [], [], 0.0
    with virtual_gpus(gpus, shapes_only=shapes_only):
        step, net, optimizer = job("cuda", gpus)
        steps = steps_for(step, seconds)
        before = cpu_seconds(step, steps)
        for _ in range(rounds):
            gc.collect()  # else whose garbage it is would be chance
            inside, around, events = under_monitor(step, net, optimizer, steps)
            gc.collect()
            after = cpu_seconds(step, steps)
            alone.append(2 * inside / (before + after))
            whole.append(2 * around / (before + after))
            before = after
    return alone, whole, events


def show(ratios: list[float]) -> str:
    """'1.02 (1.01 to 1.04)': the median and the quartiles."""
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def table(rounds: int, seconds: float):
    """A row per job, as soon as it is known."""
    yield "| training step on virtual GPUs | monitored / not | with entering, leaving, peak | events per step |"
    yield "|---|---|---|---|"
    for name, row in ROWS.items():
        alone, whole, events = measured(*row, rounds, seconds)
        yield f"| {name} | {show(alone)} | {show(whole)} | {events:.0f} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=15, help="how often each row is measured, 2 or more (default 15)")
    parser.add_argument("--seconds", type=float, default=0.5, help="of CPU time between two changes (default 0.5)")
    parser.add_argument("--threads", type=int, default=1, help="threads of PyTorch (default 1)")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"torch {torch.__version__}, {options.threads} threads, {options.rounds} rounds\n")
    for line in table(options.rounds, options.seconds):
        print(line, flush=True)


if __name__ == "__main__":
    main()
