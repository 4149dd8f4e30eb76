"""Checks of lesson 02, DataParallel."""

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from helpers.exercises import compare
from helpers.exercises.core import NotYet, call, exercise, require, show
from helpers.exercises.gpus import check_largest, need_gpus
from helpers.lesson04 import LENGTH, bert_peaks
from helpers.measure import GiB
from helpers.models import bert_article


class _WithoutPyTorch(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        raise NotYet(f"You call PyTorch's `{function.__name__}`. Compute the sizes from the two numbers alone.")


@exercise
def piece_sizes(answer):
    """Exercise 1: `answer(batch, gpus)` must list how many samples each GPU gets, as torch.nn.parallel.scatter cuts."""
    for batch, gpus in ((64, 4), (3, 4), (10, 4), (9, 4), (34, 8), (1, 2), (100, 7)):
        right = [len(piece) for piece in torch.zeros(batch).chunk(gpus)]
        with _WithoutPyTorch():
            found = call(answer, batch, gpus)
        said = f"piece_sizes({batch}, {gpus}) is {show(found)}."
        integers = isinstance(found, list) and all(type(size) is int for size in found)
        require(integers, said, "Return a list of integers.")
        require(sum(found) == batch, said, f"These are {sum(found)} samples, and the batch has {batch}.")
        require(0 not in found, said, "A GPU that gets no samples has no entry in the list.")
        alike = "DataParallel makes all pieces of the same size, except the last, which may be smaller."
        require(len(set(found[:-1])) <= 1 and found[-1] <= found[0], said, alike)
        require(found == right, said, f"The first piece has {right[0]} samples. Which rule gives that?")
    return "These are the pieces of scatter, even where some GPUs get no samples."


@exercise
def without_prefix(answer):
    """Exercise 2: `answer(state_dict)` must give the state dict with the keys of the net that is not wrapped."""
    nested = nn.ModuleDict({"module": nn.Linear(2, 2), "head": nn.ModuleDict({"module": nn.Linear(2, 1)})})
    for net in (nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)), nested):
        right = net.state_dict()
        for given, kind in ((nn.DataParallel(net).state_dict(), "wrapped"), (right, "plain")):
            found = call(answer, dict(given))
            require(isinstance(found, Mapping), f"{show(found)} is not a dict. Return a state dict.")
            became = f"The keys of a {kind} net, {list(given)}, became {list(found)}."
            why = "Remove only what DataParallel has added. A net may have a layer that is called `module`."
            require(set(found) == set(right), became, why)
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
    before, after = _peak(batch, vocabulary, gpus, 0), _peak(batch, vocabulary, gpus, 1)
    adam = 2 * sum(parameter.nbytes for parameter in bert_article(vocabulary).parameters())
    mistakes = {
        logits: "is the size of the logits. How many tensors of that size does GPU 0 hold at its peak?",
        2 * logits: "is twice the size of the logits. How many tensors of that size does GPU 0 hold at its peak?",
        3 * logits: "is three times the size of the logits. Which part of them does GPU 0 still hold afterwards?",
        4 * logits: "is four times the size of the logits. How many tensors of that size does GPU 0 hold at its peak?",
        2.75 * logits * 3 / 2: "would be right for 30,000 words. Here the vocabulary has 20,000.",
        2.75 * logits + adam: "includes Adam's state, which stays on GPU 0 in both cases.",
    }
    compare.memory(answer, before - after, "GiB", rel=0.04, mistakes=mistakes)
    return f"The peak of GPU 0 falls from {before / GiB:.2f} to {after / GiB:.2f} GiB."


@exercise
def largest_vocabulary(answer):
    """Exercise 4: the largest vocabulary, in steps of 2,000, with which BERT trains at batch 200 on four 12 GB GPUs."""

    def train(gpus: list[torch.device], vocabulary: int) -> None:
        _peak(200, vocabulary, gpus, 0)

    check_largest(answer, 2_000, 200_000, "words", train)
    return "With 2,000 words more, GPU 0 runs out of memory."


def _peak(batch: int, vocabulary: int, gpus: list[torch.device], output_device: int) -> int:
    """Bytes of GPU 0 at the peak of a training step of BERT."""
    wrap = partial(nn.DataParallel, output_device=output_device)
    return bert_peaks(wrap, batch, gpus, vocabulary=vocabulary)[0].peak_allocated


@exercise
def damaged(answer):
    """Exercise 5: `answer(gpus, send)` must list the ways (source, target) on which `send` copies wrong numbers."""
    gpus = need_gpus(4, values=True)[:4]
    for broken in (set(), {(1, 2)}, {(0, 3), (3, 0), (2, 1)}):

        def send(tensor: Tensor, device: torch.device, broken=broken) -> Tensor:
            there = tensor.to(device)
            return torch.zeros_like(there) if (tensor.device.index, there.device.index) in broken else there

        found = call(answer, gpus, send)
        require(isinstance(found, list), f"{show(found)} is not a list. Return a list of pairs (source, target).")
        pairs = {_pair(each) for each in found}
        unharmed = f"Copies arrive without damage on {len(pairs - broken)} of the {len(pairs)} pairs in your list."
        require(pairs <= broken, unharmed, "Each direction is a pair of its own. Test it without the way back.")
        missing = f"{len(broken - pairs)} of {len(broken)} damaged pairs are missing from your list."
        tested = "Test both directions between every two GPUs, with `send`, and with numbers other than zero."
        require(broken <= pairs, missing, tested)
    return "The list has every damaged pair, and no other."


def _pair(found: object) -> tuple[int, int]:
    pair = isinstance(found, tuple | list) and len(found) == 2
    indices = tuple(gpu.index if isinstance(gpu, torch.device) else gpu for gpu in found) if pair else ()
    whole = pair and all(type(index) is int for index in indices)
    require(whole, f"{show(found)} is not a pair (source, target) of two of `gpus`.")
    return indices
