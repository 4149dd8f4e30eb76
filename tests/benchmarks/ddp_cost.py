"""What DistributedTrainer costs: an epoch on two ranks against a loop written by hand for the same job, as ratios.

    python -m tests.benchmarks.ddp_cost               # about 3 minutes on two idle cores
    python -m tests.benchmarks.ddp_cost --rounds 1    # a quick look

The loop written by hand adds up loss and correct answers, too. A second column compares with one process: how many
times the samples per second of one rank two ranks get through, with one thread each.

In each round the loops take turns in the same ranks, so that a busy machine slows them alike, and the median epoch of
each counts; the median of the rounds' ratios is shown, with the smallest and the largest. Processor time, of rank 0
with all its threads, is what the loop itself does; it leaves out waiting, and with it most of what else runs on the
machine.

The ranks keep the memory that they free. Otherwise glibc may return it to the system and take it again: the same epoch
of the BERT, by hand, had 23,000 page faults in one run and 4 in the next, and took 197 and 158 ms.

On two cores with torch 2.15, an epoch takes 1.03 times a loop written by hand, for a small ResNet and for a small BERT
with 64 texts per batch. The exact mean over all ranks' labels needs a collective per step: with 16 texts, where a step
takes 17 ms, the ratio is 1.06 (1.03 to 1.09 in seven runs).
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import statistics
import time
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from helpers.data import random_images, random_tokens
from helpers.models import bert_small, group_norm, small_resnet
from helpers.parallel.launching import launch
from helpers.parallel.ranks import rank_loader
from helpers.train import DistributedTrainer

LOSS = nn.CrossEntropyLoss()
JOBS = {  # name -> (model, samples, batch of all ranks together)
    "ResNet-10, 32 x 32, batch 32": (lambda: small_resnet(norm=group_norm), lambda: random_images(256), 32),
    "BERT, 64 words, batch 64": (lambda: bert_small(2000, 64, dropout=0.0), lambda: random_tokens(512, 64, 2000), 64),
    "BERT, 64 words, batch 16": (lambda: bert_small(2000, 64, dropout=0.0), lambda: random_tokens(128, 64, 2000), 16),
}


def parts(job):
    """A model, its optimizer, the samples and this rank's batch."""
    build, data, batch = job
    torch.manual_seed(0)
    model = build()
    samples = TensorDataset(*data())
    return model, torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9), samples, batch


def loss_and_right(outputs, labels):
    """The mean loss, with its graph, and how many answers were right."""
    return LOSS(outputs.flatten(0, -2), labels.flatten()), (outputs.detach().argmax(-1) == labels).sum().float()


# ---- loops: each gives a function that trains an epoch and returns its seconds ---------------------------------------


def seconds(act, *arguments) -> float:
    """Of `act`, from when all ranks are ready until the slowest is done."""
    dist.barrier()
    start = time.perf_counter()
    act(*arguments)
    dist.barrier()
    return time.perf_counter() - start


def trainer(job):
    """The course's."""
    model, optimizer, samples, batch = parts(job)
    made = DistributedTrainer(model, optimizer, LOSS, rank_loader(samples, batch), "cpu", log=None)
    return lambda epoch: seconds(made.train_epoch)


def by_hand(job):
    """As in PyTorch's tutorials."""
    model, optimizer, samples, batch = parts(job)
    network = DistributedDataParallel(model)
    sampler = DistributedSampler(samples)
    loader = DataLoader(samples, batch // dist.get_world_size(), sampler=sampler)

    def epoch_of(number):
        sampler.set_epoch(number)
        network.train()
        total = torch.zeros(2)
        for inputs, labels in loader:
            optimizer.zero_grad()
            loss, right = loss_and_right(network(inputs), labels)
            loss.backward()
            optimizer.step()
            total += torch.stack([loss.detach(), right])
        return total.tolist()

    return lambda epoch: seconds(epoch_of, epoch)


OURS, BY_HAND = "DistributedTrainer", "by hand"
LOOPS = {OURS: trainer, BY_HAND: by_hand}


# ---- rounds ----------------------------------------------------------------------------------------------------------


def keep_freed_memory() -> None:
    """Let malloc give nothing back to the system, where it is glibc's."""
    trim_threshold, mmap_max = -1, -4  # M_TRIM_THRESHOLD and M_MMAP_MAX of malloc.h
    with contextlib.suppress(AttributeError, OSError, TypeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(trim_threshold, 2**31 - 1)
        mallopt(mmap_max, 0)


def median_epoch(job, loops: dict, epochs: int) -> dict[str, tuple[float, float]]:
    """(seconds, processor seconds), each the median of the loop's epochs after one that warms up; called in a rank.

    The loops take turns.
    """
    keep_freed_memory()
    warnings.simplefilter("ignore")
    runs = {name: loop(job) for name, loop in loops.items()}
    taken = [{name: timed(run, number) for name, run in runs.items()} for number in range(epochs + 1)]
    return {name: tuple(map(statistics.median, zip(*(each[name] for each in taken[1:]), strict=True))) for name in runs}


def timed(run, number: int) -> tuple[float, float]:
    """(seconds as `run` measures them, processor seconds of this process)."""
    start = time.process_time()
    return run(number), time.process_time() - start


def show(values: list[float]) -> str:
    """The median with the smallest and the largest value, as in "1.09 (1.07 to 1.12)"."""
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def table(rounds: int, epochs: int, jobs: dict = JOBS) -> list[str]:
    """A row per job."""
    lines = [
        "| an epoch of DistributedTrainer on 2 ranks | time / by hand's | processor time / by hand's "
        "| samples per second / one process's |",
        "|---|---|---|---|",
    ]
    for name, job in jobs.items():
        pairs = [(times(job, LOOPS, epochs, 2), times(job, {OURS: trainer}, epochs, 1)) for _ in range(rounds)]
        wall = [two[OURS][0] / two[BY_HAND][0] for two, _ in pairs]
        processor = [two[OURS][1] / two[BY_HAND][1] for two, _ in pairs]
        scaling = [one[OURS][0] / two[OURS][0] for two, one in pairs]
        lines.append(f"| {name} | {show(wall)} | {show(processor)} | {show(scaling)} |")
    return lines


def times(job, loops: dict, epochs: int, ranks: int) -> dict[str, tuple[float, float]]:
    """`median_epoch`, on the CPU."""
    return launch(lambda rank: median_epoch(job, loops, epochs), ranks=ranks, gpus=False, show=False, timeout=600)[0]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3, help="how often each loop is timed (default 3)")
    parser.add_argument("--epochs", type=int, default=20, help="of which the median counts (default 20)")
    options = parser.parse_args()
    print(f"torch {torch.__version__}; gloo, one thread per rank, {options.rounds} rounds\n")
    print("\n".join(table(options.rounds, options.epochs)))


if __name__ == "__main__":
    main()
