"""The checks of lesson 03: solutions pass, typical mistakes are explained, nothing raises."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from virtual_gpus import virtual_gpus

from helpers import lesson04
from helpers.exercises import lesson03 as check
from helpers.parallel import DataParallelCriterion
from tests.check_answers import Hostile, explains, measured_once, one_layer, survives_strange_answers, told

pytestmark = pytest.mark.usefixtures("workspaces_given_back", "small_program", "small_jobs")


@pytest.fixture
def small_jobs(monkeypatch):
    one_layer(monkeypatch, check, lesson04)


def losses(answers):
    """The check, with the losses of the lesson's own cells."""
    lesson = json.loads((Path(__file__).parents[1] / "notebooks" / "03_parallel_loss.ipynb").read_text())
    cells = ["".join(cell["source"]) for cell in lesson["cells"] if cell["cell_type"] == "code"]
    first, second = [cell for cell in cells if "\ndef present(" in cell or "\nlosses = {" in cell]
    names = {}
    exec(first, names)
    exec(second, names)
    return check.losses(answers, names["losses"])


@pytest.mark.parametrize("shapes_only", [True, False])
def test_no_answer_makes_a_check_raise(shapes_only):
    with virtual_gpus(4, kind="TITAN Xp", shapes_only=shapes_only):
        assert survives_strange_answers(check.combine, check.masked_criterion, losses)
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


def in_one_product(losses, weights):
    counts = torch.tensor(weights, device=losses[0].device)
    return torch.where(counts > 0, on_the_first(losses), 0.0) @ (counts / counts.sum())


def test_combine(gpus):
    assert check.combine(combine) and check.combine(in_one_product)
    explains(
        check.combine,
        (lambda losses, weights: sum(losses) / len(losses), "on the same device"),
        (lambda losses, weights: on_the_first(losses).mean(), "is the mean of the means. Where are the weights?"),
        (lambda losses, weights: weighted(losses, weights, divide=False), "is the weighted sum. A mean is asked for."),
        (weighted, "0 x nan is nan"),
        (lambda losses, weights: combine(losses, weights).item(), "Return a tensor, which has a gradient"),
        (lambda losses, weights: combine(losses, weights).detach(), "the result has no graph"),
        (lambda losses, weights: combine(losses, weights).cpu(), "the result is on cpu, and the first loss is on"),
        (
            lambda losses, weights: combine([loss.to("cuda:0") for loss in losses], weights),
            "the result is on cuda:0, and",
        ),
        (
            lambda losses, weights: combine([loss.nan_to_num() for loss in losses], weights),
            "A loss that counts is nan, so the result must be nan",
        ),
        (lambda losses, weights: combine(losses, weights)[None], "of shape ()"),
        (lambda losses, weights: 3 * combine(losses, weights), "[3, 1], 8.25 is more than twice the right value"),
        (
            lambda losses, weights: combine([losses[0], *(x.detach() for x in losses[1:])], weights),
            "no gradient arrives",
        ),
    )


class MaskedError(nn.Module):
    def __init__(self, least=1):
        super().__init__()
        self.least = least

    def forward(self, outputs, targets, mask):
        return ((outputs - targets).square() * mask).sum() / mask.sum().clamp(min=self.least)


class PickedError(nn.Module):
    def forward(self, outputs, targets, mask):
        errors = (outputs - targets).square()[mask == 1]
        return errors.mean() if len(errors) else 0 * outputs.sum()


class SummedError(nn.Module):
    def forward(self, outputs, targets, mask):
        return ((outputs - targets).square() * mask).sum()


def places(outputs, targets, mask):
    return mask.sum()


def test_masked_criterion(gpus):
    assert check.masked_criterion(DataParallelCriterion(MaskedError(), gpus, weight=places))
    assert check.masked_criterion(DataParallelCriterion(PickedError(), gpus, weight=lambda *a: int(a[2].sum())))

    def guarded(*arguments):
        return places(*arguments).clamp(min=1)

    def mean_place(*arguments):
        return arguments[2].mean()

    weights = "The criterion is right on each GPU. What is its mean over?"
    for criterion, options, words in (
        (MaskedError(0), {}, weights),
        (MaskedError(), {}, weights),
        (MaskedError(), {"weight": mean_place}, weights),
        (MaskedError(), {"weight": guarded}, weights),
        (MaskedError(), {"reduction": "sum"}, weights),
        (MaskedError(0), {"weight": places}, "its gradient is nan. 0 / 0 inside the criterion"),
        (MaskedError(0), {"weight": guarded}, "the loss is nan. The criterion divides by 0 where no place counts"),
        (MaskedError(100), {"weight": places}, "On a single device, a loss of"),
        (SummedError(), {"reduction": "sum"}, "is the sum, not a mean."),
        (nn.MSELoss(), {}, "your code stopped"),
    ):
        assert told(check.masked_criterion(DataParallelCriterion(criterion, gpus, **options)), words)
    assert told(check.masked_criterion(DataParallelCriterion(MaskedError(), gpus[:1], weight=places)), "two or more")
    assert told(check.masked_criterion(MaskedError()), "is not a DataParallelCriterion")


