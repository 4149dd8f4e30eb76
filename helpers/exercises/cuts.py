"""Which losses come out of pieces: lesson 03's exercise runs each on one GPU and on several, as the answer says."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, softplus, triplet_margin_loss

from helpers.exercises.core import not_yet, require, show
from helpers.parallel.loss import DataParallelCriterion, DataParallelModel

__all__ = ["LOSSES", "AS_IT_IS", "NOT_AT_ALL", "check_cut", "check_names"]

AS_IT_IS, NOT_AT_ALL = "as it is", "not at all"
SAMPLES, PLACES = 10, 6

# As the lesson's cell defines them, of scores (N, 6) and tags (N, 6), each 0 or 1.
LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "binary": binary_cross_entropy_with_logits,
    "present": lambda scores, tags: softplus(-scores)[tags == 1].mean(),
    "triplet": lambda scores, tags: triplet_margin_loss(*scores.chunk(3, 1)),
    "root": lambda scores, tags: (scores - tags).square().mean().sqrt(),
    "Dice": lambda scores, tags: 1 - 2 * (scores.sigmoid() * tags).sum() / (scores.sigmoid() + tags).sum(),
    "ranking": lambda scores, tags: softplus(scores[tags == 0] - scores[tags == 1][:, None]).mean(),
}

# How one GPU's loss does come out of the pieces, where it does.
_WEIGHTS: dict[str, Callable | None] = {"binary": None, "triplet": None, "present": lambda scores, tags: tags.sum()}


class _Loss(nn.Module):
    def __init__(self, name: str):
        super().__init__()
        self.name = name

    def forward(self, scores: Tensor, tags: Tensor) -> Tensor:
        return LOSSES[self.name](scores, tags)


def check_names(answers: object) -> None:
    """ "not yet" unless `answers` has for each of the losses one of the three kinds of answer."""
    require(
        isinstance(answers, Mapping), f"{show(answers)} is no dict", "an answer for each loss is asked for, by name"
    )
    require(set(answers) == set(LOSSES), f"the losses are {show(list(answers))}", f"these are: {', '.join(LOSSES)}")
    for name in LOSSES:
        known = callable(answers[name]) or (isinstance(answers[name], str) and answers[name] in (AS_IT_IS, NOT_AT_ALL))
        why = f"{AS_IT_IS!r}, {NOT_AT_ALL!r} or the weight, a function of scores and tags, is asked for"
        require(known, f"{name}: {show(answers[name])}", why)


def check_cut(name: str, answer: object, gpus: list[torch.device]) -> None:
    """ "not yet", with the numbers, unless the loss `name` comes out of the pieces as `answer` says."""
    alone = _step(name, gpus[:1], None)
    if answer == NOT_AT_ALL:
        if name in _WEIGHTS:
            both = f"one GPU {alone[0]:.3f}, {len(gpus)} GPUs {_step(name, gpus, _WEIGHTS[name])[0]:.3f}"
            not_yet(f"{name}: {NOT_AT_ALL}", f"it can be had: {both}. What is its mean over?")
        return
    found = _step(name, gpus, None if answer == AS_IT_IS else answer)
    how = "as it is" if answer == AS_IT_IS else "with your weight"
    what = f"{name}, {how}: one GPU {alone[0]:.3f}, {len(gpus)} GPUs {found[0]:.3f}"
    require(abs(found[0] - alone[0]) < 1e-4, what, "the pieces' losses, each counted so often, make another mean")
    off = float((found[1] - alone[1]).norm() / alone[1].norm())
    why = f"the gradient is off by {off:.0%}: a weight counts as a constant, and yours depends on the scores"
    require(off < 1e-3, what, why)


def _step(name: str, gpus: list[torch.device], weight: Callable | None) -> tuple[float, Tensor]:
    """Loss and gradient of a small net on these GPUs, the same batch each time."""
    numbers = torch.Generator().manual_seed(1)
    inputs, chance = 3 * torch.randn(SAMPLES, 3, generator=numbers), torch.rand(SAMPLES, PLACES, generator=numbers)
    tags = (chance < torch.linspace(0.1, 0.8, SAMPLES)[:, None]).float()
    torch.manual_seed(0)
    net = nn.Linear(3, PLACES).to(gpus[0])
    criterion = DataParallelCriterion(_Loss(name), gpus, reduction="mean", weight=weight)
    loss = criterion(DataParallelModel(net, gpus)(inputs), tags)
    return loss.item(), torch.autograd.grad(loss, net.weight)[0].cpu()
