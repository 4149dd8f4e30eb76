"""Checks of lesson 05, model parallelism. The third one runs the learner's schedule on two GPUs."""

from itertools import combinations

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from helpers.exercises import compare
from helpers.exercises.core import call, exercise, not_yet, require, show
from helpers.exercises.gpus import with_values
from helpers.parallel.pipeline import Pipeline, Task, bubble, gpipe, most_kept, simulate

__all__ = ["backward_in_parts", "best_cuts", "fewest", "frugal"]


# ------------------------------------------------------------------------------------------------ 1: where to cut


@exercise
def best_cuts(answer):
    """`answer(times, stages)` must list the first layers of the stages but the first, the slowest stage being short."""
    for times, stages in (
        ([4, 1, 1, 2, 6], 2), ([1, 1, 1, 1], 2), ([5, 1, 1, 1, 1, 1], 3), ([1, 2, 3, 4, 5, 6, 7, 8], 4),
        ([9, 1, 1], 3), ([3, 3, 3], 1), ([0.5, 0.25, 2.0, 0.25, 1.0], 3),
    ):  # fmt: skip
        _check_cuts(call(answer, list(times), stages), times, stages)
    return "the slowest stage is as short as it can be, also where layers differ much"


def _check_cuts(found: object, times: list, stages: int) -> None:
    what = f"best_cuts({times}, {stages}) is {show(found)}"
    try:
        cuts = [int(cut) for cut in found]
        whole = all(cut == given for cut, given in zip(cuts, found, strict=True))
    except (TypeError, ValueError):
        not_yet(what, "a list with the numbers of layers is asked for")
    require(whole, what, "the numbers of layers are whole")
    require(len(cuts) == stages - 1, what, f"{stages} stages have {stages - 1} cuts between them")
    edges = [0, *cuts, len(times)]
    growing = all(start < end for start, end in zip(edges, edges[1:], strict=False))
    require(growing, what, f"cuts grow and lie between 1 and {len(times) - 1}, or a stage has no layer")
    slowest, best = _slowest(times, cuts), min(_slowest(times, cuts) for cuts in _all_cuts(len(times), stages))
    if slowest > best + 1e-9:
        not_yet(what, f"the slowest stage then takes {slowest:g}, and {best:g} is possible")


def _all_cuts(layers: int, stages: int):
    return combinations(range(1, layers), stages - 1)


def _slowest(times: list, cuts) -> float:
    edges = [0, *cuts, len(times)]
    return max(sum(times[start:end]) for start, end in zip(edges, edges[1:], strict=False))


# ------------------------------------------------------------------------------------- 2: how many micro-batches


