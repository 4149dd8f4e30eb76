"""Checks of lesson 03, parallel loss."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from helpers.data import random_tokens
from helpers.exercises import compare
from helpers.exercises.core import call, exercise, require, show
from helpers.exercises.gpus import check_largest, need_gpus
from helpers.lesson04 import LENGTH, WordLoss, bert_peaks
from helpers.models import bert_article
from helpers.parallel import DataParallelCriterion, DataParallelModel, count_labels


@exercise
def combine(answer):
    """Exercise 1: `answer(losses, weights)` must be the weighted mean, on the first loss's GPU, with its gradient."""
    gpus, nan = need_gpus(2, values=True)[::-1], float("nan")
    for means, weights in (
        ([2.0, 5.0], [3, 1]), ([2.0, 4.0], [5, 5]), ([3.0, nan], [4, 0]), ([7.0], [2]), ([nan, 2.0], [1, 3]),
    ):  # fmt: skip
        leaves = [torch.tensor(mean, device=gpu, requires_grad=True) for mean, gpu in zip(means, gpus, strict=False)]
        found = call(answer, [leaf * 1 for leaf in leaves], list(weights))
        case = f"For the losses {means} with the weights {weights}"
        require(isinstance(found, Tensor), f"{case}, you return {show(found)}. Return a tensor, which has a gradient.")
        require(found.shape == (), f"{case}, the shape is {tuple(found.shape)}. Return one number, of shape ().")
        there = f"{case}, the result is on {found.device}, and the first loss is on {gpus[0]}."
        require(found.device == gpus[0], there, "It should be where the first loss is.")
        counted = [(leaf, weight) for leaf, weight in zip(leaves, weights, strict=True) if weight]
        weighted = sum(leaf.item() * weight for leaf, weight in counted)
        if weighted != weighted:  # nan
            hidden = f"{case}, the result is {found.item():.3g}. A loss that counts is nan, so the result must be nan."
            require(bool(found.isnan()), hidden)
            continue
        require(not found.isnan(), f"{case}, the result is nan. A loss of weight 0 must not count, and 0 x nan is nan.")
        mistakes = {
            sum(leaf.item() for leaf, _ in counted) / len(weights): "is the mean of the means. Where are the weights?",
            weighted: "is the weighted sum. A mean is asked for.",
        }
        compare.number(found, weighted / sum(weights), rel=1e-4, mistakes=mistakes, case=f"{case}, ")
        require(found.requires_grad, f"{case}, the result has no graph: .item(), .data and .detach() cut it off.")
        found.backward()
        for leaf, weight in counted:
            require(leaf.grad is not None, f"{case}, no gradient arrives on {leaf.device}.")
            compare.number(leaf.grad, weight / sum(weights), rel=1e-4, case=f"{case}, a gradient of ")
    return "The value, the GPU and the gradients are right, and a piece of weight 0 does no harm."


