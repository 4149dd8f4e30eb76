"""Checks of lesson 03, parallel loss."""

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from helpers.data import random_tokens
from helpers.exercises import compare, cuts
from helpers.exercises.core import call, exercise, not_yet, require, show
from helpers.exercises.gpus import four_cards_of_12_gb, four_without_values, with_values
from helpers.lesson04 import LENGTH
from helpers.measure import GiB, largest_batch, peak_memory
from helpers.models import bert_article
from helpers.parallel.loss import DataParallelCriterion, DataParallelModel, LossInForward, count_labels, total

__all__ = ["combine", "largest_fused", "losses", "masked_criterion", "peaks"]

BATCH, VOCABULARY, KNOWN_VOCABULARY = 200, 20_000, 30_000
FUSED_VOCABULARY, STEP, MOST = 10_000, 40, 4_000


# ----------------------------------------------------------------------------------- 1: one loss out of several


@exercise
def combine(answer):
    """`answer(losses, weights)` must be the weighted mean, on the first loss's GPU, with its gradient."""
    gpus = _gpus_with_values(2)
    for means, weights in (([2.0, 5.0], [3, 1]), ([2.0, 4.0], [5, 5]), ([3.0, float("nan")], [4, 0]), ([7.0], [2])):
        leaves = [torch.tensor(mean, device=gpu, requires_grad=True) for mean, gpu in zip(means, gpus, strict=False)]
        found = call(answer, [leaf * 1 for leaf in leaves], list(weights))
        _check_combined(found, leaves, means, weights)
    return "the weights, the GPU and the gradients are right, and a piece of weight 0 does no harm"


def _check_combined(found: object, leaves: list[Tensor], means: list[float], weights: list[int]) -> None:
    what = f"for losses {means} with the weights {weights} you return {show(found)}"
    require(isinstance(found, Tensor), what, "a tensor is asked for: a plain number has no gradient")
    require(found.shape == (), what, f"one number, of shape (), is asked for, not {tuple(found.shape)}")
    require(found.device == leaves[0].device, what, f"it should be on {leaves[0].device}, where the first loss is")
    counted = [(leaf, mean, weight) for leaf, mean, weight in zip(leaves, means, weights, strict=True) if weight]
    right = sum(mean * weight for _, mean, weight in counted) / sum(weights)
    require(not found.isnan(), what, "0 x nan is nan: what has weight 0 must be left out")
    if abs(found.item() / right - 1) > 1e-4:
        not_yet(what, _why_combined(found.item(), right, [mean for _, mean, _ in counted], weights))
    require(found.requires_grad, what, "it has no gradient: .item(), .data and .detach() cut it off")
    found.backward()
    for leaf, _, weight in counted:
        require(leaf.grad is not None, what, f"no gradient arrives on {leaf.device}")
        compare.number(leaf.grad.item(), weight / sum(weights), "(the gradient of a loss)", rel=1e-4)


def _why_combined(value: float, right: float, means: list[float], weights: list[int]) -> str:
    mistakes = {
        sum(means) / len(weights): "that is the mean of the means: each should count by its weight",
        right * sum(weights): "that is the weighted sum: divide it by the sum of the weights",
    }
    known = [because for wrong, because in mistakes.items() if abs(value / wrong - 1) < 1e-4]
    return known[0] if known else f"it should be {'smaller' if value > right else 'larger'}"


# ---------------------------------------------------------------------------------- 2: a criterion of one's own


