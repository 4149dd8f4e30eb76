"""Rank 0 alone saved the optimizer's state. To gather a sharded tensor is a collective.

Thread: https://github.com/EleutherAI/bergson/pull/380
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

ERROR = "all_gather"
ON_GPUS = "hangs until the time limit of NCCL"


def trained():
    model = fully_shard(nn.Linear(4, 4).cuda())
    adam = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 4, device="cuda")).sum().backward()
    adam.step()
    return adam.state[model.weight]["exp_avg"]


def before(rank):
    moment = trained()
    if rank == 0:
        moment.full_tensor()  # to be saved
    dist.barrier()


def after(rank):
    moment = trained().full_tensor()
    dist.barrier()
    return moment.shape if rank == 0 else None
