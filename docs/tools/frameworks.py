"""What a framework costs: steps per second of DDP by a plain loop, Lightning, Accelerate and transformers' Trainer.

    python -m docs.tools.frameworks                 # some minutes on two cores; needs the group `frameworks`
    python -m docs.tools.frameworks --rounds 1      # a quick look

Two ranks train the network of lesson 10 on images in memory, on the CPU and on virtual GPUs. Each round times all four,
one after the other, in the same two processes, and begins with another one. The table has medians over the rounds. The
ratio to the plain loop, with the smallest and the largest, and the last column are of rank 0's CPU seconds, which
other programs on the computer disturb less than the time. The rows "nothing" train a single number, so that what is
left of a step is the loop itself.
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from virtual_gpus import virtual_gpus

from helpers.parallel import launch

BATCH, WARM_UP = 32, 5  # images per rank, steps that are not timed


class Network(nn.Module):
    """The network of the lesson: images (N, 1, 28, 28), labels (N,) -> the mean loss, named as the Trainer asks."""

    def __init__(self) -> None:
        super().__init__()
        features = [nn.Conv2d(1, 32, 5, padding=2), nn.GroupNorm(8, 32), nn.ReLU(), nn.MaxPool2d(4)]
        classifier = [nn.Flatten(), nn.Linear(32 * 7 * 7, 128), nn.ReLU(), nn.Linear(128, 10)]
        self.layers = nn.Sequential(*features, *classifier)

    def forward(self, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": cross_entropy(self.layers(images), labels)}


class Nothing(nn.Module):
    """One weight, and a loss that hardly takes time: images and labels as above."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": self.weight * 1.0}


def images(steps: int, ranks: int) -> TensorDataset:
    """Random images and labels for so many steps of so many ranks."""
    count = steps * ranks * BATCH
    return TensorDataset(torch.rand(count, 1, 28, 28), torch.randint(10, (count,)))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


class Watch:
    """The time and the CPU seconds of a step, after the first ones: call `tick` after each step."""

    def __init__(self) -> None:
        self.times: list[tuple[float, float]] = []

    def tick(self, *_: object, **__: object) -> None:
        self.times.append((time.perf_counter(), time.process_time()))

    @property
    def seconds(self) -> tuple[float, float]:
        """The medians of the timed steps: time, and CPU seconds of this process."""
        steps = list(zip(self.times[WARM_UP - 1 :], self.times[WARM_UP:], strict=False))
        time_of_a_step = statistics.median(after[0] - before[0] for before, after in steps)
        return time_of_a_step, statistics.median(after[1] - before[1] for before, after in steps)


def plain(model: nn.Module, data: TensorDataset, device: str, watch: Watch) -> None:
    """The loop of ddp.py."""
    loader = DataLoader(data, BATCH, sampler=DistributedSampler(data), drop_last=True)
    model.to(device)
    optimizer, ddp_model = sgd(model), DistributedDataParallel(model)
    model.train()
    for inputs, labels in loader:
        inputs, labels = inputs.to(device), labels.to(device)
        optimizer.zero_grad()
        ddp_model(inputs, labels)["loss"].backward()
        optimizer.step()
        watch.tick()


def lightning(model: nn.Module, data: TensorDataset, device: str, watch: Watch) -> None:
    """Lightning's Trainer, without logs, bars and checkpoints."""
    import lightning as L

    class Job(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: list[Tensor], index: int) -> Tensor:
            return self.model(*batch)["loss"]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return sgd(self.model)

        on_train_batch_end = watch.tick

    off = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    kind, ranks = "gpu" if device == "cuda" else "cpu", torch.distributed.get_world_size()
    trainer = L.Trainer(accelerator=kind, devices=ranks, strategy="ddp", max_epochs=1, **off)
    trainer.fit(Job(), DataLoader(data, BATCH, shuffle=True, drop_last=True))


