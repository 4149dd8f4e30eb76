"""Checks of lesson 03, parallel loss."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, softplus, triplet_margin_loss

from helpers.data import random_tokens
from helpers.exercises import compare
from helpers.exercises.core import call, exercise, require, show
from helpers.exercises.gpus import check_largest, need_gpus
from helpers.lesson04 import LENGTH, WordLoss
from helpers.measure import peak_memory
from helpers.models import bert_article
from helpers.parallel import DataParallelCriterion, DataParallelModel, LossInForward, count_labels, total


@exercise
def combine(answer):
    """Exercise 1: `answer(losses, weights)` must be the weighted mean, on the first loss's GPU, with its gradient."""
    gpus = need_gpus(2, values=True)
    for means, weights in (([2.0, 5.0], [3, 1]), ([2.0, 4.0], [5, 5]), ([3.0, float("nan")], [4, 0]), ([7.0], [2])):
        leaves = [torch.tensor(mean, device=gpu, requires_grad=True) for mean, gpu in zip(means, gpus, strict=False)]
        found = call(answer, [leaf * 1 for leaf in leaves], list(weights))
        what = f"for losses {means} with the weights {weights} you return {show(found)}"
        require(isinstance(found, Tensor), f"{what}.", "A tensor is asked for: a plain number has no gradient.")
        require(found.shape == (), f"{what}.", f"One number, of shape (), is asked for, not {tuple(found.shape)}.")
        require(found.device == gpus[0], f"{what}.", f"It should be on {gpus[0]}, where the first loss is.")
        require(not found.isnan(), f"{what}.", "0 x nan is nan: what has weight 0 must be left out.")
        counted = [(leaf, weight) for leaf, weight in zip(leaves, weights, strict=True) if weight]
        weighted = sum(leaf.item() * weight for leaf, weight in counted)
        mistakes = {
            sum(leaf.item() for leaf, _ in counted) / len(weights): "is the mean of the means. Weight each.",
            weighted: "is the weighted sum. Divide it by the sum of the weights.",
        }
        case = f"For losses {means} with the weights {weights}, "
        compare.number(found, weighted / sum(weights), rel=1e-4, mistakes=mistakes, case=case)
        require(found.requires_grad, f"{what}.", "It has no gradient: .item(), .data and .detach() cut it off.")
        found.backward()
        for leaf, weight in counted:
            require(leaf.grad is not None, f"{what}.", f"No gradient arrives on {leaf.device}.")
            compare.number(leaf.grad, weight / sum(weights), rel=1e-4, case="As the gradient of a loss, ")
    return "The weights, the GPU and the gradients are right, and a piece of weight 0 does no harm."


@exercise
def masked_criterion(answer):
    """Exercise 2: `answer`, a DataParallelCriterion, must give one GPU's masked mean, however the mask is spread."""
    why = "DataParallelCriterion(MaskedError(), ...) itself is asked for"
    require(isinstance(answer, DataParallelCriterion), f"{show(answer)} is not a DataParallelCriterion.", f"{why}.")
    gpus = [torch.device("cuda", index) for index in answer.device_ids]
    require(len(gpus) > 1, f"It works on {len(gpus)} GPUs.", "Two or more are asked for: give it gpus.")
    need_gpus(len(gpus), values=True)
    numbers = torch.Generator().manual_seed(3)
    for kept in ((4, 4, 4, 4), (4, 3, 1, 1), (4, 2, 0, 0)):  # places that count in each quarter of the batch
        mask = (torch.arange(4).expand(8, 4) < torch.tensor(kept).repeat_interleave(2)[:, None]).float()
        inputs, targets = torch.randn(8, 3, generator=numbers), torch.randn(8, 4, generator=numbers)
        torch.manual_seed(0)
        net = nn.Linear(3, 4).to(gpus[0])
        right = ((net(inputs.to(gpus[0])).cpu() - targets).square() * mask).sum() / mask.sum()
        expected = torch.autograd.grad(right, list(net.parameters()))
        loss = answer(DataParallelModel(net, gpus)(inputs), targets, mask)
        counts = [int(piece.sum()) for piece in mask.chunk(len(gpus))]
        what = f"with {counts} places that count on the GPUs the loss is {loss.item():.3f}"
        require(not loss.isnan(), f"{what}.", "Where no place counts your criterion still divides by 0.")
        why = f"One GPU's is {right.item():.3f}: tell DataParallelCriterion what the mean of each GPU is over"
        require(torch.isclose(loss.cpu(), right, rtol=1e-4), f"{what}.", f"{why}.")
        loss.backward()
        why = "0 / 0 inside the criterion makes the gradient nan, even where its result counts for nothing"
        for parameter, wanted in zip(net.parameters(), expected, strict=True):
            require(not parameter.grad.isnan().any(), f"{what}, and its gradient nan.", f"{why}.")
            compare.tensor(parameter.grad, wanted)
    return "The loss and the gradients of one GPU, also where a GPU has nothing that counts."


# Exercise 3: which losses come out of pieces? Each runs on one GPU and on four, as the answer says.
AS_IT_IS, NOT_AT_ALL = "as it is", "not at all"

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


