"""Four training steps in which GPUs wait, to be read from their timelines: exercise 2 of lesson 07.

    timelines = record_job("A")                    # {"A": timeline}; of B one for each rank
    faster = record_job("A", micro_batches=8)      # the same step with one argument changed

`JOBS` says in words what each is, and its arguments as they are. The steps run on two virtual GPUs of their own,
without values, so all times are modelled. (What makes them wait stands below; answer first.)
"""

from __future__ import annotations

from functools import cache, partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from helpers.gpus import modelled_gpus
from helpers.measure.timeline import Timeline, record_timeline
from helpers.parallel.launching import launch
from helpers.parallel.pipeline import Pipeline, one_f_one_b

__all__ = ["JOBS", "WaitingJob", "record_job"]


class WaitingJob(NamedTuple):
    """A step on two GPUs of `kind`. words: what it is; arguments: those that can be changed, with their values."""

    words: str
    kind: str
    arguments: dict


_TWO_STAGES = "a net in two stages, one per GPU, in one process"
JOBS = {
    "A": WaitingJob(_TWO_STAGES, "A100", {"micro_batches": 16, "fused": False}),
    "B": WaitingJob("DDP, a process per GPU", "A100", {"shares": (6144, 2048), "fused": False}),
    "C": WaitingJob(_TWO_STAGES, "A100", {"micro_batches": 1, "fused": False}),
    "D": WaitingJob(
        "a table of words' vectors on GPU 0, layers that take the mean of a text's vectors on GPU 1, in one process",
        "TITAN Xp", {"micro_batches": 4, "average_on": 1, "fused": False},
    ),
}  # fmt: skip


def record_job(name: str, **changes) -> dict[str, Timeline]:
    """The timelines of a step of job `name` of `JOBS`, after a warm-up, with `changes` of its arguments.

    micro_batches: how many the batch is cut into; fused: Adam in one kernel (else in some for each kind of
    arithmetic); shares: samples of each rank, 8,192 together; average_on: the GPU, 0 or 1, that takes the means. The
    same step is recorded once: the modelled clock would say the same again. Raises ValueError for another job, an
    argument that it does not have, and a value that makes no step of it.
    """
    if name not in JOBS:
        raise ValueError(f"There is no job {name!r}. Choose one of {', '.join(JOBS)}.")
    job = JOBS[name]
    arguments = job.arguments | {key: tuple(each) if isinstance(each, list) else each for key, each in changes.items()}
    for key, value in arguments.items():
        if key not in job.arguments:
            raise ValueError(f"Job {name} has no argument {key!r}, only {', '.join(job.arguments)}.")
        if type(value) is not type(job.arguments[key]) or not _POSSIBLE[key](value):
            raise ValueError(f"{key}={value!r} makes no step, {key}={job.arguments[key]!r} would.")
        if key == "shares" and sum(value) != 8192:
            raise ValueError(f"shares of {value} are another step: 8,192 samples together are asked for.")
    return dict(_recorded(name, tuple(arguments.items())))


_POSSIBLE = {
    "micro_batches": lambda count: 1 <= count <= 1024,
    "fused": lambda fused: True,
    "average_on": lambda gpu: gpu in (0, 1),
    "shares": lambda each: len(each) == 2 and all(type(share) is int and share > 0 for share in each),
}


@cache
def _recorded(name: str, arguments: tuple) -> dict[str, Timeline]:
    with modelled_gpus(2, JOBS[name].kind, "256 GiB") as gpus:
        found = _RUN[name](gpus, **dict(arguments))
    return {name: found} if isinstance(found, Timeline) else {f"{name}, rank {r}": each for r, each in enumerate(found)}


# ---- the steps ------------------------------------------------------------------------------------------------------


def _layers(count: int, width: int) -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(count)])


def _recorded_step(step, warm_up: int) -> Timeline:
    """Of `step`, after some: Adam's states are made in the first, and DDP orders its buckets after it."""
    for _ in range(warm_up):
        step()
    with record_timeline() as timeline:
        step()
    return timeline


def _stages(gpus, stages, inputs: Tensor, micro_batches: int, fused: bool) -> Timeline:
    pipeline = Pipeline(stages, gpus, one_f_one_b)
    adam, targets = torch.optim.Adam(pipeline.parameters(), fused=fused), torch.empty(len(inputs), device=gpus[1])

    def step():
        adam.zero_grad()
        pipeline.step(inputs, targets, _loss, micro_batches)
        adam.step()

    return _recorded_step(step, warm_up=1)


def _loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs.square().mean()


def _plain_stages(gpus, micro_batches: int, fused: bool, layers: int, width: int, batch: int) -> Timeline:
    with torch.device(gpus[0]):
        stages, inputs = [_layers(layers, width) for _ in gpus], torch.empty(batch, width)
    return _stages(gpus, stages, inputs, micro_batches, fused)


class _Mean(nn.Module):
    """The mean of a text's vectors: (texts, words, width) in, (texts, width) out."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


def _table(gpus, micro_batches: int, average_on: int, fused: bool) -> Timeline:
    with torch.device(gpus[0]):
        stages = [[nn.Embedding(50_000, 256)], [nn.Linear(256, 2048), nn.ReLU(), nn.Linear(2048, 2048)]]
        texts = torch.empty(4096, 64, dtype=torch.long)
    stages[average_on].insert(1 - average_on, _Mean())
    return _stages(gpus, [nn.Sequential(*each) for each in stages], texts, micro_batches, fused)


def _ranks(gpus, shares: tuple[int, int], fused: bool) -> list[Timeline]:
    return launch(_rank, shares, fused, ranks=2, show=False)


def _rank(rank: int, shares: tuple[int, int], fused: bool) -> Timeline:
    with torch.device(rank):
        net, inputs = _layers(6, 2048), torch.empty(shares[rank], 2048)
    ddp = DistributedDataParallel(net, device_ids=[rank])
    adam = torch.optim.Adam(ddp.parameters(), fused=fused)
    share = 2 * shares[rank] / sum(shares)  # DDP takes the mean over ranks, and each sample is to count the same

    def step():
        adam.zero_grad()
        (_loss(ddp(inputs), inputs) * share).backward()
        adam.step()

    return _recorded_step(step, warm_up=2)


_RUN = {
    "A": partial(_plain_stages, layers=3, width=512, batch=1024),
    "B": _ranks,
    "C": partial(_plain_stages, layers=6, width=2048, batch=4096),
    "D": _table,
}
