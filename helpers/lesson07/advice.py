"""The decision guide: formulas for the memory and the time of a step with each method, and `advise`, which uses them.

    advice = advise(NETS["BERT of the article"], batch=200, gpus=4, cluster=Cluster("TITAN Xp"))
    print(advice)                                 # "Take DDP on 4 GPUs." and the reasons
    peak_bytes(NETS["BERT of the article"], "DDP", 200, 4, Cluster("TITAN Xp"))

The formulas do not run a model. Lesson 07 compares them with runs, and tests do so for more kinds of GPUs. Memory is
within 2 %, except for a pipeline that is cut at other layers (13 %). Times are 0.92 to 1.07 of the modelled times for
the article's BERT, and 0.77 to 1.00 for its PyramidNet. Formulas and runs use the same rates of GPUs and links, so the
comparison does not check these rates. Sharding was not compared. Fragmentation takes additional memory.
"""

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
    """Return the peak bytes on the fullest GPU for a step of `batch` samples on all `gpus` together, in float32.

    micro_batches: number of micro-batches over which gradients are accumulated. None means one, or one per GPU for a
    pipeline. cluster: its speed determines where a pipeline is cut. Raises ValueError for an unknown method.
    """
    _check(method)
    if method == "pipeline":
        return stage_bytes(net, batch, gpus, cluster, micro_batches).max()
    pieces = micro_batches or 1
    weights, states = net.weights, net.states
    activations, outputs, largest_layer = net.activations, net.outputs, 4 * net.layers.parameters.max()
    earlier = weights if pieces > 1 else 0  # the gradients of earlier micro-batches
    whole = batch / pieces
    share = whole / gpus
    formulas = {
        "one GPU": weights * (1 + states) + max(weights, earlier + whole * (activations + 3 * outputs)),
        "DataParallel": weights * (1 + states) + max(2 * weights, earlier + share * activations + 3 * whole * outputs),
        "parallel loss": weights * (1 + states) + max(2 * weights, earlier + share * (activations + 3 * outputs)),
        "DDP": weights * (2 + states) + max(weights, earlier + share * (activations + 3 * outputs)),
        "sharding": weights * (2 + states) / gpus + largest_layer + share * (activations + 3 * outputs),
    }
    return formulas[method]


def _check(method: str) -> None:
    if method not in METHODS:
        raise ValueError(f"There is no method {method!r}. Choose one of {', '.join(METHODS)}.")


def stage_bytes(net: Net, batch: float, gpus: int, cluster: Cluster, micro_batches: int | None = None) -> np.ndarray:
    """Return the peak bytes of each stage of a pipeline (1F1B)."""
    micro_batches = micro_batches or gpus
    samples = batch / micro_batches
    stages = cut(net, gpus, samples, cluster)
    found = []
    received = 0.0  # bytes per sample from the previous stage
    for number, (start, end) in enumerate(stages):
        layers = net.layers[start:end]
        stages_left = len(stages) - number
        held = min(micro_batches, stages_left)  # micro-batches whose activations the stage holds at once
        weights = 4 * layers.parameters.sum()
        gradients = weights if held < micro_batches else 0  # they exist at the peak, except in the first round
        outputs = layers.output[-1] * (3 if stages_left == 1 else 1)
        kept = samples * (held * (layers.activations.sum() + received) + outputs)
        found.append(weights * (1 + net.states) + gradients + kept)
        received = layers.output[-1]
    return np.array(found)


# ---- time ------------------------------------------------------------------------------------------------------------

_FORWARD = 1 / 3  # of the computation
_UPDATE = {"SGD": 3, "SGD with momentum": 8, "Adam": 18}  # how often a parameter's four bytes are read or written


def step_seconds(
    net: Net, method: str, batch: float, gpus: int, cluster: Cluster, micro_batches: int | None = None
) -> float:
    """Return the approximate modelled seconds of a step of `batch` samples on all `gpus` together. micro_batches: for a
    pipeline; None means one per GPU. Raises ValueError for an unknown method."""
    _check(method)
    update = net.weights * _UPDATE[net.optimizer] / cluster.rates.memory
    if gpus == 1 or method == "one GPU":
        return max(layer_seconds(net, batch, cluster).sum(), launch_seconds(net)) + update
    if method == "pipeline":
        return _pipeline_seconds(net, batch, gpus, cluster, micro_batches or gpus)
    if method == "DDP":
        return _ddp_seconds(net, batch, gpus, cluster) + update
    computing = layer_seconds(net, batch / gpus, cluster).sum()
    exchange = cluster.all_reduce_seconds(net.weights, gpus)
    if method == "sharding":  # weights are gathered in both passes, gradients scattered: three halves of an all-reduce
        computing = max(computing, launch_seconds(net, ddp=True))
        return computing + max(0, 1.5 * exchange - (1 - _FORWARD) * computing) + update / gpus
    # DataParallel and the parallel loss: one thread of the host launches the forward passes of all GPUs in turn.
    launching = launch_seconds(net) / 2
    passes = max(_FORWARD * computing, gpus * launching) + max((1 - _FORWARD) * computing, launching)
    seconds = passes + exchange * gpus / (gpus - 1) + update  # each link carries all weights and all gradients
    if method == "DataParallel":  # the first GPU gets all outputs, computes the loss, and sends gradients back
        others = batch * (gpus - 1) / gpus
        seconds += 2 * cluster.copy_seconds(others * net.outputs, gpus) + loss_seconds(net, others, cluster)
    return seconds


