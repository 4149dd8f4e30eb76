"""The ImageNet example averaged a meter that was on the CPU: NCCL has no CPU tensors.

Thread: https://github.com/pytorch/examples/pull/1034
"""

import torch
import torch.distributed as dist

ERROR = "No backend type associated with device type cpu"


def mean(sums):
    dist.all_reduce(sums)
    return (sums[0] / sums[1]).item()


def before(rank):
    return mean(torch.FloatTensor([3.0 + rank, 1.0]))


def after(rank):
    return mean(torch.tensor([3.0 + rank, 1.0], device="cuda"))
