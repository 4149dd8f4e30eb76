"""Checks of lesson 04, distributed data parallel. Two of them start ranks of their own."""

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset

from helpers.exercises import compare, validation
from helpers.exercises.core import call, exercise, given, not_yet, require, show
from helpers.exercises.gpus import with_values
from helpers.parallel.launching import launch

__all__ = ["factor", "ranked", "samples", "tree", "validate"]


# ------------------------------------------------------------------------------------- 1: a broadcast as a tree


@exercise
def tree(answer):
    """`answer(ranks)` must list steps, each a list of (source, target), that bring rank 0's tensor to all ranks."""
    for ranks in (2, 4, 3, 8, 1, 13, 64):
        steps = call(answer, ranks)
        require(isinstance(steps, list), f"{show(steps)} is no list", "a list of steps is asked for")
        have = {0}
        for number, step in enumerate(steps, 1):
            have |= _targets(step, have, f"{ranks} ranks, step {number}", ranks)
        what = f"{ranks} ranks after {len(steps)} steps"
        require(len(have) == ranks, what, f"{ranks - len(have)} of them still wait for the tensor")
        fewest = (ranks - 1).bit_length()
        why = f"{fewest} are enough: everyone who has it can send at the same time, so that they double in each step"
        require(len(steps) == fewest, what, why)
    return "64 ranks in 6 steps, where one after the other would take 63"


def _targets(step: object, have: set[int], what: str, ranks: int) -> set[int]:
    """Who has the tensor after this step, and did not before."""
    try:
        pairs = [(int(source), int(target)) for source, target in step]
    except (TypeError, ValueError):
        not_yet(f"{what}: {show(step)}", "a step is a list of pairs (source, target)")
    sources, targets = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    for source, target in pairs:
        pair = f"{what}: ({source}, {target})"
        require(0 <= source < ranks and 0 <= target < ranks, pair, f"ranks run from 0 to {ranks - 1}")
        require(source in have, pair, f"rank {source} does not have the tensor before this step")
        require(target not in have, pair, f"rank {target} has it already")
    require(len(set(sources)) == len(sources), what, "a rank sends twice in one step: it can do one thing at a time")
    require(len(set(targets)) == len(targets), what, "a rank receives twice in one step")
    return set(targets)


# ------------------------------------------------------------------------------------------ 2: a validation


@exercise
def validate(answer):
    """`answer(rank, count, losses)` must give every one of four ranks the mean loss of all samples, each asked once."""
    require(callable(answer), f"{show(answer)} cannot be called", "the check needs the function itself")
    _gpus_with_values(validation.RANKS)
    found = launch(validation.in_rank, answer, ranks=validation.RANKS, show=False, timeout=20)
    for place, count in enumerate(validation.COUNTS):
        values, asked = zip(*(of_rank[place] for of_rank in found), strict=True)
        silent = [rank for rank, value in enumerate(values) if value is None]
        what = f"rank {', '.join(map(str, silent))} returned None"
        require(len(silent) in (0, len(values)), what, "all are to return the mean: an all-reduce gives it to each")
        values = [given(value, answer) for value in values]
        validation.check_shares(asked, count)
        validation.check_mean(values, asked, count)
    return "each sample counted once, the same mean on every rank, also where a rank has no sample"


def _gpus_with_values(count: int) -> None:
    again = "run the cell with use_gpus above again"
    with_values(count, fewer=f"{count} are asked for: {again}", without=f"{again}, without shapes_only")


# ------------------------------------------------------------------------------------------ 3: a weighted mean


@exercise
def factor(answer):
    """`answer(counts, rank)`: what a rank's mean loss is multiplied with, so that DDP's is the mean over all labels."""
    generator = torch.Generator().manual_seed(0)
    for counts in ([16, 16, 16, 13], [37, 12, 8, 4], [5, 5], [1, 9], [3, 0, 7], [10]):
        means = torch.rand(len(counts), generator=generator, dtype=torch.double).tolist()
        factors = [compare.number(f := call(answer, list(counts), rank), float(f)) for rank in range(len(counts))]
        found = sum(each * mean for each, mean in zip(factors, means, strict=True)) / len(counts)
        right = sum(count * mean for count, mean in zip(counts, means, strict=True)) / sum(counts)
        if abs(found - right) > 1e-9 * right:
            what = f"ranks with {counts} labels: the loss becomes {found / right:.3g} times the mean over all labels"
            not_yet(what, _why_factor(factors, counts))
    return "the mean of the ranks is now the mean over all labels, also where a rank has none"


