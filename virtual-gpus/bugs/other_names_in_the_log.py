"""Ranks logged different names, and each name was a collective of its own.

Thread: https://github.com/Lightning-AI/pytorch-lightning/issues/19106
"""

import torch
import torch.distributed as dist

ERROR = "all_reduce"
ON_GPUS = "hangs until the time limit of NCCL"


def means(metrics):
    values = {}
    for name, value in metrics.items():
        total = torch.tensor(value, device="cuda")
        dist.all_reduce(total)
        values[name] = total.item() / dist.get_world_size()
    return values


def metrics_of(rank):
    return {"loss": 1.0, "rare class": 0.5} if rank == 0 else {"loss": 1.0}  # which rank 1 has not seen


def before(rank):
    values = means(metrics_of(rank))
    dist.barrier()
    return values


def after(rank):
    metrics = metrics_of(rank)
    names = [None] * dist.get_world_size()
    dist.all_gather_object(names, list(metrics))
    values = means({name: metrics.get(name, 0.0) for name in sorted(set().union(*names))})
    dist.barrier()
    return values
