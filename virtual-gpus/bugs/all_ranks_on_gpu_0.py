"""The local rank did not choose the GPU, so that all ranks worked on the first one.

Thread: https://github.com/galilai-group/stable-pretraining/pull/50
"""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

ERROR = "Duplicate GPU detected"


def train(gpu):
    model = DistributedDataParallel(nn.Linear(4, 4).to(gpu))
    model(torch.ones(2, 4, device=gpu)).sum().backward()


def before(rank):
    train("cuda:0")


def after(rank):
    train(f"cuda:{rank}")
