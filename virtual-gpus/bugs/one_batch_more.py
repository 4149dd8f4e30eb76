"""Ranks had different numbers of validation batches. With FSDP, each forward pass is a collective.

Thread: https://github.com/PrimeIntellect-ai/prime-rl/issues/2515
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

ERROR = "all_gather"
ON_GPUS = "hangs until the time limit of NCCL"


def sharded():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).cuda()
    for layer in model:
        fully_shard(layer)
    return fully_shard(model)


def batches_of(rank):
    return iter([torch.ones(2, 4, device="cuda")] * (2 + rank))


@torch.no_grad()
def before(rank):
    model = sharded()
    for batch in batches_of(rank):
        model(batch)
    dist.barrier()


@torch.no_grad()
def after(rank):
    model = sharded()
    batches = batches_of(rank)
    while True:
        batch = next(batches, None)
        ranks_with_data = torch.tensor(0 if batch is None else 1, device="cuda")
        dist.all_reduce(ranks_with_data)
        if ranks_with_data < dist.get_world_size():
            break
        model(batch)
    dist.barrier()