@exercise
def fewest(answer):
    """`answer(stages, share)`: the smallest number of micro-batches whose bubble is at most `share`."""
    for stages, share in ((4, 0.5), (2, 0.5), (4, 0.1), (8, 0.25), (8, 0.2), (1, 0.1), (3, 0.9), (64, 0.05)):
        right = next(number for number in range(1, 10_000) if bubble(stages, number) <= share + 1e-9)
        found = call(answer, stages, share)
        what = f"fewest({stages}, {share}) is {show(found)}"
        number = isinstance(found, (int, float)) and not isinstance(found, bool)
        require(number and found == found // 1, what, "a whole number is asked for")
        require(found >= 1, what, "at least one micro-batch is needed")
        reached = bubble(stages, int(found))
        require(found >= right, what, f"the bubble is then {reached:.3f}, more than {share}")
        require(found <= right, what, f"fewer are enough: {int(found) - 1} have a bubble of at most {share}, too")
    return "64 stages need 1,197 micro-batches to be busy for 95 % of the time"


# ------------------------------------------------------------------------------- 3: a schedule for little memory

KEEPS = 2  # micro-batches that a stage has room for


@exercise
def frugal(answer):
    """`answer(stages, micro_batches)`: orders that never keep more than two, as fast as two at a time through GPipe."""
    for stages, micro_batches in ((2, 2), (2, 6), (3, 6), (4, 8), (4, 2), (8, 4)):
        orders = _orders(call(answer, stages, micro_batches), stages, micro_batches)
        what = f"{stages} stages, {micro_batches} micro-batches"
        for stage, order in enumerate(orders):
            kept = most_kept(order)
            require(kept <= KEEPS, f"{what}: stage {stage} keeps {kept}", f"it has room for {KEEPS}")
        try:
            taken = max(slot.end for slot in simulate(orders))
        except ValueError as error:
            not_yet(what, str(error))
        bound = micro_batches // 2 * max(slot.end for slot in simulate(gpipe(stages, 2)))
        why = f"two at a time take {bound:g}: let a second micro-batch follow the first"
        require(taken <= bound, f"{what} take {taken:g} forward passes", why)
    _run_it(answer)
    return "memory for two, whatever the number of micro-batches, and the gradients of the whole batch"


def _orders(found: object, stages: int, micro_batches: int) -> list[list[Task]]:
    """The learner's orders as tasks, each forward and backward pass once on each stage."""
    try:
        orders = [[Task(str(kind), int(number)) for kind, number in order] for order in found]
    except (TypeError, ValueError):
        not_yet(show(found), 'a list of orders is asked for, each a list of pairs such as ("F", 0)')
    require(len(orders) == stages, f"{len(orders)} orders", f"each of {stages} stages needs one")
    every = {Task(kind, number) for kind in "FB" for number in range(micro_batches)}
    for stage, order in enumerate(orders):
        what = f"stage {stage} of {stages}, {micro_batches} micro-batches"
        for task in order:
            require(task in every, f"{what}: {tuple(task)}", "there is no such task")
        require(len(order) == len(set(order)), what, "a task comes twice")
        missing = sorted(every - set(order))
        require(
            not missing, f"{what} lacks {len(missing)} tasks", f"{tuple(missing[0])} is one of them" if missing else ""
        )
        for number in range(micro_batches):
            late = order.index(Task("B", number)) < order.index(Task("F", number))
            require(not late, what, f"micro-batch {number} goes backward before it went forward")
    return orders


def _run_it(answer) -> None:
    """The schedule on two GPUs gives the gradients of the whole batch."""
    again = "run a cell with use_gpus above again"
    with_values(2, fewer=f"two are asked for: {again}", without=f"{again}, without shapes_only")
    torch.manual_seed(0)
    net, (x, y) = _small_net(), _batch(12)
    right = _gradients(net, lambda: cross_entropy(net(x), y).backward())
    net.zero_grad()
    pipeline = Pipeline(list(net.children()), ["cuda:0", "cuda:1"], answer)
    found = _gradients(net, lambda: pipeline.step(x, y, cross_entropy, micro_batches=4))
    compare.tensor(found, right)


# ---------------------------------------------------------------------------------------- 4: uneven micro-batches


@exercise
def backward_in_parts(answer):
    """`answer(net, images, labels, size)`: backward in micro-batches; gradients and loss of the whole batch."""
    torch.manual_seed(0)
    for samples, size in ((50, 16), (12, 4), (7, 3), (5, 8)):
        net, (x, y) = _small_net(), _batch(samples)
        loss = cross_entropy(net(x), y)
        right = _gradients(net, loss.backward)
        net.zero_grad(set_to_none=True)
        sizes: list[int] = []
        net.register_forward_hook(lambda module, inputs, output, sizes=sizes: sizes.append(len(output)))
        found = call(answer, net, x, y, size)
        _check_parts(net, right, samples, sizes, size)
        found = found.item() if isinstance(found, torch.Tensor) and found.numel() == 1 else found
        compare.number(found, loss.item(), rel=1e-4)
    return "each image counts the same, also in a micro-batch of two"


def _check_parts(net: nn.Module, right: torch.Tensor, samples: int, sizes: list[int], size: int) -> None:
    what = f"{samples} images in micro-batches of {size}"
    require(bool(sizes), what, "the net was never called")
    require(max(sizes) <= size, f"{what}: one had {max(sizes)}", "that is more than a micro-batch")
    require(sum(sizes) == samples, f"{what}: {sum(sizes)} images went through", f"there are {samples}")
    require(all(p.grad is not None for p in net.parameters()), what, "there are no gradients: call backward()")
    gradient = _flat(net)
    if not torch.allclose(gradient, right, rtol=1e-4, atol=1e-6):
        factor = float((gradient * right).sum() / (right * right).sum())
        why = "a micro-batch's mean loss counts by its share of the images, len(micro-batch) / len(batch)"
        if abs(factor / samples - 1) < 0.01:
            why = "the losses of all images were added up, and their mean is asked for"
        not_yet(f"{what}: the gradients are not the whole batch's (about {factor:.2f} times as large)", why)


def _small_net() -> nn.Sequential:
    return nn.Sequential(nn.Sequential(nn.Linear(6, 8), nn.Tanh()), nn.Linear(8, 3))


def _batch(samples: int):
    return torch.randn(samples, 6), torch.randint(0, 3, (samples,))


def _flat(net: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.grad.flatten().cpu() for parameter in net.parameters()])


def _gradients(net: nn.Module, backward) -> torch.Tensor:
    backward()
    return _flat(net)
