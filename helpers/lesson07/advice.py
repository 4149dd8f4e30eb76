"""Which method to take for a net, its batch, the GPUs and their links: formulas of memory and time, and `advise`.

    advice = advise(NETS["BERT of the article"], batch=200, gpus=4, cluster=Cluster("TITAN Xp"))
    advice.method, advice.reasons, advice.peaks["DDP"]

Nothing is run. Lesson 07 shows the formulas and holds them against runs, and tests do so for more kinds of GPUs: memory
is within 2 %, except for a pipeline that is cut at other layers (13 %). Times are 0.92 to 1.07 of the modelled ones for
the article's BERT and 0.77 to 1.00 for its PyramidNet. They use the rates of the same clock, so this checks what is
done with the rates and not the rates. Sharding is not run. Memory in pieces comes on top of all figures.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from helpers.gpus import OPERATOR_SECONDS
from helpers.lesson07.methods import balanced_cuts
from helpers.lesson07.nets import Net
from helpers.lesson07.scaling import Cluster
from helpers.measure import MiB, format_bytes

METHODS = ("one GPU", "DataParallel", "parallel loss", "DDP", "pipeline", "sharding")

# ---- memory ----------------------------------------------------------------------------------------------------------


def peak_bytes(
    net: Net, method: str, batch: float, gpus: int, cluster: Cluster, micro_batches: int | None = None
) -> float:
    """Bytes on the fullest GPU in a step of `batch` samples on all `gpus` together, in float32.

    micro_batches: None for one, or one per GPU of a pipeline. If there are more, the gradients of those before stay.
    cluster: its speed says where a pipeline is cut. Raises ValueError for an unknown method.
    """
    if method == "pipeline":
        return stage_bytes(net, batch, gpus, cluster, micro_batches).max()
    pieces, weights = micro_batches or 1, net.weights
    samples = batch / pieces if method == "one GPU" else batch / pieces / gpus  # at once on a GPU
    gradients = weights if pieces > 1 else 0
    at_loss = gradients + samples * (net.activations + 3 * net.outputs)  # the log-softmax and two gradients
    own = weights * (1 + net.states)
    if method == "one GPU":
        return own + max(weights, at_loss)
    if method == "DataParallel":  # its first GPU gathers all outputs
        return own + max(2 * weights, gradients + samples * net.activations + 3 * gpus * samples * net.outputs)
    if method == "parallel loss":
        return own + max(2 * weights, at_loss)
    if method == "DDP":  # its buckets are as large as the gradients
        return own + weights + max(weights, at_loss)
    if method == "sharding":  # a part of everything, and one layer's weights in full
        return (own + weights) / gpus + 4 * net.layers.parameters.max() + at_loss - gradients
    raise ValueError(f"There is no method {method!r}. Choose one of {', '.join(METHODS)}.")


def stage_bytes(net: Net, batch: float, gpus: int, cluster: Cluster, micro_batches: int | None = None) -> np.ndarray:
    """Bytes of each stage of a pipeline (1F1B) at its peak."""
    micro_batches = micro_batches or gpus
    micro, found, received = batch / micro_batches, [], 0.0
    stages = cut(net, gpus, micro, cluster)
    for number, (start, end) in enumerate(stages):
        layers, to_the_last = net.layers[start:end], len(stages) - number
        held = min(micro_batches, to_the_last)  # micro-batches whose activations it has at once
        weights = 4 * layers.parameters.sum()
        gradients = weights if held < micro_batches else 0  # they are there at the peak, except in the first round
        outputs = layers.output[-1] * (3 if to_the_last == 1 else 1)
        kept = micro * (held * (layers.activations.sum() + received) + outputs)
        found.append(weights * (1 + net.states) + gradients + kept)
        received = layers.output[-1]
    return np.array(found)


# ---- time ------------------------------------------------------------------------------------------------------------

_FORWARD = 1 / 3  # of the computation
_UPDATE = {"SGD": 3, "SGD with momentum": 8, "Adam": 18}  # times that a parameter's four bytes are read or written


def layer_seconds(net: Net, samples: float, cluster: Cluster) -> np.ndarray:
    """Of each layer on one GPU, both passes: starting its kernels, arithmetic, and moving samples and weights. They are
    added, because operators of the one sort wait for those of the other. The last layer's has the loss in it."""
    layers, rates = net.layers, cluster.rates
    starts = 5 * layers.operators * rates.kernel  # 5 of the shortest kernel's time for an operator, on average
    arithmetic = samples * layers.flops / (rates.convolutions if net.convolutions else rates.products)
    moved = samples * layers.moved + 3 * 4 * layers.parameters  # weights read in both passes, gradients written
    seconds = starts + arithmetic + moved / rates.memory
    seconds[-1] += loss_seconds(net, samples, cluster)
    return seconds


