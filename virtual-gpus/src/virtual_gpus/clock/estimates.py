"""Estimates without running anything: the rates of a kind of GPU, and the seconds of copies and all-reduces.

    rates("A100").convolutions                                       # operations per second
    all_reduce_seconds(87_001_280, 64, "A100", per_machine=8, network="Ethernet 25")

Use these functions to calculate the time of a step instead of running it. They use the same numbers as the clock. They
need no GPU, neither a real nor a virtual one.
"""

from __future__ import annotations

from typing import NamedTuple

from virtual_gpus.clock.cost_conv import CONVOLUTIONS_BACKWARD
from virtual_gpus.clock.cost_matmul import peak, tensor_cores
from virtual_gpus.clock.host import HOST
from virtual_gpus.clock.links import NETWORKS, REACHED, arrange
from virtual_gpus.clock.traffic import ring_seconds
from virtual_gpus.gpus import spec

__all__ = ["NETWORKS", "OPERATOR_SECONDS", "Rates", "all_reduce_seconds", "copy_seconds", "rates"]

# Seconds of host time for one operator of a training step: to launch it, to record it for autograd, and for one view
# before and one after it.
OPERATOR_SECONDS = HOST.operator + HOST.training + 2 * HOST.view


class Rates(NamedTuple):
    """The speeds that a kind of GPU reaches with float32 and PyTorch's default settings.

    products: operations per second of large matrix multiplications.
    convolutions: operations per second of convolutions over both passes, on TF32 tensor cores if the GPU has them.
    memory: bytes per second.
    kernel: seconds of the shortest kernel.
    """

    products: float
    convolutions: float
    memory: float
    kernel: float


def rates(kind: str) -> Rates:
    """The rates of a kind of GPU. Raises ValueError for an unknown kind."""
    gpu = spec(kind)
    shares, cores = gpu.reached, tensor_cores(gpu, "tf32")
    forward = peak(gpu, "tf32" if cores else "fp32") * (shares.tensor_conv if cores else shares.conv)
    both_passes = forward * 3 / (1 + 2 / CONVOLUTIONS_BACKWARD)  # two thirds of the arithmetic are backward
    return Rates(peak(gpu, "fp32") * shares.simt, both_passes, gpu.bandwidth * shares.memory, shares.kernel)


def copy_seconds(
    nbytes: float, gpus: int, kind: str, per_machine: int, links: str | None = None, network: str = "Ethernet 100"
) -> float:
    """The seconds of a copy of `nbytes` between two neighbours among `gpus` GPUs, over the slowest link between them.

    The result for one GPU is 0. The arguments and errors are those of `all_reduce_seconds`.
    """
    topology = arrange(spec(kind), gpus, links, -(-gpus // per_machine), network)
    between = [topology.between(gpu, gpu + 1) for gpu in range(gpus - 1)]
    return max((link.latency + nbytes / (REACHED * link.bandwidth) for link in between), default=0.0)


def all_reduce_seconds(
    nbytes: float,
    gpus: int,
    kind: str,
    per_machine: int,
    links: str | None = None,
    network: str = "Ethernet 100",
    adapters: int = 1,
) -> float:
    """The seconds of an all-reduce of `nbytes` around a ring of `gpus` GPUs, with up to `per_machine` GPUs per machine.

    links: the links within a machine. None: those of the kind.
    network: the network between machines, a name in `NETWORKS`.
    adapters: network adapters of one machine. NCCL builds one ring per adapter and divides the bytes among the rings.

    Raises ValueError for unknown names, for less than one adapter, and if the GPUs do not fill all machines evenly.
    """
    hosts = -(-gpus // per_machine)
    topology = arrange(spec(kind), gpus, links, hosts, network, adapters)
    route = topology.route(list(zip(topology.hosts, range(gpus), strict=True)), per_host=gpus // hosts)
    return ring_seconds(route.links, gpus, "all_reduce", nbytes)
