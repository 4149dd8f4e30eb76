"""The checks of lesson 05: solutions pass, typical mistakes are explained, nothing raises."""

import math
from itertools import combinations

import torch
from torch.nn.functional import cross_entropy

from helpers.exercises import lesson05 as check
from helpers.parallel import bubble, gpipe, one_f_one_b
from tests.check_answers import explains, survives_strange_answers


def test_no_answer_makes_a_check_raise():
    assert survives_strange_answers(check.best_cuts, check.fewest, check.frugal, check.backward_in_parts)


def best_cuts(times, stages):
    def slowest(cuts):
        edges = [0, *cuts, len(times)]
        return max(sum(times[start:end]) for start, end in zip(edges, edges[1:], strict=False))

    return list(min(combinations(range(1, len(times)), stages - 1), key=slowest))


def stage_by_stage(times, stages):
    """Right in another form: the smallest limit, to which stages are filled from the left."""

    def filled(limit):
        cuts, taken = [], 0
        for number, time in enumerate(times):
            left = len(times) - number == stages - 1 - len(cuts)  # each stage behind gets one of the layers left
            if number and len(cuts) < stages - 1 and (taken + time > limit or left):
                cuts.append(number)
                taken = 0
            taken += time
            if taken > limit:
                return None
        return cuts

    limits = sorted({sum(times[start:end]) for start, end in combinations(range(len(times) + 1), 2)})
    return next(cuts for cuts in map(filled, limits) if cuts is not None and len(cuts) == stages - 1)


