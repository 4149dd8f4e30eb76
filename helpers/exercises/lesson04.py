"""Checks of lesson 04, distributed data parallel. Two of them start ranks of their own."""

import math

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import Dataset

from helpers.exercises import compare
from helpers.exercises.core import NotYet, call, exercise, given, require, show
from helpers.exercises.gpus import need_gpus
from helpers.parallel import launch


@exercise
def tree(answer):
    """Exercise 1: `answer(ranks)` lists steps, each a list of (source, target), that bring rank 0's tensor to all."""
    for ranks in (2, 4, 3, 8, 1, 13, 64):
        steps = call(answer, ranks)
        require(isinstance(steps, list), f"{show(steps)} is not a list.", "A list of steps is asked for.")
        have = {0}
        for number, step in enumerate(steps, 1):
            what = f"{ranks} ranks, step {number}: {show(step)}"
            try:
                pairs = [(int(source), int(target)) for source, target in step]
            except (TypeError, ValueError) as error:
                raise NotYet(f"{what}.", "A step is a list of pairs (source, target).") from error
            sources, targets = {source for source, _ in pairs}, {target for _, target in pairs}
            require(
                sources <= have,
                f"{what}.",
                f"{sources - have} cannot send: they do not have the tensor before this step.",
            )
            require(not targets & have, f"{what}.", f"{targets & have} have it already.")
            require(targets <= set(range(ranks)), f"{what}.", f"Ranks run from 0 to {ranks - 1}.")
            require(
                len(sources) == len(pairs), f"{what}.", "A rank sends twice in one step: it can do one thing at a time."
            )
            require(len(targets) == len(pairs), f"{what}.", "A rank receives twice in one step.")
            have |= targets
        what = f"{ranks} ranks after {len(steps)} steps"
        require(len(have) == ranks, f"{what}.", f"{ranks - len(have)} of them still wait for the tensor.")
        fewest = (ranks - 1).bit_length()
        why = f"{fewest} are enough: everyone who has it can send at the same time, so that they double in each step"
        require(len(steps) == fewest, f"{what}.", f"{why}.")
    return "64 ranks in 6 steps, where one after the other would take 63."


# Exercise 2: four ranks share so many samples: uneven, and with one rank left over.
VALIDATION_RANKS, COUNTS = 4, (10, 3)


class _Losses:
    """Called with numbers of samples, gives their losses as a tensor on `device`; notes which were asked for."""

    def __init__(self, count: int, device: str):
        self.values = 1 + torch.arange(count, device=device) ** 2 / 10
        self.asked: list[int] = []

    def __call__(self, numbers) -> Tensor:
        asked = [int(number) for number in numbers]
        self.asked += asked
        return self.values[asked]


def _validate_in_rank(rank: int, answer) -> list[tuple]:
    """For each count: what the learner's function returned in this rank, and which samples it asked for."""
    found = []
    for count in COUNTS:
        losses = _Losses(count, f"cuda:{rank}")
        found.append((_plain(answer(rank, count, losses)), losses.asked))
    return found


def _plain(value: object) -> object:
    """What can go from a rank to its parent: a number, what marks a stub, and of all else its words."""
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    return value if value is None or value is ... or type(value) in (int, float) else show(value)


@exercise
def validate(answer):
    """Exercise 2: `answer(rank, count, losses)` gives each of four ranks the mean loss of all samples, asked once."""
    need_gpus(VALIDATION_RANKS, values=True)
    found = launch(_validate_in_rank, answer, ranks=VALIDATION_RANKS, show=False, timeout=20)
    for place, count in enumerate(COUNTS):
        values, asked = zip(*(of_rank[place] for of_rank in found), strict=True)
        for value in values:
            given(value, answer)
        what = f"{count} samples, {VALIDATION_RANKS} ranks: "
        _check_shares(asked, count, what)
        shown = what + ", ".join(str(value) for value in values)
        lost = any(isinstance(value, float) and math.isnan(value) for value in values)
        require(not lost, f"{shown}.", "A rank without samples has the mean of nothing, which is nan.")
        each = _Losses(count, "cpu").values
        right, means = each.mean().item(), [each[numbers].mean().item() for numbers in asked if numbers]
        counts = " + ".join(str(len(numbers)) for numbers in asked)
        mistakes = {mean: "is the mean of this rank's samples: the ranks' sums must meet." for mean in means} | {
            sum(means) / len(means): f"is the mean of the ranks' means, which have {counts} samples.",
            right * count: "is the sum: divide by the number of samples.",
        }
        for value in values:
            compare.number(value, right, rel=1e-4, mistakes=mistakes)
    return "Each sample counted once, the same mean on every rank, also where a rank has no sample."