def loss_seconds(net: Net, samples: float, cluster: Cluster) -> float:
    """Of the loss and its gradient, which go over the outputs eight times."""
    return 8 * samples * net.outputs / cluster.rates.memory


@lru_cache(maxsize=512)
def cut(net: Net, gpus: int, samples: float, cluster: Cluster) -> list[tuple[int, int]]:
    """(start, end) of the layers of each stage: as many as GPUs, or as layers if there are fewer."""
    return balanced_cuts(layer_seconds(net, samples, cluster).tolist(), min(gpus, len(net.layers)))


def launch_seconds(net: Net, ddp: bool = False) -> float:
    """What the host needs to launch a step's operators; under DDP each gradient is also copied to a bucket and back."""
    operators = net.layers.operators.sum() + (2 * net.layers.tensors.sum() if ddp else 0)
    return operators * OPERATOR_SECONDS


def step_seconds(
    net: Net, method: str, batch: float, gpus: int, cluster: Cluster, micro_batches: int | None = None
) -> float:
    """Rough modelled seconds of a step of `batch` samples on all `gpus` together. micro_batches: of a pipeline, None
    for one per GPU. Raises ValueError for an unknown method."""
    if method not in METHODS:
        raise ValueError(f"There is no method {method!r}. Choose one of {', '.join(METHODS)}.")
    update = net.weights * _UPDATE[net.optimizer] / cluster.rates.memory
    if gpus == 1 or method == "one GPU":
        return max(layer_seconds(net, batch, cluster).sum(), launch_seconds(net)) + update
    if method == "pipeline":
        return _pipeline_seconds(net, batch, gpus, cluster, micro_batches or gpus)
    if method == "DDP":
        return _ddp_seconds(net, batch, gpus, cluster) + update
    computing = layer_seconds(net, batch / gpus, cluster).sum()
    exchange = cluster.all_reduce_seconds(net.weights, gpus)
    if method == "sharding":  # weights gathered in both passes and gradients scattered: three halves of an all-reduce
        computing = max(computing, launch_seconds(net, ddp=True))
        return computing + max(0, 1.5 * exchange - (1 - _FORWARD) * computing) + update / gpus
    # DataParallel and the parallel loss: one host thread at a time launches the forward passes of all GPUs.
    launching = launch_seconds(net) / 2
    passes = max(_FORWARD * computing, gpus * launching) + max((1 - _FORWARD) * computing, launching)
    seconds = passes + exchange * gpus / (gpus - 1) + update  # weights out and gradients back pass each link whole
    if method == "DataParallel":  # the others' outputs to the first GPU, their gradients back, and their loss there
        others = batch * (gpus - 1) / gpus
        seconds += 2 * cluster.copy_seconds(others * net.outputs, gpus) + loss_seconds(net, others, cluster)
    return seconds


def _ddp_seconds(net: Net, batch: float, gpus: int, cluster: Cluster) -> float:
    """Gradients come from the last layer to the first. A bucket is sent when it is full and the one before is done."""
    layers = layer_seconds(net, batch / gpus, cluster)
    layers *= max(1, launch_seconds(net, ddp=True) / layers.sum())  # the host's speed, where it is slower
    now, sent, bucket = _FORWARD * layers.sum(), 0.0, 0.0
    for number in reversed(range(len(layers))):
        now += (1 - _FORWARD) * layers[number]
        bucket += 4 * net.layers.parameters[number]
        if bucket and (bucket >= 25 * MiB or number == 0):
            sent, bucket = max(sent, now) + cluster.all_reduce_seconds(bucket, gpus), 0.0
    return max(sent, now)


