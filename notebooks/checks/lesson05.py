"""Checks of lesson 05, model parallelism. Only the schedule, exercise 3, needs GPUs."""

import functools
import gc
import weakref
from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise
from math import isclose

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from helpers.measure import GiB, MiB
from helpers.parallel import Task, bubble, gpipe, most_kept, one_f_one_b, simulate
from notebooks.checks import compare
from notebooks.checks.core import NotYet, call, exercise, require, show
from notebooks.checks.gpus import AGAIN, need_gpus
from notebooks.checks.par import Score, compare_with_par, measured

# ---- exercise 1 -----------------------------------------------------------------------------------------------------


@exercise
def best_cuts(answer):
    """Exercise 1: `answer(times, stages)` returns the best cuts, the first layer of each stage except stage 0."""
    drawn = [(torch.randint(1, 10, (7,)).tolist(), stages) for stages in (2, 3, 4, 5)]
    for times, stages in (
        ([4, 1, 1, 2, 6], 2), ([1, 1, 1, 1], 2), ([5, 1, 1, 1, 1, 1], 3), ([6, 6, 5, 3, 3, 5], 3), ([9, 1, 1], 3),
        ([3, 3, 3], 1), ([0.5, 0.25, 2.0, 0.25, 1.0], 3), ([1, 2, 3, 4, 5, 6, 7, 8], 4), *drawn,
    ):  # fmt: skip
        found = call(answer, list(times), stages)
        what = f"best_cuts({times}, {stages}) is {show(found)}."
        cuts = _integers(found)
        edges = [0, *cuts, len(times)]
        valid = len(cuts) == stages - 1 and all(start < end for start, end in pairwise(edges))
        many = "an empty list" if stages == 1 else f"a list of {stages - 1} increasing integers" if stages > 2 else ""
        many = many or "a list with one integer"
        limits = "" if stages == 1 else f" from 1 to {len(times) - 1}, so that each stage has a layer"
        require(valid, what, f"Return {many}{limits}.")
        each = [_stage_times(times, each) for each in combinations(range(1, len(times)), stages - 1)]
        yours = _stage_times(times, cuts)
        best = min(map(max, each))
        what = f"{what[:-1]}, so the stages take {yours}."
        why = f"The slowest stage then takes {max(yours):g}, and {best:g} is possible."
        if isclose(_spread(yours), min(map(_spread, each))):
            why += " The times of your stages differ as little as possible, but only the slowest one matters."
        require(max(yours) <= best + 1e-9, what, why)
    return "The slowest stage takes as little time as possible, even if some layers take much longer than others."


def _integers(found: object) -> list[int]:
    """The integers of a list, tuple, array or tensor; [-1] for anything else."""
    try:
        found = found.tolist() if hasattr(found, "tolist") else found
        if isinstance(found, list | tuple) and all(int(each) == each for each in found):
            return [int(each) for each in found]
    except (TypeError, ValueError, RuntimeError, NotImplementedError):
        pass
    return [-1]


def _stage_times(times: list, cuts: Sequence[int]) -> list:
    return [sum(times[start:end]) for start, end in pairwise([0, *cuts, len(times)])]


def _spread(times: list) -> float:
    return max(times) - min(times)


# ---- exercise 2 -----------------------------------------------------------------------------------------------------


@exercise
def fewest(answer):
    """Exercise 2: `answer(stages, share)`: the smallest number of micro-batches whose bubble is at most `share`."""
    drawn = [(int(stages), int(percent) / 100) for stages, percent in torch.randint(2, 60, (6, 2))]
    for stages, share in (
        (4, 0.5), (2, 0.5), (4, 0.29), (4, 0.1), (4, 0.2), (8, 0.25), (8, 0.2), (1, 0.1), (3, 0.9), (64, 0.6),
        (64, 0.05), (22, 0.35), *drawn,
    ):  # fmt: skip
        right = next(number for number in range(1, 10_000) if bubble(stages, number) <= share + 1e-9)
        found = call(answer, stages, share)
        what = f"fewest({stages}, {share}) is {show(found)}."
        number = compare.as_number(found)
        require(number.is_integer() and number >= 1, what, "Return an integer of at least 1.")
        idle = bubble(stages, int(number))
        require(number >= right, what, f"The bubble is then {idle:.4g} of the step, which is more than {share}.")
        why = f"With one micro-batch less, the bubble is {bubble(stages, max(1, int(number) - 1)):.4g} of the step"
        why += f", and {share} is allowed."
        # An answer that asks for less than `share` has failed before, with 0.5, which is not rounded.
        if number == right + 1 and share != 0.5 and isclose(bubble(stages, right), share):
            why += " Your formula may be right, but floating-point rounding moved its result past an integer."
        require(number <= right, what, why)
    return "64 stages need 1,197 micro-batches to be busy for 95 % of the time."


