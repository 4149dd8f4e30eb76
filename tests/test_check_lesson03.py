"""The checks of lesson 03: solutions pass, typical mistakes are explained, nothing raises."""

import ast
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from virtual_gpus import virtual_gpus

from helpers.models import Llama
from notebooks.checks import lesson03 as check
from tests.check_answers import STRANGE_RESULTS, Answers, answers_test, changed, lesson_cell, measured_once, then, told

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


def combine(losses, weights, home=None):
    home = losses[0].device if home is None else home
    return sum(weight * loss.to(home) for loss, weight in zip(losses, weights, strict=True) if weight) / sum(weights)


def destroys(losses, weights):
    return combine([losses.pop(0) for _ in weights], weights)


def on_the_first(losses):
    return torch.stack([loss.to(losses[0].device) for loss in losses])


def where(losses, weights):
    counts = torch.tensor(weights, device=losses[0].device)
    return torch.where(counts > 0, on_the_first(losses), 0.0) @ (counts / counts.sum())


def two_only(losses, weights):
    kept = [index for index, weight in enumerate(weights) if weight]
    kept = [kept[0], kept[-1]] if len(kept) > 1 else kept
    return combine([losses[i] for i in kept], [weights[i] for i in kept], losses[0].device)


COMBINE = [
    (two_only, "[3.0, 1.0, 6.0] with the weights [1, 5, 2]"),
    (lambda losses, weights: combine([losses[0].mul_(2) / 2, *losses[1:]], weights), "changes losses[0] to 4"),
    (lambda losses, weights: combine(losses, weights, losses[-1].device), "should be where the first loss is"),
    (where, "a gradient is nan. The backward pass still runs through the piece of weight 0"),
    (lambda losses, weights: combine([loss.nan_to_num() for loss in losses], weights), "so the result must be nan"),
    (lambda losses, weights: on_the_first(losses).mean(), "is the mean of the means. Where are the weights?"),
    (lambda losses, weights: combine(losses, weights) * sum(weights), "is the weighted sum. A mean is asked for."),
    (lambda losses, weights: on_the_first(losses) @ torch.tensor(weights).to(losses[0]) / sum(weights), "0 x nan"),
    (lambda losses, weights: combine(losses, weights).item(), "Return a tensor, which has a gradient"),
    (lambda losses, weights: combine(losses, weights).detach(), "the result has no graph"),
    (lambda losses, weights: combine(losses, weights).cpu(), "the result is on cpu, and the first loss is on"),
    (lambda losses, weights: combine([losses[0], *map(torch.detach, losses[1:])], weights), "no gradient arrives"),
]


def words(model, tokens, labels, **options):
    return cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), **options)


def counted(batches, count=lambda labels: (labels != -100).sum()):
    return sum(count(labels) for _, labels in batches)


def summed(model, tokens, labels, batches, count=counted):
    return words(model, tokens, labels, reduction="sum") / count(batches)


def accumulate(model, micro_batches, loss_of=summed, before=lambda model: None):
    total = 0
    for tokens, labels in micro_batches:
        before(model)
        loss = loss_of(model, tokens, labels, micro_batches)
        loss.backward()
        total += loss.detach()
    return total


def by(loss_of, skip=True):
    """Accumulates `loss_of(model, tokens, labels, batches)`, without micro-batches that have no labels."""

    def answer(model, batches):
        kept = [each for each in batches if not skip or (each[1] != -100).any()]
        return accumulate(model, kept, lambda model, x, y, _: loss_of(model, x, y, batches))

    return answer


def weighted(model, x, y, batches):
    return words(model, x, y) * counted([(x, y)]) / counted(batches)


def in_the_end(model, micro_batches):
    loss = sum(words(model, *each, reduction="sum") for each in micro_batches) / counted(micro_batches)
    loss.backward()
    return loss.detach()


ACCUMULATE = [
    (by(lambda model, x, y, batches: words(model, x, y) / len(batches)), ("off by", "It is a mean of means")),
    (by(lambda model, x, y, batches: words(model, x, y)), "the sum of the micro-batches' means"),
    (by(partial(summed, count=lambda _: 1)), "the sum over all labels"),
    (by(partial(summed, count=lambda each: counted(each, torch.numel))), "of all labels, also ignored ones"),
    (by(lambda model, x, y, b: words(model, x, y) * len(x) / counted(b, len)), "weighted by sequences. Count la"),
    (by(partial(summed, count=lambda each: counted(each[:1]) * len(each))), "Every label that counts should count"),
    # PyTorch's own backward gives 0, but the loss is nan.
    (by(weighted, skip=False), "nan"),
    (then(lambda model, b: model.output.bias.data.add_(1e-6), accumulate), "changes `output.bias`. Leave the model"),
    (then(lambda model, b: model.cpu(), accumulate), "moves `embedding.weight` to cpu"),
    (in_the_end, "before the first backward()"),
    (lambda model, b: accumulate(model, [[*map(torch.cat, zip(*b, strict=True))]]), "Run one micro-batch at a time"),
    (partial(accumulate, before=lambda model: model.zero_grad()), "that of the last micro-batch alone"),
    (lambda model, batches: accumulate(model, batches) * 0 + 1, "the gradients are right, but the returned loss"),
    (lambda model, batches: 1.0, "no gradient. Was backward() called?"),
]


def lesson(*starts):
    """What the lesson's cells with these words define."""
    names = {"torch": torch, "nn": nn, "cross_entropy": cross_entropy}
    for start in starts:
        tree = ast.parse(lesson_cell("03_parallel_loss", start))
        tree.body = [part for part in tree.body if not isinstance(part, ast.Expr)]
        exec(compile(tree, start, "exec"), names)
    return names


LOSSES = lesson("\ndef present(", "def dice(", "def present_sums")
FIVE = PRESENT, TRIPLET, ROOT, DICE, RANKING = [LOSSES[name] for name in check._DIVISIBLE]


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
    (dice(over), "from your sums on 4 GPUs"),
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
LARGEST = [
    (MOST - 4, "are not the most: 4 more still fit"),
    (MOST + 4, "a GPU runs out of memory. A new job with two steps"),
    (65, "is not a multiple of 4"),
    (0, "is not a multiple of 4"),
    (10**6, "No RTX 4090 holds its quarter"),
]


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
    (lambda model, *job: words(model.cpu(), *job[1:]), "your function moves `embedding.weight` to cpu"),
    (only_with_values, "gets no gradient"),
    (lambda model, *job: check._divided(model.bfloat16(), *job), "your function changes `embedding.weight`"),
]
ANSWERS = {
    "combine": Answers(
        check.combine,
        [combine, destroys, lambda losses, weights: combine(losses, weights, "cpu").to(losses[0].device)],
        COMBINE,
        fixtures="four",
    ),
    "accumulate": Answers(check.accumulate_words, [accumulate, by(summed), by(weighted)], ACCUMULATE, fixtures="four"),
    "losses": Answers(
        lambda change: check.losses(changed(LOSSES["answers_solution"], change), FIVE),
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
