"""Checks of lesson 05, model parallelism. The third one runs the learner's schedule on two GPUs."""

from itertools import combinations, pairwise

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from helpers.exercises import compare
from helpers.exercises.core import NotYet, call, exercise, require, show
from helpers.exercises.gpus import need_gpus
from helpers.parallel.pipeline import Pipeline, Task, bubble, gpipe, most_kept, simulate


@exercise
def best_cuts(answer):
    """Exercise 1: `answer(times, stages)` lists the first layers of the stages after the first; the best cuts."""
    for times, stages in (
        ([4, 1, 1, 2, 6], 2), ([1, 1, 1, 1], 2), ([5, 1, 1, 1, 1, 1], 3), ([1, 2, 3, 4, 5, 6, 7, 8], 4),
        ([9, 1, 1], 3), ([3, 3, 3], 1), ([0.5, 0.25, 2.0, 0.25, 1.0], 3),
    ):  # fmt: skip
        found = call(answer, list(times), stages)
        what = f"best_cuts({times}, {stages}) is {show(found)}"
        try:
            cuts = [int(cut) for cut in found]
        except (TypeError, ValueError) as error:
            raise NotYet(f"{what}.", "A list with the numbers of layers is asked for.") from error
        require(cuts == list(found), f"{what}.", "The numbers of layers are integers.")
        require(len(cuts) == stages - 1, f"{what}.", f"{stages} stages have {stages - 1} cuts between them.")
        growing = all(start < end for start, end in pairwise([0, *cuts, len(times)]))
        require(growing, f"{what}.", f"Cuts grow and lie between 1 and {len(times) - 1}, or a stage has no layer.")
        best = min(_slowest(times, each) for each in combinations(range(1, len(times)), stages - 1))
        slowest = _slowest(times, cuts)
        require(
            slowest <= best + 1e-9, f"{what}.", f"The slowest stage then takes {slowest:g}, and {best:g} is possible."
        )
    return "The slowest stage is as short as it can be, also where layers differ much."


def _slowest(times: list, cuts) -> float:
    return max(sum(times[start:end]) for start, end in pairwise([0, *cuts, len(times)]))


@exercise
def fewest(answer):
    """Exercise 2: `answer(stages, share)`: the smallest number of micro-batches whose bubble is at most `share`."""
    for stages, share in ((4, 0.5), (2, 0.5), (4, 0.1), (4, 0.2), (8, 0.25), (8, 0.2), (1, 0.1), (3, 0.9), (64, 0.05)):
        right = next(number for number in range(1, 10_000) if bubble(stages, number) <= share + 1e-9)
        found = call(answer, stages, share)
        what = f"fewest({stages}, {share}) is {show(found)}"
        number = compare.as_number(found)
        require(number.is_integer() and number >= 1, f"{what}.", "An integer of at least 1 is asked for.")
        require(
            number >= right, f"{what}.", f"The bubble is then {bubble(stages, int(number)):.3f}, more than {share}."
        )
        require(
            number <= right, f"{what}.", f"Fewer are enough: {int(number) - 1:,} have a bubble of at most {share}, too."
        )
    return "64 stages need 1,197 micro-batches to be busy for 95 % of the time."


KEEPS = 2  # micro-batches that a stage of exercise 3 has room for


@exercise
def frugal(answer):
    """Exercise 3: `answer(stages, micro_batches)` never keeps more than two, as fast as two at a time through GPipe."""
    for stages, micro_batches in ((2, 2), (2, 6), (3, 6), (4, 8), (4, 2), (8, 4)):
        orders = _orders(call(answer, stages, micro_batches), stages, micro_batches)
        what = f"{stages} stages, {micro_batches} micro-batches"
        for stage, order in enumerate(orders):
            kept = most_kept(order)
            require(kept <= KEEPS, f"{what}: stage {stage} keeps {kept}.", f"It has room for {KEEPS}.")
        try:
            taken = max(slot.end for slot in simulate(orders))
        except ValueError as error:
            raise NotYet(f"{what}.", str(error)) from error
        bound = micro_batches // 2 * max(slot.end for slot in simulate(gpipe(stages, 2)))
        why = f"Two at a time take {bound:g}: let a second micro-batch follow the first"
        require(taken <= bound, f"{what} take {taken:g} forward passes.", f"{why}.")
    need_gpus(2, values=True)
    net, x, y = _job(12)
    right = _gradients_of(net, lambda: cross_entropy(net(x), y).backward())
    pipeline = Pipeline(list(net.children()), ["cuda:0", "cuda:1"], answer)
    compare.tensor(_gradients_of(net, lambda: pipeline.step(x, y, cross_entropy, micro_batches=4)), right)
    return "Memory for two, whatever the number of micro-batches, and the gradients of the whole batch."


def _orders(found: object, stages: int, micro_batches: int) -> list[list[Task]]:
    """The learner's orders as tasks, each forward and backward pass once on each stage."""
    try:
        orders = [[Task(str(kind), int(number)) for kind, number in order] for order in found]
    except (TypeError, ValueError) as error:
        raise NotYet(
            f"{show(found)}.", 'A list of orders is asked for, each a list of pairs such as ("F", 0).'
        ) from error
    require(len(orders) == stages, f"{len(orders)} orders.", f"Each of {stages} stages needs one.")
    every = sorted(Task(kind, number) for kind in "FB" for number in range(micro_batches))
    for stage, order in enumerate(orders):
        what = f"stage {stage} of {stages}, {micro_batches} micro-batches: {show(order)}"
        require(sorted(order) == every, f"{what}.", "Each stage runs every micro-batch forward and backward, once.")
    return orders


@exercise
def backward_in_parts(answer):
    """Exercise 4: `answer(net, images, labels, size)`: backward in micro-batches; gradients and loss of the batch."""
    for samples, size in ((50, 16), (12, 4), (7, 3), (5, 8)):
        net, x, y = _job(samples)
        loss = cross_entropy(net(x), y)
        right = _gradients_of(net, loss.backward)
        sizes: list[int] = []
        net.register_forward_hook(lambda module, inputs, output, sizes=sizes: sizes.append(len(output)))
        found = call(answer, net, x, y, size)
        what = f"{samples} images in micro-batches of {size}"
        require(bool(sizes), f"{what}.", "The net was never called.")
        require(max(sizes) <= size, f"{what}: one had {max(sizes)}.", "That is more than a micro-batch.")
        require(sum(sizes) == samples, f"{what}: {sum(sizes)} images went through.", f"There are {samples}.")
        require(
            all(p.grad is not None for p in net.parameters()), f"{what}.", "There are no gradients: call backward()."
        )
        compare.tensor(_flat_gradients(net), right)
        compare.number(found, loss.item(), rel=1e-4, case="As the loss, ")
    return "Each image counts the same, also in a micro-batch of two."


def _job(samples: int) -> tuple[nn.Sequential, Tensor, Tensor]:
    """A net of two stages, and a batch, the same each time."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Sequential(nn.Linear(6, 8), nn.Tanh()), nn.Linear(8, 3))
    return net, torch.randn(samples, 6), torch.randint(0, 3, (samples,))


def _gradients_of(net: nn.Module, backward) -> Tensor:
    """What `backward` leaves in the net, which is afterwards without gradients again."""
    backward()
    gradients = _flat_gradients(net)
    net.zero_grad()
    return gradients


def _flat_gradients(net: nn.Module) -> Tensor:
    return torch.cat([parameter.grad.flatten().cpu() for parameter in net.parameters()])