# ---- exercise 3 -----------------------------------------------------------------------------------------------------

STAGES, MICRO_BATCHES = 4, 8  # of the job that is scored
ROWS, WIDTH, LAYERS = 4096, 4096, 12  # of a micro-batch, and of each stage
Orders = list[list[tuple[str, int]]]


@exercise
def schedule(answer):
    """Exercise 3: `answer(stages, micro_batches)` returns the orders of a pipeline. Its score: 4 stages, 8 batches."""
    for stages, micro_batches in ((2, 2), (3, 6), (4, 2), (1, 3), (STAGES, MICRO_BATCHES)):
        orders = _orders(call(answer, stages, micro_batches), stages, micro_batches, halves=True)
        list(_in_turn(orders))
    gpus = need_gpus(STAGES, values=False)[:STAGES]
    gc.collect()
    held = max(torch.cuda.memory_allocated(gpu) for gpu in gpus)
    require(held < 64 * MiB, f"Your cells still hold {held / GiB:.1f} GiB on a GPU.", AGAIN)
    you = _score(orders, gpus)
    require(you.peak is not None, "Your schedule runs out of memory. How many micro-batches does each stage keep?")
    naive, par = _goals(torch.cuda.get_device_name(gpus[0]))
    return compare_with_par("05 a schedule", naive=naive, par=par, you=you)


@functools.cache
def _goals(kind: str) -> tuple[Score, Score]:
    """The scores of GPipe and of 1F1B on this kind of GPU."""
    gpus = [torch.device("cuda", index) for index in range(STAGES)]
    naive, par = (_score(orders(STAGES, MICRO_BATCHES), gpus) for orders in (gpipe, one_f_one_b))
    return naive, par


def _score(orders: Orders, gpus: list[torch.device]) -> Score:
    job = _Job(gpus)
    try:
        return measured(lambda: job.step(orders), gpus)
    except torch.OutOfMemoryError:
        return Score(None, None)


def _in_turn(orders: Orders) -> Iterator[tuple[int, str, int]]:
    """All tasks (stage, kind, number) by the time at which they can start, if "B" takes 2 units and the others 1."""
    waiting, ends, free = [list(order) for order in orders], {}, [0] * len(orders)
    while any(waiting):
        starts = {}
        for stage, order in enumerate(waiting):
            needs = _needs(stage, *order[0], len(orders)) if order else {None}
            if needs <= ends.keys():
                starts[stage] = max([free[stage], *(ends[need] for need in needs)])
        if not starts:
            stuck = [f"stage {stage} before {order[0][0]}{order[0][1]}" for stage, order in enumerate(waiting) if order]
            raise NotYet(f"These orders never end, because the stages wait for each other ({', '.join(stuck)}).")
        stage = min(starts, key=starts.__getitem__)
        kind, number = waiting[stage].pop(0)
        free[stage] = starts[stage] + (2 if kind == "B" else 1)
        ends[stage, "I" if kind == "B" else kind, number] = free[stage]
        yield stage, kind, number


def _needs(stage: int, kind: str, number: int, stages: int) -> set:
    """The tasks that must have ended before this one."""
    if kind == "F":
        return {(stage - 1, "F", number)} if stage else set()
    if kind == "W" or stage == stages - 1:
        return {(stage, "I" if kind == "W" else "F", number)}
    return {(stage, "F", number), (stage + 1, "I", number)}


