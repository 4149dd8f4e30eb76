"""Ranks used two process groups in different orders, and each waited for its numbers: a deadlock in production.

Thread: https://github.com/meta-pytorch/torchrec/pull/4149
"""

import torch
import torch.distributed as dist

ERROR = "rank 0 waits for rank 1 in all_to_all of float32"
ON_GPUS = "hangs until the time limit of NCCL"


def exchange(group):
    received = torch.empty(2, device="cuda")
    dist.all_to_all_single(received, torch.ones(2, device="cuda"), group=group)
    return received.tolist()  # waits until the numbers are there


def average(group):
    total = torch.ones(2, device="cuda")
    dist.all_reduce(total, group=group)
    return total.tolist()


def before(rank):
    shard, replicate = dist.new_group(), dist.new_group()
    if rank == 0:
        return exchange(shard), average(replicate)
    return average(replicate), exchange(shard)


def after(rank):
    shard, replicate = dist.new_group(), dist.new_group()
    return exchange(shard), average(replicate)
