"""Checks of lesson 02, DataParallel."""

import gc
from collections.abc import Mapping

import torch
from torch import nn

from helpers.data import random_tokens
from helpers.exercises import compare
from helpers.exercises.core import call, exercise, not_yet, require, show
from helpers.exercises.gpus import four_cards_of_12_gb, four_without_values, with_values
from helpers.lesson04 import LENGTH
from helpers.measure import GiB, peak_memory
from helpers.models import bert_article
from helpers.train import DataParallelTrainer

__all__ = ["damaged", "largest_vocabulary", "peak_moved", "piece_sizes", "without_prefix"]

MOVED_BATCH, MOVED_VOCABULARY = 100, 20_000
ARTICLE_BATCH, STEP = 200, 2_000


# ------------------------------------------------------------------------------------------ 1: uneven batches


@exercise
def piece_sizes(answer):
    """`answer(batch, gpus)` must list how many samples each GPU gets, as torch.nn.parallel.scatter cuts."""
    for batch, gpus in ((64, 4), (3, 4), (10, 4), (9, 4), (34, 8), (1, 2), (100, 7)):
        found, right = call(answer, batch, gpus), _chunks(batch, gpus)
        require(isinstance(found, list), f"{show(found)} is no list", "a list of whole numbers is asked for")
        if found != right:
            not_yet(f"{batch} samples on {gpus} GPUs: {show(found)}", _why_not(found, batch, gpus))
    return "the same pieces as scatter's, even where GPUs stay without work"


def _chunks(batch: int, gpus: int) -> list[int]:
    return [len(piece) for piece in torch.zeros(batch).chunk(gpus)]


def _why_not(found: list, batch: int, gpus: int) -> str:
    if not all(isinstance(size, int) for size in found):
        return "a GPU gets a whole number of samples"
    if sum(found) != batch:
        return f"that makes {sum(found)} samples: none may be lost, and none invented"
    if 0 in found:
        return "a GPU without samples gets no piece at all: leave it out of the list"
    return (
        "scatter does not share as evenly as it could: every piece but the last has the same size, "
        "batch / gpus rounded up"
    )


# ----------------------------------------------------------------------------------- 2: `module.` in the keys


class _Nested(nn.Module):
    """A net with a layer of its own that is called `module`, which a careless cut would damage."""

    def __init__(self):
        super().__init__()
        self.module, self.head = nn.Linear(2, 2), nn.Sequential()
        self.head.add_module("module", nn.Linear(2, 1))


@exercise
def without_prefix(answer):
    """`answer(state_dict)` must give the state dict with the keys of the net that is not wrapped."""
    for net in (nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)), _Nested()):
        right = net.state_dict()
        for given, what in ((nn.DataParallel(net).state_dict(), "a wrapped"), (right, "a plain")):
            found = call(answer, dict(given))
            require(isinstance(found, Mapping), f"{show(found)} is no dict", "a state dict is asked for")
            if set(found) != set(right):
                not_yet(f"{what} net's keys {list(given)} became {list(found)}", _why_keys(found, right))
            for key, value in right.items():
                compare.tensor(found[key], value)
    return "load_state_dict takes it, and a layer that is itself called `module` keeps its name"


def _why_keys(found: Mapping, right: Mapping) -> str:
    if all(str(key).startswith("module.") for key in found) and len(found) == len(right):
        return "the `module.` that DataParallel put in front is still there"
    if len(found) != len(right):
        return f"{len(right)} keys are asked for, and two keys that become the same overwrite each other"
    return "only the one `module.` at the very front belongs to DataParallel, and only if every key has it"


# -------------------------------------------------------------------------------- 3: output_device, predicted


