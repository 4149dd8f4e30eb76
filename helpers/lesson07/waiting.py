"""Four training steps in which GPUs wait, to be read from their timelines: exercise 2 of lesson 07.

    timelines = record_job("A")                    # {"A": timeline}; job B has one for each rank
    faster = record_job("A", micro_batches=8)      # the same step with one argument changed

`JOBS` describes each job and gives its arguments. The steps run on two virtual GPUs of their own, in shapes only, so
all times are modelled. Answer the exercise before you read on, because the code below shows what makes the GPUs wait.
"""

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from helpers.gpus import modelled_gpus
from helpers.measure.timeline import Timeline, record_timeline
from helpers.parallel.launching import launch
from helpers.parallel.pipeline import Pipeline, one_f_one_b


class WaitingJob(NamedTuple):
    """A step on two GPUs of `kind`. words: a description. arguments: those that can be changed, with their values."""

    words: str
    kind: str
    arguments: dict


_TWO_STAGES = "a model in two stages, one per GPU, in one process"
JOBS = {
    "A": WaitingJob(_TWO_STAGES, "A100", {"micro_batches": 16, "fused": False}),
    "B": WaitingJob("DDP, a process per GPU", "A100", {"shares": (6144, 2048), "fused": False}),
    "C": WaitingJob(_TWO_STAGES, "A100", {"micro_batches": 1, "fused": False}),
    "D": WaitingJob(
        "an embedding of words on GPU 0, layers that take the mean of each text's vectors on GPU 1, in one process",
        "TITAN Xp", {"micro_batches": 4, "average_on": 1, "fused": False},
    ),
}  # fmt: skip
_POSSIBLE = {
    "micro_batches": lambda count: type(count) is int and 1 <= count <= 1024,
    "fused": lambda fused: type(fused) is bool,
    "average_on": lambda gpu: gpu in (0, 1),
    "shares": lambda each: [type(share) for share in each] == [int, int] and sum(each) == 8192 and min(each) > 0,
}


def record_job(name: str, **changes) -> dict[str, Timeline]:
    """Return the timelines of a step of job `name` of `JOBS`, after a warm-up, with `changes` of its arguments.

    micro_batches: the number of micro-batches. fused: whether Adam runs as one kernel, otherwise as several for each
    kind of arithmetic. shares: samples of each rank, 8,192 together. average_on: the GPU, 0 or 1, that computes the
    means. The same step is recorded only once, because its modelled times are always equal. Raises ValueError for an
    argument that the job does not have, and for a value with which the step would be impossible or different work.
    """
    usual = JOBS[name].arguments
    for key, value in changes.items():
        if key not in usual:
            raise ValueError(f"Job {name} has no argument {key!r}. It has {', '.join(usual)}.")
        if not _POSSIBLE[key](value):
            raise ValueError(f"Job {name} cannot run with {key}={value!r}. {key}={usual[key]!r} would be possible.")
    return _recorded(name, **{key: tuple(each) if key == "shares" else each for key, each in (usual | changes).items()})


@cache
def _recorded(name: str, **arguments) -> dict[str, Timeline]:
    with modelled_gpus(2, JOBS[name].kind, "256 GiB") as gpus:
        if name == "B":
            ranks = launch(_rank, arguments["shares"], arguments["fused"], ranks=2, show=False)
            return {f"B, rank {rank}": timeline for rank, timeline in enumerate(ranks)}
        micro_batches, fused = arguments.pop("micro_batches"), arguments.pop("fused")
        with torch.device(gpus[0]):
            stages, inputs = _stages(name, **arguments)
        pipeline, targets = Pipeline(stages, gpus, one_f_one_b), torch.empty(len(inputs), device=gpus[1])
        return {name: _recorded_step(pipeline, fused, lambda: pipeline.step(inputs, targets, _loss, micro_batches))}


# ---- the steps ------------------------------------------------------------------------------------------------------


def _layers(count: int, width: int) -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(count)])


class _Mean(nn.Module):
    """The mean of the vectors of each text: (texts, words, width) -> (texts, width)."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


def _stages(name: str, average_on: int = 1) -> tuple[list[nn.Sequential], Tensor]:
    """Return the stages of a job in one process, and its inputs. Only job D averages."""
    if name != "D":
        count, width, batch = {"A": (3, 512, 1024), "C": (6, 2048, 4096)}[name]
        return [_layers(count, width), _layers(count, width)], torch.empty(batch, width)
    stages = [[nn.Embedding(50_000, 256)], [nn.Linear(256, 2048), nn.ReLU(), nn.Linear(2048, 2048)]]
    stages[average_on].insert(1 - average_on, _Mean())
    return [nn.Sequential(*each) for each in stages], torch.empty(4096, 64, dtype=torch.long)


def _loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs.square().mean()


def _rank(rank: int, shares: tuple[int, int], fused: bool) -> Timeline:
    with torch.device(rank):
        net, inputs = _layers(6, 2048), torch.empty(shares[rank], 2048)
    ddp = DistributedDataParallel(net, device_ids=[rank])
    share = 2 * shares[rank] / sum(shares)  # so that samples count equally in DDP's mean over ranks
    return _recorded_step(ddp, fused, lambda: (_loss(ddp(inputs), inputs) * share).backward())


def _recorded_step(net: nn.Module, fused: bool, both_passes) -> Timeline:
    adam = torch.optim.Adam(net.parameters(), fused=fused)

    def step():
        adam.zero_grad()
        both_passes()
        adam.step()

    step(), step()  # the first creates Adam's states, and DDP orders its buckets after it
    with record_timeline() as timeline:
        step()
    return timeline
