"""The checks of lesson 05."""

import copy
import math

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy
from virtual_gpus import virtual_gpus

from helpers.parallel import bubble, gpipe, one_f_one_b
from notebooks.checks import lesson05 as check
from tests.check_answers import Answers, answers_test, stored, told

cuts = stored("05_model_parallelism", "best_cuts_solution", np=np, stage_times=check._stage_times)
ALL, SLOWEST = "(min(all_cuts", ": slowest_stage(times, cuts)"
VALID = "Return a list with one integer from 1 to 4, so that each stage has a layer"
BEST_CUTS = Answers(
    check.best_cuts,
    right=[
        cuts(ALL, "(min(reversed(list(all_cuts))", "return list", "return tuple"),
        cuts("return list(", "return list(np.int64(cut) for cut in "),
    ],
    wrong=[
        (cuts(SLOWEST, ": slowest_stage([1] * len(times), cuts)"), "[5, 9]. The slowest stage then takes 9, and 8"),
        (cuts(SLOWEST, ": max(stage_times(times, cuts)) - min(stage_times(times, cuts))"),
         "12, and 11 is possible. The times of your stages differ as"),
        (lambda times, stages: cuts()(times, stages)[::-1], "is [2, 1]. Return a list of 2 increasing integers"),
        (cuts("return list(", "return [0] + list("), VALID),
        (cuts("return list(", "return list(cut + 0.5 for cut in "), VALID),
    ],
)  # fmt: skip


def fewest(stages, share):
    return next(number for number in range(1, 10_000) if bubble(stages, number) <= share + 1e-9)


def waits(stages, share):
    return (stages - 1) * (1 / share - 1)


FEWEST = Answers(
    check.fewest,
    right=[
        fewest,
        lambda stages, share: float(fewest(stages, share)),
        lambda stages, share: max(1, math.ceil(waits(stages, share) - 1e-9)),  # solved for m, with room for rounding
    ],
    wrong=[
        (lambda stages, share: max(1, round(waits(stages, share))), "fewest(4, 0.29) is 7. The bubble is then 0.3 of"),
        (lambda stages, share: max(1, int(waits(stages, share)) + 1), "fewest(4, 0.5) is 4"),
        (lambda stages, share: max(1, math.ceil((stages - 1) * (1 - share) / share)),
         ("fewest(4, 0.2) is 13. With one", "floating-point rounding")),
        (lambda stages, share: max(1, math.ceil(waits(stages, share))), "fewest(64, 0.6) is 43. With one"),
        (lambda stages, share: fewest(stages, share + 1e-4), "The bubble is then 0.05008 of the step, which is more"),
        (lambda stages, share: waits(stages, share) + 0.5, "an integer of at least 1"),
    ],
)  # fmt: skip


def test_less_than_the_share_is_no_matter_of_rounding():
    verdict = check.fewest(lambda stages, share: fewest(stages, share - 2e-9))
    assert told(verdict, "fewest(4, 0.5) is 4. With one micro-batch less, the bubble is 0.5 of the step, and 0.5")
    assert "rounding" not in verdict.text


def frugal(stages, micro_batches, back="10"):
    """Two micro-batches at a time, which go back in the order `back`; the last of an odd number is alone."""
    each = []
    for first in range(0, micro_batches, 2):
        each += [("F", first), ("F", first + 1), *(("B", first + int(number)) for number in back)]
    return [[task for task in each if task[1] < micro_batches]] * stages


def one_at_a_time(stages, micro_batches):
    return [[(kind, number) for number in range(micro_batches) for kind in "FB"]] * stages


def never_ends(stages, micro_batches):
    reverse = [(kind, number) for number in reversed(range(micro_batches)) for kind in "FB"]
    return [*one_at_a_time(stages - 1, micro_batches), reverse]


def halves(stages, micro_batches, kinds="FIW"):
    """1F1B with each backward pass in two halves, one after the other; `kinds` renames the three."""
    parts = {"F": [kinds[0]], "B": kinds[1:]}
    return [
        [(part, number) for kind, number in order for part in parts[kind]]
        for order in one_f_one_b(stages, micro_batches)
    ]


def edited(change, orders=one_f_one_b):
    return lambda stages, micro_batches: [change(list(order)) for order in orders(stages, micro_batches)]