class _Job:
    """Stages of linear layers in bfloat16, one on each GPU, whose backward passes can be divided in two."""

    def __init__(self, gpus: list[torch.device]):
        self.gpus, self.last = gpus, len(gpus) - 1
        self.copies = [torch.cuda.Stream(gpu) for gpu in gpus]
        make = functools.partial(torch.zeros, WIDTH, WIDTH, dtype=torch.bfloat16)
        self.weights = [[make(device=gpu) for _ in range(LAYERS)] for gpu in gpus]
        self.gradients = [[torch.zeros_like(weight) for weight in stage] for stage in self.weights]

    def step(self, orders: Orders) -> None:
        self.inputs: dict = {}  # of the layers, by stage and micro-batch
        self.outputs: dict = {}  # the gradients of the layers' outputs, between the two halves of a backward pass
        self.sent: dict = {}
        for stage, kind, number in _in_turn(orders):
            {"F": self.forward, "B": self.backward, "I": self.of_inputs, "W": self.of_weights}[kind](stage, number)

    def forward(self, stage: int, number: int) -> None:
        x = self._receive("F", stage, number)
        kept = self.inputs[stage, number] = []
        for weight in self.weights[stage]:
            kept.append(x)
            x = x @ weight
        self._send("B" if stage == self.last else "F", x, stage, min(stage + 1, self.last), number)

    def backward(self, stage: int, number: int) -> None:
        gradient, inputs = self._receive("B", stage, number), self.inputs.pop((stage, number))
        for weight, total in zip(reversed(self.weights[stage]), reversed(self.gradients[stage]), strict=True):
            total.addmm_(inputs.pop().T, gradient)
            gradient = gradient @ weight.T
        self._send("B", gradient, stage, stage - 1, number)

    def of_inputs(self, stage: int, number: int) -> None:
        gradient = self._receive("B", stage, number)
        kept = self.outputs[stage, number] = []
        for weight in reversed(self.weights[stage]):
            kept.append(gradient)
            gradient = gradient @ weight.T
        self._send("B", gradient, stage, stage - 1, number)

    def of_weights(self, stage: int, number: int) -> None:
        inputs, outputs = self.inputs.pop((stage, number)), self.outputs.pop((stage, number))
        for total, gradient in zip(reversed(self.gradients[stage]), outputs, strict=True):
            total.addmm_(inputs.pop().T, gradient)

    def _send(self, kind: str, tensor: Tensor, source: int, target: int, number: int) -> None:
        """On streams of its own, so that no GPU waits for the copy. The loss of the last stage is half a square."""
        if target < 0:
            return
        if source == target:
            self.sent[kind, target, number] = tensor, None
            return
        self.copies[source].wait_stream(torch.cuda.current_stream(self.gpus[source]))
        with torch.cuda.stream(self.copies[source]), torch.cuda.stream(self.copies[target]):
            copy = tensor.to(self.gpus[target], non_blocking=True)
            self.sent[kind, target, number] = copy, self.copies[target].record_event()
        tensor.record_stream(self.copies[source])

    def _receive(self, kind: str, stage: int, number: int) -> Tensor:
        if kind == "F" and stage == 0:
            return torch.zeros(ROWS, WIDTH, dtype=torch.bfloat16, device=self.gpus[0])
        copy, arrival = self.sent.pop((kind, stage, number))
        if arrival is not None:
            stream = torch.cuda.current_stream(self.gpus[stage])
            stream.wait_event(arrival)
            copy.record_stream(stream)
        return copy


# ---- exercise 4 -----------------------------------------------------------------------------------------------------

KEEPS = 2  # micro-batches that fit in the memory of a stage


@exercise
def frugal(answer):
    """Exercise 4: `answer(stages, micro_batches)` never keeps more than two, as fast as GPipe with two at a time."""
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


def _seconds(orders: list[list[Task]]) -> float:
    return max(slot.end for slot in simulate(orders))