def layer_seconds(net: Net, samples: float, cluster: Cluster) -> np.ndarray:
    """Return the seconds of each layer on one GPU in both passes: starting kernels, arithmetic, and memory traffic.
    They are added, because operators that compute wait for operators that move data. The loss is in the last layer."""
    layers, rates = net.layers, cluster.rates
    starts = 5 * layers.operators * rates.kernel  # on average, an operator takes 5 times the shortest kernel's time
    arithmetic = samples * layers.flops / (rates.convolutions if net.convolutions else rates.products)
    moved = samples * layers.moved + 3 * 4 * layers.parameters  # weights read in both passes, gradients written
    seconds = starts + arithmetic + moved / rates.memory
    seconds[-1] += loss_seconds(net, samples, cluster)
    return seconds


def loss_seconds(net: Net, samples: float, cluster: Cluster) -> float:
    """Return the seconds of the loss and its gradient, which read or write the outputs eight times."""
    return 8 * samples * net.outputs / cluster.rates.memory


def launch_seconds(net: Net, ddp: bool = False) -> float:
    """Return the seconds in which the host launches a step's operators. DDP adds copies of gradients to buckets."""
    operators = net.layers.operators.sum() + (2 * net.layers.tensors.sum() if ddp else 0)
    return operators * OPERATOR_SECONDS


@lru_cache(maxsize=512)
def cut(net: Net, gpus: int, samples: float, cluster: Cluster) -> list[tuple[int, int]]:
    """Return (start, end) of the layers of each stage. There are as many stages as GPUs, or as layers if fewer."""
    return balanced_cuts(layer_seconds(net, samples, cluster).tolist(), min(gpus, len(net.layers)))


def _ddp_seconds(net: Net, batch: float, gpus: int, cluster: Cluster) -> float:
    """Gradients come from the last layer first. A bucket is sent when it is full and the previous bucket is done."""
    layers = layer_seconds(net, batch / gpus, cluster)
    layers *= max(1, launch_seconds(net, ddp=True) / layers.sum())  # the host may be slower than the GPU
    now, sent, bucket = _FORWARD * layers.sum(), 0.0, 0.0
    for number in reversed(range(len(layers))):
        now += (1 - _FORWARD) * layers[number]
        bucket += 4 * net.layers.parameters[number]
        if bucket and (bucket >= 25 * MiB or number == 0):
            sent, bucket = max(sent, now) + cluster.all_reduce_seconds(bucket, gpus), 0.0
    return max(sent, now)


def _pipeline_seconds(net: Net, batch: float, gpus: int, cluster: Cluster, micro_batches: int) -> float:
    """Add all stages, the slowest stage again for each further micro-batch, and the copies between stages."""
    samples = batch / micro_batches
    stages, layers = cut(net, gpus, samples, cluster), layer_seconds(net, samples, cluster)
    seconds = [layers[start:end].sum() for start, end in stages]
    copies = sum(2 * cluster.copy_seconds(samples * net.layers.output[end - 1], gpus) for _, end in stages[:-1])
    passes = sum(seconds) + (micro_batches - 1) * max(seconds) + copies
    largest = 4 * max(net.layers.parameters[start:end].sum() for start, end in stages)
    update = largest * _UPDATE[net.optimizer] / cluster.rates.memory
    return max(passes, micro_batches * launch_seconds(net)) + update  # one process launches the work of all GPUs


# ---- advice ----------------------------------------------------------------------------------------------------------

_WORTH = 0.5  # the lowest efficiency at which more GPUs are worth it


@dataclass(frozen=True)
class Advice:
    """The recommended method, the numbers of `gpus` and of `micro_batches` to use, and the `reasons` as sentences.
    Micro-batches are those of a pipeline. With other methods, gradients are accumulated over them."""

    method: str
    gpus: int
    micro_batches: int
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        how = "of" if self.method == "pipeline" else "accumulating gradients over"
        more = f", {how} {self.micro_batches} micro-batches" if self.micro_batches > 1 else ""
        on = f" on {self.gpus} GPUs" if self.gpus > 1 and self.method != "more GPUs" else ""
        return "\n".join([f"Take {self.method}{on}{more}.", *(f"- {reason}" for reason in self.reasons)])


