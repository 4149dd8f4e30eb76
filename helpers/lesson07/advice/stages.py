"""A net of the guide cut into the stages of a pipeline: part of `helpers.lesson07.advice`."""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate

from helpers.lesson07.advice.costs import layer_seconds
from helpers.lesson07.advice.nets import Layers, Net
from helpers.lesson07.scaling import Cluster

_STEEP = 16  # the larger, the more the dearest stage alone decides


@lru_cache(maxsize=512)
def stages(net: Net, gpus: int, samples: float, cluster: Cluster) -> tuple[tuple[Layers, ...], ...]:
    """The layers of each stage, so that the slowest is as fast as can be with `samples` per micro-batch.

    As many stages as GPUs, or as layers if there are fewer.
    """
    costs = layer_seconds(net, samples, cluster)
    edges = [0, *_cuts(costs, min(gpus, len(costs))), len(costs)]
    return tuple(net.layers[start:end] for start, end in zip(edges, edges[1:], strict=False))


def _cuts(costs: list[float], parts: int) -> list[int]:
    """Where the second, third, ... part begins: the least sum of the parts' costs to a high power.

    One part after the other is added: best[end] is (sum, cuts) of the parts so far, which take the first `end` layers.
    """
    sums = [0.0, *accumulate(costs)]
    mean = sums[-1] / parts
    best = {end: ((sums[end] / mean) ** _STEEP, []) for end in range(1, len(costs) + 1)}
    for part in range(1, parts):
        best = {
            end: min(
                (best[cut][0] + ((sums[end] - sums[cut]) / mean) ** _STEEP, [*best[cut][1], cut])
                for cut in range(part, end)
            )
            for end in range(part + 1, len(costs) + 1)
        }
    return best[len(costs)][1]
