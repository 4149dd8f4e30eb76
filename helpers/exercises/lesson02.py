"""Checks of lesson 02, DataParallel."""

import gc
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from helpers.data import random_tokens
from helpers.exercises import compare
from helpers.exercises.core import call, exercise, require, show
from helpers.exercises.gpus import check_largest, need_gpus
from helpers.lesson04 import LENGTH
from helpers.measure import GiB, peak_memory
from helpers.models import bert_article
from helpers.train import DataParallelTrainer


@exercise
def piece_sizes(answer):
    """Exercise 1: `answer(batch, gpus)` must list how many samples each GPU gets, as torch.nn.parallel.scatter cuts."""
    for batch, gpus in ((64, 4), (3, 4), (10, 4), (9, 4), (34, 8), (1, 2), (100, 7)):
        found, right = call(answer, batch, gpus), [len(piece) for piece in torch.zeros(batch).chunk(gpus)]
        require(isinstance(found, list), f"{show(found)} is not a list.", "A list of integers is asked for.")
        why = "Every piece but the last has the same size, batch / gpus rounded up, and no piece is empty"
        require(
            found == right, f"{batch} samples on {gpus} GPUs: {show(found)} with {show(sum(found))} samples.", f"{why}."
        )
    return "The same pieces as scatter's, even where GPUs stay without work."


@exercise
def without_prefix(answer):
    """Exercise 2: `answer(state_dict)` must give the state dict with the keys of the net that is not wrapped."""
    nested = nn.ModuleDict({"module": nn.Linear(2, 2), "head": nn.ModuleDict({"module": nn.Linear(2, 1)})})
    for net in (nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)), nested):
        right = net.state_dict()
        for given, what in ((nn.DataParallel(net).state_dict(), "a wrapped"), (right, "a plain")):
            found = call(answer, dict(given))
            require(isinstance(found, Mapping), f"{show(found)} is not a dict.", "A state dict is asked for.")
            why = "Only the one `module.` at the very front belongs to DataParallel, and only if every key has it"
            require(set(found) == set(right), f"{what} net's keys {list(given)} became {list(found)}.", f"{why}.")
            for key, value in right.items():
                compare.tensor(found[key], value)
    return "`load_state_dict` takes it, and a layer that is itself called `module` keeps its name."


@exercise
def peak_moved(answer):
    """Exercise 3: the GiB by which output_device=1 lowers GPU 0's peak: BERT, batch 100, 20,000 words, four GPUs."""
    compare.as_number(answer)  # what is no number is told before the jobs run
    gpus = need_gpus(4, values=False)[:4]
    batch, vocabulary = 100, 20_000
    logits = batch * LENGTH * vocabulary * 4
    peaks = [_peak(batch, vocabulary, gpus, output_device) for output_device in (None, gpus[1])]
    mistakes = {
        logits: "is the size of the logits. At the peak there are more tensors of that size.",
        2 * logits: "is twice the size of the logits. At the peak there are more tensors of that size.",
        3 * logits: "is too large: GPU 0 still has to hold the gradient of its own quarter of the logits.",
        4 * logits: "is one tensor of the logits' size too many.",
    }
    compare.memory(answer, peaks[0] - peaks[1], "GiB", rel=0.04, mistakes=mistakes)
    return f"GPU 0's peak falls from {peaks[0] / GiB:.2f} to {peaks[1] / GiB:.2f} GiB."


@exercise
def largest_vocabulary(answer):
    """Exercise 4: the largest vocabulary, in steps of 2,000, with which BERT trains at batch 200 on four 12 GB GPUs."""

    def make_fits(gpus: list[torch.device]) -> Callable:
        return lambda vocabulary: _peak(200, vocabulary, gpus)

    check_largest(answer, 2_000, 200_000, "words", make_fits)
    return "With 2,000 words more GPU 0 runs out of memory."


def _peak(batch: int, vocabulary: int, gpus: list[torch.device], output_device: torch.device | None = None) -> int:
    """Bytes of GPU 0 at the peak of the second training step: the first makes Adam's state."""
    gc.collect()  # what ran out of memory before may have left its net behind, in cycles
    model = bert_article(vocabulary)
    adam, loss = torch.optim.Adam(model.parameters()), nn.CrossEntropyLoss()
    trainer = DataParallelTrainer(model, adam, loss, [], gpus, output_device)
    trainer.step(*random_tokens(batch, LENGTH, vocabulary))
    readings = peak_memory(lambda: trainer.step(*random_tokens(batch, LENGTH, vocabulary)), gpus)
    return readings[0].peak_allocated


@exercise
def damaged(answer):
    """Exercise 5: `answer(gpus, send)` must list the ways (source, target) on which `send` copies wrong numbers."""
    gpus = need_gpus(4, values=True)[:4]
    for broken in (set(), {(1, 2)}, {(0, 3), (3, 0), (2, 1)}):

        def send(tensor: Tensor, device: torch.device, broken=broken) -> Tensor:
            there = tensor.to(device)
            return torch.zeros_like(there) if (tensor.device.index, there.device.index) in broken else there

        found = call(answer, gpus, send)
        require(
            isinstance(found, list), f"{show(found)} is not a list.", "A list of pairs (source, target) is asked for."
        )
        ways = {_way(pair) for pair in found}
        what = f"of {sorted(ways)} the copies on {sorted(ways - broken)} arrive whole"
        require(not ways - broken, f"{what}.", "Each direction is a way of its own, to be tested without the way back.")
        what = f"{len(broken - ways)} of {len(broken)} damaged ways are missing from your list"
        require(
            not broken - ways,
            f"{what}.",
            "Zeros arrive there: send numbers that are not zero, by `send`, on every way.",
        )
    return "Every damaged way, and no other."


def _way(pair) -> tuple[int, int]:
    require(
        isinstance(pair, tuple | list) and len(pair) == 2, f"{show(pair)}.", "A pair (source, target) is asked for."
    )
    indices = tuple(gpu.index if isinstance(gpu, torch.device) else gpu for gpu in pair)
    require(all(type(index) is int for index in indices), f"{show(pair)}.", "Two of `gpus` are asked for.")
    return indices