def _orders(found: object, stages: int, micro_batches: int, halves: bool = False) -> list[list[Task]]:
    """The learner's orders as tasks, each forward and backward pass once on each stage.

    halves: a backward pass may also be "I" and then "W".
    """
    try:
        orders = [[_task(kind, number) for kind, number in order] for order in found]
    except (TypeError, ValueError) as error:
        why = 'Return a list with an order for each stage. An order is a list of pairs such as ("F", 0).'
        raise NotYet(f"The answer is {show(found)}.", why) from error
    what = f"For {stages} stages and {micro_batches} micro-batches, "
    why = f"Return {stages}, one for each stage."
    require(len(orders) == stages, f"{what}you return {len(orders)} orders.", why)
    for stage, order in enumerate(orders):
        for number in range(micro_batches):
            kinds = [task.kind for task in order if task.micro_batch == number]
            said = f"{what}stage {stage} does {show(kinds)} with micro-batch {number}."
            right = sorted(kinds) == ["B", "F"] or (halves and sorted(kinds) == ["F", "I", "W"])
            others = ' ("I" and "W" in place of "B" are allowed)' if halves else ""
            require(right, said, f'Each stage needs "F" and "B" once for every micro-batch{others}.')
            why = 'Such an order never ends: "F" comes first' + (', and "I" before "W".' if halves else ".")
            require(kinds[0] == "F" and kinds[-1] != "I", said, why)
        extra = sorted(f"{kind}{number}" for kind, number in order if not 0 <= number < micro_batches)
        require(not extra, f"{what}stage {stage} does {show(extra)}. There is no such micro-batch.")
    return orders


def _task(kind: object, number: object) -> Task:
    if int(number) != float(number):
        raise ValueError(f"{number} is no micro-batch")
    return Task(str(kind), int(number))


# ---- exercise 5 -----------------------------------------------------------------------------------------------------


@exercise
def backward_in_parts(answer):
    """Exercise 5: `answer(model, images, labels, size)` runs micro-batches; gradients and loss are the batch's."""
    for samples, size in ((50, 16), (12, 4), (7, 3), (5, 8)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        x, y = torch.randn(samples, 6), torch.randint(0, 3, (samples,))
        before = [each.detach().clone() for each in (x, y, *model.parameters())]
        loss = cross_entropy(model(x), y).item()
        sizes, passes, graphs, kept = [], [], [], []

        def note(module, inputs, output, sizes=sizes, passes=passes, graphs=graphs, kept=kept) -> None:
            kept.append(sum(graph() is not None for graph in graphs))
            graphs.append(weakref.ref(inputs[0]))  # as long as the graph lives, it keeps the input of this layer
            sizes.append(len(output))
            passes.append("F")
            if output.requires_grad:
                output.register_hook(lambda gradient: passes.append("B"))

        hook = model[-1].register_forward_hook(note)  # also called by model.forward(...)
        try:
            found = call(answer, model, x, y, size)
            switched = not torch.is_grad_enabled()
        finally:
            torch.set_grad_enabled(True)
        hook.remove()
        what = f"With {samples} images in micro-batches of {size},"
        whole = sum(sizes) == samples and max(sizes, default=0) <= size
        why = f"Pass each image through the model once, at most {size} at a time."
        require(whole, f"{what} the model was called with {sizes} images.", why)
        at_once = max(map(len, "".join(passes).split("B")))
        why = "Their graphs are in memory at the same time. Call backward() before the next forward pass."
        require(at_once == 1, f"{what} {at_once} forward passes ran without a backward pass.", why)
        why = "Call backward() without retain_graph=True, and keep no tensor that refers to a graph."
        require(not any(kept), f"{what} graphs of earlier micro-batches are in memory during a forward pass.", why)
        same = all(torch.equal(old, new) for old, new in zip(before, (x, y, *model.parameters()), strict=True))
        require(same, "Your function changed the weights, the images or the labels. It should only leave gradients.")
        compare.accumulated(model, list(zip(x.split(size), y.split(size), strict=True)))
        graph = isinstance(found, Tensor) and found.requires_grad
        require(not graph, "The loss that you return still refers to its graph. Return a number.")
        compare.number(found, loss, rel=1e-4, case=f"{what} your loss of ")
        why = "The next step trains without dropout and with BatchNorm's old means. Leave the mode as it is."
        require(model.training, "Your function leaves the model in evaluation mode.", why)
        require(not switched, "Your function leaves gradients switched off for the whole program.")
    return "Each image counts the same, even in a micro-batch of two."
