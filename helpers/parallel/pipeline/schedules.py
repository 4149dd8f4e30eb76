"""Orders in which the stages of a pipeline work through micro-batches, and the time that they would take.

    orders = one_f_one_b(stages=4, micro_batches=8)     # orders[stage] = [Task("F", 0), Task("F", 1), ...]
    slots = simulate(orders)                            # who works when, if "F" takes 1 and "B" 2 units of time
    idle_share(slots), bubble(4, 8)                     # 3/11 each
    most_kept(orders[0])                                # micro-batches whose activations stage 0 holds at once

A schedule is a list of orders, one per stage, and an order a list of tasks. Nothing here needs a GPU. Sources: GPipe,
arXiv 1811.06965; one forward one backward ("1F1B"), as in PipeDream-Flush, arXiv 2006.09503. Lesson 05 writes both by
hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["Slot", "Task", "bubble", "gpipe", "idle_share", "most_kept", "one_f_one_b", "simulate"]


class Task(NamedTuple):
    """The forward ("F") or backward ("B") pass of one micro-batch through one stage."""

    kind: str
    micro_batch: int


class Slot(NamedTuple):
    """A task in time: when it starts and ends on its stage, in units."""

    stage: int
    task: Task
    start: float
    end: float


def gpipe(stages: int, micro_batches: int) -> list[list[Task]]:
    """All forward passes, then all backward passes, the last micro-batch first (as autograd would)."""
    _check(stages, micro_batches)
    forward = [Task("F", number) for number in range(micro_batches)]
    backward = [Task("B", number) for number in reversed(range(micro_batches))]
    return [forward + backward for _ in range(stages)]


def one_f_one_b(stages: int, micro_batches: int) -> list[list[Task]]:
    """As few forward passes as fill the pipeline, then one forward, one backward in turns, then the rest."""
    _check(stages, micro_batches)
    return [_one_f_one_b(min(stages - stage - 1, micro_batches), micro_batches) for stage in range(stages)]


def _one_f_one_b(ahead: int, micro_batches: int) -> list[Task]:
    """`ahead`: forward passes before the turns begin."""
    order = [Task("F", number) for number in range(ahead)]
    for number in range(micro_batches - ahead):
        order += [Task("F", ahead + number), Task("B", number)]
    return order + [Task("B", number) for number in range(micro_batches - ahead, micro_batches)]


def bubble(stages: int, micro_batches: int) -> float:
    """The share of time that a GPU is idle for want of work, (p - 1) / (m + p - 1), with equally long stages."""
    _check(stages, micro_batches)
    return (stages - 1) / (micro_batches + stages - 1)


def most_kept(order: Sequence[Task]) -> int:
    """How many micro-batches a stage has gone forward with and not yet backward, at most."""
    kept = most = 0
    for kind, _ in order:
        kept += 1 if kind == "F" else -1
        most = max(most, kept)
    return most


def simulate(orders: Sequence[Sequence[Task]], forward: float = 1.0, backward: float = 2.0) -> list[Slot]:
    """The tasks in time, sorted by their start: each starts when its stage is free and what it needs is there.

    A forward pass needs that of the stage before, a backward pass that of the stage behind (the last stage: its own
    forward pass). Sending takes no time. Raises ValueError for orders in which the stages wait for each other for ever.
    """
    orders = [[Task(*task) for task in order] for order in orders]  # plain pairs will do
    places, free, ends, slots = [0] * len(orders), [0.0] * len(orders), {}, []
    while any(place < len(order) for place, order in zip(places, orders, strict=True)):
        ready = [stage for stage, order in enumerate(orders) if places[stage] < len(order)
                 and all(need in ends for need in _needs(stage, order[places[stage]], len(orders)))]  # fmt: skip
        if not ready:
            stuck = {stage: order[place] for stage, (place, order) in enumerate(zip(places, orders, strict=True))
                     if place < len(order)}  # fmt: skip
            said = ", ".join(f"stage {stage} before {task.kind}{task.micro_batch}" for stage, task in stuck.items())
            raise ValueError(f"these orders never end: all wait for each other ({said})")
        for stage in ready:
            task = orders[stage][places[stage]]
            start = max([free[stage], *(ends[need] for need in _needs(stage, task, len(orders)))])
            free[stage] = ends[stage, task] = start + (forward if task.kind == "F" else backward)
            slots.append(Slot(stage, task, start, free[stage]))
            places[stage] += 1
    return sorted(slots, key=lambda slot: (slot.start, slot.stage))


def _needs(stage: int, task: Task, stages: int) -> list[tuple[int, Task]]:
    """What must be done before a task."""
    kind, number = task
    if kind == "F":
        return [(stage - 1, Task("F", number))] if stage else []
    return [(stage + 1, Task("B", number))] if stage + 1 < stages else [(stage, Task("F", number))]


def idle_share(slots: Sequence[Slot]) -> float:
    """The share of the time, from the first start to the last end, in which a stage is idle; the mean over stages."""
    stages = 1 + max(slot.stage for slot in slots)
    whole = max(slot.end for slot in slots) - min(slot.start for slot in slots)
    return 1 - sum(slot.end - slot.start for slot in slots) / (stages * whole)


def _check(stages: int, micro_batches: int) -> None:
    for name, number in (("stages", stages), ("micro_batches", micro_batches)):
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise ValueError(f"{name} is a whole number of at least 1, not {number!r}")
