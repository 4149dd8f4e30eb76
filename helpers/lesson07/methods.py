"""Measures every method for several GPUs on the same job: memory, modelled time, utilisation, largest batch.

    gpus = use_gpus(4, kind="K80", memory="64 GiB", shapes_only=True)
    row = measure(PYRAMIDNET, "DataParallel", gpus, Cluster("K80"))
    row.seconds, row.utilisation, row.peaks       # modelled s, 0 to 1 per GPU, bytes per GPU
    found = compare({"K80s": Cluster("K80")})     # all methods on both jobs

Times are modelled, so this needs virtual GPUs. A step is measured after the optimizer's state has been created. Use
GPUs with more memory than any method needs. A batch that does not fit can then still be compared, and `Row.fits` says
so. For DDP, one rank's step is measured in this process, and `helpers.lesson07.scaling` computes it for several ranks.
"""

import gc
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import accumulate, pairwise, product

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from helpers.gpus import modelled_gpus
from helpers.lesson04 import LENGTH, WordLoss
from helpers.lesson07.scaling import Cluster, RankStep, one_rank, rank_step
from helpers.measure import largest_batch, peak_memory
from helpers.measure.batch_size import skipping_what_exists
from helpers.measure.timeline import record_timeline
from helpers.models import bert_article, pyramidnet_article
from helpers.parallel.loss import DataParallelCriterion, DataParallelModel
from helpers.parallel.pipeline import Pipeline, layers_of, one_f_one_b

METHODS = ("one GPU", "DataParallel", "parallel loss", "DDP", "model parallel", "pipeline")

# ---- jobs ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """A training job. batch: samples per step on all GPUs together. alone: samples per step on one GPU. inputs and
    targets: shapes of one sample. words: whether the inputs are integers. optimizer: called with the parameters.
    criterion: called with outputs and targets."""

    name: str
    build: Callable[[], nn.Module]
    batch: int
    alone: int
    inputs: tuple[int, ...]
    targets: tuple[int, ...]
    words: bool
    optimizer: Callable[..., torch.optim.Optimizer]
    criterion: Callable[[Tensor, Tensor], Tensor] = WordLoss()

    def loss(self, net: nn.Module, inputs: Tensor, targets: Tensor, gpu: torch.device) -> Tensor:
        """Return the loss of a model whose inputs must be on `gpu`."""
        return self.criterion(net(inputs.to(gpu)), targets)

    def batch_of(self, size: int) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of `size` samples on the CPU. All are zero, because nothing here reads values."""
        dtype = torch.long if self.words else torch.float32
        return torch.zeros(size, *self.inputs, dtype=dtype), torch.zeros(size, *self.targets, dtype=torch.long)


_MOMENTUM = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
BERT = Job("BERT", bert_article, 200, 50, (LENGTH,), (LENGTH,), True, torch.optim.Adam)
PYRAMIDNET = Job("PyramidNet", pyramidnet_article, 768, 240, (3, 32, 32), (), False, _MOMENTUM)


class TrainStep:
    """A training step for batches of any size. Call it with the number of samples.

    loss_of(inputs, targets) returns the loss, or runs the backward pass itself and returns None. A first step with
    gradients of zero creates the optimizer's state.
    """

    def __init__(self, job: Job, net, loss_of: Callable[[Tensor, Tensor], Tensor | None]):
        self._job, self._loss_of, parameters = job, loss_of, list(net.parameters())
        self._optimizer = job.optimizer(parameters)
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        self._optimizer.step()
        self.clear()

    def clear(self) -> None:
        """Free the gradients, which otherwise stay until the next step."""
        self._optimizer.zero_grad()

    def backward(self, batch: int) -> None:
        """Run both passes with `batch` samples, and add to the existing gradients."""
        loss = self._loss_of(*self._job.batch_of(batch))
        if loss is not None:
            loss.backward()

    def __call__(self, batch: int) -> None:
        self.clear()
        self.backward(batch)
        self._optimizer.step()


# ---- methods ---------------------------------------------------------------------------------------------------------


