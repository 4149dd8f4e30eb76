"""One step of a job by one method: memory, modelled time, utilisation, the largest batch."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from helpers.lesson07.methods.cuts import stages_of
from helpers.lesson07.methods.jobs import Job, micro_batches_on
from helpers.lesson07.methods.largest import largest_that_fits
from helpers.lesson07.scaling import Cluster, RankStep, one_rank, rank_step
from helpers.measure import peak_memory
from helpers.measure.timeline import record_timeline
from helpers.parallel.loss import DataParallelCriterion, DataParallelModel
from helpers.parallel.pipeline import Pipeline, one_f_one_b

METHODS = ("one GPU", "DataParallel", "parallel loss", "DDP", "model parallel", "pipeline")


@dataclass(frozen=True)
class Row:
    """A method on a job: `seconds` of a step (modelled), and per GPU its `utilisation`, the bytes allocated at `rest`
    between steps and at the `peaks`. largest: the largest batch that was found to fit, to some 4 %; None if it was not
    asked for. line: the same by a line through rest and peak, which knows nothing of fragmentation. rank: of DDP, the
    step of one rank alone."""

    job: str
    method: str
    batch: int
    seconds: float
    utilisation: tuple[float, ...]
    rest: tuple[int, ...]
    peaks: tuple[int, ...]
    largest: int | None = None
    line: int | None = None
    rank: RankStep | None = field(default=None, repr=False)

    @property
    def samples_per_second(self) -> float:
        """Of all GPUs together, modelled."""
        return self.batch / self.seconds

    def fits(self, cluster: Cluster) -> bool:
        """True if every GPU's peak is within the room on a card, and the batch was not found too large: memory in
        pieces can stop a step whose peak would fit."""
        return max(self.peaks) <= cluster.room and (self.largest is None or self.largest >= self.batch)


def measure(
    job: Job,
    method: str,
    gpus: Sequence[torch.device],
    cluster: Cluster,
    batch: int | None = None,
    search: bool = False,
    like: Row | None = None,
) -> Row:
    """One step of `job` by `method` (one of `METHODS`) on GPUs that are as those of `cluster`.

    batch: samples on all GPUs together; None: the job's. search: also find the largest batch that fits the cluster's
    cards, by running steps; like: the same method's row on other cards, to begin near the right one. Raises ValueError
    for another method, other GPUs than the cluster's, and a batch that cannot be cut evenly; RuntimeError where times
    are not modelled.
    """
    _check_gpus(gpus, method, cluster)
    used = list(gpus[:1]) if method == "one GPU" else list(gpus)
    batch = batch or (job.alone if method == "one GPU" else job.batch)
    if batch % len(used):
        raise ValueError(f"a batch of {batch} cannot be cut evenly over {len(used)} GPUs: take a multiple of them")
    gc.collect()  # nets of earlier runs that are in cycles
    torch.cuda.empty_cache()
    row, new_step, ready = (_in_ranks if method == "DDP" else _in_one_process)(job, method, used, cluster, batch)
    if not search:
        return row
    with ready():
        return _with_largest(row, new_step, cluster, used[:1] if method == "DDP" else used, like)


def _check_gpus(gpus: Sequence[torch.device], method: str, cluster: Cluster) -> None:
    if method not in METHODS:
        raise ValueError(f"no method {method!r}: choose one of {', '.join(METHODS)}")
    name = torch.cuda.get_device_properties(gpus[0]).name
    if name != cluster.name:
        raise ValueError(
            f"the GPUs are {name}, the cluster has {cluster.name}: call use_gpus(..., kind={cluster.kind!r})"
        )


def _in_one_process(job: Job, method: str, gpus: list, cluster: Cluster, batch: int):
    """The row, what gives a step, and what must be open while it runs."""
    step, timelines = step_by(job, method, gpus), []
    rest = tuple(torch.cuda.memory_allocated(gpu) for gpu in gpus)

    def timed():
        with record_timeline() as timeline:
            step(batch)
        timelines.append(timeline)

    peaks = tuple(reading.peak_allocated for reading in peak_memory(timed, gpus))
    shares = tuple(timelines[0].utilisation(gpu.index) for gpu in gpus)
    return Row(job.name, method, batch, timelines[0].seconds, shares, rest, peaks), lambda: step, nullcontext


def _in_ranks(job: Job, method: str, gpus: list, cluster: Cluster, batch: int):
    """The same of one of the ranks, alone."""
    ranks, first = len(gpus), gpus[0]
    net = job.build().to(first)

    def step_of(ddp):
        return TrainStep(job, ddp, partial(job.loss, ddp, gpu=first))

    def new_step():  # a new wrapper for each try: an error in the backward pass leaves DDP unusable
        return step_of(DistributedDataParallel(net, device_ids=[first]))

    step = rank_step(net, lambda ddp: partial(step_of(ddp), batch // ranks), first)
    share, seconds = step.utilisation_on(ranks, cluster), step.on(ranks, cluster)
    rests, peaks = (step.rest,) * ranks, (step.peak,) * ranks
    return Row(job.name, method, batch, seconds, (share,) * ranks, rests, peaks, rank=step), new_step, one_rank


def _with_largest(row: Row, new_step: Callable, cluster: Cluster, gpus: list, like: Row | None) -> Row:
    """new_step() gives a step on `gpus`; where the row has more GPUs, they do the same."""
    ranks, line = len(row.peaks) // len(gpus), _by_a_line(row, cluster.room)
    guess = line * like.largest / like.line if like else 0.9 * line
    found = largest_that_fits(new_step, cluster.room, gpus, round(guess / ranks))
    return replace(row, largest=ranks * found, line=line)


def _by_a_line(row: Row, room: int) -> int:
    """The largest batch if what a step adds to what rests grew with the batch, and no memory lay idle."""
    added = [(peak - rest) / row.batch for peak, rest in zip(row.peaks, row.rest, strict=True)]
    return max(1, int(min((room - rest) / each for rest, each in zip(row.rest, added, strict=True))))


class TrainStep:
    """A training step of a batch of any size: `TrainStep(...)(batch)`.

    loss_of(inputs, targets) gives the loss, or does the backward pass itself and gives None. The optimizer's state is
    made beforehand, by a step with gradients of zero.
    """

    def __init__(self, job: Job, net, loss_of: Callable):
        self._job, self._loss_of, parameters = job, loss_of, list(net.parameters())
        self._optimizer = job.optimizer(parameters)
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        self._optimizer.step()
        self.clear()

    def clear(self) -> None:
        """Let go of the gradients, which otherwise stay until the next step."""
        self._optimizer.zero_grad()

    def backward(self, batch: int) -> None:
        """Both passes: the gradients come on top of those that are there."""
        loss = self._loss_of(*self._job.batch_of(batch))
        if loss is not None:
            loss.backward()

    def __call__(self, batch: int) -> None:
        self.clear()
        self.backward(batch)
        self._optimizer.step()


def step_by(job: Job, method: str, gpus: list) -> TrainStep:
    """A function of the batch that runs a step by a method of this process, any but DDP."""
    return _STEPS[method](job, gpus)


# ---- the methods ----------------------------------------------------------------------------------------------------


def _one_gpu(job: Job, gpus: list):
    net = job.build().to(gpus[0])
    return TrainStep(job, net, partial(job.loss, net, gpu=gpus[0]))


def _data_parallel(job: Job, gpus: list):
    net = nn.DataParallel(job.build().to(gpus[0]), gpus)
    return TrainStep(job, net, partial(job.loss, net, gpu=gpus[0]))


def _parallel_loss(job: Job, gpus: list):
    net = DataParallelModel(job.build().to(gpus[0]), gpus)
    criterion = DataParallelCriterion(job.criterion, gpus, weight=lambda outputs, targets: targets.numel())
    return TrainStep(job, net, lambda inputs, targets: criterion(net(inputs.to(gpus[0])), targets))


def _stages(job: Job, gpus: list, micro_batches: int | None = None):
    net = Pipeline(stages_of(job.build(), len(gpus), job.batch_of(8)[0], gpus[0]), gpus, one_f_one_b)

    def loss_of(inputs, targets):
        net.step(inputs, targets, job.criterion, micro_batches or micro_batches_on(len(gpus)))

    return TrainStep(job, net, loss_of)


_STEPS = {
    "one GPU": _one_gpu,
    "DataParallel": _data_parallel,
    "parallel loss": _parallel_loss,
    "model parallel": partial(_stages, micro_batches=1),
    "pipeline": _stages,
}
