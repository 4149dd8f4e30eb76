"""The checks of lesson 03: solutions pass, typical mistakes are explained, nothing raises."""

import ast
import json
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from virtual_gpus import virtual_gpus

from notebooks.checks import lesson03 as check
from notebooks.checks.par import Score
from tests.check_answers import explains, measured_once, survives_strange_answers, told

pytestmark = pytest.mark.usefixtures("workspaces_given_back", "small_program", "small_jobs")


@pytest.fixture
def small_jobs(monkeypatch):
    """One layer; the solution runs with all of them in the lesson."""
    monkeypatch.setattr(check, "LLAMA_1B", check.LLAMA_1B | {"layers": 1})
    monkeypatch.setenv("COURSE_PROGRESS", "off")


@pytest.fixture
def gpus():
    with virtual_gpus(4) as devices:
        yield devices


def lesson(*words):
    """What the lesson's cells with these words define."""
    path = Path(__file__).parents[1] / "notebooks" / "03_parallel_loss.ipynb"
    cells = ["".join(cell["source"]) for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    names = {"torch": torch, "nn": nn, "cross_entropy": cross_entropy}
    for word in words:
        tree = ast.parse(next(cell for cell in cells if word in cell))
        tree.body = [part for part in tree.body if _defines(part)]
        exec(compile(tree, word, "exec"), names)
    return names


def _defines(part):
    dictionary = isinstance(part, ast.Assign) and isinstance(part.value, ast.Dict)
    return dictionary or isinstance(part, ast.Import | ast.ImportFrom | ast.FunctionDef | ast.ClassDef)


LOSSES = lesson("\ndef present(", "def dice(", "def present_sums")
ANSWERS, FIVE = LOSSES["answers_solution"], [LOSSES[name] for name in check._DIVISIBLE]


def losses(answers):
    return check.losses(answers, FIVE)


@pytest.mark.parametrize("shapes_only", [True, False])
def test_no_answer_makes_a_check_raise(shapes_only):
    with virtual_gpus(4, kind="RTX4090", shapes_only=shapes_only):
        assert survives_strange_answers(check.combine, check.accumulate_words, losses, check.largest)
    for strange in (..., None, 3, "x", lambda *_: None, lambda *_: ..., nn.Identity(), lambda *_: torch.ones(3)):
        assert told(check.llama_loss(strange))


def test_what_needs_values_or_none_says_so(gpus):
    assert told(check.largest(64), "shapes_only=True")
    with virtual_gpus(4, shapes_only=True):
        assert told(check.combine(combine), "These GPUs keep no values")
        assert told(check.accumulate_words(accumulate), "These GPUs keep no values")
        assert told(losses(ANSWERS), "These GPUs keep no values")
        assert told(check.largest(64), "the exercise asks for RTX 4090")


# ---- 1 ---------------------------------------------------------------------------------------------------------------


def combine(losses, weights, home=None):
    home = losses[0].device if home is None else home
    return sum(weight * loss.to(home) for loss, weight in zip(losses, weights, strict=True) if weight) / sum(weights)


def on_the_first(losses):
    return torch.stack([loss.to(losses[0].device) for loss in losses])


def first_with_weight(losses, weights):
    return combine(losses, weights, next(loss.device for loss, weight in zip(losses, weights, strict=True) if weight))


def where(losses, weights):
    counts = torch.tensor(weights, device=losses[0].device)
    return torch.where(counts > 0, on_the_first(losses), 0.0) @ (counts / counts.sum())


def two_only(losses, weights):
    pairs = list(zip(losses, weights, strict=True))
    first = next(pair for pair in pairs if pair[1])
    last = next(pair for pair in reversed(pairs) if pair[1])
    kept = [first] if first is last else [first, last]
    home = losses[0].device
    return sum(weight * loss.to(home) for loss, weight in kept) / sum(weight for _, weight in kept)


def running(losses, weights):
    """Forgets the weights before the last one."""
    mean, before = None, 0
    for loss, weight in zip(losses, weights, strict=True):
        if weight:
            loss = loss.to(losses[0].device)
            mean = loss if mean is None else (mean * before + loss * weight) / (before + weight)
            before = weight
    return mean


def into_the_first(losses, weights):
    total = losses[0]
    total *= weights[0]
    for loss, weight in zip(losses[1:], weights[1:], strict=True):
        total = total + weight * loss.to(total.device)
    return total / sum(weights)


def test_combine(gpus):
    assert check.combine(combine)
    assert check.combine(lambda losses, weights: combine([losses.pop(0) for _ in weights], weights))
    assert check.combine(lambda losses, weights: combine(losses, weights, "cpu").to(losses[0].device))
    counted = lambda losses, weights: [pair for pair in zip(losses, weights, strict=True) if pair[1] > 0]  # noqa: E731
    assert check.combine(
        lambda losses, weights: sum(
            (loss * weight).to(losses[0].device) / sum(weights) for loss, weight in counted(losses, weights)
        )
    )
    explains(
        check.combine,
        (two_only, "[3.0, 1.0, 6.0] with the weights [1, 5, 2]"),
        (running, "[3.0, 1.0, 6.0] with the weights [1, 5, 2]"),
        (into_the_first, "your function changes losses[0] to 6"),
        (first_with_weight, "should be where the first loss is, whatever its weight"),
        (where, "a gradient is nan. The backward pass still runs through the piece of weight 0"),
        (lambda losses, weights: where([loss.nan_to_num() for loss in losses], weights), "a gradient is nan"),
        (lambda losses, weights: sum(losses) / len(losses), "on the same device"),
        (lambda losses, weights: on_the_first(losses).mean(), "is the mean of the means. Where are the weights?"),
        (lambda losses, weights: combine(losses, weights) * sum(weights), "is the weighted sum. A mean is asked for."),
        (lambda losses, weights: on_the_first(losses) @ torch.tensor(weights).to(losses[0]) / sum(weights), "0 x nan"),
        (lambda losses, weights: combine(losses, weights).item(), "Return a tensor, which has a gradient"),
        (lambda losses, weights: combine(losses, weights).detach(), "the result has no graph"),
        (lambda losses, weights: combine(losses, weights).cpu(), "the result is on cpu, and the first loss is on"),
        (lambda losses, weights: combine(losses, weights, "cuda:0"), "the result is on cuda:0, and"),
        (lambda losses, weights: combine(losses, weights)[None], "of shape ()"),
        (lambda losses, weights: 3 * combine(losses, weights), "[3, 1], 8.25 is more than twice the right value"),
        (lambda losses, weights: torch.tensor(2.75, device="cuda:3", requires_grad=True), "no gradient arrives"),
        (lambda losses, weights: combine([losses[0], *map(torch.detach, losses[1:])], weights), "no gradient arrives"),
    )


# ---- 2 ---------------------------------------------------------------------------------------------------------------


def words(model, tokens, labels, **options):
    return cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), **options)


