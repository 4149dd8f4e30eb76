"""Checks of lesson 05, model parallelism. None of them needs a GPU."""

from itertools import combinations, pairwise
from math import isclose

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from helpers.exercises import compare
from helpers.exercises.core import NotYet, call, exercise, require, show
from helpers.parallel.pipeline import Task, bubble, gpipe, most_kept, simulate


@exercise
def best_cuts(answer):
    """Exercise 1: `answer(times, stages)` returns the best cuts, the first layer of each stage except stage 0."""
    for times, stages in (
        ([4, 1, 1, 2, 6], 2), ([1, 1, 1, 1], 2), ([5, 1, 1, 1, 1, 1], 3), ([1, 2, 3, 4, 5, 6, 7, 8], 4),
        ([9, 1, 1], 3), ([3, 3, 3], 1), ([0.5, 0.25, 2.0, 0.25, 1.0], 3),
    ):  # fmt: skip
        found = call(answer, list(times), stages)
        what = f"best_cuts({times}, {stages}) is {show(found)}."
        edges = [0, *found, len(times)] if isinstance(found, list | tuple) else [0]
        valid = all(isinstance(edge, int) for edge in edges) and len(edges) == stages + 1
        valid = valid and all(start < end for start, end in pairwise(edges))
        why = f"Return {stages - 1} increasing integers from 1 to {len(times) - 1}, so that each stage has a layer."
        require(valid, what, why)
        best = min(_slowest(times, each) for each in combinations(range(1, len(times)), stages - 1))
        slowest = _slowest(times, found)
        require(slowest <= best + 1e-9, what, f"The slowest stage then takes {slowest:g}, and {best:g} is possible.")
    return "The slowest stage takes as little time as possible, even if some layers take much longer than others."


def _slowest(times: list, cuts) -> float:
    return max(sum(times[start:end]) for start, end in pairwise([0, *cuts, len(times)]))


@exercise
def fewest(answer):
    """Exercise 2: `answer(stages, share)`: the smallest number of micro-batches whose bubble is at most `share`."""
    for stages, share in (
        (4, 0.5), (2, 0.5), (4, 0.1), (4, 0.2), (8, 0.25), (8, 0.2), (1, 0.1), (3, 0.9), (64, 0.6), (64, 0.05),
    ):  # fmt: skip
        right = next(number for number in range(1, 10_000) if bubble(stages, number) <= share + 1e-9)
        found = call(answer, stages, share)
        what = f"fewest({stages}, {share}) is {show(found)}."
        number = compare.as_number(found)
        require(number.is_integer() and number >= 1, what, "Return an integer of at least 1.")
        idle = bubble(stages, int(number))
        require(number >= right, what, f"The bubble is then {idle:.3f} of the step, which is more than {share}.")
        why = f"With one micro-batch less, the bubble is {bubble(stages, max(1, int(number) - 1)):.3f} of the step."
        if number == right + 1 and isclose(bubble(stages, right), share):
            why += " Your formula may be right, but floating-point rounding moved its result past an integer."
        require(number <= right, what, why)
    return "64 stages need 1,197 micro-batches to be busy for 95 % of the time."


KEEPS = 2  # micro-batches that fit in the memory of a stage in exercise 3


@exercise
def frugal(answer):
    """Exercise 3: `answer(stages, micro_batches)` never keeps more than two, as fast as GPipe with two at a time."""
    for stages, micro_batches in ((2, 2), (2, 6), (3, 6), (4, 8), (4, 2), (8, 4)):
        orders = _orders(call(answer, stages, micro_batches), stages, micro_batches)
        what = f"With {stages} stages and {micro_batches} micro-batches,"
        kept = [most_kept(order) for order in orders]
        fullest = f"stage {kept.index(max(kept))} keeps {max(kept)} micro-batches at a time"
        require(max(kept) <= KEEPS, f"{what} {fullest}. It has room for {KEEPS}.")
        try:
            taken, bound = _seconds(orders), micro_batches // KEEPS * _seconds(gpipe(stages, KEEPS))
        except ValueError as error:
            raise NotYet(what.replace(",", ":"), str(error)) from error
        slow = f"{what} your schedule takes {taken:g} units of time, and {bound:g} are allowed."
        why = "Look at simulate(...) of your orders: where does a stage wait?"
        if max(kept) == 1:
            why = "Only one micro-batch is in the pipeline at a time. What could the idle stages do?"
        require(taken <= bound, slow, why)
    return "No stage keeps more than two micro-batches, however many there are."


def _seconds(orders) -> float:
    return max(slot.end for slot in simulate(orders))


def _orders(found: object, stages: int, micro_batches: int) -> list[list[Task]]:
    """The learner's orders as tasks, each forward and backward pass once on each stage."""
    try:
        orders = [[Task(str(kind), int(number)) for kind, number in order] for order in found]
    except (TypeError, ValueError) as error:
        why = 'Return a list with an order for each stage. An order is a list of pairs such as ("F", 0).'
        raise NotYet(f"The answer is {show(found)}.", why) from error
    every = sorted(Task(kind, number) for kind in "FB" for number in range(micro_batches))
    whole = len(orders) == stages and all(sorted(order) == every for order in orders)
    what = f"For {stages} stages and {micro_batches} micro-batches, the orders are {show(found)}."
    require(whole, what, "Each stage needs an order, with every micro-batch forward and backward once.")
    return orders


@exercise
def backward_in_parts(answer):
    """Exercise 4: `answer(model, images, labels, size)` runs micro-batches; gradients and loss are the batch's."""
    for samples, size in ((50, 16), (12, 4), (7, 3), (5, 8)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        x, y = torch.randn(samples, 6), torch.randint(0, 3, (samples,))
        loss = cross_entropy(model(x), y).item()
        sizes, passes = [], []

        def note(module, inputs, output, sizes=sizes, passes=passes) -> None:
            sizes.append(len(output))
            passes.append("F")
            if output.requires_grad:
                output.register_hook(lambda gradient: passes.append("B"))

        hook = model.register_forward_hook(note)
        found = call(answer, model, x, y, size)
        hook.remove()
        what = f"With {samples} images in micro-batches of {size},"
        whole = sum(sizes) == samples and max(sizes, default=0) <= size
        why = f"Pass each image through the model once, at most {size} at a time."
        require(whole, f"{what} the model was called with {sizes} images.", why)
        at_once = max(map(len, "".join(passes).split("B")))
        why = "Their graphs are in memory at the same time. Call backward() before the next forward pass."
        require(at_once == 1, f"{what} {at_once} forward passes ran without a backward pass.", why)
        compare.accumulated(model, list(zip(x.split(size), y.split(size), strict=True)))
        graph = isinstance(found, Tensor) and found.requires_grad
        require(not graph, "The loss that you return still refers to its graph. Return a number.")
        compare.number(found, loss, rel=1e-4, case=f"{what} your loss of ")
    return "Each image counts the same, even in a micro-batch of two."
