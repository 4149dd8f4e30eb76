"""What a method takes for a net, from a handful of its numbers: memory per GPU and a rough time.

With W the bytes of the parameters, k the optimizer's states per parameter (Adam 2, momentum 1, SGD 0), A those of the
activations that a sample keeps for the backward pass, O its outputs, b the batch, n the GPUs, all in float32:

    one GPU         W (1 + k) + larger of W and b (A + 3 O)
    DataParallel    the first GPU: W (1 + k) + larger of W and b A / n + 3 b O, since it gathers all outputs
    parallel loss   W (1 + k) + larger of 2 W and b (A + 3 O) / n
    DDP             the same + W for the buckets
    pipeline        n micro-batches (`helpers.methods.micro_batches_on`), 1F1B: the larger of the first stage, which
                    keeps n of them, and the last, which has the outputs
    sharding        W (2 + k) / n + a layer's weights + b (A + 3 O) / n

3 O, at the loss: the log-softmax of the outputs and two gradients. Tests hold these against steps on virtual GPUs,
within 10 %. The pipeline's stages are taken to be alike (30 %), but early layers of an image net keep far more than
late ones: the PyramidNet's pipeline is said to take 7.1 GiB, and takes 10 to 12.5.
Times are rough: a card is taken to reach 40 % of its peak, and two thirds of the computation, the backward pass, to
hide communication. Against modelled steps of the course's two nets they are up to three times too long (PyramidNet on
A100s) and half as long as they should be (on K80s): only their order is of use.
"""

from __future__ import annotations

from dataclasses import dataclass

from helpers.memory import MiB
from helpers.methods import micro_batches_on
from helpers.scaling import Cluster

METHODS = ("one GPU", "DataParallel", "parallel loss", "DDP", "pipeline", "sharding")
OPTIMIZERS = {"SGD": 0, "SGD with momentum": 1, "Adam": 2}
_REACHED, _HIDDEN = 0.4, 2 / 3


@dataclass(frozen=True)
class Net:
    """A net and its optimizer. activations, outputs: bytes of a sample; flops: of a sample, both passes; layers: how
    many can be put on different GPUs."""

    name: str
    parameters: int
    activations: float
    outputs: float
    flops: float
    layers: int
    optimizer: str = "Adam"

    @property
    def weights(self) -> int:
        """Bytes of the parameters in float32."""
        return 4 * self.parameters

    @property
    def states(self) -> int:
        """Optimizer states per parameter."""
        return OPTIMIZERS[self.optimizer]

    @property
    def at_loss(self) -> float:
        """Bytes per sample at the loss."""
        return self.activations + 3 * self.outputs


# Measured on virtual GPUs in shapes only (float32, PyTorch 2.15). The last one's follow from runs with one and with two
# of its 32 layers.
NETS = {net.name: net for net in (
    Net("BERT of the article", 21_750_320, 37.3 * MiB, 18.65 * MiB, 14.3e9, 10),
    Net("PyramidNet of the article", 24_253_410, 37.6 * MiB, 40, 24.2e9, 53, "SGD with momentum"),
    Net("ResNet-50, 224 pixels", 25_557_032, 82.5 * MiB, 4_000, 24.3e9, 20, "SGD with momentum"),
    Net("BERT large, 512 tokens", 365_375_290, 845 * MiB, 59.6 * MiB, 1.024e12, 26),
    Net("7 billion, 2,048 tokens", 6_714_000_000, 18_000 * MiB, 250 * MiB, 80.8e12, 34),
)}  # fmt: skip


def peak_bytes(net: Net, method: str, batch: float, gpus: int) -> float:
    """Bytes on the fullest GPU in a step of `batch` samples on all `gpus` together. ValueError: unknown method."""
    own, mine = net.weights * (1 + net.states), batch / gpus
    if method == "one GPU":
        return own + max(net.weights, batch * net.at_loss)
    if method == "DataParallel":
        return own + max(2 * net.weights, mine * net.activations + 3 * batch * net.outputs)
    if method == "parallel loss":
        return own + max(2 * net.weights, mine * net.at_loss)
    if method == "DDP":
        return own + net.weights + max(net.weights, mine * net.at_loss)
    if method == "pipeline":
        micro, stage = batch / micro_batches_on(gpus), net.activations / gpus
        first, last = micro * stage * gpus, micro * (stage + 3 * net.outputs)
        return (own + net.weights) / gpus + max(first, last)
    if method == "sharding":
        return (own + net.weights) / gpus + net.weights / net.layers + mine * net.at_loss
    raise ValueError(f"no method {method!r}: choose one of {', '.join(METHODS)}")


def computing(net: Net, batch: float, cluster: Cluster) -> float:
    """Rough seconds that one card computes for `batch` samples."""
    return batch * net.flops / (_REACHED * cluster.flops)


def step_seconds(net: Net, method: str, batch: float, gpus: int, cluster: Cluster) -> float:
    """Rough modelled seconds of a step, without Python's part, which DataParallel and the parallel loss suffer from."""
    alone, shared = computing(net, batch, cluster), computing(net, batch / gpus, cluster)
    sent = cluster.all_reduce_seconds(net.weights, gpus) if gpus > 1 else 0.0
    if method == "one GPU" or gpus == 1:
        return alone
    if method == "pipeline":
        micro_batches = micro_batches_on(gpus)
        return shared * (micro_batches + gpus - 1) / micro_batches
    if method == "DDP":
        return shared + max(0.0, sent - _HIDDEN * shared)
    if method == "sharding":  # weights are gathered in both passes, gradients scattered: three halves of an all-reduce
        return shared + max(0.0, 1.5 * sent - _HIDDEN * shared)
    outputs = cluster.all_reduce_seconds(batch * net.outputs, gpus) if method == "DataParallel" else 0.0
    return shared + sent + outputs
