"""Which method to take, and why: `advise`. Part of `helpers.lesson07.advice`."""

from __future__ import annotations

import math
from dataclasses import dataclass

from helpers.lesson07.advice.nets import Net
from helpers.lesson07.advice.sizes import peak_bytes
from helpers.lesson07.advice.times import METHODS, issuing_seconds, step_seconds
from helpers.lesson07.methods import micro_batches_on
from helpers.lesson07.scaling import Cluster
from helpers.measure import format_bytes

_WORTH = 0.5  # efficiency below which more GPUs are not worth it


@dataclass(frozen=True)
class Advice:
    """What to take on how many `gpus`, in how many `micro_batches` (a pipeline's; else gradients are accumulated over
    them, and 1 is the whole batch at once), `reasons` as sentences, and per method its bytes on the fullest of all GPUs
    that there are and its rough seconds on them."""

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
    """The method for training `net` with `batch` samples per step on `gpus` GPUs of `cluster`, with reasons.

    Raises ValueError for less than one sample or GPU, and for GPUs that leave a machine partly empty.
    """
    if batch < 1 or gpus < 1:
        raise ValueError(f"batch={batch}, gpus={gpus}: at least one of each is needed")
    cluster.all_reduce_seconds(1, gpus)
    ways = METHODS[:1] if gpus == 1 else METHODS
    peaks = {way: peak_bytes(net, way, batch, 1 if way == "one GPU" else gpus, cluster) for way in ways}
    seconds = {way: step_seconds(net, way, batch, gpus, cluster) for way in ways}
    method, used, micro_batches, reasons = _choose(net, batch, gpus, cluster, peaks, seconds)
    return Advice(method, used, micro_batches, tuple(reasons), peaks, seconds)


def _choose(net: Net, batch: int, gpus: int, cluster: Cluster, peaks: dict, seconds: dict):
    """(method, GPUs, micro-batches, reasons)."""
    room = format_bytes(cluster.room)
    one, many = (_pieces(net, way, batch, n, cluster) for way, n in (("one GPU", 1), ("DDP", gpus)))
    if gpus == 1:
        if one:
            return "one GPU", 1, one, [_fits(one, "one GPU", peaks["one GPU"], room)]
        return "more GPUs", 1, 1, [_too_large(net, room), _how_many(net, batch, gpus, cluster)]
    if not many:
        return _split(net, batch, gpus, cluster, peaks)
    faster = seconds["one GPU"] / seconds["DDP"]
    said = (
        f"{gpus} GPUs compute a step {faster:.1f} times as fast, an efficiency of {100 * faster / gpus:.0f} % (rough)"
    )
    if faster / gpus < _WORTH:
        return _fewer(net, batch, gpus, cluster, said)
    reasons = [_fits(many, "a copy on every GPU", peaks["DDP"], room), said]
    return "DDP", gpus, many, [*reasons, _why_not_dataparallel(net, batch, gpus, peaks, cluster)]


def _fewer(net: Net, batch: int, gpus: int, cluster: Cluster, said: str):
    """So many GPUs are not worth it: the most within one machine that are, or one."""
    why, change = _why_slow(net, gpus, cluster)
    for fewer in range(min(gpus - 1, cluster.per_machine), 0, -1):
        way = "DDP" if fewer > 1 else "one GPU"
        faster = step_seconds(net, "one GPU", batch, 1, cluster) / step_seconds(net, way, batch, fewer, cluster)
        pieces = _pieces(net, way, batch, fewer, cluster)
        if faster / fewer >= _WORTH and pieces:
            better = f"{way} on {fewer} of one machine: {faster:.1f} times as fast as one GPU"
            return way, fewer, pieces, [f"{said}: {why}", f"{better}. {change} would change that"]
    return "DDP", gpus, 1, [f"{said}: {why}"]


def _why_slow(net: Net, gpus: int, cluster: Cluster) -> tuple[str, str]:
    """What keeps DDP's GPUs waiting, links or host, and what would help."""
    links, host = cluster.all_reduce_seconds(net.weights, gpus), issuing_seconds(net)
    if links < host:
        return f"the host takes {_time(host)} to launch a step's kernels, however few the samples", "Larger batches"
    why = f"exchanging {format_bytes(net.weights)} of gradients takes longer than the samples in between"
    return why, "Larger batches, gradients accumulated under no_sync, or a faster network"


