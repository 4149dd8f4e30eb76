"""How soon the memory explorer answers, and how near its formula is to runs with shapes only.

    python -m tests.benchmarks.explorer_time                 # answer times, about a minute
    python -m tests.benchmarks.explorer_time --points 100    # the formula on random jobs as well, some minutes

An answer is everything from a slider's event to the new picture in its widget: the formula, whether it fits, and the
drawing. It is compared with one shapes-only run of the same job on virtual GPUs (model, optimizer, two steps), one
after the other; medians of the rounds, with the smallest and the largest. Then the live panel: processor seconds of a
look, which comes every half second, as a share of that.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from unittest import mock

import torch
from benchmarks.step_cost import show
from torch import nn
from virtual_gpus import virtual_gpus

from helpers.data import random_tokens
from helpers.measure import peak_memory
from helpers.models import Bert
from helpers.parallel.loss import DataParallelCriterion, DataParallelModel, LossInForward, count_labels, total
from helpers.show.widgets.bert_memory import METHODS, OPTIMIZERS, Job, step_memory
from helpers.show.widgets.cards import card
from helpers.show.widgets.explorer import SLIDERS, MemoryExplorer
from helpers.show.widgets.live_panel import LivePanel
from helpers.train import DataParallelTrainer, Trainer

KINDS = ("K80", "TITAN Xp", "V100", "T4", "A100", "H200")
PLENTY = "200000 GiB"  # of which no job asks for all
JOBS = {
    "DataParallel on 4, batch 200": Job(),
    "parallel loss on 4, batch 200": Job(method="parallel loss"),
    "parallel loss on 8, 24 layers, batch 400": Job(gpus=8, batch=400, layers=24, method="parallel loss"),
}
_OPTIMIZERS = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "SGD with momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "Adam": torch.optim.Adam,
    "AdamW": torch.optim.AdamW,
}


class Words(nn.Module):
    """The loss of lesson 03's cures: logits (N, T, V) and labels (N, T)."""

    def forward(self, logits, labels):
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def training_step(job: Job):
    """The job's step as the lessons take it, on the virtual GPUs that are on: a function of tokens and labels."""
    model = Bert(job.vocabulary, job.hidden, job.layers, job.heads, job.length).to("cuda:0")
    optimizer = _OPTIMIZERS[job.optimizer](model.parameters())
    parts, gpus = (model, optimizer, nn.CrossEntropyLoss(), []), list(range(job.gpus))
    if job.method == "one GPU":
        return Trainer(*parts, "cuda:0").step
    if job.method in ("DataParallel", "output_device=1"):
        output = f"cuda:{int(job.method != 'DataParallel')}"
        return DataParallelTrainer(*parts, [f"cuda:{gpu}" for gpu in gpus], output).step
    if job.method == "parallel loss":
        net, criterion = DataParallelModel(model, gpus), DataParallelCriterion(Words(), gpus, weight=count_labels)
        return _plain_step(optimizer, lambda tokens, labels: criterion(net(tokens), labels))
    net = nn.DataParallel(LossInForward(model, Words(), weight=count_labels), gpus)
    return _plain_step(optimizer, lambda tokens, labels: total(net(tokens, labels)))


def _plain_step(optimizer, loss):
    def step(tokens, labels) -> None:
        optimizer.zero_grad()
        loss(tokens, labels).backward()
        optimizer.step()

    return step


def run(job: Job, memory: int | str = PLENTY, steps: int = 2) -> list[int]:
    """Steps with shapes only on virtual GPUs of the job's kind: the peak of every GPU in the last."""
    version = ".".join(map(str, job.card.torch))
    with virtual_gpus(job.gpus, kind=job.card.kind, memory=memory, shapes_only=True, torch_version=version):
        step, batch = training_step(job), random_tokens(job.batch, job.length, job.vocabulary)
        for _ in range(steps - 1):
            step(*batch)
        return [reading.peak_allocated for reading in peak_memory(lambda: step(*batch))]


