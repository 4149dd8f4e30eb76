"""The checks of lesson 05: solutions pass, typical mistakes are explained, nothing raises."""

import copy
import math
from itertools import combinations

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint
from virtual_gpus import virtual_gpus

from helpers.parallel import bubble, gpipe, one_f_one_b
from notebooks.checks import lesson05 as check
from tests.check_answers import explains, survives_strange_answers, told


def test_no_answer_makes_a_check_raise():
    checks = check.best_cuts, check.fewest, check.schedule, check.frugal, check.backward_in_parts
    assert survives_strange_answers(*checks)


def stage_times(times, cuts):
    edges = [0, *cuts, len(times)]
    return [sum(times[start:end]) for start, end in zip(edges, edges[1:], strict=False)]


def cuts_by(key):
    def answer(times, stages):
        every = combinations(range(1, len(times)), stages - 1)
        return list(min(every, key=lambda cuts: key(stage_times(times, cuts))))

    return answer


best_cuts = cuts_by(max)


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
    assert check.best_cuts(lambda times, stages: np.array(best_cuts(times, stages)))
    assert check.best_cuts(lambda times, stages: torch.tensor(best_cuts(times, stages)))
    assert check.best_cuts(lambda times, stages: [np.int64(cut) for cut in best_cuts(times, stages)])
    valid = "Return a list with one integer from 1 to 4, so that each stage has a layer"
    explains(
        check.best_cuts,
        (lambda times, stages: [len(times) * k // stages for k in range(1, stages)], "is possible"),
        (lambda times, stages: best_cuts([1] * len(times), stages), "[5, 9]. The slowest stage then takes 9, and 8"),
        (cuts_by(lambda each: max(each) - min(each)), "12, and 11 is possible. The times of your stages differ as"),
        (cuts_by(lambda each: -min(each)), "is possible"),
        (lambda times, stages: best_cuts(times, stages)[::-1], "is [2, 1]. Return a list of 2 increasing integers"),
        (lambda times, stages: [4, 3, 3, 1][: stages - 1] if stages > 1 else [], valid.replace("4,", "3,")),
        (lambda times, stages: [0, *best_cuts(times, stages)], valid),
        (lambda times, stages: [*best_cuts(times, stages), len(times)], valid),
        (lambda times, stages: [0] * (stages - 1), valid),
        (lambda times, stages: [cut + 0.5 for cut in best_cuts(times, stages)], valid),
        (lambda times, stages: stage_times(times, best_cuts(times, stages)), valid),
        (lambda times, stages: 4, valid),
    )


def fewest(stages, share):
    micro_batches = 1
    while bubble(stages, micro_batches) > share + 1e-9:
        micro_batches += 1
    return micro_batches


def strictly_less(stages, share):
    return next(number for number in range(1, 10_000) if bubble(stages, number) < share)


def test_fewest():
    assert check.fewest(fewest)
    # Right in another form: (p - 1) / (m + p - 1) <= share, solved for m, with room for rounding.
    assert check.fewest(lambda stages, share: max(1, math.ceil((stages - 1) * (1 / share - 1) - 1e-9)))
    assert check.fewest(lambda stages, share: float(fewest(stages, share)))
    waits = lambda stages, share: (stages - 1) * (1 / share - 1)  # noqa: E731
    for wrong in (strictly_less, lambda stages, share: max(1, math.ceil(stages * (1 / share - 1)))):
        verdict = check.fewest(wrong)
        assert told(verdict, "fewest(4, 0.5) is 4. With one micro-batch less, the bubble is 0.5 of the step, and 0.5")
        assert "rounding" not in verdict.text
    explains(
        check.fewest,
        (lambda stages, share: max(1, round(waits(stages, share))), "fewest(4, 0.29) is 7. The bubble is then 0.3 of"),
        (lambda stages, share: max(1, int(waits(stages, share))), "fewest(4, 0.29) is 7"),
        (lambda stages, share: max(1, int(waits(stages, share)) + 1), "fewest(4, 0.5) is 4"),
        (lambda stages, share: 3, "fewest(2, 0.5) is 3"),
        (lambda stages, share: str(fewest(stages, share)), "is text"),
        (lambda stages, share: fewest(stages, share) + 1, "With one micro-batch less, the bubble is 0.5 of the step"),
        (lambda stages, share: max(1, math.ceil((stages - 1) * (1 - share) / share)), "fewest(4, 0.2) is 13. With one"),
        (lambda stages, share: max(1, math.ceil((stages - 1) * (1 - share) / share)), "floating-point rounding"),
        (lambda stages, share: max(1, math.ceil((stages - 1) * (1 / share - 1))), "fewest(64, 0.6) is 43. With one"),
        (lambda stages, share: max(1, math.ceil((stages - 1) / share) - stages + 1), "fewest(22, 0.35) is 40. With"),
        (lambda stages, share: max(1, int(-(-(stages - 1) * (1 - share) // share))), "floating-point rounding"),
        (lambda stages, share: fewest(stages, share + 1e-4), "The bubble is then 0.05008 of the step, which is more"),
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
    whole = 'Each stage needs "F" and "B" once for every micro-batch'
    explains(
        check.frugal,
        (gpipe, "stage 0 keeps 6 micro-batches at a time. It has room for 2"),
        (one_f_one_b, "It has room for 2"),
        (one_at_a_time, "your schedule takes 12 units of time, and 9 are allowed"),
        (one_at_a_time, "Only one micro-batch is in the pipeline"),
        (always_two, "your schedule takes 33 units of time, and 27 are allowed"),
        (always_two, "where does a stage wait"),
        (never_ends, "never end"),
        (lambda stages, m: frugal(stages, m)[1:], "you return 1 orders. Return 2, one for each stage"),
        (halves, whole),
        (lambda stages, m: [order[:-1] for order in frugal(stages, m)], whole),
        (lambda stages, m: [[*order, ("B", 0)] for order in frugal(stages, m)], whole),
        (lambda stages, m: [[*order, ("X", 0)] for order in frugal(stages, m)], whole),
        (lambda stages, m: [order[::-1] for order in frugal(stages, m)], 'never ends: "F" comes first.'),
        (lambda stages, m: [[(kind, n + 0.5) for kind, n in each] for each in frugal(stages, m)], "An order is a list"),
        (lambda stages, m: [[*order, ("F", m)] for order in frugal(stages, m)], "There is no such micro-batch"),
        (lambda stages, m: frugal(stages, m)[0], "An order is a list of pairs"),
    )


def halves(stages, micro_batches):
    """1F1B with each backward pass in two halves, one after the other."""
    orders = one_f_one_b(stages, micro_batches)
    return [
        [each for kind, n in order for each in ([("F", n)] if kind == "F" else [("I", n), ("W", n)])]
        for order in orders
    ]


def puts_off(stages, micro_batches):
    """A stage that would wait does the weights of an earlier micro-batch: the schedule that beats par in time."""
    orders, ends, now = [[] for _ in range(stages)], {}, 0
    free, done = [0] * stages, [dict.fromkeys("FIW", 0) for _ in range(stages)]
    while any(each["W"] < micro_batches for each in done):
        for stage, each in enumerate(done):
            above = ends.get((stage + 1, "I", each["I"]), math.inf) if stage < stages - 1 else 0
            below = ends.get((stage - 1, "F", each["F"]), math.inf) if stage else 0
            if free[stage] > now:
                continue
            if each["I"] < each["F"] and above <= now:
                kind = "I"
            elif each["F"] < micro_batches and each["F"] - each["W"] < stages - stage and below <= now:
                kind = "F"
            elif each["W"] < each["I"]:
                kind = "W"
            else:
                continue
            orders[stage].append((kind, each[kind]))
            ends[stage, kind, each[kind]] = free[stage] = now + 1
            each[kind] += 1
        now += 1
    return orders


def swapped(first, second):
    """1F1B in halves in which all of one kind trade places with all of another."""
    return lambda stages, m: [
        [({first: second, second: first}.get(kind, kind), n) for kind, n in order] for order in halves(stages, m)
    ]


@pytest.fixture
def rtx(monkeypatch):
    """Four GPUs of 24 GB, and a job with few layers."""
    monkeypatch.setattr(check, "LAYERS", 4)
    check._goals.cache_clear()
    with virtual_gpus(4, kind="RTX 4090", shapes_only=True) as devices:
        yield devices
    check._goals.cache_clear()


def test_schedule(rtx):
    verdict = check.schedule(one_f_one_b)
    assert verdict and "You reach par in memory and time." in verdict.text
    assert "over par in memory" in check.schedule(gpipe).text
    assert "You beat par in time." in check.schedule(puts_off).text
    for right in (frugal_of_any, halves, lambda stages, m: tuple(map(tuple, one_f_one_b(stages, m))), as_text):
        assert check.schedule(right)


def frugal_of_any(stages, micro_batches):
    """Beats par in memory: at most two at a time."""
    order = []
    for first in range(0, micro_batches, 2):
        pair = range(first, min(first + 2, micro_batches))
        order += [("F", number) for number in pair] + [("B", number) for number in pair]
    return [order] * stages


def as_text(stages, micro_batches):
    return [[f"{kind}{number}" for kind, number in order] for order in one_f_one_b(stages, micro_batches)]


def test_schedule_explains(rtx):
    once = '"F" and "B" once for every micro-batch ("I" and "W" in place of "B" are allowed)'
    explains(
        check.schedule,
        (lambda stages, m: one_f_one_b(4, 8), "you return 4 orders. Return 2, one for each stage"),
        (lambda stages, m: one_f_one_b(stages, 8), "stage 0 does ['B2', 'B3', "),
        (lambda stages, m: one_f_one_b(stages, m - 1), "stage 0 does [] with micro-batch 1"),
        (lambda stages, m: one_f_one_b(stages, m)[0], "An order is a list of pairs"),
        (lambda stages, m: [order[:-1] for order in gpipe(stages, m)], once),
        (lambda stages, m: [[*order, ("W", 0)] for order in gpipe(stages, m)], once),
        (lambda stages, m: [[each for each in order if each[0] != "W"] for order in halves(stages, m)], once),
        (lambda stages, m: [[each for each in order if each[0] != "I"] for order in halves(stages, m)], once),
        (lambda stages, m: [[(kind.lower(), n) for kind, n in order] for order in gpipe(stages, m)], once),
        (swapped("I", "W"), 'never ends: "F" comes first, and "I" before "W"'),
        (swapped("F", "I"), 'never ends: "F" comes first'),
        (never_ends, "the stages wait for each other (stage 0 before "),
        (one_f_one_b(4, 8), "cannot be called"),
    )


def test_schedule_asks_for_its_gpus():
    with virtual_gpus(4):
        assert told(check.schedule(one_f_one_b), "shapes_only=True")
    with virtual_gpus(2, shapes_only=True):
        assert told(check.schedule(one_f_one_b), "needs 4 GPUs")
    with virtual_gpus(4, shapes_only=True) as gpus:
        held = torch.empty(2**28, device=gpus[1])
        assert told(check.schedule(one_f_one_b), "Your cells still hold 1.0 GiB on a GPU")
        del held


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


def stays_in_eval(net, images, labels, size):
    return in_parts(right)(net.eval(), images, labels, size)


def and_back(net, images, labels, size):
    total = stays_in_eval(net, images, labels, size)
    net.train()
    return total


def switches_gradients_off(net, images, labels, size):
    total = in_parts(right)(net, images, labels, size)
    torch.set_grad_enabled(False)
    return total


def steps(net, images, labels, size):
    total = in_parts(right)(net, images, labels, size)
    torch.optim.SGD(net.parameters(), lr=0.1).step()
    return total


def of_a_copy(net, images, labels, size):
    return in_parts(right)(copy.deepcopy(net), images, labels, size)


def keeps_all_graphs(net, images, labels, size):
    losses = []
    for x, y in zip(images.split(size), labels.split(size), strict=True):
        losses.append(cross_entropy(net(x), y) * len(y) / len(labels))
        losses[-1].backward(retain_graph=True)
    return sum(losses).item()


def loss_of_all_layers(net, images, labels, size):
    """The whole batch goes through the layers one by one, which a hook on the model would not see."""
    in_parts(right)(net, images, labels, size)
    return cross_entropy(net[2](net[1](net[0](images))), labels).item()


def test_backward_in_parts():
    assert check.backward_in_parts(in_parts(right))
    assert check.backward_in_parts(lambda net, *rest: in_parts(right)(net.forward, *rest))
    assert check.backward_in_parts(
        lambda net, *rest: in_parts(right)(lambda x: checkpoint(net, x, use_reentrant=False), *rest)
    )
    assert check.backward_in_parts(and_back)
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
        (keeps_all_graphs, "graphs of earlier micro-batches are in memory during a forward pass"),
        (loss_of_all_layers, "called with [16, 16, 16, 2, 50] images"),
        (lambda net, images, labels, size: 0.0, "was called with [] images"),
        (stays_in_eval, "leaves the model in evaluation mode"),
        (switches_gradients_off, "leaves gradients switched off"),
        (steps, "changed the weights"),
        (
            lambda net, images, labels, size: in_parts(right)(net, images.mul_(2), labels, size),
            "changed the weights, the",
        ),
        (of_a_copy, "Some parameters have no gradient"),
        (in_parts(right, log=lambda loss, y, labels: 1.0986), "your loss of "),
        (torch.no_grad()(in_parts(right)), "does not require grad"),
    )
    assert torch.is_grad_enabled()