def _pieces(net: Net, way: str, batch: int, gpus: int, cluster: Cluster) -> int:
    """The fewest micro-batches that fit; 0 if not even one sample per GPU does."""
    least, most = (micro_batches_on(gpus), batch) if way == "pipeline" else (1, math.ceil(batch / gpus))
    counts = {least * 2**power for power in range((most // least).bit_length())} | {most}
    fitting = (
        n for n in sorted(counts) if least <= n and peak_bytes(net, way, batch, gpus, cluster, n) <= cluster.room
    )
    return next(fitting, 0)


def _split(net: Net, batch: int, gpus: int, cluster: Cluster, peaks: dict):
    """No GPU can have a copy of its own."""
    fitting = {way: n for way in ("pipeline", "sharding") if (n := _pieces(net, way, batch, gpus, cluster))}
    reasons = [_too_large(net, format_bytes(cluster.room))]
    if gpus > len(net.layers) and fitting.pop("pipeline", None):
        reasons.append(f"no pipeline: {len(net.layers)} layers cannot make {gpus} stages")
    if not fitting:
        return "more GPUs", gpus, 1, [*reasons, _how_many(net, batch, gpus, cluster)]
    times = {way: _seconds(net, way, batch, gpus, cluster, n) for way, n in fitting.items()}
    best = min(times, key=times.__getitem__)
    spread = "its layers are spread over the GPUs" if best == "pipeline" else "each GPU keeps a part of every layer"
    whole = "a micro-batch per GPU" if best == "pipeline" else "the whole batch at once"
    whole = f"with {whole} the fullest GPU would hold {format_bytes(round(peaks[best]))}"
    reasons.append(f"{best}: {spread}; {whole}")
    for other in fitting.keys() - {best}:
        against = f"{_time(times[other])} against {_time(times[best])}"
        reasons.append(f"{other} would fit as well, but is slower: {against} (rough)")
    return best, gpus, fitting[best], reasons


def _seconds(net: Net, way: str, batch: int, gpus: int, cluster: Cluster, pieces: int) -> float:
    """Sharding gathers the weights for each micro-batch anew."""
    if way == "sharding":
        return pieces * step_seconds(net, way, batch / pieces, gpus, cluster)
    return step_seconds(net, way, batch, gpus, cluster, pieces)


def _time(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds >= 10 else f"{1e3 * seconds:,.0f} ms"


def _fits(pieces: int, what: str, peak: float, room: str) -> str:
    whole = f"{what} takes {format_bytes(round(peak))} for the whole batch, and a card has {room}"
    return f"{whole}: it fits" if pieces == 1 else f"{whole}: accumulate gradients over {pieces} micro-batches"


def _too_large(net: Net, room: str) -> str:
    size = format_bytes(round(net.weights * (2 + net.states)))
    states = f"parameters, gradients and {net.optimizer}'s states are {size}"
    return f"{states}, and a card has {room}: no copy fits with a sample"


def _how_many(net: Net, batch: int, gpus: int, cluster: Cluster) -> str:
    for more in (gpus * 2**power for power in range(1, 13)):
        ways = [way for way in ("sharding", "pipeline") if _pieces(net, way, batch, more, cluster)]
        if ways:
            return f"on {more} such cards {' or '.join(ways)} would fit"
    return "no number of such cards up to thousands would do: the batch or the net is too large for them"


def _why_not_dataparallel(net: Net, batch: int, gpus: int, peaks: dict, cluster: Cluster) -> str:
    if cluster.machines(gpus) > 1:
        return "DataParallel and the parallel loss are for one machine; this takes more"
    if 3 * batch * net.outputs > 0.2 * peaks["DataParallel"]:
        size = format_bytes(round(peaks["DataParallel"]))
        return f"DataParallel's first GPU would hold everyone's outputs, {size} in all"
    return "DataParallel would be balanced here, and one line; but one process would have to feed all GPUs"