@exercise
def masked_criterion(answer):
    """Exercise 2: `answer`, a DataParallelCriterion, must give one GPU's masked mean, however the mask is spread."""
    asked = "Pass DataParallelCriterion(MaskedError(), ...) itself."
    require(isinstance(answer, DataParallelCriterion), f"{show(answer)} is not a DataParallelCriterion.", asked)
    gpus = [torch.device("cuda", index) for index in answer.device_ids]
    require(len(gpus) > 1, f"It works on {len(gpus)} GPUs. Give it `gpus`, which are two or more.")
    need_gpus(len(gpus), values=True)
    numbers = torch.Generator().manual_seed(3)
    for kept in ((4, 4, 4, 4), (4, 3, 1, 1), (4, 2, 0, 0)):  # places that count in each quarter of the batch
        mask = (torch.arange(4).expand(7, 4) < torch.tensor(kept).repeat_interleave(2)[:7, None]).float()
        inputs, targets = torch.randn(7, 3, generator=numbers), torch.randn(7, 4, generator=numbers)
        torch.manual_seed(0)
        net = nn.Linear(3, 4)
        error = ((net(inputs) - targets).square() * mask).sum()
        right = error / mask.sum()
        expected = torch.autograd.grad(right, list(net.parameters()), retain_graph=True)
        alone, mistakes = answer.module.criterion(net(inputs), targets, mask), {error.item(): "is the sum, not a mean."}
        compare.number(alone, right.item(), rel=1e-4, mistakes=mistakes, case="On a single device, a loss of ")
        loss = answer(DataParallelModel(net.to(gpus[0]), gpus)(inputs), targets, mask)
        case = f"With {[int(piece.sum()) for piece in mask.chunk(len(gpus))]} places that count on the GPUs"
        nan = f"{case}, the loss is nan. The criterion divides by 0 where no place counts, and that piece has a weight."
        require(not loss.isnan(), nan)
        values = f"{case}, the loss is {loss.item():.3f}, and one GPU's is {right.item():.3f}."
        combined = "The criterion is right on each GPU. What is its mean over? Tell DataParallelCriterion."
        require(torch.isclose(loss.cpu(), right, rtol=1e-4), values, combined)
        loss.backward()
        why = "0 / 0 inside the criterion makes the gradient nan, even where the piece has no weight."
        for parameter, wanted in zip(net.parameters(), expected, strict=True):
            require(not parameter.grad.isnan().any(), f"{case}, the loss is right, but its gradient is nan.", why)
            compare.tensor(parameter.grad, wanted)
    return "The loss and the gradients are those of one GPU, also where a GPU has nothing that counts."


# Exercise 3: which losses come out of pieces? Each runs on one GPU and on four, as the answer says.
AS_IT_IS, NOT_AT_ALL = "as it is", "not at all"

# How one GPU's loss comes out of the pieces: with which weight, or not at all.
_WEIGHTS: dict[str, Callable | str | None] = {
    "binary": None, "present": lambda scores, tags: tags.sum(), "triplet": None,
    "root": NOT_AT_ALL, "Dice": NOT_AT_ALL, "ranking": NOT_AT_ALL,
}  # fmt: skip


@exercise
def losses(answers, losses):
    """Exercise 3: for each of `losses` "as it is", "not at all", or the weight that DataParallelCriterion needs."""
    compare.names(answers, _WEIGHTS, "an answer")
    for name, answer in answers.items():
        choice = callable(answer) or answer in (AS_IT_IS, NOT_AT_ALL)
        asked = f"Give {AS_IT_IS!r}, {NOT_AT_ALL!r}, or the weight as a function of scores and tags."
        require(choice, f"The answer for `{name}` is {show(answer)}.", asked)
    gpus = need_gpus(4, values=True)[:4]
    for name in _WEIGHTS:
        answer = answers[name]
        if answer == NOT_AT_ALL == _WEIGHTS[name]:
            continue
        weight = _WEIGHTS[name] if answer == NOT_AT_ALL else None if answer == AS_IT_IS else answer
        alone, alone_gradient = _cut_step(losses[name], gpus[:1], None)
        loss, gradient = _cut_step(losses[name], gpus, weight)
        given = answer if answer == AS_IT_IS else "with your weight"
        both = f"The loss `{name}` {given} is {loss:.3f} on {len(gpus)} GPUs and {alone:.3f} on one GPU"
        can = f"The loss `{name}` can be divided. One GPU and {len(gpus)} GPUs give {loss:.3f}. What is its mean over?"
        require(answer != NOT_AT_ALL, can)
        require(abs(loss - alone) < 1e-4, f"{both}. Does it need another weight, or can no weight help?")
        off = float((gradient - alone_gradient).norm() / alone_gradient.norm())
        why = (
            f"The loss `{name}` is right, but its gradient is off by {off:.0%}. Does your weight depend on the scores?"
        )
        require(off < 1e-3, why)
    return "Loss and gradient are those of one GPU wherever they can be, and only there."


