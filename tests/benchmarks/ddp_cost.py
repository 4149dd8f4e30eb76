"""What DistributedTrainer costs: an epoch on two ranks against other loops for the same job, as ratios.

    python -m tests.benchmarks.ddp_cost               # about 5 minutes on two idle cores
    python -m tests.benchmarks.ddp_cost --rounds 1    # a quick look

Against a loop written by hand around DistributedDataParallel, which adds up loss and right answers, as all do; against
Lightning's and Accelerate's loops, where they are installed (they are not among the course's packages); and against
one process: how many times the samples per second of one rank two ranks get through, with one thread each.

In each round the loops take turns in the same ranks, so that a busy machine slows them alike, and the median epoch of
each counts; the median of the rounds' ratios is shown, with the smallest and the largest. Processor time, of rank 0
with all its threads, is what the loop itself does; it leaves out waiting, and with it most of what else runs on the
machine.

The ranks keep the memory that they free. Otherwise glibc gives it back and takes it again, or does not, as the chance
of addresses has it: the same epoch of the BERT, by hand, had 23,000 page faults in one run and 4 in the next, and took
197 and 158 ms.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib.metadata
import importlib.util
import logging
import statistics
import time
import warnings

import torch
import torch.distributed as dist
from benchmarks.step_cost import show
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from helpers.data import random_images, random_tokens
from helpers.models import bert_small, group_norm, small_resnet
from helpers.parallel.launching import launch
from helpers.parallel.ranks import rank_loader
from helpers.train.loops import DistributedTrainer

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
    made = DistributedTrainer(model, optimizer, LOSS, rank_loader(samples, batch), "cpu", log=None, progress=False)
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


def accelerate(job):
    """Accelerate shares out the batches itself."""
    from accelerate import Accelerator

    model, optimizer, samples, batch = parts(job)
    accelerator = Accelerator(cpu=True)
    loader = DataLoader(samples, batch // dist.get_world_size(), shuffle=True)
    network, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    def epoch_of():
        network.train()
        total = torch.zeros(2)
        for inputs, labels in loader:
            optimizer.zero_grad()
            loss, right = loss_and_right(network(inputs), labels)
            accelerator.backward(loss)
            optimizer.step()
            total += torch.stack([loss.detach(), right])
        return total.tolist()

    return lambda epoch: seconds(epoch_of)


def lightning(job):
    """Lightning's `fit`: the seconds between the beginning and the end of its training epoch."""
    import lightning as library

    model, optimizer, samples, batch = parts(job)

    class Module(library.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = model

        def training_step(self, pair, _):
            loss, right = loss_and_right(self.model(pair[0]), pair[1])
            self.log_dict({"loss": loss, "right": right}, on_step=False, on_epoch=True)
            return loss

        def configure_optimizers(self):
            return optimizer

    class Clock(library.Callback):
        def on_train_epoch_start(self, *_):
            dist.barrier()
            self.start = time.perf_counter()

        def on_train_epoch_end(self, *_):
            dist.barrier()
            self.taken = time.perf_counter() - self.start

    module = Module()
    loader = DataLoader(samples, batch // dist.get_world_size(), shuffle=True)

    def epoch_of(epoch):
        clock, quiet = Clock(), dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
        fit = library.Trainer(
            accelerator="cpu", strategy="ddp", devices=dist.get_world_size(), max_epochs=1, callbacks=[clock],
            enable_model_summary=False, **quiet,
        )  # fmt: skip
        fit.fit(module, loader)
        return clock.taken

    return epoch_of


OURS, BY_HAND = "DistributedTrainer", "by hand"
LOOPS = {OURS: trainer, BY_HAND: by_hand, "Accelerate": accelerate, "Lightning": lightning}


def installed() -> dict:
    """The loops that can run here."""
    needs = {"Accelerate": "accelerate", "Lightning": "lightning"}
    return {name: loop for name, loop in LOOPS.items() if name not in needs or importlib.util.find_spec(needs[name])}


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
    logging.disable(logging.WARNING)
    runs = {name: loop(job) for name, loop in loops.items()}
    taken = [{name: timed(run, number) for name, run in runs.items()} for number in range(epochs + 1)]
    return {name: tuple(map(statistics.median, zip(*(each[name] for each in taken[1:]), strict=True))) for name in runs}


def timed(run, number: int) -> tuple[float, float]:
    """(seconds as `run` measures them, processor seconds of this process)."""
    start = time.process_time()
    return run(number), time.process_time() - start


def table(rounds: int, epochs: int, jobs: dict = JOBS) -> list[str]:
    """A row per job."""
    loops = installed()
    others = [name for name in loops if name != OURS]
    heads = [f"time / {name}'s" for name in others] + [f"processor time / {BY_HAND}'s"]
    lines = [
        "| an epoch of DistributedTrainer on 2 ranks | "
        + " | ".join(heads)
        + " | samples per second / one process's |",
        "|---" * (len(others) + 3) + "|",
    ]
    for name, job in jobs.items():
        pairs = [(times(job, loops, epochs, 2), times(job, {OURS: trainer}, epochs, 1)) for _ in range(rounds)]
        columns = [[two[OURS][0] / two[other][0] for two, _ in pairs] for other in others]
        columns.append([two[OURS][1] / two[BY_HAND][1] for two, _ in pairs])
        columns.append([one[OURS][0] / two[OURS][0] for two, one in pairs])
        lines.append(f"| {name} | " + " | ".join(map(show, columns)) + " |")
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
    packages = [name for name in ("accelerate", "lightning") if importlib.util.find_spec(name)]
    versions = [f"{name} {importlib.metadata.version(name)}" for name in ("torch", *packages)]
    print(f"{', '.join(versions)}; gloo, one thread per rank, {options.rounds} rounds\n")
    print("\n".join(table(options.rounds, options.epochs)))


if __name__ == "__main__":
    main()
