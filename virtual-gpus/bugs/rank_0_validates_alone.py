"""Rank 0 alone validated, through the model that DDP had wrapped, whose forward pass sends the buffers to all ranks.

Thread: https://github.com/LibreYOLO/libreyolo/pull/594
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

ERROR = "broadcast"
ON_GPUS = "hangs until the time limit of NCCL"


def validate(model):
    model.eval()
    with torch.no_grad():
        return model(torch.ones(2, 4, device="cuda")).sum().item()


def wrapped():
    return DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).cuda())


def before(rank):
    model = wrapped()
    if rank == 0:
        validate(model)
    dist.barrier()


def after(rank):
    model = wrapped()
    if rank == 0:
        validate(model.module)
    dist.barrier()