def test_what_needs_values_says_so(titans):
    assert told(check.combine(combine), "These GPUs keep no values")
    answer = DataParallelCriterion(MaskedError(), titans, weight=places)
    assert told(check.masked_criterion(answer), "These GPUs keep no values")


@pytest.fixture
def answers():
    with virtual_gpus(4):
        yield {"binary": check.AS_IT_IS, "present": lambda scores, tags: tags.sum(), "triplet": check.AS_IT_IS} | (
            dict.fromkeys(("root", "Dice", "ranking"), check.NOT_AT_ALL)
        )


def samples(scores, tags):
    return len(scores)


def test_losses(answers):
    assert losses(answers)
    assert losses(answers | {"binary": samples, "present": lambda scores, tags: (tags == 1).sum().item()})


def both_sums(scores, tags):
    return (scores.sigmoid() + tags).sum()


@pytest.mark.parametrize(
    ("name", "wrong", "words"),
    [
        ("binary", check.NOT_AT_ALL, "`binary` can be divided. One GPU and 4 GPUs give 1.104. What is its mean over?"),
        ("present", check.NOT_AT_ALL, "`present` can be divided"),
        ("present", check.AS_IT_IS, "`present` as it is is 0.972 on 4 GPUs and 0.996 on one GPU"),
        ("present", samples, "`present` with your weight is 0.972 on 4 GPUs and 0.996"),
        ("triplet", lambda scores, tags: tags.sum(), "Does it need another weight"),
        ("root", check.AS_IT_IS, "Does it need another weight"),
        ("Dice", both_sums, "its gradient is off by 31%. Does your weight depend on the scores?"),
        ("ranking", lambda scores, tags: (tags == 1).sum() * (tags == 0).sum(), "Does it need another weight"),
        ("root", True, "'not at all', or the weight"),
        ("root", lambda scores: 1, "your code stopped"),
    ],
)  # fmt: skip
def test_losses_explains(answers, name, wrong, words):
    assert told(losses(answers | {name: wrong}), name if "stopped" not in words else "", words)


def test_losses_wants_all_and_four_gpus(answers):
    assert told(losses({"root": check.AS_IT_IS}), "an answer for each of binary, present")
    with virtual_gpus(2):
        assert told(losses(answers), "the number of GPUs is 2", "the exercise needs 4")


# With one layer.
PEAKS = {"DataParallel": 7.66, "output_device=1": 1.08, "loss in forward": 2.19, "parallel loss": 2.19}
LOGITS = 200 * 163 * 20_000 * 4 / 2**30


def test_peaks(titans, monkeypatch):
    measured_once(monkeypatch, check, "_peak")
    assert check.peaks(PEAKS)
    for name, wrong, words in (
        ("DataParallel", 7.66 + 3 / 2 * LOGITS, "the peak with 30,000 words"),
        ("loss in forward", (2.19 + 0.75 / 2 * LOGITS) * 2 / 3, "Not all of it depends on the vocabulary"),
        ("loss in forward", 0.75 * LOGITS, "the logits alone"),
        ("loss in forward", 7.66, "As the peak of loss in forward, 7.66 GiB is more than twice"),
        ("parallel loss", 2.19 * 2**10, "in MiB"),
        ("output_device=1", 0.8, "too small"),
        ("output_device=1", "1.08 GiB", "is text"),
        ("output_device=1", ..., "still contains `...`"),
    ):
        assert told(check.peaks(PEAKS | {name: wrong}), words)
    assert told(check.peaks({"DataParallel": 7.66}), "a number for each of DataParallel, output_device=1")


def test_largest_fused(titans):
    assert check.largest_fused(2080)
    assert told(check.largest_fused(2040), "2,040 sentences are not the most: 40 more still fit")
    assert told(check.largest_fused(2120), "With 2,120 sentences, a GPU runs out of memory.")
    assert torch.cuda.memory_allocated(0) == 0


def test_largest_fused_wants_steps_of_40_and_the_articles_gpus(titans):
    for wrong in (1081, 270.5, 0, -40, 25):
        assert told(check.largest_fused(wrong), "is not a multiple of 40")
    assert told(check.largest_fused(10**6), "No GPU of 12 GB holds")
    with virtual_gpus(4, memory="24 GiB", shapes_only=True):
        assert told(check.largest_fused(1080), "the exercise asks for GPUs of 12 GB")


def test_a_large_job_is_not_computed():
    for count, words in ((2, "the exercise needs 4"), (4, "shapes_only=True")):
        with virtual_gpus(count, memory="12 GiB"):
            assert told(check.peaks(PEAKS), words)
            assert told(check.largest_fused(1080), words)
