"""An encoder with reentrant checkpointing ran twice in a step, once for the text and once for the code.

Thread: https://github.com/huggingface/transformers/issues/23018
"""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

ERROR = "Expected to mark a variable ready only once"


class Matcher(nn.Module):
    def __init__(self, use_reentrant):
        super().__init__()
        self.use_reentrant = use_reentrant
        self.embedding, self.encoder = nn.Linear(8, 8), nn.Linear(8, 8)

    def encode(self, x):
        return checkpoint(self.encoder, self.embedding(x), use_reentrant=self.use_reentrant)

    def forward(self, text, code):
        return (self.encode(text) * self.encode(code)).sum()


def train(use_reentrant):
    model = DistributedDataParallel(Matcher(use_reentrant).cuda())
    text, code = torch.ones(2, 4, 8, device="cuda")
    model(text, code).backward()


def before(rank):
    train(use_reentrant=True)


def after(rank):
    train(use_reentrant=False)
