"""How often a limit set to the estimate runs out of memory: `python -m benchmarks.memory --margin`.

For each measured job: would a GPU with `estimate x (1 + margin)` bytes for PyTorch have been enough? The context comes
on top. What a job needs lies between two measured figures. Its peak of allocated memory must fit. If its peak of
reserved memory fits too, the caching allocator never has to give anything back. Estimates are of fresh virtual GPUs.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from benchmarks import leave_one_out
from benchmarks.reference import measure, second
from benchmarks.reference.cases import CASES

MARGINS = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)


def enough(errors: Iterable[float], margin: float) -> str:
    """'11 of 12': the jobs whose real figure is at most the estimate with this margin. errors: estimate / real - 1."""
    fits = [1 <= (1 + error) * (1 + margin) for error in errors]
    return f"{sum(fits)} of {len(fits)}"


def of_steps() -> dict[str, list[float]]:
    """Figure -> estimate / real - 1 of its highest value in each training step of the first and second set."""
    errors: dict[str, list[float]] = {"peak_reserved": [], "peak_allocated": []}
    for folder, builds in (("", CASES), ("second/", second.STEPS)):
        measured = measure.load(f"{folder}steps.json")
        for name, build in builds.items():
            modelled = measure.on_virtual_gpu(partial(measure.training_steps, build), measured["meta"]["torch"])
            for figure, found in errors.items():
                of = [max(step[figure] for step in case["memory"]) for case in (modelled, measured["cases"][name])]
                found.append(of[0] / of[1] - 1)
    return errors


def table() -> list[str]:
    """One line per margin."""
    steps, unseen = of_steps(), leave_one_out.leave_one_out(leave_one_out.cases())
    columns = {
        "steps, reserved": steps["peak_reserved"],
        "steps, allocated": steps["peak_allocated"],
        "cases by rules fitted without them, allocated": [without for _, _, without, _ in unseen],
    }
    lines = ["Jobs for which a limit of the estimate and this margin is enough", "", "margin  " + "   ".join(columns)]
    for margin in MARGINS:
        cells = (f"{enough(errors, margin):>{len(title)}}" for title, errors in columns.items())
        lines.append(f"{100 * margin:4.0f} %  " + "   ".join(cells))
    return lines