# ---- answer times --------------------------------------------------------------------------------------------------


def seconds(function) -> float:
    """Wall seconds of one call."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def answer(explorer: MemoryExplorer) -> float:
    """Seconds from a slider's event to the new picture: the batch moves and comes back, half of both."""
    slider = explorer.controls["batch"]
    batch, before = slider.value, explorer.words

    def there_and_back() -> None:
        slider.value = batch + slider.step
        assert explorer.words != before
        slider.value = batch

    return seconds(there_and_back) / 2


def answer_times(job: Job, rounds: int) -> tuple[list[float], list[float]]:
    """Per round: seconds of an answer, and as a ratio to a shapes-only run of the same job."""
    explorer = MemoryExplorer(job)
    answer(explorer)  # the first one also fills caches
    times = [(answer(explorer), seconds(lambda: run(job))) for _ in range(rounds)]
    return [one for one, _ in times], [one / other for one, other in times]


def table(rounds: int) -> list[str]:
    """A row per job."""
    lines = ["| job | answer, ms | answer / shapes-only run |", "|---|---|---|"]
    for name, job in JOBS.items():
        times, ratios = answer_times(job, rounds)
        shares = sorted(ratios)
        lines.append(
            f"| {name} | {show([1000 * each for each in times])} | "
            f"{shares[len(shares) // 2]:.4f} ({shares[0]:.4f} to {shares[-1]:.4f}) |"
        )
    return lines


def look_share(gpus: int = 4, looks: int = 20, every: float = 0.5) -> float:
    """Processor seconds of the live panel per second of a training."""
    panel = LivePanel(every)
    panel._picture = mock.Mock()
    with virtual_gpus(gpus):
        start = time.process_time()
        for _ in range(looks):
            panel._look(list(range(gpus)))
        return (time.process_time() - start) / looks / every


# ---- the formula ---------------------------------------------------------------------------------------------------


def random_job(numbers: random.Random, most: int | None = None) -> Job:
    """A job from anywhere on the sliders, small values as often as large ones. `most`: GPUs x layers."""
    while True:
        values = {name: _anywhere(numbers, *slider[1:]) for name, slider in SLIDERS.items()}
        method, optimizer = numbers.choice(METHODS), numbers.choice(list(OPTIMIZERS))
        if method == "output_device=1" and values["gpus"] == 1:
            continue
        if most is None or values["gpus"] * values["layers"] <= most:
            return Job(**values, method=method, optimizer=optimizer, card=card(numbers.choice(KINDS)))


def _anywhere(numbers: random.Random, low: int, high: int, step: int) -> int:
    value = math.exp(numbers.uniform(math.log(low), math.log(high)))
    return low + round((value - low) / step) * step


def errors(job: Job) -> list[float]:
    """Per GPU: the formula's peak over the run's, less 1; GPUs without work must have none in both."""
    pairs = zip(step_memory(job), run(job), strict=True)
    return [gpu.peak / peak - 1 if peak else float(gpu.peak > 0) for gpu, peak in pairs]


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=7, help="how often each is timed (default 7)")
    parser.add_argument("--points", type=int, default=0, help="random jobs to run beside the formula (default 0)")
    parser.add_argument("--seed", type=int, default=0, help="of the random jobs (default 0)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, one thread, {options.rounds} rounds\n")
    print("\n".join(table(options.rounds)))
    print(f"\nlive panel, 4 GPUs: {100 * look_share():.2f} % of a processor")
    if options.points:
        numbers = random.Random(options.seed)
        found = [(max(errors(job), key=abs), job) for job in (random_job(numbers) for _ in range(options.points))]
        worst, job = max(found, key=lambda pair: abs(pair[0]))
        within = sum(abs(error) <= 0.01 for error, _ in found)
        print(f"\nformula: worst of {len(found)} random jobs {100 * worst:+.2f} % ({job}); {within} within 1 %")


if __name__ == "__main__":
    main()