def accumulate(model, micro_batches, loss_of=None, skip=False):
    count, total = sum((labels != -100).sum() for _, labels in micro_batches), 0
    for tokens, labels in micro_batches:
        if skip and (labels == -100).all():
            continue
        if loss_of is None:
            loss = words(model, tokens, labels, reduction="sum") / count
        else:
            loss = loss_of(model, tokens, labels, len(micro_batches))
        loss.backward()
        total += loss.detach()
    return total


def weighted_means(model, micro_batches):
    counts = [(labels != -100).sum().item() for _, labels in micro_batches]
    total = 0
    for count, (tokens, labels) in zip(counts, micro_batches, strict=True):
        if count:
            loss = words(model, tokens, labels) * count / sum(counts)
            loss.backward()
            total += loss.item()
    return total


def in_the_end(model, micro_batches):
    parts = [words(model, *each, reduction="sum") for each in micro_batches]
    loss = sum(parts) / sum((labels != -100).sum() for _, labels in micro_batches)
    loss.backward()
    return loss.detach()


def at_once(model, micro_batches):
    loss = words(model, *map(torch.cat, zip(*micro_batches, strict=True)))
    loss.backward()
    return loss


def keeping_the_last(model, micro_batches):
    count, total = sum((labels != -100).sum() for _, labels in micro_batches), 0
    for each in micro_batches:
        model.zero_grad()
        loss = words(model, *each, reduction="sum") / count
        loss.backward()
        total += loss.detach()
    return total


