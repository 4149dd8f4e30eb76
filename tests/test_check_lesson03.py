"""The checks of lesson 03: solutions pass, typical mistakes are explained, nothing raises."""

from functools import partial

import pytest
import torch
from torch.nn.functional import cross_entropy
from virtual_gpus import virtual_gpus

from helpers.models import Llama
from notebooks.checks import lesson03 as check
from tests.check_answers import (
    STRANGE_RESULTS,
    Answers,
    answers_test,
    cells_of,
    changed,
    measured_once,
    stored,
    then,
    told,
)

pytestmark = pytest.mark.usefixtures("workspaces_given_back", "small_program", "small_jobs")


@pytest.fixture
def small_jobs(monkeypatch):
    """One layer, and each job runs once; the solution runs with all layers in the lesson."""
    monkeypatch.setattr(check, "Llama", lambda **shape: Llama(**shape | {"layers": 1}))
    monkeypatch.setenv("COURSE_PROGRESS", "off")
    measured_once(monkeypatch, check, "_score")


@pytest.fixture
def rtx():
    with virtual_gpus(4, kind="RTX4090", shapes_only=True) as devices:
        yield devices


LESSON = "03_parallel_loss"
combine = stored(LESSON, "combine_solution")
GIVEN, EACH, END = "home = losses[0].device", "weight * loss.to(home)", "return weighted_sum / sum(weights)"
COMBINE = [
    (combine(EACH, f"(loss is losses[0] or loss is losses[-1]) * {EACH}"), "[3.0, 1.0, 6.0] with the weights [1"),
    (combine(END, f"losses[0].mul_(2)\n    {END}"), "changes losses[0] to 4"),
    (combine("losses[0].device", "losses[-1].device"), "should be where the first loss is"),
    (combine("weight > 0", "True", "loss.to(home)", "torch.where(torch.tensor(weight > 0), loss.to(home), 0.0)"),
     "a gradient is nan. The backward pass still runs through the piece of weight 0"),
    (combine("loss.to(home)", "loss.nan_to_num().to(home)"), "so the result must be nan"),
    (combine(EACH, "loss.to(home)", "sum(weights)", "len(weights)"), "the mean of the means. Where are the"),
    (combine(END, "return weighted_sum"), "is the weighted sum. A mean is asked for."),
    (combine("weight > 0", "True"), "0 x nan"),
    (combine(END, "return weighted_sum.item() / sum(weights)"), "Return a tensor, which has a gradient"),
    (combine("loss.to", "loss.detach().to"), "the result has no graph"),
    (combine(END, "return weighted_sum.cpu() / sum(weights)"), "the result is on cpu, and the first loss is on"),
    (combine("loss.to", "(loss if loss is losses[0] else loss.detach()).to"), "no gradient arrives"),
]  # fmt: skip


accumulate = stored(LESSON, "accumulate_words_solution", cross_entropy=cross_entropy)
SUM, COUNT = "loss_sum / count", "(labels != -100).sum()"
HAS_LABELS = "loss.backward()", "loss.isnan() or loss.backward()"
ACCUMULATE = [
    (accumulate(SUM, f"loss_sum / {COUNT} / len(micro_batches)", *HAS_LABELS), ("off by", "It is a mean of means")),
    (accumulate(SUM, f"loss_sum / {COUNT}", *HAS_LABELS), "the sum of the micro-batches' means"),
    (accumulate(SUM, "loss_sum"), "the sum over all labels"),
    (accumulate(COUNT, "labels.numel()"), "of all labels, also ignored ones"),
    (accumulate(SUM, f"loss_sum / {COUNT} * len(labels) / sum(len(y) for _, y in micro_batches)", *HAS_LABELS),
     "weighted by sequences. Count la"),
    (accumulate("return", "model.output.weight.grad.mul_(2)\n    return"), "Every label that counts should count"),
    # PyTorch's own backward gives 0, but the loss is nan.
    (accumulate(SUM, f"loss_sum / {COUNT} * {COUNT} / count"), "nan"),
    (accumulate("return", "model.output.bias.data.add_(1e-6)\n    return"), "changes `output.bias`. Leave the model"),
    (accumulate("return", "model.cpu()\n    return"), "moves `embedding.weight` to cpu"),
    (accumulate("loss.backward()\n", "\n", "loss.detach()", "loss", "return", "total.backward()\n    return"),
     "before the first backward()"),
    (accumulate("in micro_batches:", "in [[*map(torch.cat, zip(*micro_batches))]]:"), "Run one micro-batch at a time"),
    (accumulate("loss.backward()", "model.zero_grad(), loss.backward()"), "that of the last micro-batch alone"),
    (accumulate("return total", "return total * 0 + 1"), "the gradients are right, but the returned loss"),
    (accumulate("loss.backward()", "pass"), "no gradient. Was backward() called?"),
]  # fmt: skip


LOSSES = cells_of(LESSON)[1]
FIVE = PRESENT, TRIPLET, ROOT, DICE, RANKING = [LOSSES[name] for name in check._DIVISIBLE]
SOLUTION = stored(LESSON, "answers_solution")()