def accelerate(model: nn.Module, data: TensorDataset, device: str, watch: Watch) -> None:
    """The plain loop with Accelerate."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=device == "cpu")
    loader = DataLoader(data, BATCH, shuffle=True, drop_last=True)
    model, optimizer, loader = accelerator.prepare(model, sgd(model), loader)
    model.train()
    for inputs, labels in loader:
        optimizer.zero_grad()
        accelerator.backward(model(inputs, labels)["loss"])
        optimizer.step()
        watch.tick()


def transformers(model: nn.Module, data: TensorDataset, device: str, watch: Watch) -> None:
    """The Trainer of transformers, with the optimizer of the others and without logs and checkpoints."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Ticks(TrainerCallback):
        on_step_end = watch.tick

    def collate(samples: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
        inputs, labels = zip(*samples, strict=True)
        return {"images": torch.stack(inputs), "labels": torch.stack(labels)}

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, per_device_train_batch_size=BATCH, num_train_epochs=1, max_grad_norm=0, report_to="none",
            lr_scheduler_type="constant", logging_strategy="no", save_strategy="no", disable_tqdm=True,
            dataloader_drop_last=True, ddp_find_unused_parameters=False, use_cpu=device == "cpu",
        )  # fmt: skip
        trainer = Trainer(model, arguments, collate, data, optimizers=(sgd(model), None), callbacks=[Ticks])
        trainer.train()


WAYS: tuple[Callable, ...] = (plain, lightning, accelerate, transformers)


def in_rank(rank: int, network: type[nn.Module], steps: int, first: int, device: str) -> dict[str, tuple]:
    """All ways in this rank, `first` first: what `Watch` measures, by name."""
    sys.stdout = open("/dev/null", "w")  # noqa: SIM115 - the Trainer prints a summary
    data, found = images(WARM_UP + steps, torch.distributed.get_world_size()), {}
    for way in (*WAYS[first:], *WAYS[:first]):
        torch.manual_seed(0)
        watch = Watch()
        way(network(), data, device, watch)
        found[way.__name__] = watch.seconds
    return found


def rows(network: type[nn.Module], device: str, rounds: int, steps: int, ranks: int = 2) -> Iterator[str]:
    """The table's rows of one network on one kind of device."""
    times = []
    for number in range(rounds):
        arguments = network, steps, number % len(WAYS), device
        times.append(launch(in_rank, *arguments, ranks=ranks, gpus=device == "cuda", show=False, timeout=None)[0])
    where = "virtual GPUs" if device == "cuda" else "CPU"
    for way in WAYS:
        name = way.__name__
        seconds = statistics.median(found[name][0] for found in times)
        ratios = [found[name][1] / found["plain"][1] for found in times]
        shown = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        extra = 1e3 * statistics.median(found[name][1] - found["plain"][1] for found in times)
        yield f"| {where} | {network.__name__.lower()} | {name} | {1 / seconds:.0f} | {shown} | {extra:.2f} ms |"


def table(rounds: int, steps: int) -> Iterator[str]:
    yield "| device | trains | loop | steps per second | CPU seconds / plain | CPU per step beyond plain |"
    yield "|---|---|---|---|---|---|"
    for network in (Network, Nothing):
        yield from rows(network, "cpu", rounds, steps)
        with virtual_gpus(2):
            yield from rows(network, "cuda", rounds, steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=8, help="how often each is timed (default 8)")
    parser.add_argument("--steps", type=int, default=60, help="timed steps of each (default 60)")
    options = parser.parse_args()
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", ACCELERATE_LOG_LEVEL="ERROR")
    logging.disable(logging.INFO)
    warnings.filterwarnings("ignore", module="lightning")
    import accelerate
    import lightning
    import transformers

    packages = ", ".join(f"{each.__name__} {each.__version__}" for each in (torch, accelerate, lightning, transformers))
    print(f"{packages}, {options.rounds} rounds of {options.steps} steps, 2 ranks\n")
    for line in table(options.rounds, options.steps):
        print(line, flush=True)


if __name__ == "__main__":
    main()