@exercise
def masked_criterion(answer):
    """`answer` must be a DataParallelCriterion that gives the masked mean of one GPU, however the mask is spread."""
    what = f"{show(answer)} is no DataParallelCriterion"
    require(
        isinstance(answer, DataParallelCriterion), what, "DataParallelCriterion(MaskedError(), ...) itself is asked for"
    )
    gpus = [torch.device("cuda", index) for index in answer.device_ids]
    require(len(gpus) > 1, f"it works on {len(gpus)} GPUs", "two or more are asked for: give it gpus")
    _gpus_with_values(len(gpus))
    numbers = torch.Generator().manual_seed(3)
    for kept in ((4, 4, 4, 4), (4, 3, 1, 1), (4, 2, 0, 0)):  # places that count in each quarter of the batch
        mask = torch.arange(4).expand(8, 4) < torch.tensor(kept).repeat_interleave(2)[:, None]
        inputs, targets = torch.randn(8, 3, generator=numbers), torch.randn(8, 4, generator=numbers)
        _check_masked(answer, gpus, inputs, targets, mask.float())
    return "the loss and the gradients of one GPU, also where a GPU has nothing that counts"


def _check_masked(criterion: nn.Module, gpus: list[torch.device], inputs: Tensor, targets: Tensor, mask: Tensor):
    torch.manual_seed(0)
    net = nn.Linear(3, 4).to(gpus[0])
    right = ((net(inputs.to(gpus[0])).cpu() - targets).square() * mask).sum() / mask.sum()
    expected = torch.autograd.grad(right, list(net.parameters()))
    loss = criterion(DataParallelModel(net, gpus)(inputs), targets, mask)
    counts = [int(piece.sum()) for piece in mask.chunk(len(gpus))]
    what = f"with {counts} places that count on the GPUs the loss is {loss.item():.3f}"
    require(not loss.isnan(), what, "where no place counts your criterion still divides by 0")
    why = f"one GPU's is {right.item():.3f}: tell DataParallelCriterion what the mean of each GPU is over"
    require(torch.isclose(loss.cpu(), right, rtol=1e-4), what, why)
    loss.backward()
    found = [parameter.grad for parameter in net.parameters()]
    why = "0 / 0 inside the criterion makes the gradient nan, even where its result counts for nothing"
    require(not any(gradient.isnan().any() for gradient in found), f"{what}, and its gradient nan", why)
    for gradient, wanted in zip(found, expected, strict=True):
        compare.tensor(gradient, wanted)


# ------------------------------------------------------------------------------------ 3: which losses can be cut


@exercise
def losses(answers):
    """For each loss of `cuts.LOSSES`: "as it is", "not at all", or the weight that DataParallelCriterion needs."""
    cuts.check_names(answers)
    gpus = _gpus_with_values(4)
    for name in cuts.LOSSES:
        cuts.check_cut(name, answers[name], gpus)
    return "loss and gradient of one GPU wherever they can be had, and only there"


# ------------------------------------------------------------------------------------------------ 4: four peaks


class _PerWord(nn.CrossEntropyLoss):
    def forward(self, logits: Tensor, words: Tensor) -> Tensor:
        return super().forward(logits.flatten(0, 1), words.flatten())


def _gathered(bert: nn.Module, gpus: list[torch.device], output_device: int = 0) -> Callable:
    net = nn.DataParallel(bert, gpus, output_device)
    return lambda tokens, words: _PerWord()(net(tokens), words.to(gpus[output_device]))


def _in_forward(bert: nn.Module, gpus: list[torch.device]) -> Callable:
    net = nn.DataParallel(LossInForward(bert, _PerWord(), weight=count_labels), gpus)
    return lambda tokens, words: total(net(tokens, words))


def _parallel(bert: nn.Module, gpus: list[torch.device]) -> Callable:
    net, criterion = DataParallelModel(bert, gpus), DataParallelCriterion(_PerWord(), gpus, weight=count_labels)
    return lambda tokens, words: criterion(net(tokens), words)


# How to build the loss, and how many tensors of the logits' size GPU 0 then holds at its peak.
METHODS = {
    "DataParallel": (_gathered, 3),
    "output_device=1": (partial(_gathered, output_device=1), 1 / 4),
    "loss in forward": (_in_forward, 3 / 4),
    "parallel loss": (_parallel, 3 / 4),
}


