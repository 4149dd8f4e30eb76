"""The checks of lesson 03: solutions pass, typical mistakes are explained, nothing raises."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from virtual_gpus import virtual_gpus

from helpers.exercises import lesson03 as check
from helpers.parallel import DataParallelCriterion
from tests.check_answers import Hostile, explains, measured_once, survives_strange_answers, told

pytestmark = pytest.mark.usefixtures("workspaces_given_back")


@pytest.mark.parametrize("shapes_only", [True, False])
def test_no_answer_makes_a_check_raise(shapes_only):
    with virtual_gpus(4, kind="TITAN Xp", shapes_only=shapes_only):
        assert survives_strange_answers(check.combine, check.masked_criterion, check.losses)
        assert survives_strange_answers(check.peaks, check.largest_fused)
        for each in (dict.fromkeys(PEAKS, Hostile), dict.fromkeys(PEAKS, "1"), DataParallelCriterion):
            assert told(check.peaks(each)) and told(check.masked_criterion(each))


@pytest.fixture(params=[2, 4])
def gpus(request):
    with virtual_gpus(request.param) as devices:
        yield devices


def combine(losses, weights):
    home = losses[0].device
    counted = [weight * loss.to(home) for loss, weight in zip(losses, weights, strict=True) if weight]
    return sum(counted) / sum(weights)


def on_the_first(losses):
    return torch.stack([loss.to(losses[0].device) for loss in losses])


def weighted(losses, weights, divide=True):
    summed = (on_the_first(losses) * torch.tensor(weights, device=losses[0].device)).sum()
    return summed / sum(weights) if divide else summed


def test_combine(gpus):
    assert check.combine(combine)
    explains(
        check.combine,
        (lambda losses, weights: sum(losses) / len(losses), "on the same device"),
        (lambda losses, weights: on_the_first(losses).mean(), "the mean of the means"),
        (lambda losses, weights: weighted(losses, weights, divide=False), "divide it by the sum"),
        (weighted, "0 x nan is nan"),
        (lambda losses, weights: combine(losses, weights).item(), "a plain number has no gradient"),
        (lambda losses, weights: combine(losses, weights).detach(), "no gradient"),
        (lambda losses, weights: combine(losses, weights).cpu(), "where the first loss is"),
        (lambda losses, weights: combine(losses, weights)[None], "of shape ()"),
        (lambda losses, weights: 3 * combine(losses, weights), "[3, 1], 8.25 is more than twice"),
        (lambda losses, weights: combine([losses[0], *(x.detach() for x in losses[1:])], weights), "no gradient"),
    )


class MaskedError(nn.Module):
    def __init__(self, least=1):
        super().__init__()
        self.least = least

    def forward(self, outputs, targets, mask):
        return ((outputs - targets).square() * mask).sum() / mask.sum().clamp(min=self.least)


def places(outputs, targets, mask):
    return mask.sum()


def test_masked_criterion(gpus):
    assert check.masked_criterion(DataParallelCriterion(MaskedError(), gpus, weight=places))
    for least in (0, 1):
        wrong = DataParallelCriterion(MaskedError(least), gpus)
        assert told(check.masked_criterion(wrong), "what the mean of each GPU is over")
    assert told(check.masked_criterion(DataParallelCriterion(MaskedError(0), gpus, weight=places)), "gradient nan")
    guarded = DataParallelCriterion(MaskedError(0), gpus, weight=lambda *a: a[2].sum().clamp(min=1))
    assert told(check.masked_criterion(guarded), "still divides by 0")
    assert told(check.masked_criterion(DataParallelCriterion(MaskedError(), gpus[:1], weight=places)), "two or more")
    assert told(check.masked_criterion(MaskedError()), "is not a DataParallelCriterion")
    assert told(check.masked_criterion(DataParallelCriterion(nn.MSELoss(), gpus)), "your code stopped")


def test_what_needs_values_says_so(titans):
    assert told(check.combine(combine), "the exercise needs values")
    answer = DataParallelCriterion(MaskedError(), titans, weight=places)
    assert told(check.masked_criterion(answer), "the exercise needs values")


@pytest.fixture
def answers():
    with virtual_gpus(4):
        yield {"binary": check.AS_IT_IS, "present": lambda scores, tags: tags.sum(), "triplet": check.AS_IT_IS} | (
            dict.fromkeys(("root", "Dice", "ranking"), check.NOT_AT_ALL)
        )


def samples(scores, tags):
    return len(scores)


def test_losses(answers):
    assert check.losses(answers)
    assert check.losses(answers | {"binary": samples, "present": lambda scores, tags: (tags == 1).sum().item()})


def both_sums(scores, tags):
    return (scores.sigmoid() + tags).sum()


@pytest.mark.parametrize(
    ("name", "wrong", "words"),
    [
        ("binary", check.NOT_AT_ALL, "it can be had: one GPU 1.104, 4 GPUs 1.104. What is its mean over?"),
        ("present", check.NOT_AT_ALL, "it can be had"),
        ("present", check.AS_IT_IS, "as it is: one GPU 0.996, 4 GPUs 0.972"),
        ("present", samples, "with your weight: one GPU 0.996, 4 GPUs 0.972"),
        ("triplet", lambda scores, tags: tags.sum(), "make another mean"),
        ("root", check.AS_IT_IS, "make another mean"),
        ("Dice", both_sums, "the gradient is off by 31%: a weight counts as a constant"),
        ("ranking", lambda scores, tags: (tags == 1).sum() * (tags == 0).sum(), "make another mean"),
        ("root", True, "'not at all' or the weight"),
        ("root", lambda scores: 1, "your code stopped"),
    ],
)  # fmt: skip
def test_losses_explains(answers, name, wrong, words):
    assert told(check.losses(answers | {name: wrong}), name if "stopped" not in words else "", words)


def test_losses_wants_all_and_four_gpus(answers):
    assert told(check.losses({"root": check.AS_IT_IS}), "an answer for each of binary, present")
    with virtual_gpus(2):
        assert told(check.losses(answers), "the number of GPUs is 2", "the exercise needs 4")


def test_the_lesson_shows_the_losses_that_are_checked():
    lesson = json.loads((Path(__file__).parents[1] / "notebooks" / "03_parallel_loss.ipynb").read_text())
    cells = ["".join(cell["source"]) for cell in lesson["cells"] if cell["cell_type"] == "code"]
    (shown,) = [cell for cell in cells if "\nlosses = {" in cell]
    names = {}
    exec(shown, names)
    scores, tags = torch.randn(4, 6), torch.arange(24).reshape(4, 6) % 2
    assert list(names["losses"]) == list(check.LOSSES)
    for name, loss in names["losses"].items():
        torch.testing.assert_close(loss(scores, tags.float()), check.LOSSES[name](scores, tags.float()))


PEAKS = {"DataParallel": 9.36, "output_device=1": 2.83, "loss in forward": 3.89, "parallel loss": 3.89}
LOGITS = 200 * 163 * 20_000 * 4 / 2**30


def test_peaks(titans, monkeypatch):
    measured_once(monkeypatch, check, "_peak")
    assert check.peaks(PEAKS)
    for name, wrong, words in (
        ("DataParallel", 13.0, "the peak with 30,000 words"),
        ("DataParallel", 13.0 * 2 / 3, "the layers' activations do not"),
        ("loss in forward", 0.75 * LOGITS, "the logits alone"),
        ("loss in forward", 9.36, "where GPU 0 holds 0.75 times the logits at its peak, 9.36 GiB is more than twice"),
        ("parallel loss", 3.84 * 2**10, "in MiB"),
        ("output_device=1", 2.3, "too small"),
        ("output_device=1", "2.83 GiB", "is text"),
        ("output_device=1", ..., "still contains `...`"),
    ):
        assert told(check.peaks(PEAKS | {name: wrong}), words)
    assert told(check.peaks({"DataParallel": 9.36}), "a number for each of DataParallel, output_device=1")


def test_largest_fused(titans):
    assert check.largest_fused(1080)
    assert told(check.largest_fused(1040), "40 sentences more still fit")
    assert told(check.largest_fused(1120), "runs out of memory")
    assert torch.cuda.memory_allocated(0) == 0


def test_largest_fused_wants_steps_of_40_and_the_articles_gpus(titans):
    for wrong in (1081, 270.5, 0, -40, 25):
        assert told(check.largest_fused(wrong), "a multiple of 40")
    assert told(check.largest_fused(10**6), "no GPU of 12 GB holds so many")
    with virtual_gpus(4, memory="24 GiB", shapes_only=True):
        assert told(check.largest_fused(1080), "GPUs of 12 GB are asked for")


def test_a_large_job_is_not_computed():
    for count, words in ((2, "the exercise needs 4"), (4, "shapes_only=True")):
        with virtual_gpus(count, memory="12 GiB"):
            assert told(check.peaks(PEAKS), words)
            assert told(check.largest_fused(1080), words)