@exercise
def losses(answers):
    """Exercise 3: for each of `LOSSES` "as it is", "not at all", or the weight that DataParallelCriterion needs."""
    compare.names(answers, LOSSES, "an answer")
    why = f"{AS_IT_IS!r}, {NOT_AT_ALL!r} or the weight, a function of scores and tags, is asked for"
    for name, answer in answers.items():
        require(callable(answer) or answer in (AS_IT_IS, NOT_AT_ALL), f"{name}: {show(answer)}.", f"{why}.")
    gpus = need_gpus(4, values=True)[:4]
    for name in LOSSES:
        answer = answers[name]
        if answer == NOT_AT_ALL and name not in _WEIGHTS:
            continue
        weight = _WEIGHTS[name] if answer == NOT_AT_ALL else None if answer == AS_IT_IS else answer
        alone, alone_gradient = _cut_step(name, gpus[:1], None)
        loss, gradient = _cut_step(name, gpus, weight)
        both = f"one GPU {alone:.3f}, {len(gpus)} GPUs {loss:.3f}"
        require(answer != NOT_AT_ALL, f"{name}: {NOT_AT_ALL}.", f"It can be had: {both}. What is its mean over?")
        what = f"{name}, {answer if answer == AS_IT_IS else 'with your weight'}: {both}"
        require(abs(loss - alone) < 1e-4, f"{what}.", "The pieces' losses, each counted so often, make another mean.")
        off = float((gradient - alone_gradient).norm() / alone_gradient.norm())
        why = f"The gradient is off by {off:.0%}: a weight counts as a constant, and yours depends on the scores"
        require(off < 1e-3, f"{what}.", f"{why}.")
    return "Loss and gradient of one GPU wherever they can be had, and only there."


class _Loss(nn.Module):
    def __init__(self, name: str):
        super().__init__()
        self.name = name

    def forward(self, scores: Tensor, tags: Tensor) -> Tensor:
        return LOSSES[self.name](scores, tags)


def _cut_step(name: str, gpus: list[torch.device], weight: Callable | None) -> tuple[float, Tensor]:
    """Loss and gradient of a small net on these GPUs, the same batch each time."""
    numbers = torch.Generator().manual_seed(1)
    inputs, chance = 3 * torch.randn(10, 3, generator=numbers), torch.rand(10, 6, generator=numbers)
    tags = (chance < torch.linspace(0.1, 0.8, 10)[:, None]).float()
    torch.manual_seed(0)
    net = nn.Linear(3, 6).to(gpus[0])
    criterion = DataParallelCriterion(_Loss(name), gpus, reduction="mean", weight=weight)
    loss = criterion(DataParallelModel(net, gpus)(inputs), tags)
    return loss.item(), torch.autograd.grad(loss, net.weight)[0].cpu()


def _gathered(bert: nn.Module, gpus: list[torch.device], output_device: int = 0) -> Callable:
    net = nn.DataParallel(bert, gpus, output_device)
    return lambda tokens, words: WordLoss()(net(tokens), words)


def _in_forward(bert: nn.Module, gpus: list[torch.device]) -> Callable:
    net = nn.DataParallel(LossInForward(bert, WordLoss(), weight=count_labels), gpus)
    return lambda tokens, words: total(net(tokens, words))


def _parallel(bert: nn.Module, gpus: list[torch.device]) -> Callable:
    net, criterion = DataParallelModel(bert, gpus), DataParallelCriterion(WordLoss(), gpus, weight=count_labels)
    return lambda tokens, words: criterion(net(tokens), words)


# How to build the loss, and how many tensors of the logits' size GPU 0 then holds at its peak.
METHODS = {
    "DataParallel": (_gathered, 3),
    "output_device=1": (partial(_gathered, output_device=1), 1 / 4),
    "loss in forward": (_in_forward, 3 / 4),
    "parallel loss": (_parallel, 3 / 4),
}
BATCH, VOCABULARY, KNOWN_VOCABULARY = 200, 20_000, 30_000


@exercise
def peaks(answer):
    """Exercise 4: GPU 0's peak in GiB under each method, by name: BERT, batch 200, 20,000 words, four GPUs."""
    compare.names(answer, METHODS, "a number")
    for value in answer.values():
        compare.as_number(value)
    gpus = need_gpus(4, values=False)[:4]
    logits = BATCH * LENGTH * VOCABULARY * 4
    for name, (_, held) in METHODS.items():
        peak = _peak(name, gpus)
        before = peak + held * logits * (KNOWN_VOCABULARY / VOCABULARY - 1)
        mistakes = {
            before: "is the peak with 30,000 words.",
            before * VOCABULARY / KNOWN_VOCABULARY: "shrinks everything, and the layers' activations do not shrink.",
            held * logits: "is the logits alone. The layers' activations come on top.",
        }
        case = f"For {name}, where GPU 0 holds {held:g} times the logits at its peak, "
        compare.memory(answer[name], peak, "GiB", 0.05, mistakes, case)
    return "What is counted in logits shrinks with the vocabulary, the rest nearly stays."


def _peak(name: str, gpus: list[torch.device]) -> int:
    """Bytes of GPU 0 at the peak of the second training step."""
    step = _bert_step(bert_article(VOCABULARY), METHODS[name][0], gpus, VOCABULARY)
    step(BATCH)  # makes Adam's state
    return peak_memory(partial(step, BATCH), gpus)[0].peak_allocated


@exercise
def largest_fused(answer):
    """Exercise 5: the largest batch, in steps of 40: fused attention, loss in forward, 10,000 words, GPUs of 12 GB."""

    def make_fits(gpus: list[torch.device]) -> Callable:
        step = _bert_step(bert_article(10_000, fused=True), _in_forward, gpus, 10_000)
        step(4)  # makes Adam's state
        return step

    check_largest(answer, 40, 4_000, "sentences", make_fits)
    return "With 40 more a GPU runs out of memory."


def _bert_step(bert: nn.Module, method: Callable, gpus: list[torch.device], vocabulary: int) -> Callable[[int], None]:
    """`step(batch)`: one training step of `bert` with Adam."""
    adam, loss = torch.optim.Adam(bert.to(gpus[0]).parameters()), method(bert, gpus)

    def step(batch: int) -> None:
        adam.zero_grad()
        loss(*random_tokens(batch, LENGTH, vocabulary)).backward()
        adam.step()

    return step