class _Loss(nn.Module):
    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor]):
        super().__init__()
        self.forward = loss


def _cut_step(function: Callable, gpus: list[torch.device], weight: Callable | None) -> tuple[float, Tensor]:
    """Loss and gradient of a small net on these GPUs, the same batch each time."""
    numbers = torch.Generator().manual_seed(1)
    inputs, chance = 3 * torch.randn(10, 3, generator=numbers), torch.rand(10, 6, generator=numbers)
    tags = (chance < torch.linspace(0.1, 0.8, 10)[:, None]).float()
    torch.manual_seed(0)
    net = nn.Linear(3, 6).to(gpus[0])
    criterion = DataParallelCriterion(_Loss(function), gpus, reduction="mean", weight=weight)
    loss = criterion(DataParallelModel(net, gpus)(inputs), tags)
    return loss.item(), torch.autograd.grad(loss, net.weight)[0].cpu()


BATCH, VOCABULARY, KNOWN_VOCABULARY = 200, 20_000, 30_000
# For each method how many tensors of the logits' size GPU 0 holds at its peak.
HELD = {"DataParallel": 3, "output_device=1": 1 / 4, "loss in forward": 3 / 4, "parallel loss": 3 / 4}


@exercise
def peaks(answer):
    """Exercise 4: GPU 0's peak in GiB under each method, by name: BERT, batch 200, 20,000 words, four GPUs."""
    compare.names(answer, HELD, "a number")
    for value in answer.values():
        compare.as_number(value)
    gpus = need_gpus(4, values=False)[:4]
    logits = BATCH * LENGTH * VOCABULARY * 4
    peaks = {name: _peak(name, gpus) for name in HELD if name != "loss in forward"}
    peaks["loss in forward"] = peaks["parallel loss"]  # they hold the same, as the lesson shows
    for name, held in HELD.items():
        peak = peaks[name]
        before = peak + held * logits * (KNOWN_VOCABULARY / VOCABULARY - 1)
        mistakes = {
            before: "is the peak with 30,000 words.",
            before * VOCABULARY / KNOWN_VOCABULARY: "shrinks all of the peak. Not all of it depends on the vocabulary.",
            held * logits: "is the size of the logits alone. The layers' activations come on top.",
        }
        compare.memory(answer[name], peak, "GiB", 0.05, mistakes, case=f"As the peak of {name}, ")
    return "Tensors of the size of the logits shrink with the vocabulary. The rest stays nearly the same."


def _peak(name: str, gpus: list[torch.device]) -> int:
    """Bytes of GPU 0 at its peak."""
    wrap, criterion = partial(nn.DataParallel, output_device=int(name == "output_device=1")), None
    if name == "parallel loss":
        wrap, criterion = DataParallelModel, DataParallelCriterion(WordLoss(), gpus, weight=count_labels)
    return bert_peaks(wrap, BATCH, gpus, criterion, VOCABULARY)[0].peak_allocated


@exercise
def largest_fused(answer):
    """Exercise 5: the largest batch, in steps of 40: fused attention, loss in forward, 10,000 words, GPUs of 12 GB."""

    def train(gpus: list[torch.device], batch: int) -> None:
        vocabulary = 10_000
        bert = bert_article(vocabulary, fused=True).to(gpus[0])
        net, criterion = DataParallelModel(bert, gpus), DataParallelCriterion(WordLoss(), gpus, weight=count_labels)
        adam = torch.optim.Adam(bert.parameters())
        for size in (4, batch):  # the first step makes Adam's state
            tokens, words = random_tokens(size, LENGTH, vocabulary)
            adam.zero_grad()
            criterion(net(tokens), words).backward()
            adam.step()

    check_largest(answer, 40, 4_000, "sentences", train)
    return "With 40 sentences more, a GPU runs out of memory."
