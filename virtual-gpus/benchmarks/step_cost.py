"""What virtual GPUs cost: ratios of training steps, taken in one run, printed as tables.

    python -m benchmarks.step_cost                # all tables, about 6 minutes on two cores that do nothing else
    python -m benchmarks.step_cost --rounds 1     # a quick look
    python -m benchmarks.step_cost --table races  # only one of them
    python -m benchmarks.step_cost --cpu-time --threads 1    # on a machine that does other things as well

Table "steps": a step on one virtual GPU, and the same step on the CPU under a dispatch mode that does nothing (see
`operator_cost`), under MemTracker of PyTorch and on FakeGPU where that is found, against the plain CPU step.
Table "races": the step on one virtual GPU with `check_races`, against the step without.
Table "gpus": nn.DataParallel over 1 to 16 virtual GPUs at a fixed total batch, against one virtual GPU.
Each round times all columns one after the other, so that a busy machine slows them alike; the median of the rounds'
ratios is shown, with the smallest and the largest.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from virtual_gpus import virtual_gpus

from benchmarks.jobs import JOBS, resnet18_b64
from benchmarks.operator_cost import COLUMNS, DoNothing, fakegpu_process
from benchmarks.reference.measure import mem_tracker

LEAST = 0.5  # seconds of a timing, so that short steps are timed more often

_now = time.perf_counter


def seconds(step, steps: int) -> float:
    """Seconds of one step: the fastest of at least `steps`, after one that warms up."""
    step()
    taken = []
    while len(taken) < steps or sum(taken) < LEAST:
        start = _now()
        step()
        taken.append(_now() - start)
    return min(taken)


def on_cpu(job, steps: int) -> float:
    """The plain step."""
    return seconds(job("cpu")[0], steps)


def on_virtual_gpus(job, steps: int, gpus: int = 1) -> float:
    """The same step on virtual GPUs, under nn.DataParallel when there are several."""
    with virtual_gpus(gpus):
        return seconds(job("cuda", gpus)[0], steps)


def checked(job, steps: int) -> float:
    """The same step on a virtual GPU that looks for races."""
    with virtual_gpus(1, check_races=True):
        return seconds(job("cuda", 1)[0], steps)


def under_a_mode(job, steps: int) -> float:
    """The same step on the CPU under a dispatch mode that hands every operator on."""
    with DoNothing():
        return seconds(job("cpu")[0], steps)


def under_mem_tracker(job, steps: int) -> float:
    """The same step on the CPU while PyTorch's own memory tracker watches."""
    step, net, optimizer = job("cpu")
    with mem_tracker(net, optimizer) as tracker:

        def tracked() -> None:
            step()
            tracker.reset_mod_stats()  # it refuses a second step otherwise

        return seconds(tracked, steps)


def on_fakegpu(job, steps: int, now: Callable[[], float]) -> float:
    """The same step where FakeGPU is on, by the clock `now`."""
    global _now
    _now = now
    return seconds(job("cuda")[0], steps)


def ratios(baseline, others, rounds: int) -> list[list[float]]:
    """For each of `others` its ratio to `baseline`, once per round."""
    found = [[] for _ in others]
    for _ in range(rounds):
        base = baseline()
        for column, other in zip(found, others, strict=True):
            column.append(other() / base)
    return found


def show(values: list[float]) -> str:
    """'1.09 (1.07 to 1.12)'."""
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def table_of_steps(rounds: int, steps: int) -> list[str]:
    """One virtual GPU, and the other ways to watch a step, against the plain CPU step."""
    columns = {
        "one virtual GPU": on_virtual_gpus,
        "do-nothing mode": under_a_mode,
        "MemTracker": under_mem_tracker,
    }
    with fakegpu_process() as run:
        if "FakeGPU" in COLUMNS:
            columns["FakeGPU"] = lambda job, steps: run(on_fakegpu, job, steps, _now)
        lines = ["| training step | " + " | ".join(f"{name} / CPU" for name in columns) + " |"]
        lines.append("|---" * (1 + len(columns)) + "|")
        for name, job in JOBS.items():
            others = [lambda job=job, way=way: way(job, steps) for way in columns.values()]
            found = ratios(lambda job=job: on_cpu(job, steps), others, rounds)
            lines.append(f"| {name} | " + " | ".join(map(show, found)) + " |")
    return lines


def table_of_races(rounds: int, steps: int) -> list[str]:
    """One virtual GPU that looks for races, against one that does not."""
    lines = ["| training step | with check_races / without |", "|---|---|"]
    for name, job in JOBS.items():
        without, looking = (partial(way, job, steps) for way in (on_virtual_gpus, checked))
        lines.append(f"| {name} | {show(ratios(without, [looking], rounds)[0])} |")
    return lines


def table_of_gpus(rounds: int, steps: int, counts=(2, 4, 8, 16)) -> list[str]:
    """DataParallel at a fixed total batch: every replica runs in turn, so the cost is that of more, smaller steps."""
    others = [lambda n=n: on_virtual_gpus(resnet18_b64, steps, n) for n in counts]
    columns = ratios(lambda: on_virtual_gpus(resnet18_b64, steps), others, rounds)
    lines = ["| ResNet-18, total batch 64 | step / step on one virtual GPU |", "|---|---|", "| 1 GPU | 1.00 |"]
    return lines + [f"| {n} GPUs, DataParallel | {show(c)} |" for n, c in zip(counts, columns, strict=True)]


def main() -> None:
    """Print the tables."""
    tables = {"steps": table_of_steps, "races": table_of_races, "gpus": table_of_gpus}
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5, help="how often each column is timed (default 5)")
    parser.add_argument(
        "--steps", type=int, default=5, help="steps per timing at least, of which the fastest counts (default 5)"
    )
    parser.add_argument("--table", choices=tables, help="print only this one")
    parser.add_argument("--threads", type=int, default=2, help="threads of PyTorch (default 2)")
    parser.add_argument("--cpu-time", action="store_true", help="time of the processor instead of the wall's")
    options = parser.parse_args()
    if options.cpu_time:
        global _now
        _now = time.process_time
    torch.set_num_threads(options.threads)
    print(f"torch {torch.__version__}, {options.threads} threads, {options.rounds} rounds")
    for name in [options.table] if options.table else tables:
        print("", *tables[name](options.rounds, options.steps), sep="\n", flush=True)


if __name__ == "__main__":
    main()