def step_by(job: Job, method: str, gpus: Sequence, micro_batches: int | None = None) -> TrainStep:
    """Return a training step for a method that runs in one process, which is any method except DDP. micro_batches: for
    a pipeline; None means one per GPU (more make its bubble shorter, see lesson 05)."""
    first = gpus[0]
    with torch.device(first):  # without values there is nothing to initialise
        net = job.build()
    if method in ("model parallel", "pipeline"):
        pipeline = Pipeline(stages_of(net, len(gpus), job.batch_of(8)[0], first), list(gpus), one_f_one_b)
        pieces = 1 if method == "model parallel" else micro_batches or len(gpus)

        def both_passes(inputs, targets):
            pipeline.step(inputs, targets, job.criterion, pieces)

        return TrainStep(job, pipeline, both_passes)
    net = net.to(first)
    if method == "parallel loss":
        net = DataParallelModel(net, list(gpus))
        criterion = DataParallelCriterion(job.criterion, list(gpus), weight=lambda outputs, targets: targets.numel())
        return TrainStep(job, net, lambda inputs, targets: criterion(net(inputs.to(first)), targets))
    if method == "DataParallel":
        net = nn.DataParallel(net, list(gpus))
    return TrainStep(job, net, partial(job.loss, net, gpu=first))


def stages_of(net: nn.Module, stages: int, inputs: Tensor, gpu) -> list[nn.Sequential]:
    """Return the layers of the model in stages, cut so that the slowest stage is as fast as possible. The layers are
    moved to `gpu`, and their forward passes are timed with `inputs`. Raises what `layers_of` raises."""
    gpu, seconds, x, layers = torch.device(gpu), [], inputs.to(gpu), layers_of(net)
    with torch.no_grad():
        for layer in layers:
            layer.to(gpu)
            with record_timeline() as timeline:
                x = layer(x)
            seconds.append(timeline.busy_seconds(gpu.index))
    return [nn.Sequential(*layers[start:end]) for start, end in balanced_cuts(seconds, stages)]


def balanced_cuts(costs: Sequence[float], parts: int) -> list[tuple[int, int]]:
    """Cut layers with these `costs` into parts, and return (start, end) of each. This minimizes the sum of the parts'
    costs to the 16th power, in which the largest part dominates. Raises ValueError for more parts than layers."""
    if not 1 <= parts <= len(costs):
        raise ValueError(f"{len(costs)} layers cannot be cut into {parts} parts.")
    sums = [0.0, *accumulate(costs)]
    mean = sums[-1] / parts

    def steep(start: int, end: int) -> float:
        return ((sums[end] - sums[start]) / mean) ** 16

    @cache
    def best(parts: int, end: int) -> tuple[float, list[int]]:
        """Return (sum, edges) for the first `end` layers in this number of parts."""
        if parts == 1:
            return steep(0, end), [0, end]
        firsts = ((cut, *best(parts - 1, cut)) for cut in range(parts - 1, end))
        return min((total + steep(cut, end), [*edges, end]) for cut, total, edges in firsts)

    return list(pairwise(best(parts, len(costs))[1]))


