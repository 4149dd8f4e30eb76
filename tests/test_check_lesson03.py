"""The checks of lesson 03: solutions pass, typical mistakes are explained, nothing raises."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from virtual_gpus import virtual_gpus

from helpers.exercises import cuts
from helpers.exercises import lesson03 as check
from helpers.parallel.loss import DataParallelCriterion
from tests.check_answers import Hostile, measured_once, told

pytestmark = pytest.mark.usefixtures("workspaces_given_back")

CHECKS = (check.combine, check.masked_criterion, check.losses, check.peaks, check.largest_fused)


@pytest.fixture(params=[2, 4])
def gpus(request):
    with virtual_gpus(request.param) as devices:
        yield devices


# --- 1: one loss out of several -------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda losses, weights: sum(losses) / len(losses), "on the same device"),
        (lambda losses, weights: on_the_first(losses).mean(), "the mean of the means"),
        (lambda losses, weights: weighted(losses, weights, divide=False), "divide it by the sum"),
        (weighted, "0 x nan is nan"),
        (lambda losses, weights: combine(losses, weights).item(), "a plain number has no gradient"),
        (lambda losses, weights: combine(losses, weights).detach(), "no gradient"),
        (lambda losses, weights: combine(losses, weights).cpu(), "where the first loss is"),
        (lambda losses, weights: combine(losses, weights)[None], "of shape ()"),
        (lambda losses, weights: 2 * combine(losses, weights), "with the weights [3, 1]"),
        (lambda losses, weights: 2 * combine(losses, weights), "it should be smaller"),
        (lambda losses, weights: combine([losses[0], *(x.detach() for x in losses[1:])], weights), "no gradient"),
        (lambda losses, weights: ..., "still returns ..."),
    ],
)  # fmt: skip
def test_combine_explains(gpus, wrong, words):
    assert told(check.combine(wrong), words)


# --- 2: a criterion of one's own ------------------------------------------------------------------------


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
    assert check.masked_criterion(DataParallelCriterion(MaskedError(), gpus[::-1][::-1], weight=lambda *a: a[2].sum()))


def test_masked_criterion_explains(gpus):
    assert told(
        check.masked_criterion(DataParallelCriterion(MaskedError(0), gpus)), "what the mean of each GPU is over"
    )
    assert told(check.masked_criterion(DataParallelCriterion(MaskedError(), gpus)), "what the mean of each GPU is over")
    assert told(check.masked_criterion(DataParallelCriterion(MaskedError(0), gpus, weight=places)), "gradient nan")
    guarded = DataParallelCriterion(MaskedError(0), gpus, weight=lambda *a: a[2].sum().clamp(min=1))
    assert told(check.masked_criterion(guarded), "still divides by 0")
    assert told(check.masked_criterion(DataParallelCriterion(MaskedError(), gpus[:1], weight=places)), "two or more")
    assert told(check.masked_criterion(MaskedError()), "is no DataParallelCriterion")
    assert told(check.masked_criterion(DataParallelCriterion(nn.MSELoss(), gpus)), "your code stopped")


def test_what_needs_values_says_so(titans):
    assert told(check.combine(combine), "use_gpus(4, memory='16 GiB')")
    answer = DataParallelCriterion(MaskedError(), titans, weight=places)
    assert told(check.masked_criterion(answer), "use_gpus(4, memory='16 GiB')")


# --- 3: which losses can be cut -------------------------------------------------------------------------


@pytest.fixture
def answers():
    with virtual_gpus(4):
        yield {"binary": cuts.AS_IT_IS, "present": lambda scores, tags: tags.sum(), "triplet": cuts.AS_IT_IS} | (
            dict.fromkeys(("root", "Dice", "ranking"), cuts.NOT_AT_ALL)
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
        ("binary", cuts.NOT_AT_ALL, "it can be had: one GPU 1.104, 4 GPUs 1.104"),
        ("triplet", cuts.NOT_AT_ALL, "What is its mean over?"),
        ("present", cuts.NOT_AT_ALL, "it can be had"),
        ("present", cuts.AS_IT_IS, "as it is: one GPU 0.996, 4 GPUs 0.972"),
        ("present", samples, "with your weight: one GPU 0.996, 4 GPUs 0.972"),
        ("present", lambda scores, tags: tags.mean(), "make another mean"),
        ("triplet", lambda scores, tags: tags.sum(), "make another mean"),
        ("root", cuts.AS_IT_IS, "make another mean"),
        ("Dice", cuts.AS_IT_IS, "make another mean"),
        ("Dice", both_sums, "the gradient is off by 31%: a weight counts as a constant"),
        ("ranking", cuts.AS_IT_IS, "make another mean"),
        ("ranking", lambda scores, tags: (tags == 1).sum() * (tags == 0).sum(), "make another mean"),
        ("root", True, "'not at all' or the weight"),
        ("root", lambda scores: 1, "your code stopped"),
        ("root", lambda scores, tags: None, "your code stopped"),
    ],
)  # fmt: skip
def test_losses_explains(answers, name, wrong, words):
    assert told(check.losses(answers | {name: wrong}), name if "stopped" not in words else "", words)


def test_losses_wants_all_and_four_gpus(answers):
    assert told(check.losses({"root": cuts.AS_IT_IS}), "these are: binary, present")
    assert told(check.losses(answers | {"root": ...}), "still holds ...")
    with virtual_gpus(2):
        assert told(check.losses(answers), "there are 2 GPUs", "use_gpus(4, ...)")


def test_an_answer_does_not_tell_the_next(answers):
    """One loss at a time, and no word of the other kinds of answer."""
    told_of = check.losses(dict.fromkeys(answers, cuts.NOT_AT_ALL)).text
    assert "binary" in told_of and not any(word in told_of for word in ("present", "triplet", "weight", cuts.AS_IT_IS))


def test_the_lesson_shows_the_losses_that_are_checked():
    lesson = json.loads((Path(__file__).parents[1] / "notebooks" / "03_parallel_loss.ipynb").read_text())
    cells = ["".join(cell["source"]) for cell in lesson["cells"] if cell["cell_type"] == "code"]
    (shown,) = [cell for cell in cells if "\nlosses = {" in cell]
    names = {}
    exec(shown, names)
    scores, tags = torch.randn(4, 6), torch.arange(24).reshape(4, 6) % 2
    assert list(names["losses"]) == list(cuts.LOSSES)
    for name, loss in names["losses"].items():
        torch.testing.assert_close(loss(scores, tags.float()), cuts.LOSSES[name](scores, tags.float()))


# --- 4: four peaks --------------------------------------------------------------------------------------

PEAKS = {"DataParallel": 9.36, "output_device=1": 2.83, "loss in forward": 3.89, "parallel loss": 3.89}
LOGITS = 200 * 163 * 20_000 * 4 / 2**30


def test_peaks(titans, monkeypatch):
    measured_once(monkeypatch, check, "_peak")
    assert check.peaks(PEAKS)
    for name, wrong, words in (
        ("DataParallel", 13.0, "the peak with 30,000 words"),
        ("DataParallel", 13.0 * 2 / 3, "the layers' activations do not"),
        ("loss in forward", 0.75 * LOGITS, "the logits alone"),
        ("loss in forward", 9.36, "it is too large: GPU 0 holds 0.75 of the logits' size"),
        ("parallel loss", 3.84 * 2**10, "those are MiB"),
        ("output_device=1", 2.3, "it is too small: GPU 0 holds 0.25 of the logits' size"),
        ("output_device=1", 9.16, "too large"),
    ):
        assert told(check.peaks(PEAKS | {name: wrong}), name, words)


def test_peaks_wants_all_four(titans):
    assert told(check.peaks([9.36, 2.83, 3.89, 3.89]), "is no dict")
    assert told(check.peaks({"DataParallel": 9.36}), "these four are asked for")
    assert told(check.peaks(PEAKS | {"parallel loss": "3.89 GiB"}), "could not convert")
    assert told(check.peaks(PEAKS | {"parallel loss": ...}), "still holds ...")


# --- 5: what limits now ---------------------------------------------------------------------------------


def test_largest_fused(titans):
    assert check.largest_fused(1080)
    assert told(check.largest_fused(1040), "40 more still fit")
    assert told(check.largest_fused(1120), "runs out of memory")
    assert torch.cuda.memory_allocated(0) == 0


@pytest.mark.parametrize("wrong", [1081, 270.5, 0, -40, 25])
def test_largest_fused_wants_steps_of_40(titans, wrong):
    assert told(check.largest_fused(wrong), "a multiple of 40")


def test_largest_fused_wants_the_articles_cards(titans):
    assert told(check.largest_fused(10**6), "no card of 12 GB holds a quarter")
    with virtual_gpus(4, memory="24 GiB", shapes_only=True):
        assert told(check.largest_fused(1080), "cards of 12 GB are asked for")


def test_a_large_job_is_not_computed():
    for count, words in ((2, "four are asked for"), (4, "shapes_only=True")):
        with virtual_gpus(count, memory="12 GiB"):
            assert told(check.peaks(PEAKS), words)
            assert told(check.largest_fused(1080), words)
    assert told(check.peaks(PEAKS), "there are 0 GPUs")
    assert told(check.combine(combine), "there are 0 GPUs")


# --- whatever is passed ---------------------------------------------------------------------------------


STRANGE = [
    None, ..., "", "1080", b"", True, -1, 10**400, float("nan"), 3 + 4j, [], {}, [...], object, int, print,
    torch.ones(3), torch.ones((), device="meta"), nn.Identity(), lambda: 1, lambda *_: 1 / 0,
    lambda *_: [...], lambda *_: Hostile(), dict.fromkeys(PEAKS, Hostile), dict.fromkeys(PEAKS, "1"), {1: 2}, Hostile(),
    Hostile, exit, DataParallelCriterion,
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(STRANGE)))
@pytest.mark.parametrize("shapes_only", [True, False])
def test_no_answer_makes_a_check_raise(number, shapes_only):
    with virtual_gpus(4, kind="TITAN Xp", shapes_only=shapes_only):
        for each in CHECKS:
            assert told(each(STRANGE[number]))
