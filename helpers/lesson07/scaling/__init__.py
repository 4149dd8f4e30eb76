"""Scaling analysis: the modelled step of DDP on any number of GPUs, speed-up, efficiency, and Amdahl's law.

    step = rank_step(build, train_step, "cuda:0")        # one rank, alone in its process group
    step.on(64, cluster)                                 # seconds on 64 GPUs
    speedup(seconds), efficiency(seconds)                # {GPUs: seconds} -> {GPUs: ...}
    serial = amdahl(seconds)                             # the share that does not get faster

64 ranks would be 64 processes. So one rank's step is recorded: when each bucket of gradients is ready, how large it is,
and when each kernel starts. The all-reduces are then laid on a line of their own, each starting when its bucket is
ready and the one before is done, for the time that a ring of n GPUs takes. A kernel that needs its result comes after
it, and no earlier than with one rank, since the host goes on meanwhile: where it is the bottleneck, the gaps between
kernels take up the delay. All ranks are taken to be equally fast, and the broadcasts of buffers (a BatchNorm's) to take
no longer than with one rank.

Against real ranks in processes of their own, 2 and 4 of them, steps came within 0.2 %, whether the GPU, the host or the
network was the bottleneck (tests/test_scaling.py). Both are modelled by one clock: this checks the laying out, not the
clock.
"""

from helpers.lesson07.scaling.clusters import KINDS, NETWORKS, Cluster
from helpers.lesson07.scaling.laws import amdahl, amdahl_seconds, efficiency, speedup
from helpers.lesson07.scaling.logs import read_log
from helpers.lesson07.scaling.picture import describe_scaling, scaling_picture
from helpers.lesson07.scaling.ranks import Bucket, RankStep, one_rank, rank_step

__all__ = [
    "KINDS",
    "NETWORKS",
    "Bucket",
    "Cluster",
    "RankStep",
    "amdahl",
    "amdahl_seconds",
    "describe_scaling",
    "efficiency",
    "one_rank",
    "rank_step",
    "read_log",
    "scaling_picture",
    "speedup",
]