def test_best_cuts():
    assert check.best_cuts(best_cuts)
    assert check.best_cuts(stage_by_stage)
    assert check.best_cuts(lambda times, stages: tuple(best_cuts(times, stages)))
    valid = "increasing integers from 1 to 4, so that each stage has a layer"
    explains(
        check.best_cuts,
        (lambda times, stages: [len(times) * k // stages for k in range(1, stages)], "is possible"),
        (lambda times, stages: best_cuts([1] * len(times), stages), "The slowest stage then takes 9, and 8 is"),
        (lambda times, stages: [*best_cuts(times, stages), len(times)], valid),
        (lambda times, stages: [0] * (stages - 1), valid),
        (lambda times, stages: [cut + 0.5 for cut in best_cuts(times, stages)], valid),
        (lambda times, stages: 4, valid),
    )


def fewest(stages, share):
    micro_batches = 1
    while bubble(stages, micro_batches) > share + 1e-9:
        micro_batches += 1
    return micro_batches


def test_fewest():
    assert check.fewest(fewest)
    # Right in another form: (p - 1) / (m + p - 1) <= share, solved for m, with room for rounding.
    assert check.fewest(lambda stages, share: max(1, math.ceil((stages - 1) * (1 / share - 1) - 1e-9)))
    explains(
        check.fewest,
        (lambda stages, share: fewest(stages, share) + 1, "With one micro-batch less, the bubble is 0.500 of the step"),
        (lambda stages, share: max(1, math.ceil((stages - 1) * (1 - share) / share)), "fewest(4, 0.2) is 13. With one"),
        (lambda stages, share: max(1, math.ceil((stages - 1) * (1 - share) / share)), "floating-point rounding"),
        (lambda stages, share: max(1, math.ceil((stages - 1) * (1 / share - 1))), "fewest(64, 0.6) is 43. With one"),
        (lambda stages, share: max(1, fewest(stages, share) - 1), "which is more than 0.5"),
        (lambda stages, share: math.ceil(stages / share), "With one micro-batch less"),
        (lambda stages, share: (stages - 1) * (1 / share - 1) + 0.5, "an integer of at least 1"),
        (lambda stages, share: 0, "an integer of at least 1"),
        (lambda stages, share: float("nan"), "a finite number"),
    )


def frugal(stages, micro_batches):
    order = []
    for first in range(0, micro_batches, 2):
        order += [("F", first), ("F", first + 1), ("B", first + 1), ("B", first)]
    return [order] * stages


def first_in_first_out(stages, micro_batches):
    pairs = [(first, first + 1) for first in range(0, micro_batches, 2)]
    return [[[kind, number] for pair in pairs for kind in "FB" for number in pair] for _ in range(stages)]


def one_at_a_time(stages, micro_batches):
    return [[(kind, number) for number in range(micro_batches) for kind in "FB"]] * stages


def always_two(stages, micro_batches):
    """The obvious idea: the next one goes forward as soon as one has come back. It travels alone."""
    order = [("F", 0), ("F", 1)]
    for number in range(micro_batches - 2):
        order += [("B", number), ("F", number + 2)]
    return [[*order, ("B", micro_batches - 2), ("B", micro_batches - 1)]] * stages


def never_ends(stages, micro_batches):
    reverse = [(kind, number) for number in reversed(range(micro_batches)) for kind in "FB"]
    return [*one_at_a_time(stages - 1, micro_batches), reverse]


def test_frugal():
    assert check.frugal(frugal)
    assert check.frugal(first_in_first_out)
    whole = "every micro-batch forward and backward once"
    explains(
        check.frugal,
        (gpipe, "stage 0 keeps 6 micro-batches at a time. It has room for 2"),
        (one_f_one_b, "It has room for 2"),
        (one_at_a_time, "your schedule takes 12 units of time, and 9 are allowed"),
        (one_at_a_time, "Only one micro-batch is in the pipeline"),
        (always_two, "your schedule takes 33 units of time, and 27 are allowed"),
        (always_two, "where does a stage wait"),
        (never_ends, "never end"),
        (lambda stages, m: frugal(stages, m)[1:], whole),
        (lambda stages, m: [order[:-1] for order in frugal(stages, m)], whole),
        (lambda stages, m: [[*order, ("B", 0)] for order in frugal(stages, m)], whole),
        (lambda stages, m: [[*order, ("X", 0)] for order in frugal(stages, m)], whole),
        (lambda stages, m: [order[::-1] for order in frugal(stages, m)], "never end"),
        (lambda stages, m: frugal(stages, m)[0], "An order is a list of pairs"),
    )


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


def by_sums(net, images, labels, size):
    """Right in another form: sums, the gradients divided at the end, and a tensor without a graph."""
    total = torch.zeros(())
    for start in range(0, len(images), size):
        loss = cross_entropy(net(images[start : start + size]), labels[start : start + size], reduction="sum")
        loss.backward()
        total += loss.detach()
    for parameter in net.parameters():
        parameter.grad /= len(images)
    return total / len(images)


def another_loss(net, images, labels, size):
    for x, y in zip(images.split(size), labels.split(size), strict=True):
        (cross_entropy(net(x), y, label_smoothing=0.1) * len(y) / len(labels)).backward()
    return 1.0


def at_once(net, images, labels, size):
    loss = cross_entropy(net(images), labels)
    loss.backward()
    return loss.item()


def drops_the_last(net, images, labels, size):
    whole = len(images) // size * size
    return in_parts(right)(net, images[:whole], labels[:whole], size)


def without_backward(net, images, labels, size):
    parts = zip(images.split(size), labels.split(size), strict=True)
    return sum(cross_entropy(net(x), y) * len(y) / len(labels) for x, y in parts)


def one_backward_at_the_end(net, images, labels, size):
    loss = without_backward(net, images, labels, size)
    loss.backward()
    return loss.item()


def clears_in_the_loop(net, images, labels, size):
    total = 0.0
    for x, y in zip(images.split(size), labels.split(size), strict=True):
        net.zero_grad()
        loss = cross_entropy(net(x), y) * len(y) / len(labels)
        loss.backward()
        total += loss.item()
    return total


def test_backward_in_parts():
    assert check.backward_in_parts(in_parts(right))
    assert check.backward_in_parts(by_sums)
    explains(
        check.backward_in_parts,
        (in_parts(lambda y, labels, parts: 1 / len(parts)), "[16, 16, 16, 2] samples count [0.25, 0.25, 0.25, 0.25]"),
        (in_parts(lambda y, labels, parts: 1), "samples count [1.0, 1.0, 1.0, 1.0]"),
        (in_parts(lambda y, labels, parts: len(y)), "Every sample must count the same, and all of them together 1"),
        (clears_in_the_loop, "samples count [0.0, 0.0, 0.0, 0.04]"),
        (in_parts(right, log=lambda loss, y, labels: loss.item()), "your loss of "),
        (in_parts(right, log=lambda loss, y, labels: loss * len(y) / len(labels)), "still refers to its graph"),
        (another_loss, "values are wrong"),
        (at_once, "the model was called with [50] images"),
        (drops_the_last, "called with [16, 16, 16] images. Pass each image through the model once"),
        (one_backward_at_the_end, "4 forward passes ran without a backward pass"),
        (without_backward, "4 forward passes ran without a backward pass"),
        (lambda net, images, labels, size: 0.0, "was called with [] images"),
    )