def ignored_labels_count(model, micro_batches):
    count = sum((labels != -100).sum() for _, labels in micro_batches)
    for _, labels in micro_batches:
        labels.clamp_(min=0)  # in place
    return accumulate(model, micro_batches, lambda m, x, y, n: words(m, x, y, reduction="sum") / count)


def with_a_tiny_step(model, micro_batches):
    loss = accumulate(model, micro_batches)
    torch.optim.SGD(model.parameters(), lr=1e-6).step()
    return loss


def on_another_device(device):
    def answer(model, micro_batches):
        model.to(device)
        return accumulate(model, [(x.to(device), y.to(device)) for x, y in micro_batches])

    return answer


def first_count(model, micro_batches):
    count = (micro_batches[0][1] != -100).sum() * len(micro_batches)
    return accumulate(model, micro_batches, lambda m, x, y, n: words(m, x, y, reduction="sum") / count)


def divided_in_the_end(model, micro_batches):
    """Right in another form."""
    total = accumulate(model, micro_batches, lambda m, x, y, n: words(m, x, y, reduction="sum"))
    count = sum((labels != -100).sum() for _, labels in micro_batches)
    for parameter in model.parameters():
        parameter.grad /= count
    return total / count


def test_accumulate_words(gpus):
    assert check.accumulate_words(divided_in_the_end)
    assert check.accumulate_words(accumulate) and check.accumulate_words(weighted_means)
    assert check.accumulate_words(partial(accumulate, skip=True))
    assert check.accumulate_words(lesson("def word_sums", "def accumulate_words_solution")["accumulate_words_solution"])

    def wrong(loss_of, skip=True):
        return partial(accumulate, loss_of=loss_of, skip=skip)

    def by_sequences(model, micro_batches):
        total = sum(len(labels) for _, labels in micro_batches)
        return accumulate(model, micro_batches, lambda m, x, y, n: words(m, x, y) * len(x) / total, skip=True)

    def by_all_labels(model, micro_batches):
        total = sum(labels.numel() for _, labels in micro_batches)
        return accumulate(model, micro_batches, lambda m, x, y, n: words(m, x, y, reduction="sum") / total)

    explains(
        check.accumulate_words,
        (wrong(lambda model, x, y, n: words(model, x, y) / n), "the gradient is a mean of means"),
        (wrong(lambda model, x, y, n: words(model, x, y) / n, skip=False), "a mean of means"),
        (wrong(lambda model, x, y, n: words(model, x, y)), "the sum of the micro-batches' means"),
        (wrong(lambda model, x, y, n: words(model, x, y, reduction="sum")), "the sum over all labels"),
        (
            wrong(lambda model, x, y, n: words(model, x, y, reduction="sum") / y.numel() / n),
            "the gradient is off by",
        ),
        (by_all_labels, "by the number of all labels, also ignored ones"),
        (by_sequences, "weighted by sequences. Count labels"),
        (ignored_labels_count, "the gradient is off by"),
        (first_count, "the gradient is off by"),
        (with_a_tiny_step, "changes parameters"),
        (on_another_device("cpu"), "leaves the model on cpu"),
        (on_another_device("cuda:1"), "leaves the model on cuda:1"),
        (in_the_end, "before the first backward()"),
        (at_once, "Run one micro-batch at a time"),
        (keeping_the_last, "that of the last micro-batch alone"),
        (lambda model, batches: accumulate(model, batches) * 0 + 1, "the gradients are right, but the returned loss"),
        (lambda model, batches: None if accumulate(model, batches) else 1, "returned None"),
        (lambda model, batches: 1.0, "no gradient. Was backward() called?"),
    )


