"""A collate function moved each batch to the GPU, in workers that were forked from a process that had used it.

Thread: https://github.com/pytorch/pytorch/issues/17359
"""

import torch
from torch.utils.data import DataLoader

ERROR = "Cannot re-initialize CUDA in forked subprocess"
RANKS = None
SETTINGS = {"refuse_forks": True}


def collate(numbers):
    return torch.tensor(numbers)


def collate_on_the_gpu(numbers):
    return collate(numbers).to("cuda")


def batches(collate_fn):
    torch.ones(1, device="cuda")  # the program has used the GPU
    return DataLoader(range(4), 2, num_workers=1, collate_fn=collate_fn, multiprocessing_context="fork")


def before():
    return [batch.tolist() for batch in batches(collate_on_the_gpu)]


def after():
    return [batch.to("cuda").tolist() for batch in batches(collate)]
