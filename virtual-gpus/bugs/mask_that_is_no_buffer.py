"""A mask was an attribute and no buffer, so that replicas on other GPUs had the mask of the first.

Thread: https://github.com/OpenNMT/OpenNMT-py/pull/240
"""

import torch
from torch import nn

ERROR = "Expected all tensors to be on the same device"
RANKS = None


class Decoder(nn.Module):
    def __init__(self, as_a_buffer):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        mask = torch.ones(4, 4, device="cuda").tril()
        if as_a_buffer:
            self.register_buffer("mask", mask)
        else:
            self.mask = mask

    def forward(self, x):
        return self.layer(x) @ self.mask


def run(as_a_buffer):
    model = nn.DataParallel(Decoder(as_a_buffer).cuda(), device_ids=[0, 1])
    return model(torch.ones(4, 4, device="cuda")).shape


def before():
    return run(as_a_buffer=False)


def after():
    return run(as_a_buffer=True)