def test_a_mean_over_no_labels_is_named(gpus):
    def times_its_count(model, micro_batches):
        count = sum((labels != -100).sum() for _, labels in micro_batches)
        return accumulate(model, micro_batches, lambda m, x, y, n: words(m, x, y) * (y != -100).sum() / count)

    verdict = check.accumulate_words(times_its_count)  # PyTorch's own backward gives 0, but the loss is nan
    assert told(verdict, "nan")


# ---- 3 ---------------------------------------------------------------------------------------------------------------


def over(totals):
    return totals[0] / totals[1]


def count_and(loss):
    return lambda scores, tags: torch.stack(
        [loss(scores, tags) * len(scores), torch.tensor(len(scores) * 1.0).to(scores)]
    )


PRESENT, TRIPLET, ROOT, DICE, RANKING = FIVE


def as_tuple(scores, tags):
    return ((scores - tags) ** 2).sum(), scores.numel()


def pairs(scores, tags):
    return torch.stack([RANKING(scores, tags) * tags.sum() * (1 - tags).sum(), tags.sum() * (1 - tags).sum()])


def detached(scores, tags):
    predicted = scores.sigmoid()
    return torch.stack([(predicted * tags).sum(), (predicted + tags).sum().detach()])


pieces = []


def kept_outside(scores, tags):
    pieces.append((scores.to("cuda:0"), tags.to("cuda:0")))
    return scores.sum()


def of_what_was_kept(totals):
    found = RANKING(*map(torch.cat, zip(*pieces, strict=True)))
    pieces.clear()
    return found + 0 * totals


def test_losses(gpus):
    assert losses(ANSWERS | {"ranking": "Not at all"})
    assert losses(ANSWERS | {"root": (as_tuple, lambda totals: (totals[0] / totals[1]) ** 0.5)})
    assert losses(ANSWERS | {"triplet": [count_and(TRIPLET), over]})
    for name, wrong, words in (
        ("present", "not at all", "`present` can be divided. Which sums"),
        ("root", "not at all", "`root` can be divided"),
        ("dice", "not at all", "`dice` can be divided"),
        ("present", (count_and(PRESENT), over), "`present` is"),
        ("root", (count_and(ROOT), over), "Does each of your numbers add up"),
        ("dice", (count_and(DICE), over), "Does each of your numbers add up"),
        ("dice", (detached, lambda totals: 1 - 2 * over(totals)), "gradient is off by"),
        ("dice", (LOSSES["dice_sums"], over), "from your sums on 4 GPUs"),
        ("dice", (LOSSES["dice_sums"], lambda totals: (1 - 2 * over(totals)).detach()), "no graph"),
        ("dice", (LOSSES["dice_sums"], lambda totals: (1 - 2 * over(totals)).item()), "Return a tensor, which has"),
        ("ranking", (kept_outside, of_what_was_kept), "more than 4 numbers per GPU. They pass whole pieces on"),
        ("root", (lambda *both: as_tuple(*both)[0], lambda total: (total / 60).sqrt()), "size of a batch"),
        ("triplet", (lambda *both: TRIPLET(*both) * len(both[0]), lambda total: total / 10), "right with 10 images"),
        ("ranking", (pairs, over), "It compares tags of different images"),
        ("ranking", (lambda scores, tags: scores.flatten(), over), "at most 4 numbers"),
        ("root", (lambda scores, tags: scores - tags, over), "at most 4 numbers"),
        ("root", "as it is", "or a pair of functions"),
        ("root", (ROOT,), "or a pair of functions"),
        ("root", (lambda scores: 1, over), "your code stopped"),
        ("root", (lambda scores, tags: None, over), "returned None"),
    ):  # fmt: skip
        assert told(losses(ANSWERS | {name: wrong}), words)
    assert told(losses({"root": "not at all"}), "an answer for each of present, triplet")
    with virtual_gpus(2):
        assert told(losses(ANSWERS), "the number of GPUs is 2")