def _why_factor(factors: list[float], counts: list[int]) -> str:
    share = [count / sum(counts) for count in counts]
    if all(each == factors[0] for each in factors):
        return "all ranks have the same factor, whatever number of labels they have"
    if torch.allclose(torch.tensor(factors), torch.tensor(share), rtol=1e-6):
        return f"DDP divides by the number of ranks, {len(counts)}, afterwards: make up for it"
    if torch.allclose(torch.tensor(factors), torch.tensor([float(count) for count in counts])):
        return "those are the numbers of labels, and a mean is divided by how many there are in all"
    return "a rank's share is its labels by all labels, and DDP divides by the number of ranks"


# --------------------------------------------------------------------------------------------- 4: make it DDP

SAMPLES, EPOCHS, RANKS, BATCH = 32, 3, 2, 8


class _Watched(Dataset):
    """y = x times fixed weights; notes which samples were asked for."""

    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(SAMPLES, 4, generator=generator)
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


def _in_rank(rank: int, answer) -> dict:
    """The learner's function in a rank: what it trained, which samples it took, what it logged."""
    samples, logged = _Watched(), []
    net = answer(rank, samples, logged.append)
    weights = None
    if isinstance(net, nn.Module):
        weights = torch.cat([parameter.detach().flatten().cpu() for parameter in net.parameters()])
    dist.barrier()
    empty = net if net is ... or net is None else show(net)
    return {"weights": weights, "asked": samples.asked, "logged": len(logged), "returned": empty}


@exercise
def ranked(answer):
    """`answer(rank, samples, log)` must train for three epochs on two ranks, and end where one GPU ends."""
    require(callable(answer), f"{show(answer)} cannot be called", "the check needs the function itself")
    _gpus_with_values(RANKS)
    found = launch(_in_rank, answer, ranks=RANKS, show=False, timeout=30)
    for each in found:
        returned = given(each["returned"], answer)
        require(each["weights"] is not None, f"it returned {returned}", "the net is asked for")
    weights, asked = ([each[name] for each in found] for name in ("weights", "asked"))
    _check_weights(*weights)
    _check_samples(asked)
    logged = [each["logged"] for each in found]
    require(logged[0] == EPOCHS, f"rank 0 logged {logged[0]} lines", f"one per epoch is asked for, {EPOCHS} in all")
    require(
        logged[1] == 0, f"rank 1 logged {logged[1]} lines", "with a hundred ranks nobody could read that: let rank 0"
    )
    one = _on_one_device(asked)
    same = one.shape == weights[0].shape and torch.allclose(one, weights[0], atol=1e-4)
    why = (
        f"{BATCH} samples per step are {BATCH // RANKS} on each rank, and net, seed, rate and loss are those of `alone`"
    )
    require(same, "the ranks agree, but one GPU with the same samples ends with other weights", why)
    return "one GPU's weights on both ranks, another order in each epoch, one line of log"


def _on_one_device(asked: list[list[int]]) -> torch.Tensor:
    """The weights of `alone` after the samples that the ranks took, a batch of all ranks per step."""
    data, each = _Watched(), BATCH // RANKS
    torch.manual_seed(0)
    net = nn.Linear(4, 1)
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    for first in range(0, len(asked[0]), each):
        numbers = sum((rank[first : first + each] for rank in asked), [])
        sgd.zero_grad()
        nn.functional.mse_loss(net(data.x[numbers]), data.y[numbers]).backward()
        sgd.step()
    return torch.cat([parameter.detach().flatten() for parameter in net.parameters()])


def _check_weights(first: torch.Tensor, second: torch.Tensor) -> None:
    same = first.shape == second.shape and torch.allclose(first, second, atol=1e-6)
    why = "their gradients never met: does the forward pass go through DistributedDataParallel?"
    require(same, "the two ranks end with different weights", why)


def _check_samples(asked: list[list[int]]) -> None:
    size = SAMPLES // RANKS
    for rank, numbers in enumerate(asked):
        what = f"rank {rank} took {len(numbers)} samples"
        require(len(numbers) == EPOCHS * size, what, f"{EPOCHS} epochs of {size} are asked for")
    epochs = [[numbers[e * size : (e + 1) * size] for numbers in asked] for e in range(EPOCHS)]
    for number, parts in enumerate(epochs):
        what = f"in epoch {number} the ranks took {len(set(sum(parts, [])))} different samples of {SAMPLES}"
        require(set(sum(parts, [])) == set(range(SAMPLES)), what, "each sample belongs to one rank: use the sampler")
    why = "nobody told the sampler which epoch it is"
    require(epochs[0] != epochs[1] and epochs[1] != epochs[2], "every epoch has the same order", why)