def _check_shares(asked: tuple[list[int], ...], count: int, what: str) -> None:
    """Each sample is asked for by one rank, and no rank has more than its share."""
    together, most = sum(asked, []), max(map(len, asked))
    missing = sorted(set(range(count)) - set(together))
    require(not missing, f"{what}nobody asked for {missing}.", "Every sample is to be counted.")
    shared = most <= -(-count // VALIDATION_RANKS)
    require(shared, f"{what}a rank asked for {most} of them.", "The ranks should share them.")
    why = "DistributedSampler fills up, so that all ranks get equally many: deal them out yourself"
    twice = sorted({number for number in together if together.count(number) > 1})
    require(not twice, f"{what}{twice} were asked for twice.", f"{why}.")


@exercise
def factor(answer):
    """Exercise 3: `answer(counts, rank)` is the factor of a rank's loss that makes DDP's the mean over all labels."""
    generator = torch.Generator().manual_seed(0)
    for counts in ([16, 16, 16, 13], [37, 12, 8, 4], [5, 5], [1, 9], [3, 0, 7], [10]):
        means = torch.rand(len(counts), generator=generator, dtype=torch.double).tolist()
        factors = [compare.as_number(call(answer, list(counts), rank)) for rank in range(len(counts))]
        found = sum(each * mean for each, mean in zip(factors, means, strict=True)) / len(counts)
        right = sum(count * mean for count, mean in zip(counts, means, strict=True)) / sum(counts)
        what = f"ranks with {counts} labels: the loss becomes {found / right:.3g} times the mean over all labels"
        why = "A rank's share is its labels by all labels, and DDP divides by the number of ranks"
        if torch.allclose(torch.tensor(factors), torch.tensor(counts) / sum(counts)):
            why = f"DDP divides by the number of ranks, {len(counts)}, afterwards: make up for it"
        require(abs(found - right) <= 1e-9 * right, f"{what}.", f"{why}.")
    return "The mean of the ranks is now the mean over all labels, also where a rank has none."


SAMPLES, EPOCHS, RANKS, BATCH = 32, 3, 2, 8  # of exercise 4


class _Watched(Dataset):
    """y = x times fixed weights; notes which samples were asked for."""

    def __init__(self):
        self.x = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(0))
        self.y = self.x @ torch.tensor([[1.0], [-2.0], [3.0], [0.5]])
        self.asked: list[int] = []

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, number: int):
        self.asked.append(int(number))
        return self.x[number], self.y[number]


def samples() -> Dataset:
    """What exercise 4 trains on: 32 pairs, x of shape (4,) and y of shape (1,)."""
    return _Watched()


def _train_in_rank(rank: int, answer) -> tuple[Tensor | None, list[int], int, object]:
    """The learner's function in a rank: the weights, which samples it took, how often it logged, what it returned."""
    samples, logged = _Watched(), []
    net = answer(rank, samples, logged.append)
    weights = nn.utils.parameters_to_vector(net.parameters()).detach().cpu() if isinstance(net, nn.Module) else None
    dist.barrier()
    return weights, samples.asked, len(logged), _plain(net)


@exercise
def ranked(answer):
    """Exercise 4: `answer(rank, samples, log)` must train for three epochs on two ranks, and end where one GPU ends."""
    need_gpus(RANKS, values=True)
    found = launch(_train_in_rank, answer, ranks=RANKS, show=False, timeout=30)
    weights, asked, logged, returned = zip(*found, strict=True)
    for net, value in zip(weights, returned, strict=True):
        require(net is not None, f"It returned {given(value, answer)}.", "The net is asked for.")
    same = weights[0].shape == weights[1].shape and torch.allclose(*weights, atol=1e-6)
    why = "Their gradients never met: does the forward pass go through DistributedDataParallel?"
    require(same, "The two ranks end with different weights.", why)
    _check_samples(asked)
    why = f"Rank 0 logs one per epoch, {EPOCHS} in all, and rank 1 none: of a hundred ranks nobody could read them"
    require(logged == (EPOCHS, 0), f"Ranks 0 and 1 logged {logged[0]} and {logged[1]} lines.", f"{why}.")
    one = _on_one_device(asked)
    same = one.shape == weights[0].shape and torch.allclose(one, weights[0], atol=1e-4)
    each = BATCH // RANKS
    why = f"{BATCH} samples per step are {each} on each rank, and net, seed, rate and loss are those of `alone`"
    require(same, "The ranks agree, but one GPU with the same samples ends with other weights.", f"{why}.")
    return "One GPU's weights on both ranks, another order in each epoch, one line of log."


def _check_samples(asked: tuple[list[int], ...]) -> None:
    size = SAMPLES // RANKS
    for rank, numbers in enumerate(asked):
        what = f"rank {rank} took {len(numbers)} samples"
        require(len(numbers) == EPOCHS * size, f"{what}.", f"{EPOCHS} epochs of {size} are asked for.")
    epochs = [[numbers[e * size : (e + 1) * size] for numbers in asked] for e in range(EPOCHS)]
    for number, parts in enumerate(epochs):
        took = set(sum(parts, []))
        what = f"in epoch {number} the ranks took {len(took)} different samples of {SAMPLES}"
        require(took == set(range(SAMPLES)), f"{what}.", "Each sample belongs to one rank: use the sampler.")
    why = "Nobody told the sampler which epoch it is"
    require(epochs[0] != epochs[1] and epochs[1] != epochs[2], "Every epoch has the same order.", f"{why}.")


def _on_one_device(asked: tuple[list[int], ...]) -> Tensor:
    """The weights of `alone` after the samples that the ranks took, a batch of all ranks per step."""
    data, each = _Watched(), BATCH // RANKS
    torch.manual_seed(0)
    net = nn.Linear(4, 1)
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    for first in range(0, len(asked[0]), each):
        numbers = sum((rank[first : first + each] for rank in asked), [])
        sgd.zero_grad()
        mse_loss(net(data.x[numbers]), data.y[numbers]).backward()
        sgd.step()
    return nn.utils.parameters_to_vector(net.parameters()).detach()
