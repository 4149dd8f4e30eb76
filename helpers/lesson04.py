"""The peak memory of a training step of the article's BERT, under any of PyTorch's wrappers.

bert_peaks(nn.DataParallel, 200, gpus)             # one process, four GPUs; with gpus[:1] one GPU
bert_peaks(DistributedDataParallel, 50, [rank])    # in each of four ranks
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from helpers.data import random_tokens
from helpers.measure import Readings, peak_memory
from helpers.models import bert_article

__all__ = ["LENGTH", "VOCABULARY", "WordLoss", "bert_peaks"]

LENGTH, VOCABULARY = 163, 30_000  # words of a sentence, and different words in all


class WordLoss(nn.Module):
    """Cross entropy, mean over words: logits (N, T, V), words (N, T), which go to the GPU of the logits.

    Images have one word each: logits (N, V), words (N,).
    """

    def forward(self, logits: Tensor, words: Tensor) -> Tensor:
        return cross_entropy(logits.flatten(0, -2), words.to(logits.device).flatten())


def bert_peaks(
    wrap: Callable[[nn.Module, Sequence], nn.Module],
    batch: int,
    devices: Sequence[torch.device | int],
    criterion: nn.Module | None = None,
    vocabulary: int = VOCABULARY,
) -> Readings:
    """Readings of `devices` with the peaks of one step: forward, loss, backward, Adam.

    It is the second step, when Adam's states and DDP's final buckets exist. wrap: called with the net on the first
    device and with the devices. batch: sentences that this process trains on. criterion: `WordLoss` by default.
    vocabulary: its words. Memory that earlier runs left reserved is released first. Raises ValueError for no device and
    for a batch below one.
    """
    if not devices or batch < 1:
        raise ValueError(f"Give at least one device and one sentence, not {len(devices)} and {batch}.")
    torch.cuda.empty_cache()
    network, criterion = wrap(bert_article(vocabulary).to(devices[0]), devices), criterion or WordLoss()
    adam = torch.optim.Adam(network.parameters())

    def step():
        tokens, words = random_tokens(batch, LENGTH, vocabulary)
        adam.zero_grad()
        criterion(network(tokens), words).backward()
        adam.step()

    step()
    return peak_memory(step, devices)