# ---- one step, measured ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """The result of a method on a job: modelled `seconds` of a step, and for each GPU its `utilisation` (0 to 1), and
    the bytes allocated between steps (`rest`) and at the peak (`peaks`). largest: the largest batch found to fit, to
    about 4 %, or None without a search. estimate: the same from a line through rest and peak, which ignores
    fragmentation. rank: for DDP, the step of one rank on its own."""

    job: str
    method: str
    batch: int
    seconds: float
    utilisation: tuple[float, ...]
    rest: tuple[int, ...]
    peaks: tuple[int, ...]
    largest: int | None = None
    estimate: int | None = None
    rank: RankStep | None = field(default=None, repr=False)

    @property
    def samples_per_second(self) -> float:
        """Modelled samples per second of all GPUs together."""
        return self.batch / self.seconds

    def fits(self, cluster: Cluster) -> bool:
        """True if every GPU's peak fits, and the search did not find the batch to be too large. With fragmented memory,
        a step can fail although its peak would fit."""
        return max(self.peaks) <= cluster.room and (self.largest is None or self.largest >= self.batch)


def measure(job: Job, method: str, gpus: Sequence[torch.device], cluster: Cluster, search: bool = False) -> Row:
    """Measure one step of `job` with `method` (one of `METHODS`) on GPUs of the cluster's kind, with the job's batch.

    search: also find the largest batch that fits on the cluster's GPUs, by running steps. Raises ValueError for an
    unknown method, and RuntimeError if times are not modelled.
    """
    if method not in METHODS:
        raise ValueError(f"There is no method {method!r}. Choose one of {', '.join(METHODS)}.")
    gpus, batch = (list(gpus[:1]), job.alone) if method == "one GPU" else (list(gpus), job.batch)
    gc.collect()  # models of earlier runs that are in reference cycles
    torch.cuda.empty_cache()
    row, new_step = (_one_of_the_ranks if method == "DDP" else _one_process)(job, method, gpus, cluster, batch)
    if not search:
        return row
    with one_rank() if method == "DDP" else nullcontext():
        return _with_largest(row, new_step, cluster.room, gpus)


def _one_process(job: Job, method: str, gpus: list, cluster: Cluster, batch: int):
    """Return the row, and a function that returns a step for the search."""
    step, timelines = step_by(job, method, gpus), []
    rest = tuple(torch.cuda.memory_allocated(gpu) for gpu in gpus)

    def timed():
        with record_timeline() as timeline:
            step(batch)
        timelines.append(timeline)

    peaks = tuple(reading.peak_allocated for reading in peak_memory(timed, gpus))
    shares = tuple(timelines[0].utilisation(gpu.index) for gpu in gpus)
    return Row(job.name, method, batch, timelines[0].seconds, shares, rest, peaks), lambda: step


def _one_of_the_ranks(job: Job, method: str, gpus: list, cluster: Cluster, batch: int):
    """Return the same for DDP, from the step of one rank on its own."""
    ranks, first = len(gpus), gpus[0]
    net = job.build().to(first)

    def step_of(ddp):
        return TrainStep(job, ddp, partial(job.loss, ddp, gpu=first))

    rank = rank_step(net, lambda ddp: partial(step_of(ddp), batch // ranks), first)
    share, seconds = rank.utilisation_on(ranks, cluster), rank.on(ranks, cluster)
    row = Row(job.name, method, batch, seconds, (share,) * ranks, (rank.rest,) * ranks, (rank.peak,) * ranks, rank=rank)
    # Each try of a search needs a new wrapper, because an error in the backward pass leaves DDP unusable.
    return row, lambda: step_of(DistributedDataParallel(net, device_ids=[first]))


# ---- the largest batch -----------------------------------------------------------------------------------------------


def _with_largest(row: Row, new_step: Callable[[], TrainStep], room: int, gpus: Sequence) -> Row:
    """Return the row with the largest batch for which two steps run if each GPU has `room` bytes."""
    # The memory that a step adds is proportional to the batch, except for fragmentation.
    each = [(room - rest) * row.batch / (peak - rest) for peak, rest in zip(row.peaks, row.rest, strict=True)]
    line = max(1, int(min(each)))
    # A rank runs only its own share of the batch, on the first GPU.
    shares, used = (len(gpus), gpus[:1]) if row.method == "DDP" else (1, gpus)

    def two_steps(batch: int) -> None:
        step = new_step()
        step.clear()
        torch.cuda.empty_cache()
        step(batch // shares)
        step(batch // shares)

    _limit_memory(used, room)
    try:
        size = grain(line, len(gpus))
        start, limit = math.ceil(0.8 * line), math.ceil(1.25 * line / size) * size
        largest = largest_batch(two_steps, start, limit, multiple_of=size, steps=1)
    finally:
        _limit_memory(used)
    return replace(row, largest=largest, estimate=line)


def _limit_memory(gpus: Sequence, room: int | None = None) -> None:
    """Limit PyTorch to `room` bytes on each GPU, as if the GPU had no more. None removes the limit."""
    for gpu in gpus:
        whole = torch.cuda.get_device_properties(gpu).total_memory
        torch.cuda.set_per_process_memory_fraction((room or whole) / whole, gpu)


def grain(line: int, gpus: int) -> int:
    """Return the step size of the search in samples: 1, 2, 4, ... per GPU, about 4 % of the batch."""
    return gpus * 2 ** max(0, int(math.log2(max(1, int(0.9 * line) // gpus // 25))))


# ---- all methods on all jobs and clusters ----------------------------------------------------------------------------

_MEMORY = "4 TiB"  # of every GPU, which is enough for every job


def compare(
    clusters: Mapping[str, Cluster],
    jobs: Sequence[Job] = (PYRAMIDNET, BERT),
    methods: Sequence[str] = METHODS,
    gpus: int = 4,
) -> dict[tuple[str, str], list[Row]]:
    """Measure all methods on `gpus` GPUs. Returns {(name of the cluster, name of the job): a list of `Row`}.

    This uses virtual GPUs of its own, so it does not matter which GPUs are active.
    """
    found = {}
    with skipping_what_exists():
        for job, (name, cluster) in product(jobs, clusters.items()):
            with modelled_gpus(gpus, cluster.kind, _MEMORY, cluster.links) as devices:
                found[name, job.name] = [measure(job, method, devices, cluster) for method in methods]
    return found