WHOLE = 'Each stage needs "F" and "B" once for every micro-batch'
FRUGAL = Answers(
    check.frugal,
    right=[frugal, lambda stages, m: [list(map(list, order)) for order in frugal(stages, m, "01")]],
    wrong=[
        (one_f_one_b, "It has room for 2"),  # three on the first of three stages
        (one_at_a_time, ("takes 12 units of time, and 9 are allowed", "Only one micro-batch is in the pipeline")),
        (lambda stages, m: [a[:4] + b[4:] for a, b in zip(frugal(stages, m), one_at_a_time(stages, m), strict=True)],
         "where does a stage wait"),
        (never_ends, "never end"),
        (lambda stages, m: frugal(stages, m)[1:], "you return 1 orders. Return 2, one for each stage"),
        (halves, WHOLE + "."),
        (edited(lambda order: order[::-1], frugal), 'never ends: "F" comes first.'),
        (edited(lambda order: [(kind, number + 0.5) for kind, number in order], frugal), "An order is a list"),
        (edited(lambda order: [*order, ("F", len(order))], frugal), "There is no such micro-batch"),
    ],
)  # fmt: skip


@pytest.fixture
def rtx(monkeypatch):
    """Four GPUs of 24 GB, a job with few layers, and scores of nobody."""
    monkeypatch.setenv("COURSE_PROGRESS", "off")
    monkeypatch.setattr(check, "LAYERS", 2)
    check._goals.cache_clear()
    with virtual_gpus(4, kind="RTX 4090", shapes_only=True) as devices:
        yield devices
    check._goals.cache_clear()


ONCE = WHOLE + ' ("I" and "W" in place of "B" are allowed)'
SCHEDULE = Answers(
    check.schedule,
    scored=[
        (one_f_one_b, "You reach par in memory and time."),
        (gpipe, "over par in memory"),
        (frugal, "You beat par in memory."),
        (lambda stages, m: tuple([f"{kind}{number}" for kind, number in order] for order in halves(stages, m)),
         "You beat par in time"),
    ],
    wrong=[
        (lambda stages, m: one_f_one_b(stages, 8), "stage 0 does ['B2', 'B3', "),
        (lambda stages, m: one_f_one_b(stages, m - 1), "stage 0 does [] with micro-batch 1"),
        (edited(lambda order: [*order, ("W", 0)]), ONCE),
        (lambda stages, m: halves(stages, m, "FWI"), 'never ends: "F" comes first, and "I" before "W"'),
        (lambda stages, m: halves(stages, m, "IFW"), 'never ends: "F" comes first'),
        (never_ends, "the stages wait for each other (stage 0 before "),
    ],
    fixtures="rtx",
)  # fmt: skip


parts = stored("05_model_parallelism", "backward_in_parts_solution", cross_entropy=cross_entropy, copy=copy, held=[])
LOSS, BACK, LOG = "* len(y) / len(labels)", "loss.backward()", "loss.item()"
SET, END = "total = 0.0", "    return total"
IN_EVAL = SET, f"{SET}\n    model.eval()"
IN_PARTS = Answers(
    check.backward_in_parts,
    right=[
        parts("model(x)", "model.forward(x)", LOG, "loss.detach()"),
        parts("model(x)", "torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False)"),
        parts(*IN_EVAL, END, f"    model.train()\n{END}"),
    ],
    wrong=[
        (parts(LOSS, "/ 4"), "[16, 16, 16, 2] samples count [0.25, 0.25, 0.25, 0.25]"),
        (parts(BACK, f"model.zero_grad(), {BACK}"), "samples count [0.0, 0.0, 0.0, 0.04]"),
        (parts("model(x)", "copy.deepcopy(model)(x)"), "Some parameters have no gradient"),
        (parts(LOG, f"{LOG} * size"), "your loss of "),
        (parts(LOG, "loss"), "still refers to its graph"),
        (parts("split(size)", "split(99)"), "the model was called with [50] images"),
        (lambda model, images, labels, size: 0.0, "was called with [] images"),
        # one by one through the layers, which a hook on the model would not see
        (parts(END, f"    model[2](model[1](model[0](images)))\n{END}"), "called with [16, 16, 16, 2, 50] images"),
        (parts(BACK, "held.append(loss)", END, f"    sum(held[-4:]).backward()\n{END}"),
         "forward passes ran without a backward pass"),
        (parts(BACK, "held.append(loss), loss.backward(retain_graph=True)"),
         "graphs of earlier micro-batches are in memory during a forward pass"),
        (parts(*IN_EVAL), "leaves the model in evaluation mode"),
        (parts(END, f"    torch.set_grad_enabled(False)\n{END}"), "leaves gradients switched off"),
        (parts(END, f"    torch.optim.SGD(model.parameters(), lr=0.1).step()\n{END}"), "changed the weights"),
        (parts(SET, f"{SET}\n    images.mul_(2)"), "changed the weights, the images"),
        (torch.no_grad()(parts()), "does not require grad"),
    ],
)  # fmt: skip

test_answers = answers_test(
    {"best_cuts": BEST_CUTS, "fewest": FEWEST, "schedule": SCHEDULE, "frugal": FRUGAL, "backward_in_parts": IN_PARTS}
)
