"""What a step takes by each method, from a net's layers, a card's rates and its links.

A layer takes a card its operations at the pace of products or convolutions, and what it moves at the memory's: the
two are added, since operators of the one sort wait for those of the other. To what moves with the samples come the
weights, read in both passes, and their gradients written. The loss goes eight times over the outputs. The optimizer
reads and writes each parameter's numbers as often as PyTorch's lists of tensors do. A third of the computation is the
forward pass. The host needs some 35 microseconds per operator; where that is longer than the GPU needs, it counts.

    one GPU         layers, loss, optimizer
    DataParallel    the same for b / n samples; weights out and gradients back; all outputs to the first GPU and
                    their gradients back; the loss there for all. One host thread at a time launches n forward passes
    parallel loss   without the outputs' way, and with a share of the loss on each GPU
    DDP             the all-reduce of each 25 MiB of gradients begins when the backward pass has them
    pipeline        all stages once, and the slowest for each further micro-batch; copies from stage to stage
    sharding        weights gathered in both passes and gradients scattered, three halves of an all-reduce, of which
                    two thirds of the computation hide what they can

The rates (`helpers.gpus.rates`) are those of the clock that times steps on virtual GPUs. So holding one against the
other, as tests do, proves what is done with the rates, and not the rates. Over the modelled steps it gives 0.92 to 1.07
for the BERT of the article and 0.77 to 1.00 for its PyramidNet, on six kinds of cards, and with DDP on up to 64 A100s;
0.78 for pipelines on H200s, where the host decides. Lowest are convolutions of few channels on tensor cores.
"""

from __future__ import annotations

from helpers.gpus import OPERATOR_SECONDS
from helpers.lesson07.advice.costs import layer_seconds, loss_seconds
from helpers.lesson07.advice.nets import Net
from helpers.lesson07.advice.stages import stages
from helpers.lesson07.methods import micro_batches_on
from helpers.lesson07.scaling import Cluster
from helpers.measure import MiB

_FORWARD = 1 / 3
_UPDATE = {"SGD": 3, "SGD with momentum": 8, "Adam": 18}  # reads and writes of `foreach`, in sizes of the parameters
_BUCKET = 25 * MiB  # DDP's bucket_cap_mb


def _update(net: Net, parameters: float, cluster: Cluster) -> float:
    return 4 * parameters * _UPDATE[net.optimizer] / cluster.rates.memory


def step_seconds(
    net: Net, method: str, batch: float, gpus: int, cluster: Cluster, micro_batches: int | None = None
) -> float:
    """Rough modelled seconds of a step of `batch` samples on all `gpus` together. micro_batches: of a pipeline; None:
    one per GPU. Raises ValueError for an unknown method."""
    if method not in _METHODS:
        raise ValueError(f"no method {method!r}: choose one of {', '.join(_METHODS)}")
    if method == "pipeline" and gpus > 1:
        return _pipeline(net, batch, gpus, cluster, micro_batches or micro_batches_on(gpus))
    if gpus == 1:
        method = "one GPU"
    return _METHODS[method](net, batch, gpus, cluster)


def _one_gpu(net: Net, batch: float, gpus: int, cluster: Cluster) -> float:
    return _computing(net, batch, cluster) + _update(net, net.parameters, cluster)


def _computing(net: Net, samples: float, cluster: Cluster) -> float:
    """Both passes by one process for one card: of the card and its host the slower one."""
    return max(sum(layer_seconds(net, samples, cluster)), net.operators * OPERATOR_SECONDS)


def _data_parallel(net: Net, batch: float, gpus: int, cluster: Cluster) -> float:
    share = (gpus - 1) / gpus
    there_and_back = 2 * cluster.copy_seconds(share * batch * net.outputs, gpus)
    others = share * loss_seconds(net, batch, cluster)
    return _parallel_loss(net, batch, gpus, cluster) + there_and_back + others


def _parallel_loss(net: Net, batch: float, gpus: int, cluster: Cluster) -> float:
    computing, issuing = sum(layer_seconds(net, batch / gpus, cluster)), net.operators * OPERATOR_SECONDS / 2
    forward = max(_FORWARD * computing, gpus * issuing)
    backward = max((1 - _FORWARD) * computing, issuing)  # autograd has a thread per GPU
    # All bytes pass each link of a ring twice; in an all-reduce 2 (n - 1) / n times.
    sent = cluster.all_reduce_seconds(net.weights, gpus) * gpus / (gpus - 1)
    return forward + backward + sent + _update(net, net.parameters, cluster)


def _ddp(net: Net, batch: float, gpus: int, cluster: Cluster) -> float:
    """The layers' gradients come from the last to the first. Each bucket is sent when it is full and the one before
    has been."""
    layers = layer_seconds(net, batch / gpus, cluster)
    slow = max(1.0, issuing_seconds(net) / sum(layers))  # the host's pace, where it is slower
    now, sent, bucket = _FORWARD * slow * sum(layers), 0.0, 0.0
    for layer, seconds in zip(reversed(net.layers), reversed(layers), strict=True):
        now, bucket = now + (1 - _FORWARD) * slow * seconds, bucket + 4 * layer.parameters
        if bucket >= _BUCKET:
            sent, bucket = max(sent, now) + cluster.all_reduce_seconds(bucket, gpus), 0.0
    if bucket:
        sent = max(sent, now) + cluster.all_reduce_seconds(bucket, gpus)
    return max(sent, now) + _update(net, net.parameters, cluster)


def issuing_seconds(net: Net) -> float:
    """What the host takes to launch a step of DDP: each gradient is copied to its bucket, and back."""
    return (net.operators + 2 * net.tensors) * OPERATOR_SECONDS


def _pipeline(net: Net, batch: float, gpus: int, cluster: Cluster, micro_batches: int) -> float:
    micro, costs = batch / micro_batches, iter(layer_seconds(net, batch / micro_batches, cluster))
    cut = stages(net, gpus, micro, cluster)
    seconds = [sum(next(costs) for _ in stage) for stage in cut]
    copies = sum(2 * cluster.copy_seconds(micro * stage[-1].output, gpus) for stage in cut[:-1])
    passes = sum(seconds) + (micro_batches - 1) * max(seconds) + copies
    most = max(sum(layer.parameters for layer in stage) for stage in cut)
    # One process feeds all GPUs, as in lesson 05.
    return max(passes, micro_batches * net.operators * OPERATOR_SECONDS) + _update(net, most, cluster)


def _sharding(net: Net, batch: float, gpus: int, cluster: Cluster) -> float:
    # Tensors are copied to be gathered and scattered, as DDP copies gradients.
    computing = max(sum(layer_seconds(net, batch / gpus, cluster)), issuing_seconds(net))
    sent = 1.5 * cluster.all_reduce_seconds(net.weights, gpus)
    return computing + max(0.0, sent - (1 - _FORWARD) * computing) + _update(net, net.parameters / gpus, cluster)


_METHODS = {
    "one GPU": _one_gpu,
    "DataParallel": _data_parallel,
    "parallel loss": _parallel_loss,
    "DDP": _ddp,
    "pipeline": _pipeline,
    "sharding": _sharding,
}
METHODS = tuple(_METHODS)