@exercise
def peaks(answer):
    """GPU 0's peak in GiB under each method, by name: BERT, batch 200, 20,000 words, four GPUs."""
    require(isinstance(answer, Mapping), f"{show(answer)} is no dict", "a number for each method is asked for, by name")
    names = f"the methods are {show(list(answer))}"
    require(set(answer) == set(METHODS), names, f"these four are asked for: {', '.join(METHODS)}")
    values = {name: compare.number(answer[name], float(answer[name])) for name in METHODS}
    gpus = four_without_values()
    for name, (_, held) in METHODS.items():
        peak = _peak(name, gpus)
        if abs(values[name] / peak - 1) > 0.05:
            not_yet(f"{name}: {values[name]:,.2f} GiB", _why_peak(values[name], peak, held))
    return "what is counted in logits shrinks with the vocabulary, the rest nearly stays"


def _peak(name: str, gpus: list[torch.device]) -> float:
    """GiB of GPU 0 at the peak of the second training step."""
    step = _bert_step(bert_article(VOCABULARY), METHODS[name][0], gpus, VOCABULARY)
    step(BATCH)
    return peak_memory(partial(step, BATCH), gpus)[0].peak_allocated / GiB


def _why_peak(value: float, peak: float, held: float) -> str:
    logits, known = (BATCH * LENGTH * words * 4 / GiB for words in (VOCABULARY, KNOWN_VOCABULARY))
    before = peak + held * (known - logits)
    mistakes = {
        before: "that is the peak with 30,000 words",
        before * VOCABULARY / KNOWN_VOCABULARY: "that shrinks everything, and the layers' activations do not",
        held * logits: "that is the logits alone: the layers' activations come on top",
        peak * GiB: "those are bytes: give GiB",
        peak * 2**10: "those are MiB: give GiB",
    }
    for wrong, because in mistakes.items():
        if abs(value / wrong - 1) < 0.03:
            return because
    count = f"{held:g} tensors of the logits' size" if held > 1 else f"{held:g} of the logits' size"
    return f"it is too {'large' if value > peak else 'small'}: GPU 0 holds {count} at its peak here"


# ------------------------------------------------------------------------------------------- 5: what limits now


@exercise
def largest_fused(answer):
    """The largest batch, in steps of 40: fused attention, loss in forward, 10,000 words, four 12 GB cards."""
    value = compare.number(answer, float(answer), "sentences")
    gpus = four_cards_of_12_gb()
    what = f"{value:,.0f} sentences"
    require(value >= STEP and value % STEP == 0, what, f"a multiple of {STEP} is asked for")
    require(value <= MOST, what, "no card of 12 GB holds a quarter of that")
    step = _bert_step(bert_article(FUSED_VOCABULARY, fused=True), _in_forward, gpus, FUSED_VOCABULARY)
    step(4)  # makes Adam's state
    require(_fits(step, int(value)), what, "they do not fit: a GPU runs out of memory")
    require(not _fits(step, int(value) + STEP), what, f"{STEP} more still fit")
    return f"with {STEP} more a GPU runs out of memory"


def _bert_step(bert: nn.Module, method: Callable, gpus: list[torch.device], vocabulary: int) -> Callable[[int], None]:
    """`step(batch)`: one training step of `bert` with Adam."""
    adam, loss = torch.optim.Adam(bert.to(gpus[0]).parameters()), method(bert, gpus)

    def step(batch: int) -> None:
        adam.zero_grad()
        loss(*random_tokens(batch, LENGTH, vocabulary)).backward()
        adam.step()

    return step


def _fits(step: Callable[[int], None], batch: int) -> bool:
    return largest_batch(step, start=batch, limit=batch, multiple_of=batch) == batch


def _gpus_with_values(least: int) -> list[torch.device]:
    without = "this exercise needs some: gpus = use_gpus(4, memory='16 GiB')"
    return with_values(least, fewer="call use_gpus(4, ...) before", without=without)[:4]
