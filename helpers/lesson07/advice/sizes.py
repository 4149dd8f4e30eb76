"""What a method takes for a net, from its layers: memory per GPU. Part of `helpers.lesson07.advice`.

With W the bytes of the parameters, k the optimizer's states per parameter (Adam 2, momentum 1, SGD 0), A those of the
activations that a sample keeps for the backward pass, O its outputs, b the batch, n the GPUs, all in float32:

    one GPU         W (1 + k) + larger of W and b (A + 3 O)
    DataParallel    the first GPU: W (1 + k) + larger of 2 W and b A / n + 3 b O, since it gathers all outputs
    parallel loss   W (1 + k) + larger of 2 W and b (A + 3 O) / n
    DDP             the same + W for the buckets
    pipeline        m micro-batches, 1F1B, stages that take about equally long: the fullest of them. With w, a and o of
                    a stage, and i what the stage before hands it: w (1 + k) + b / m (f (a + i) + o). f: the
                    micro-batches that it holds at once, as many as there are stages from it to the last, and no more
                    than m (GPipe would hold all m). If f < m, gradients are there as well: + w. Last stage: o is 3 O
    sharding        W (2 + k) / n + a layer's weights + b (A + 3 O) / n

3 O, at the loss: the log-softmax of the outputs and two gradients. If gradients are accumulated over m micro-batches, b
is a micro-batch, and the gradients of those before stay: + W, but no larger of the two then.

Tests hold these against the steps of lesson 07: all within 2 %, but for a pipeline that is cut at other layers (10 to
12 %, PyramidNet on A100s, V100s and H200s: `costs` takes its first layers for quicker than they are there, and gives
the first stage one more). Sharding is not run. Memory that lies in pieces comes on top.
"""

from __future__ import annotations

from helpers.lesson07.advice.nets import Net
from helpers.lesson07.advice.stages import stages
from helpers.lesson07.advice.times import METHODS
from helpers.lesson07.methods import micro_batches_on
from helpers.lesson07.scaling import Cluster


def peak_bytes(
    net: Net, method: str, batch: float, gpus: int, cluster: Cluster, micro_batches: int | None = None
) -> float:
    """Bytes on the fullest GPU in a step of `batch` samples on all `gpus` together. cluster: its cards' pace says where
    a pipeline is cut. micro_batches: that a step is done in; None: one, of a pipeline one per GPU. ValueError: unknown
    method."""
    if method == "pipeline":
        return max(stage_bytes(net, batch, gpus, cluster, micro_batches))
    weights, pieces = net.weights, micro_batches or 1
    own, samples, mine = weights * (1 + net.states), batch / pieces, batch / pieces / gpus
    gradients = weights if pieces > 1 else 0
    if method == "one GPU":
        return own + max(weights, gradients + samples * net.at_loss)
    if method == "DataParallel":
        return own + max(2 * weights, gradients + mine * net.activations + 3 * samples * net.outputs)
    if method == "parallel loss":
        return own + max(2 * weights, gradients + mine * net.at_loss)
    if method == "DDP":
        return own + weights + max(weights, gradients + mine * net.at_loss)
    if method == "sharding":
        return (own + weights) / gpus + max(4 * run.parameters for run in net.runs) + mine * net.at_loss
    raise ValueError(f"no method {method!r}: choose one of {', '.join(METHODS)}")


def stage_bytes(net: Net, batch: float, gpus: int, cluster: Cluster, micro_batches: int | None = None) -> list[float]:
    """Bytes of each stage of a pipeline, at its peak."""
    micro_batches = micro_batches or micro_batches_on(gpus)
    micro, found, received = batch / micro_batches, [], 0.0
    cut = stages(net, gpus, micro, cluster)
    for number, stage in enumerate(cut):
        last = number == len(cut) - 1
        held = min(micro_batches, len(cut) - number)
        weights, kept = (sum(getattr(layer, what) for layer in stage) for what in ("parameters", "activations"))
        # At the end of the first backward pass the gradients are there; until then nothing has been let go of.
        gradients = 4 * weights if held < micro_batches else 0.0
        most = held * (kept + received) + (3 if last else 1) * stage[-1].output
        found.append(4 * weights * (1 + net.states) + gradients + micro * most)
        received = stage[-1].output
    return found
