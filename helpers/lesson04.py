"""Measures the peak memory of a training step of the article's BERT, with any of PyTorch's wrappers.

bert_peaks(nn.DataParallel, 200, gpus)             # one process and four GPUs, or one GPU with gpus[:1]
bert_peaks(DistributedDataParallel, 50, [rank])    # in each of four ranks
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from helpers.data import random_tokens
from helpers.measure import Readings, peak_memory
from helpers.models import bert_article

LENGTH, VOCABULARY = 163, 30_000  # words per sentence, and different words in total


class WordLoss(nn.Module):
    """Cross entropy, as the mean over words: logits (N, T, V), words (N, T). Words are copied to the logits' GPU.

    For images, pass logits (N, V) and labels (N,).
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
    """Return the readings of `devices` with the peaks of one training step: forward, loss, backward, Adam.

    The second step is measured, when Adam's states and DDP's final buckets exist. wrap: called with the model on the
    first device and with the devices. batch: number of sentences of this process. criterion: `WordLoss` by default.
    vocabulary: number of words. Reserved memory of earlier runs is released first. Raises ValueError for an empty list
    of devices or a batch below 1.
    """
    if not devices or batch < 1:
        raise ValueError(f"Pass at least one device and one sentence, not {len(devices)} and {batch}.")
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
