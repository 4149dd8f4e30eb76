"""A validation that several ranks share: its samples, what a rank does, what may be wrong. For lesson 04's exercise."""

import math

import torch

from helpers.exercises import compare
from helpers.exercises.core import require, show

RANKS, COUNTS = 4, (10, 3)  # so many ranks share so many samples: uneven, and with one rank left over


class Losses:
    """Called with numbers of samples, gives their losses as a tensor on `device`; notes which were asked for."""

    def __init__(self, count: int, device: str):
        self.values = 1 + torch.arange(count, device=device) ** 2 / 10
        self.asked: list[int] = []

    def __call__(self, numbers) -> torch.Tensor:
        asked = [int(number) for number in numbers]
        self.asked += asked
        return self.values[asked]


def in_rank(rank: int, answer) -> list[tuple]:
    """For each count: what the learner's function returned in this rank, and which samples it asked for."""
    found = []
    for count in COUNTS:
        losses = Losses(count, f"cuda:{rank}")
        value = answer(rank, count, losses)
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            value = value.item()
        plain = value is None or value is ... or type(value) in (int, float)
        found.append((value if plain else show(value), losses.asked))
    return found


def check_shares(asked: tuple[list[int], ...], count: int) -> None:
    """Each sample is asked for by one rank, and no rank has more than its share."""
    what, together = f"{count} samples, {RANKS} ranks: ", sum(asked, [])
    missing = sorted(set(range(count)) - set(together))
    require(not missing, f"{what}nobody asked for {missing}", "every sample is to be counted")
    twice = sorted({number for number in together if together.count(number) > 1})
    shared = max(map(len, asked)) <= -(-count // RANKS)
    require(shared, f"{what}a rank asked for {max(map(len, asked))} of them", "the ranks should share them")
    why = "DistributedSampler fills up, so that all ranks get equally many: deal them out yourself"
    require(not twice, f"{what}{twice} were asked for twice", why)


def check_mean(values: list, asked: tuple[list[int], ...], count: int) -> None:
    """All ranks return the mean over all samples."""
    what = f"{count} samples, {RANKS} ranks: "
    strange = [value for value in values if type(value) not in (int, float)]
    require(not strange, f"a rank returned {strange[:1]}", "a number is asked for")
    shown = ", ".join(f"{value:.4g}" for value in values)
    lost = any(math.isnan(value) for value in values)
    require(not lost, f"{what}{shown}", "a rank without samples has the mean of nothing, which is nan")
    same = all(math.isclose(value, values[0], rel_tol=1e-4) for value in values)
    require(same, f"{what}the ranks return {shown}", "all should return the mean over all: their sums must meet")
    each = Losses(count, "cpu").values
    compare.number(values[0], each.mean().item(), rel=1e-4, mistakes=_mistakes(each, asked))


def _mistakes(each: torch.Tensor, asked: tuple[list[int], ...]) -> dict[float, str]:
    means = [each[numbers].mean().item() for numbers in asked if numbers]
    of_means = f"that is the mean of the ranks' means, which have {' + '.join(str(len(n)) for n in asked)} samples"
    right = each.mean().item()
    return {
        sum(means) / len(means): of_means,
        sum(means) / RANKS: of_means,
        right * len(each): "that is the sum: divide by the number of samples",
        right / RANKS: "that is divided by the number of ranks, too",
        right * RANKS: "the losses were summed over the ranks, and the numbers of samples were not",
    }