def _pipeline_seconds(net: Net, batch: float, gpus: int, cluster: Cluster, micro_batches: int) -> float:
    """All stages once, the slowest once more for each further micro-batch, copies from stage to stage and back."""
    micro = batch / micro_batches
    stages, layers = cut(net, gpus, micro, cluster), layer_seconds(net, micro, cluster)
    seconds = [layers[start:end].sum() for start, end in stages]
    copies = sum(2 * cluster.copy_seconds(micro * net.layers.output[end - 1], gpus) for _, end in stages[:-1])
    passes = sum(seconds) + (micro_batches - 1) * max(seconds) + copies
    largest = 4 * max(net.layers.parameters[start:end].sum() for start, end in stages)
    update = largest * _UPDATE[net.optimizer] / cluster.rates.memory
    return max(passes, micro_batches * launch_seconds(net)) + update  # one process feeds all GPUs


# ---- advice ----------------------------------------------------------------------------------------------------------

_WORTH = 0.5  # efficiency below which more GPUs are not worth it


@dataclass(frozen=True)
class Advice:
    """What to take on how many `gpus`, in how many `micro_batches` (of a pipeline; otherwise gradients are accumulated
    over them), `reasons` as sentences, and per method its bytes on the fullest GPU and its rough seconds on all."""

    method: str
    gpus: int
    micro_batches: int
    reasons: tuple[str, ...]
    peaks: dict[str, float]
    seconds: dict[str, float]

    def __str__(self) -> str:
        return "\n".join([self.headline, *(f"- {reason}" for reason in self.reasons)])

    @property
    def headline(self) -> str:
        """The method in a line."""
        how = "of" if self.method == "pipeline" else "accumulating gradients over"
        more = f", {how} {self.micro_batches} micro-batches" if self.micro_batches > 1 else ""
        on = f" on {self.gpus} GPUs" if self.gpus > 1 and self.method != "more GPUs" else ""
        return f"Take {self.method}{on}{more}."


def advise(net: Net, batch: int, gpus: int, cluster: Cluster) -> Advice:
    """The method for training `net` with `batch` samples per step on `gpus` GPUs of `cluster`, with reasons: one GPU or
    DDP where a copy fits, on fewer GPUs where links or host are too slow for all; otherwise sharding or a pipeline.

    Raises ValueError for less than one sample or GPU, and for GPUs that leave a machine partly empty.
    """
    if batch < 1 or gpus < 1:
        raise ValueError(f"batch={batch}, gpus={gpus}: at least one of each is needed.")
    cluster.all_reduce_seconds(1, gpus)
    methods = METHODS if gpus > 1 else METHODS[:1]
    peaks = {each: peak_bytes(net, each, batch, gpus, cluster) for each in methods}
    seconds = {each: step_seconds(net, each, batch, gpus, cluster) for each in methods}
    copy = "DDP" if gpus > 1 else "one GPU"
    pieces = _pieces(net, copy, batch, gpus, cluster)
    if not pieces:
        chosen = _split(net, batch, gpus, cluster, peaks)
    elif gpus == 1:
        chosen = copy, 1, pieces, [_fits("one GPU", pieces, peaks[copy], cluster)]
    else:
        faster = seconds["one GPU"] / seconds["DDP"]
        share = f"{100 * faster / gpus:.0f} %"
        gain = f"{gpus} GPUs compute a step {faster:.1f} times as fast, an efficiency of {share} (rough)"
        if faster / gpus < _WORTH:
            chosen = _fewer(net, batch, gpus, cluster, gain)
        else:
            fits = _fits("a copy on every GPU", pieces, peaks[copy], cluster)
            chosen = copy, gpus, pieces, [fits, gain, _why_not_dataparallel(net, batch, gpus, peaks, cluster)]
    method, used, pieces, reasons = chosen
    return Advice(method, used, pieces, tuple(reasons), peaks, seconds)