# ---- 4 and 5 ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def cards():
    with virtual_gpus(4, kind="RTX4090", shapes_only=True) as devices:
        yield devices


def test_largest(cards):
    assert check.largest(LARGEST)
    assert told(check.largest(LARGEST - 4), "are not the most: 4 more still fit")
    assert told(check.largest(LARGEST + 4), "a GPU runs out of memory. A new job with two steps")
    assert torch.cuda.memory_allocated(0) == 0
    for wrong in (65, 62.5, 0, -4):
        assert told(check.largest(wrong), "is not a multiple of 4")
    assert told(check.largest(10**6), "No RTX 4090 holds its quarter")
    kept = torch.empty(2**30, device="cuda:0")
    assert kept.is_cuda and told(check.largest(LARGEST), "Your cells still hold 4.00 GiB")


LARGEST = 84  # with one layer


def alone(model, gpus, tokens, labels):
    return words(model, tokens.to(gpus[0]), labels.to(gpus[0]))


class Means(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, tokens, labels):
        return words(self.model, tokens, labels).unsqueeze(0)


def means(model, gpus, tokens, labels):
    return nn.DataParallel(Means(model), gpus)(tokens, labels).nanmean()


def on_a_copy(model, gpus, tokens, labels):
    loss = check._divided(model, gpus, tokens, labels)
    return loss.detach().requires_grad_()


def halved(model, gpus, tokens, labels):
    loss = check._divided(model, gpus, tokens, labels)
    return loss.detach() / 2 + loss / 2


def without_ignoring(model, gpus, tokens, labels):
    return check._divided(model, gpus, tokens, labels) * (labels != -100).sum() / labels.numel()


def rounded(model, gpus, tokens, labels):
    model.bfloat16()
    return check._divided(model, gpus, tokens, labels)


def on_the_cpu(model, gpus, tokens, labels):
    return words(model.cpu(), tokens, labels)


def only_with_values(model, gpus, tokens, labels):
    if tokens.shape[1] == 1024:
        return model.output.weight.sum()
    return check._divided(model, gpus, tokens, labels)


def test_llama_loss(monkeypatch):
    measured_once(monkeypatch, check, "_score")
    solution = lesson("def word_sums", "class LossInForward", "def fused_sums", "def llama_loss_solution")
    verdict = check.llama_loss(solution["llama_loss_solution"])
    assert verdict and "You reach par in memory and time" in verdict.text and "Naive: out of memory" in verdict.text
    verdict = check.llama_loss(partial(check._divided, in_chunks=False))
    assert verdict and "over par in memory" in verdict.text
    explains(
        check.llama_loss,
        (check._gathered, "with 48 sequences a GPU runs out of memory"),
        (alone, "with 48 sequences a GPU runs out of memory"),
        (means, "What is the mean over?"),
        (without_ignoring, "What is the mean over?"),
        (lambda *a: check._divided(*a).item(), "Return the loss, a tensor"),
        (lambda *a: check._divided(*a).detach(), "has no graph"),
        (on_a_copy, "has no gradient"),
        (halved, "is off by 50.0%"),
        (on_the_cpu, "your function moves `embedding.weight` to cpu"),
        (only_with_values, "gets no gradient"),
        (rounded, "your function changes `embedding.weight`"),
        (lambda *a: check._divided(*a)[None, None].expand(2, 2), "Return one number"),
        (lambda model, gpus, tokens, labels: tokens.sum(), "the loss is"),
    )


def test_a_score_out_of_memory_is_none():
    with virtual_gpus(4, kind="RTX4090", shapes_only=True) as gpus:
        assert check._score(check._gathered, list(gpus)) == Score(None, None)