def over(totals):
    return totals[0] / totals[1]


def dice(finish):
    return {"dice": (LOSSES["dice_sums"], finish)}


def count_and(loss):
    return lambda *both: torch.stack([loss(*both) * len(both[0]), both[0].new_tensor(len(both[0]))])


def as_tuple(scores, tags):
    return ((scores - tags) ** 2).sum(), scores.numel()


pieces = []


def kept_outside(scores, tags):
    pieces.append((scores.to("cuda:0"), tags.to("cuda:0")))
    return scores.sum()


def of_what_was_kept(totals):
    found = RANKING(*map(torch.cat, zip(*pieces, strict=True)))
    pieces.clear()
    return found + 0 * totals


FIVE_LOSSES = [
    ({"present": "not at all"}, "`present` can be divided. Which sums"),
    ({"root": (count_and(ROOT), over)}, "Does each of your numbers add up"),
    (dice(lambda totals: 1 - 2 * totals[0] / totals[1].detach()), "the gradient of the net's weights is off by"),
    (dice(lambda totals: (1 - 2 * over(totals)).detach()), "`dice` is right, but the output has no graph"),
    (dice(lambda totals: (1 - 2 * over(totals)).item()), "Return a tensor, which has"),
    (dice(lambda totals: totals), "Return one number"),
    ({"ranking": (kept_outside, of_what_was_kept)}, "more than 4 numbers per GPU. They pass whole pieces on"),
    ({"root": (lambda *both: as_tuple(*both)[0], lambda total: (total / 60).sqrt())}, "size of a batch"),
    ({"ranking": (count_and(RANKING), over)}, "It compares tags of different images"),
    ({"ranking": (lambda scores, tags: scores.flatten(), over)}, "at most 4 numbers"),
    ({"root": (lambda scores, tags: scores[:1, :2], over)}, "at most 4 numbers"),
    ({"root": (lambda scores, tags: 1.0, over)}, "Return a tensor"),
    ({"root": "as it is"}, "or a pair of functions"),
]

MOST = 84  # with one layer
LARGEST = [(MOST - 4, "4 more still fit"), (MOST + 4, "a GPU runs out of memory. A new job with two steps")]


def only_with_values(model, gpus, tokens, labels):
    if tokens.shape[1] == 1024:
        return model.output.weight.sum()
    return check._divided(model, gpus, tokens, labels)


def divided(change):
    return lambda *job: change(check._divided(*job))


LLAMA_LOSS = [
    (check._gathered, "with 48 sequences a GPU runs out of memory"),
    (divided(lambda loss: 1.01 * loss), "What is the mean over?"),
    (divided(torch.Tensor.item), "Return the loss, a tensor"),
    (divided(torch.Tensor.detach), "the output has no graph"),
    (divided(lambda loss: loss.detach().requires_grad_()), "the gradient does not reach `embedding.weight`"),
    (divided(lambda loss: loss.detach() / 2 + loss / 2), "is off by 50.0%"),
    (divided(lambda loss: loss[None, None].expand(2, 2)), "Return one number"),
    (divided(lambda loss: loss / 0 * 0), "the loss is nan"),
    (then(lambda model, *job: model.cpu(), check._divided), "your function moves `embedding.weight` to cpu"),
    (only_with_values, "gets no gradient"),
    (lambda model, *job: check._divided(model.bfloat16(), *job), "your function changes `embedding.weight`"),
]
ANSWERS = {
    "combine": Answers(
        check.combine,
        [
            combine(END, f"losses.clear()\n    {END}"),
            combine(GIVEN, 'home = "cpu"', END, "return (weighted_sum / sum(weights)).to(losses[0].device)"),
        ],
        COMBINE,
        fixtures="four",
    ),
    "accumulate": Answers(
        check.accumulate_words,
        [accumulate(SUM, f"loss_sum / {COUNT} * {COUNT} / count if (labels != -100).any() else loss_sum")],
        ACCUMULATE,
        fixtures="four",
    ),
    "losses": Answers(
        lambda change: check.losses(changed(SOLUTION, change), FIVE),
        [
            {"ranking": "Not at all"},
            {"root": (as_tuple, lambda t: over(t) ** 0.5)},
            {"triplet": [count_and(TRIPLET), over]},
        ],
        FIVE_LOSSES,
        fixtures="four",
    ),
    "largest": Answers(check.largest, [MOST], LARGEST, fixtures="rtx"),
    "llama": Answers(
        check.llama_loss,
        wrong=LLAMA_LOSS,
        scored=[
            (check._divided, "Naive: out of memory. You reach par in memory and time"),
            (partial(check._divided, in_chunks=False), "over par in memory"),
        ],
        strange=[3, ..., STRANGE_RESULTS[0], STRANGE_RESULTS[-1]],
    ),
}
test_answers = answers_test(ANSWERS)


def test_the_losses_need_values(rtx):
    assert told(ANSWERS["losses"].check({"ranking": "not at all"}), "These GPUs keep no values")
