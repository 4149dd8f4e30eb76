"""What `launch` costs: an empty function on forked ranks, against `torch.multiprocessing.start_processes`.

    python -m tests.benchmarks.launch_overhead               # a minute on two cores
    python -m tests.benchmarks.launch_overhead --rounds 2    # a quick look

Two comparisons: with the bare processes, which can do nothing together, and with processes that open a process group
and close it, as `launch` does for them. Each round times all three one after the other; the median of the rounds'
ratios is shown, with the smallest and the largest, and the median times.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from benchmarks.step_cost import show

from helpers.parallel import launch


def empty(rank) -> None:
    """Nothing."""


def in_a_group(rank, ranks, file) -> None:
    """Nothing, in a process group."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=ranks)
    dist.barrier()  # a rank that leaves while another is still connecting would fail that one
    dist.destroy_process_group()


def launched(ranks: int) -> None:
    launch(empty, ranks=ranks, show=False)


def bare(ranks: int) -> None:
    mp.start_processes(empty, nprocs=ranks, start_method="fork")


def grouped(ranks: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(in_a_group, args=(ranks, f"{folder}/meet"), nprocs=ranks, start_method="fork")


def seconds(run, ranks: int) -> float:
    """Wall time of one run."""
    start = time.perf_counter()
    run(ranks)
    return time.perf_counter() - start


def table(counts: list[int], rounds: int) -> list[str]:
    """A row per number of ranks."""
    titles = "| ranks | launch | start_processes, with a group | bare | launch / with a group | launch / bare |"
    lines = [titles, "|---|---|---|---|---|---|"]
    for ranks in counts:
        runs = (launched, grouped, bare)
        for run in runs:
            run(ranks)  # the first time is slower for all of them
        times = [[seconds(run, ranks) for run in runs] for _ in range(rounds)]
        middles = [statistics.median(column) for column in zip(*times, strict=True)]
        cells = [f"{1000 * middle:.0f} ms" for middle in middles]
        cells += [show([row[0] / row[column] for row in times]) for column in (1, 2)]
        lines.append(f"| {ranks} | {' | '.join(cells)} |")
    return lines


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=9, help="how often each is timed (default 9)")
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2, 4], help="numbers of ranks (default 1 2 4)")
    options = parser.parse_args()
    print(f"torch {torch.__version__}, {options.rounds} rounds\n")
    print("\n".join(table(options.ranks, options.rounds)))


if __name__ == "__main__":
    main()
