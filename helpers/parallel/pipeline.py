"""Pipelines of micro-batches through the stages of a model, which are on several GPUs.

    pipeline = Pipeline([part_0, part_1], gpus, schedule=one_f_one_b)
    loss = pipeline.step(images, labels, nn.CrossEntropyLoss(), micro_batches=8)      # gradients of the whole batch
    optimizer.step()

A schedule is a list with the order of tasks of each stage:

    orders = one_f_one_b(stages=4, micro_batches=8)     # orders[stage] = [Task("F", 0), Task("F", 1), ...]
    slots = simulate(orders)                            # when each task runs if "F" takes 1 and "B" 2 units of time
    bubble(4, 8)                                        # each GPU is idle for 3/11 of that time
    most_kept(orders[0])                                # the most micro-batches whose activations stage 0 holds

One process launches the work of all GPUs. `torch.distributed.pipelining` does the same with one process per GPU.
Sources: GPipe, arXiv 1811.06965; one forward, one backward ("1F1B"), as in PipeDream-Flush, arXiv 2006.09503.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from helpers.engine import name_work
from helpers.gpus import Device, gpu_index, require_gpu
from helpers.sizes import require_integer
from helpers.train import option_of, require_mean

# ---- schedules -------------------------------------------------------------------------------------------------------


class Task(NamedTuple):
    """The forward ("F") or backward ("B") pass of one micro-batch through one stage."""

    kind: str
    micro_batch: int


class Slot(NamedTuple):
    """A task with its start and end on its stage, in the units of `simulate`."""

    stage: int
    task: Task
    start: float
    end: float


def gpipe(stages: int, micro_batches: int) -> list[list[Task]]:
    """Return the orders of GPipe: all forward passes, then all backward passes, beginning with the last micro-batch."""
    forward = [Task("F", number) for number in range(micro_batches)]
    backward = [Task("B", number) for number in reversed(range(micro_batches))]
    return [forward + backward for _ in range(stages)]


def one_f_one_b(stages: int, micro_batches: int) -> list[list[Task]]:
    """Return the orders of 1F1B: forward passes that fill the pipeline, then one forward and one backward in turns."""
    orders = []
    for stage in range(stages):
        ahead = min(stages - stage - 1, micro_batches)  # forward passes before the turns begin
        order = [Task("F", number) for number in range(ahead)]
        for number in range(micro_batches - ahead):
            order += [Task("F", ahead + number), Task("B", number)]
        orders.append(order + [Task("B", number) for number in range(micro_batches - ahead, micro_batches)])
    return orders


def bubble(stages: int, micro_batches: int) -> float:
    """Return the share of time in which each GPU is idle, (p - 1) / (m + p - 1), if all stages take equally long.

    Raises ValueError if an argument is no integer of at least 1.
    """
    stages, micro_batches = require_integer("stages", stages), require_integer("micro_batches", micro_batches)
    return (stages - 1) / (micro_batches + stages - 1)


def most_kept(order: Sequence[Task]) -> int:
    """Return the largest number of micro-batches whose activations a stage holds at once."""
    kept = most = 0
    for kind, _ in order:
        kept += 1 if kind == "F" else -1
        most = max(most, kept)
    return most


def simulate(orders: Sequence[Sequence[Task]], forward: float = 1.0, backward: float = 2.0) -> list[Slot]:
    """Return the tasks with their times, sorted by start. A task starts when its stage is free and its input exists.

    A forward pass needs the forward pass of the stage before it, and a backward pass needs the backward pass of the
    stage after it. On the last stage, a backward pass needs its own forward pass. Copies take no time. Raises
    ValueError if the stages would wait forever.
    """
    waiting = [[Task(*task) for task in order] for order in orders]  # also takes plain pairs
    free = [0.0] * len(waiting)
    slots: list[Slot] = []
    ends: dict[tuple[int, Task], float] = {}
    while any(waiting):
        ready = [
            stage
            for stage, tasks in enumerate(waiting)
            if tasks and _needs(stage, tasks[0], len(waiting)) <= ends.keys()
        ]
        if not ready:
            stuck = {stage: tasks[0] for stage, tasks in enumerate(waiting) if tasks}
            listed = ", ".join(f"stage {stage} before {kind}{number}" for stage, (kind, number) in stuck.items())
            raise ValueError(f"These orders never end, because no stage can start its next task ({listed}).")
        for stage in ready:
            task = waiting[stage].pop(0)
            start = max([free[stage], *(ends[need] for need in _needs(stage, task, len(waiting)))])
            free[stage] = ends[stage, task] = start + (forward if task.kind == "F" else backward)
            slots.append(Slot(stage, task, start, free[stage]))
    return sorted(slots, key=lambda slot: (slot.start, slot.stage))


def _needs(stage: int, task: Task, stages: int) -> set[tuple[int, Task]]:
    """Return the (stage, task) that must be done before a task, or an empty set if there is none."""
    kind, number = task
    if kind == "F":
        return {(stage - 1, task)} if stage else set()
    return {(stage + 1, task) if stage + 1 < stages else (stage, Task("F", number))}


# ---- the pipeline ----------------------------------------------------------------------------------------------------

Schedule = Callable[[int, int], Sequence[Sequence[Task]]]  # the orders for (stages, micro_batches)
Loss = Callable[[Tensor, Tensor], Tensor]
_Sent = dict[tuple[int, int], tuple[Tensor, torch.Event]]  # by (stage, micro-batch): a tensor and its arrival
_Kept = dict[tuple[int, int], tuple[Tensor, Tensor]]  # a stage's input and output, with the graph between them


def _require_mean_over_samples(loss: Loss, targets: Tensor) -> None:
    """Raise ValueError if the mean of a part does not count as often as it has samples."""
    require_mean(loss)
    ignored = option_of(loss, "ignore_index")  # losses that have it divide by the sum of the weights
    if ignored is not None and option_of(loss, "weight") is not None:
        raise ValueError("The loss weights classes, so micro-batches do not count by their samples. Leave weight out.")
    if targets.is_floating_point() or targets.device.type != "cpu":  # the host would wait for a GPU in every step
        return
    if ignored is not None and bool((targets == ignored).any()):
        raise ValueError(f"The loss leaves out targets of {ignored}, so micro-batches do not count by their samples.")


class Pipeline:
    """Runs training steps through stages on several GPUs, in the order of a schedule.

    stages: one module per GPU, which is moved there. Each takes one tensor and returns one, samples first. schedule:
    `gpipe`, `one_f_one_b`, or any function of (stages, micro_batches) that returns the orders. Raises ValueError unless
    there is one GPU for each stage, or if two GPUs would share a parameter. Raises TypeError for other stages or
    schedules, and RuntimeError if there is no GPU.
    """

    def __init__(self, stages: Sequence[nn.Module], gpus: Sequence[Device], schedule: Schedule = gpipe):
        require_gpu()
        if not (callable(schedule) and all(isinstance(stage, nn.Module) for stage in stages)):
            raise TypeError("Pass modules as the stages, not their classes, and as the schedule a function like gpipe.")
        if len(stages) != len(gpus) or not stages:
            raise ValueError(f"There must be one GPU for each stage, not {len(gpus)} for {len(stages)}.")
        self.gpus, self.schedule = [torch.device("cuda", gpu_index(gpu)) for gpu in gpus], schedule
        self.stages = [stage.to(gpu) for stage, gpu in zip(stages, self.gpus, strict=True)]
        if any(p.device != gpu for part, gpu in zip(self.stages, self.gpus, strict=True) for p in part.parameters()):
            raise ValueError("Stages on different GPUs share a parameter. Put them on one GPU, or give each its own.")
        self.copies = [torch.cuda.Stream(gpu) for gpu in self.gpus]

    def parameters(self) -> list[nn.Parameter]:
        """The parameters of all stages, for an optimizer."""
        return list(nn.ModuleList(self.stages).parameters())  # one that several stages share, once

    def step(self, inputs: Tensor, targets: Tensor, loss: Loss, micro_batches: int) -> Tensor:
        """Run the forward and backward pass of a batch. Add to the gradients and return the loss, on the last GPU.

        inputs and targets: tensors with N samples in the first dimension, one for each micro-batch at least. loss: a
        mean over samples, such as nn.CrossEntropyLoss(), without class weights or ignored targets. What a lambda calls
        is not known, and targets that are on a GPU are not looked at. Each micro-batch is weighted by its size, so loss
        and gradients are those of the whole batch, if the stages treat each sample by itself (no BatchNorm, no
        dropout). A stage after the first must not begin with an in-place layer, because its input is a leaf.

        Raises ValueError for other inputs, targets or losses, and for a schedule that does not give each stage every
        task once, or in which stages wait for each other. Raises TypeError for inputs or targets that are no tensors,
        for a loss that is a class, and for a stage that returns no tensor. Raises RuntimeError if all parameters are
        frozen, or if a stage's output does not depend on its input.
        """
        if not (isinstance(inputs, Tensor) and isinstance(targets, Tensor)):
            raise TypeError(f"Pass two tensors, not a {type(inputs).__name__} and a {type(targets).__name__}.")
        _require_mean_over_samples(loss, targets)
        if not len(inputs) == len(targets) > 0:
            raise ValueError(f"{len(inputs)} inputs and {len(targets)} targets. Pass as many of both, at least one.")
        if not any(parameter.requires_grad for parameter in self.parameters()):
            raise RuntimeError("No stage has a parameter that trains. Unfreeze some with requires_grad_(True).")
        micro_batches = require_integer("micro_batches", micro_batches, most=len(inputs))
        orders = self.schedule(len(self.stages), micro_batches)
        every = sorted((kind, number) for kind in "BF" for number in range(micro_batches))
        if [sorted(order) for order in orders] != [every] * len(self.stages):
            raise ValueError("Each stage must do F and B of every micro-batch once. Look at what the schedule returns.")
        # Copy the whole batch at once, because the host waits for a copy from pageable memory, and so do all GPUs.
        inputs, targets = inputs.to(self.gpus[0]), targets.to(self.gpus[-1])
        step = _Step(self, inputs.tensor_split(micro_batches), targets.tensor_split(micro_batches), loss)
        # Launch the tasks in the order of time, because a GPU runs its tasks in the order in which they are launched.
        for slot in simulate(orders):
            run = step.forward if slot.task.kind == "F" else step.backward
            with name_work(f"{slot.task.kind}{slot.task.micro_batch}"):  # for timelines
                run(slot.stage, slot.task.micro_batch)
        return torch.stack(step.losses).sum()


class _Step:
    """The tensors that a step has sent and that it keeps for the backward pass. Keys are (stage, micro-batch)."""

    def __init__(self, pipeline: Pipeline, inputs: Sequence[Tensor], targets: Sequence[Tensor], loss: Loss):
        self.pipeline, self.inputs, self.targets, self.loss = pipeline, inputs, targets, loss
        self.last, self.samples = len(pipeline.stages) - 1, sum(map(len, targets))
        self.activations: _Sent = {}  # the inputs of a stage, each with the event of its arrival
        self.gradients: _Sent = {}
        self.kept: _Kept = {}
        self.losses: list[Tensor] = []

    def forward(self, stage: int, number: int) -> None:
        # The input from another stage is a leaf, so each stage has a graph of its own.
        x = self._receive(self.activations, stage, number).requires_grad_() if stage else self.inputs[number]
        y = self.pipeline.stages[stage](x)
        if not isinstance(y, Tensor):
            raise TypeError(f"Stage {stage} returned a {type(y).__name__}. Let it return one tensor.")
        if stage < self.last:
            self._send(y.detach(), self.activations, stage, stage + 1, number)
        else:
            targets = self.targets[number]
            y = self.loss(y, targets) * (len(targets) / self.samples)
            self.losses.append(y.detach())
        self.kept[stage, number] = x, y

    def backward(self, stage: int, number: int) -> None:
        x, y = self.kept.pop((stage, number))
        gradient = self._receive(self.gradients, stage, number) if stage < self.last else None
        if y.requires_grad or self.last == 0:  # not so for a frozen stage before others
            y.backward(gradient)
        if stage:
            if x.grad is None:
                raise RuntimeError(
                    f"The output of stage {stage} does not depend on its input. Compute it from the input, without "
                    "detach() and torch.no_grad()."
                )
            self._send(x.grad, self.gradients, stage, stage - 1, number)

    def _send(self, tensor: Tensor, sent: _Sent, source: int, target: int, number: int) -> None:
        """Copy to a neighbour on separate streams. On the current streams, both GPUs would wait for the copy."""
        gpus, copies = self.pipeline.gpus, self.pipeline.copies
        copies[source].wait_stream(torch.cuda.current_stream(gpus[source]))
        with torch.cuda.stream(copies[source]), torch.cuda.stream(copies[target]):
            copy = tensor.to(gpus[target], non_blocking=True)
            sent[target, number] = copy, copies[target].record_event()
        tensor.record_stream(copies[source])  # so that its memory is not reused before it has been sent

    def _receive(self, sent: _Sent, stage: int, number: int) -> Tensor:
        copy, arrival = sent.pop((stage, number))
        stream = torch.cuda.current_stream(self.pipeline.gpus[stage])
        stream.wait_event(arrival)
        copy.record_stream(stream)
        return copy