@exercise
def peak_moved(answer):
    """By how many GiB GPU 0's peak falls with output_device=1: BERT, batch 100, 20,000 words, four GPUs."""
    compare.number(answer, float(answer))  # what is no number is told before the jobs run
    gpus = four_without_values()
    logits = MOVED_BATCH * LENGTH * MOVED_VOCABULARY * 4
    peaks = [_peak(MOVED_BATCH, MOVED_VOCABULARY, gpus, output_device) for output_device in (None, gpus[1])]
    mistakes = {
        logits: "that is the logits once: at the peak there are more tensors of their size",
        2 * logits: "that is the logits twice: forward and backward together hold one more of their size",
        3 * logits: "GPU 0 still has to hold the gradient of its own quarter of the logits",
        4 * logits: "that is one tensor of the logits' size too many",
    }
    compare.memory(answer, peaks[0] - peaks[1], "GiB", rel=0.04, mistakes=mistakes)
    return f"GPU 0's peak falls from {peaks[0] / GiB:.2f} to {peaks[1] / GiB:.2f} GiB"


# ---------------------------------------------------------------------------------- 4: the largest vocabulary


@exercise
def largest_vocabulary(answer):
    """The largest vocabulary, in steps of 2,000, with which BERT trains at batch 200 on four 12 GB cards."""
    value = compare.number(answer, float(answer), "words")
    gpus = four_cards_of_12_gb()
    what = f"{value:,.0f} words"
    require(value >= STEP and value % STEP == 0, what, f"a multiple of {STEP:,} words, in words, is asked for")
    require(value <= 200_000, what, "no card of 12 GB holds that: look at how the logits grow")
    require(_fits(int(value), gpus), what, "GPU 0 runs out of memory with so many")
    require(not _fits(int(value) + STEP, gpus), what, f"{STEP:,} words more still fit")
    return f"with {STEP:,} words more GPU 0 runs out of memory"


def _fits(vocabulary: int, gpus: list[torch.device]) -> bool:
    try:
        _peak(ARTICLE_BATCH, vocabulary, gpus)
    except torch.OutOfMemoryError:
        return False
    return True


def _peak(batch: int, vocabulary: int, gpus: list[torch.device], output_device=None) -> int:
    """Bytes of GPU 0 at the peak of the second training step: the first makes Adam's state."""
    gc.collect()  # a try that ran out of memory leaves its net behind, in cycles
    torch.cuda.empty_cache()
    model = bert_article(vocabulary)
    adam, loss = torch.optim.Adam(model.parameters()), nn.CrossEntropyLoss()
    trainer = DataParallelTrainer(model, adam, loss, [], gpus, output_device)
    trainer.step(*random_tokens(batch, LENGTH, vocabulary))
    readings = peak_memory(lambda: trainer.step(*random_tokens(batch, LENGTH, vocabulary)), gpus)
    return readings[0].peak_allocated


# ------------------------------------------------------------------------------------------ 5: damaged copies


@exercise
def damaged(answer):
    """`answer(gpus, send)` must list the ways (source, target) where `send(tensor, device)` copies wrong numbers."""
    fewer = "four are asked for: run the cell above again"
    gpus = with_values(4, fewer, "copies of no values cannot be tested: run the cell above again")[:4]
    for broken in (set(), {(1, 2)}, {(0, 3), (3, 0), (2, 1)}):
        found = call(answer, gpus, _sender(broken))
        require(isinstance(found, list), f"{show(found)} is no list", "a list of pairs (source, target) is asked for")
        ways = {_way(pair) for pair in found}
        said = (
            f"damaged are the ways {sorted(broken)}, your list has {sorted(ways)}" if broken else "all ways are whole"
        )
        require(not ways - broken, said, "each direction is a way of its own, to be tested without the way back")
        require(not broken - ways, said, "zeros arrive there: send numbers that are not zero, by `send`, on every way")
    return "every damaged way, and no other"


def _sender(broken: set[tuple[int, int]]):
    """Copies as a machine does on which zeros arrive on the `broken` ways."""

    def send(tensor, device):
        there = tensor.to(device)
        return torch.zeros_like(there) if (tensor.device.index, there.device.index) in broken else there

    return send


def _way(pair) -> tuple[int, int]:
    require(isinstance(pair, tuple | list) and len(pair) == 2, show(pair), "a pair (source, target) is asked for")
    indices = tuple(gpu.index if isinstance(gpu, torch.device) else gpu for gpu in pair)
    require(all(type(index) is int for index in indices), show(pair), "two of `gpus` are asked for")
    return indices