def _pieces(net: Net, method: str, batch: int, gpus: int, cluster: Cluster) -> int:
    """The fewest micro-batches that fit, doubling; 0 if not even one sample per GPU fits."""
    least, most = (gpus, batch) if method == "pipeline" else (1, math.ceil(batch / gpus))
    counts = [least * 2**power for power in range((most // least).bit_length())]
    for pieces in [*counts, most] if most >= least else []:
        if peak_bytes(net, method, batch, gpus, cluster, pieces) <= cluster.room:
            return pieces
    return 0


def _fits(what: str, pieces: int, peak: float, cluster: Cluster) -> str:
    whole = f"{what} takes {_size(peak)} for the whole batch, and a card has {_size(cluster.room)}"
    return f"{whole}: " + ("it fits" if pieces == 1 else f"accumulate gradients over {pieces} micro-batches")


def _fewer(net: Net, batch: int, gpus: int, cluster: Cluster, gain: str):
    """So many GPUs are not worth it: the most within one machine that are, or one."""
    if cluster.all_reduce_seconds(net.weights, gpus) < launch_seconds(net, ddp=True):
        host = _time(launch_seconds(net, ddp=True))
        why = f"the host takes {host} to launch a step's kernels, however few the samples"
        cure = "Larger batches"
    else:
        why = f"exchanging {_size(net.weights)} of gradients takes longer than the samples in between"
        cure = "Larger batches, gradients accumulated under no_sync, or a faster network"
    one = step_seconds(net, "one GPU", batch, 1, cluster)
    for fewer in range(min(gpus - 1, cluster.per_machine), 0, -1):
        method = "DDP" if fewer > 1 else "one GPU"
        faster = one / step_seconds(net, method, batch, fewer, cluster)
        pieces = _pieces(net, method, batch, fewer, cluster)
        if faster / fewer >= _WORTH and pieces:
            better = f"{method} on {fewer} of one machine: {faster:.1f} times as fast as one GPU"
            return method, fewer, pieces, [f"{gain}: {why}", f"{better}. {cure} would change that"]
    return "DDP", gpus, 1, [f"{gain}: {why}"]


def _why_not_dataparallel(net: Net, batch: int, gpus: int, peaks: dict, cluster: Cluster) -> str:
    if gpus > cluster.per_machine:
        return "DataParallel and the parallel loss are for one machine; this takes more"
    if 3 * batch * net.outputs > 0.2 * peaks["DataParallel"]:
        return f"DataParallel's first GPU would hold everyone's outputs, {_size(peaks['DataParallel'])} in all"
    return "DataParallel would be balanced here, and one line; but one process would have to feed all GPUs"


def _split(net: Net, batch: int, gpus: int, cluster: Cluster, peaks: dict):
    """No GPU can have a copy of its own."""
    states = f"parameters, gradients and {net.optimizer}'s states are {_size(net.weights * (2 + net.states))}"
    reasons = [f"{states}, and a card has {_size(cluster.room)}: no copy fits with a sample"]
    fitting = _splits_that_fit(net, batch, gpus, cluster) if gpus > 1 else {}
    if gpus > len(net.layers) and fitting.pop("pipeline", None):
        reasons.append(f"no pipeline: {len(net.layers)} layers cannot make {gpus} stages")
    if not fitting:
        return "more GPUs", gpus, 1, [*reasons, _how_many(net, batch, gpus, cluster)]
    times = {"pipeline": 0.0, "sharding": 0.0}
    for method, n in fitting.items():  # sharding gathers the weights anew for each micro-batch
        again = n if method == "sharding" else 1
        times[method] = again * step_seconds(net, method, batch / again, gpus, cluster, n)
    best = min(fitting, key=times.__getitem__)
    spread, whole = "each GPU keeps a part of every layer", "the whole batch at once"
    if best == "pipeline":
        spread, whole = "its layers are spread over the GPUs", "a micro-batch per GPU"
    reasons.append(f"{best}: {spread}; with {whole} the fullest GPU would hold {_size(peaks[best])}")
    for other in fitting.keys() - {best}:
        against = f"{_time(times[other])} against {_time(times[best])}"
        reasons.append(f"{other} would fit as well, but is slower: {against} (rough)")
    return best, gpus, fitting[best], reasons


def _splits_that_fit(net: Net, batch: int, gpus: int, cluster: Cluster) -> dict[str, int]:
    found = {method: _pieces(net, method, batch, gpus, cluster) for method in ("sharding", "pipeline")}
    return {method: pieces for method, pieces in found.items() if pieces}


def _how_many(net: Net, batch: int, gpus: int, cluster: Cluster) -> str:
    for more in (gpus * 2**power for power in range(1, 13)):
        methods = _splits_that_fit(net, batch, more, cluster)
        if methods:
            return f"on {more} such cards {' or '.join(methods)} would fit"
    return "no number of such cards up to thousands would do: the batch or the net is too large for them"


def _size(nbytes: float) -> str:
    return format_bytes(round(nbytes))


def _time(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds >= 10 else f"{1e3 * seconds:,.0f} ms"