def advise(net: Net, batch: int, gpus: int, cluster: Cluster) -> Advice:
    """Recommend a method for training `net` with `batch` samples per step on `gpus` GPUs of `cluster`, with reasons.

    If a copy of the model fits on a GPU, this is one GPU or DDP, on as many GPUs as have an efficiency of 50 %: all of
    them, fewer machines, or some GPUs of one machine. Otherwise it is sharding or a pipeline. Raises ValueError for
    less than one sample or GPU, and for a number of GPUs that leaves a machine partly unused.
    """
    if batch < 1 or gpus < 1:
        raise ValueError(f"batch={batch} and gpus={gpus}, but both must be at least 1.")
    cluster.all_reduce_seconds(1, gpus)
    return _copies(net, batch, gpus, cluster) or _parts(net, batch, gpus, cluster)


def _copies(net: Net, batch: int, gpus: int, cluster: Cluster) -> Advice | None:
    """Advise a copy of the model on each GPU, with as many GPUs as are worth it."""
    one, reasons = step_seconds(net, "one GPU", batch, 1, cluster), []
    machines = range(gpus - cluster.per_machine, cluster.per_machine, -cluster.per_machine)
    for used in (gpus, *machines, *range(min(gpus - 1, cluster.per_machine), 0, -1)):
        method = "DDP" if used > 1 else "one GPU"
        pieces = fewest_pieces(net, method, batch, used, cluster)
        if not pieces:
            return None
        faster = one / step_seconds(net, method, batch, used, cluster)
        share = f"{100 * faster / used:.0f} %"
        gain = f"{used} GPUs compute a step {faster:.1f} times as fast as one, an efficiency of {share} (rough)"
        if faster / used >= _WORTH:
            size, room = _size(peak_bytes(net, method, batch, used, cluster)), _size(cluster.room)
            fits = "it fits" if pieces == 1 else "only a part of it fits at once"
            reasons.append(f"The whole batch takes {size} on each GPU, which has {room}: {fits}.")
            if used > 1:
                reasons.append(f"{gain}.")
            return Advice(method, used, pieces, tuple(reasons))
        if used == gpus:
            reasons.append(f"{gain}, because {_what_is_slow(net, gpus, cluster)}.")
    return None


def _what_is_slow(net: Net, gpus: int, cluster: Cluster) -> str:
    launching, exchange = launch_seconds(net, ddp=True), cluster.all_reduce_seconds(net.weights, gpus)
    if exchange < launching:
        return f"Python takes {_time(launching)} to launch a step's kernels, however few samples a GPU has"
    return f"exchanging {_size(net.weights)} of gradients takes {_time(exchange)}"


def _parts(net: Net, batch: int, gpus: int, cluster: Cluster) -> Advice:
    """Advise a part of the model on each GPU."""
    whole, room = _size(net.weights * (2 + net.states)), _size(cluster.room)
    states = f"Parameters, gradients and {net.optimizer}'s states take {whole}, and a GPU has {room}"
    reasons, found = [f"{states}, so no GPU has room for a copy of the model and a sample."], {}
    for method in ("sharding", "pipeline"):
        pieces = fewest_pieces(net, method, batch, gpus, cluster) if gpus > 1 else 0
        if pieces:
            again = pieces if method == "sharding" else 1  # sharding gathers the weights for each micro-batch
            seconds = again * step_seconds(net, method, batch / again, gpus, cluster, pieces)
            found[method] = seconds, pieces
    if not found:
        return Advice("more GPUs", gpus, 1, (*reasons, "Neither sharding nor a pipeline fits these GPUs."))
    method = min(found, key=found.get)
    times = ", ".join(f"{name} {_time(seconds)}" for name, (seconds, _) in found.items())
    return Advice(method, gpus, found[method][1], (*reasons, f"Rough time of a step: {times}."))


def fewest_pieces(net: Net, method: str, batch: int, gpus: int, cluster: Cluster) -> int:
    """Return the smallest number of micro-batches, found by doubling, with which a step fits. Return 0 if not even one
    sample per GPU fits, or if a pipeline would have more stages than layers."""
    least, most = (gpus, batch) if method == "pipeline" else (1, math.ceil(batch / gpus))
    if least > most or (method == "pipeline" and gpus > len(net.layers)):
        return 0
    counts = [least * 2**power for power in range((most // least).bit_length())]
    for pieces in [*counts, most]:
        if peak_bytes(net, method, batch, gpus, cluster, pieces) <= cluster.room:
            return pieces
    return 0


def _size(nbytes: float) -> str:
    return format_bytes(round(nbytes))


def _time(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds >= 10 else f"{1e3 * seconds:,.0f} ms"
