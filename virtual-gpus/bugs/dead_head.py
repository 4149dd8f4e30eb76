"""A model kept the heads of its pretraining, which finetuning does not use, and DDP waited for their gradients.

Thread: https://github.com/NVIDIA-BioNeMo/KERMT/issues/23
"""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

ERROR = "Expected to have finished reduction in the prior iteration"


class Finetuned(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.vocabulary_head = nn.Linear(4, 100)  # of the pretraining
        self.task_head = nn.Linear(4, 2)

    def forward(self, x):
        return self.task_head(self.body(x))


def train(model):
    model = DistributedDataParallel(model.cuda())
    for _ in range(2):
        model(torch.ones(2, 4, device="cuda")).sum().backward()


def before(rank):
    train(Finetuned())


def after(rank):
    model = Finetuned()
    model.vocabulary_head.requires_grad_(False)
    train(model)
