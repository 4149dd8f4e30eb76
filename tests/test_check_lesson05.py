"""The checks of lesson 05: solutions pass, typical mistakes are explained, nothing raises."""

import math
from itertools import combinations

import pytest
import torch
from torch.nn.functional import cross_entropy
from virtual_gpus import virtual_gpus

from helpers.exercises import lesson05 as check
from helpers.parallel import bubble, gpipe, one_f_one_b
from tests.check_answers import explains, survives_strange_answers, told


def test_no_answer_makes_a_check_raise(two_gpus):
    assert survives_strange_answers(check.best_cuts, check.fewest, check.frugal, check.backward_in_parts)


@pytest.fixture
def two_gpus():
    with virtual_gpus(2) as gpus:
        yield gpus


def best_cuts(times, stages):
    def slowest(cuts):
        edges = [0, *cuts, len(times)]
        return max(sum(times[start:end]) for start, end in zip(edges, edges[1:], strict=False))

    return list(min(combinations(range(1, len(times)), stages - 1), key=slowest))


def test_best_cuts():
    assert check.best_cuts(best_cuts)
    assert check.best_cuts(lambda times, stages: tuple(best_cuts(times, stages)))
    explains(
        check.best_cuts,
        (lambda times, stages: [len(times) * k // stages for k in range(1, stages)], "is possible"),
        (lambda times, stages: [*best_cuts(times, stages), len(times)], "1 cuts between them"),
        (lambda times, stages: [0] * (stages - 1), "a stage has no layer"),
        (lambda times, stages: [float(c) + 0.5 for c in best_cuts(times, stages)], "are integers"),
        (lambda times, stages: 4, "a list with the numbers"),
    )


def fewest(stages, share):
    micro_batches = 1
    while bubble(stages, micro_batches) > share + 1e-9:
        micro_batches += 1
    return micro_batches


def test_fewest():
    assert check.fewest(fewest)
    explains(
        check.fewest,
        (lambda stages, share: fewest(stages, share) + 1, "fewer are enough"),
        (
            lambda stages, share: max(1, math.ceil((stages - 1) * (1 - share) / share)),
            "12 have a bubble of at most 0.2",
        ),
        (lambda stages, share: max(1, fewest(stages, share) - 1), "more than 0.5"),
        (lambda stages, share: (stages - 1) * (1 / share - 1) + 0.5, "an integer of at least 1"),
        (lambda stages, share: 0, "an integer of at least 1"),
        (lambda stages, share: float("nan"), "a finite number"),
    )


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


def test_frugal(two_gpus):
    assert check.frugal(frugal)
    explains(
        check.frugal,
        (gpipe, "it has room for 2"),
        (one_f_one_b, "it has room for 2"),
        (one_at_a_time, "two at a time take"),
        (never_ends, "never end"),
        (lambda stages, m: frugal(stages, m)[1:], "each of 2 stages"),
        (lambda stages, m: [order[:-1] for order in frugal(stages, m)], "every micro-batch forward and backward, once"),
        (lambda stages, m: [[*order, ("B", 0)] for order in frugal(stages, m)], "forward and backward, once"),
        (lambda stages, m: [[*order, ("X", 0)] for order in frugal(stages, m)], "forward and backward, once"),
        (lambda stages, m: [order[::-1] for order in frugal(stages, m)], "never end"),
        (lambda stages, m: frugal(stages, m)[0], "a list of orders"),
    )


def test_frugal_needs_gpus_with_values():
    with virtual_gpus(1):
        assert told(check.frugal(frugal), "the number of GPUs is 1")
    with virtual_gpus(2, shapes_only=True):
        assert told(check.frugal(frugal), "keep no values")


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
    explains(
        check.backward_in_parts,
        (in_parts(lambda y, labels, parts: 1 / len(parts)), "values are wrong"),
        (in_parts(lambda y, labels, parts: 1), "values are wrong"),
        (in_parts(lambda y, labels, parts: len(y)), "every value is 50 times what it should be"),
        (in_parts(right, log=lambda loss, y, labels: loss.item()), "As the loss, "),
        (at_once, "more than a micro-batch"),
        (drops_the_last, "there are 50"),
        (forgets_backward, "call backward()"),
        (lambda net, images, labels, size: 0.0, "never called"),
    )
