"""The checks of lesson 05: solutions pass, typical mistakes are explained, nothing raises."""

from itertools import combinations

import pytest
import torch
from torch.nn.functional import cross_entropy
from virtual_gpus import virtual_gpus

from helpers.exercises import lesson05 as check
from helpers.parallel.pipeline import bubble, gpipe, one_f_one_b
from tests.check_answers import Hostile, told

CHECKS = [check.best_cuts, check.fewest, check.frugal, check.backward_in_parts]


class Leaving:
    def __call__(self, *args):
        raise SystemExit("gone")

    def __repr__(self):
        raise RuntimeError("no repr")


STRANGE = [
    ..., None, 3, "x", Hostile(), Leaving(), lambda: 1, lambda *_: ..., lambda *_: None, lambda *_: Hostile(),
    lambda *_: Leaving(), lambda *_: "abc", lambda *_: [[["F"]]],
]  # fmt: skip


@pytest.mark.parametrize("checked", CHECKS)
@pytest.mark.parametrize("number", range(len(STRANGE)))
def test_no_answer_makes_a_check_raise(checked, number):
    with virtual_gpus(2):
        assert told(checked(STRANGE[number]))


# --- 1: where to cut ---------------------------------------------------------------------------------------


def best_cuts(times, stages):
    def slowest(cuts):
        edges = [0, *cuts, len(times)]
        return max(sum(times[start:end]) for start, end in zip(edges, edges[1:], strict=False))

    return list(min(combinations(range(1, len(times)), stages - 1), key=slowest))


def test_best_cuts():
    assert check.best_cuts(best_cuts)
    assert check.best_cuts(lambda times, stages: tuple(best_cuts(times, stages)))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda times, stages: [len(times) * k // stages for k in range(1, stages)], "is possible"),
        (lambda times, stages: [*best_cuts(times, stages), len(times)], "1 cuts between them"),
        (lambda times, stages: [0] * (stages - 1), "a stage has no layer"),
        (lambda times, stages: [float(c) + 0.5 for c in best_cuts(times, stages)], "are whole"),
        (lambda times, stages: 4, "a list with the numbers"),
    ],
)
def test_best_cuts_explains(wrong, words):
    assert told(check.best_cuts(wrong), words)


# --- 2: how many micro-batches -----------------------------------------------------------------------------


def fewest(stages, share):
    micro_batches = 1
    while bubble(stages, micro_batches) > share + 1e-9:
        micro_batches += 1
    return micro_batches


def test_fewest():
    assert check.fewest(fewest)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda stages, share: fewest(stages, share) + 1, "fewer are enough"),
        (lambda stages, share: 4 * stages, "fewer are enough"),
        (lambda stages, share: max(1, fewest(stages, share) - 1), "more than 0.5"),
        (lambda stages, share: (stages - 1) * (1 / share - 1) + 0.5, "a whole number"),
        (lambda stages, share: 0, "at least one"),
        (lambda stages, share: float("nan"), "a whole number"),
    ],
)
def test_fewest_explains(wrong, words):
    assert told(check.fewest(wrong), words)


# --- 3: a schedule for little memory -----------------------------------------------------------------------


def frugal(stages, micro_batches):
    order = []
    for first in range(0, micro_batches, 2):
        order += [("F", first), ("F", first + 1), ("B", first + 1), ("B", first)]
    return [order] * stages


def one_at_a_time(stages, micro_batches):
    return [[(kind, number) for number in range(micro_batches) for kind in "FB"]] * stages


def never_ends(stages, micro_batches):
    reverse = [(kind, number) for number in reversed(range(micro_batches)) for kind in "FB"]
    return [*one_at_a_time(stages - 1, micro_batches), reverse]


def test_frugal():
    with virtual_gpus(2):
        assert check.frugal(frugal)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (gpipe, "it has room for 2"),
        (one_f_one_b, "it has room for 2"),
        (one_at_a_time, "two at a time take"),
        (never_ends, "never end"),
        (lambda stages, m: frugal(stages, m)[1:], "each of 2 stages"),
        (lambda stages, m: [order[:-1] for order in frugal(stages, m)], "lacks 1 tasks"),
        (lambda stages, m: [[*order, ("B", 0)] for order in frugal(stages, m)], "a task comes twice"),
        (lambda stages, m: [[*order, ("X", 0)] for order in frugal(stages, m)], "no such task"),
        (lambda stages, m: [order[::-1] for order in frugal(stages, m)], "before it went forward"),
        (lambda stages, m: frugal(stages, m)[0], "a list of orders"),
    ],
)
def test_frugal_explains(wrong, words):
    with virtual_gpus(2):
        assert told(check.frugal(wrong), words)


def test_frugal_needs_gpus_with_values():
    with virtual_gpus(1):
        assert told(check.frugal(frugal), "there are 1 GPUs")
    with virtual_gpus(2, shapes_only=True):
        assert told(check.frugal(frugal), "keep no values")


# --- 4: uneven micro-batches -------------------------------------------------------------------------------


def in_parts(weight, log=lambda loss, y, labels: loss.item() * len(y) / len(labels)):
    def answer(net, images, labels, size):
        total = 0.0
        parts = list(zip(images.split(size), labels.split(size), strict=True))
        for x, y in parts:
            loss = cross_entropy(net(x), y)
            (loss * weight(y, labels, parts)).backward()
            total += log(loss, y, labels)
        return total

    return answer


def right(y, labels, parts):
    return len(y) / len(labels)


def at_once(net, images, labels, size):
    loss = cross_entropy(net(images), labels)
    loss.backward()
    return loss.item()


def drops_the_last(net, images, labels, size):
    whole = len(images) // size * size
    return in_parts(right)(net, images[:whole], labels[:whole], size)


def as_tensor(net, images, labels, size):
    return torch.tensor(in_parts(right)(net, images, labels, size))


def forgets_backward(net, images, labels, size):
    return sum(cross_entropy(net(x), y).item() for x, y in zip(images.split(size), labels.split(size), strict=True))


def test_backward_in_parts():
    assert check.backward_in_parts(in_parts(right))
    assert check.backward_in_parts(as_tensor)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (in_parts(lambda y, labels, parts: 1 / len(parts)), "counts by its share"),
        (in_parts(lambda y, labels, parts: 1), "times as large"),
        (in_parts(lambda y, labels, parts: len(y)), "their mean is asked for"),
        (in_parts(right, log=lambda loss, y, labels: loss.item()), "not yet"),
        (at_once, "more than a micro-batch"),
        (drops_the_last, "there are 50"),
        (forgets_backward, "call backward()"),
        (lambda net, images, labels, size: 0.0, "never called"),
    ],
)
def test_backward_in_parts_explains(wrong, words):
    assert not check.backward_in_parts(wrong).correct
    assert words in check.backward_in_parts(wrong).text
