"""How far each case is off by rules that were fitted without it: the fitted part of cuDNN's workspaces.

    python -m benchmarks.memory --leave-one-out

The fitted limits are in features/conv/figures.toml and features/rnn/figures.toml. Each case that uses convolutions or a
recurrent net is predicted with limits that the other cases choose: for each limit the value, fitted or alternative,
with the smallest sum of errors. Where an alternative is as good as the fitted value, the others do not
know the limit, and the alternative is taken. Alternatives stand in their order, the rule's absence first. What is
predicted is the case's peak, each case on a GPU of its own, with shapes only.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from virtual_gpus.features.conv import workspaces as conv
from virtual_gpus.features.rnn import sizes as rnn

from benchmarks.reference import compare, measure, second
from benchmarks.reference.cases import CASES
from benchmarks.reference.operators import OPERATORS

NEVER, ALWAYS = 0, 2**62
# Module -> limit -> its alternatives.
ALTERNATIVES: dict[Any, dict[str, tuple[int, ...]]] = {
    conv: {
        "shortest_part": (128, 512),
        "shortest_sum": (256, 1024),
        "deep_sum": (ALWAYS, 1024),
        "winograd_pixels": (NEVER, 16_384),
        "winograd_products": (ALWAYS, 2**24),
        "fourier_side": (NEVER,),
        "few_pixels": (NEVER, 16),
        "largest_sums": (ALWAYS, 32 << 20),
    },
    rnn: {"aligned": (1, 128), "dropout": (0,), "gru_inputs": (1,)},
}
USES_FITTED = ("conv", "lstm", "gru", "rnn")
_DIGITS = 6  # sums of errors that agree so far are equal


@dataclass(frozen=True)
class Case:
    """A measured training step or operator. family: the module whose limits it depends on."""

    name: str
    family: Any
    measured: dict
    build: Any
    is_step: bool

    def error(self) -> float:
        """The error of the peak that is farthest off, with its sign, on a fresh virtual GPU."""
        torch_version = measure.load("steps.json")["meta"]["torch"]
        act = partial(measure.training_steps if self.is_step else measure.operator_rounds, self.build)
        modelled = measure.on_virtual_gpu(act, torch_version)
        if self.is_step:
            return max((e["peak_allocated"] for e in compare.step_errors(self.measured, modelled)), key=abs)
        return max(compare.operator_errors(self.measured, modelled).values(), key=abs)


def cases() -> list[Case]:
    """All measured cases with convolutions or recurrent nets, of both sets."""
    found = []
    for folder, builds in (("", CASES), ("second/", second.STEPS)):
        measured = measure.load(f"{folder}steps.json")["cases"]
        for name, build in builds.items():
            family = rnn if name.startswith(USES_FITTED[1:]) else conv
            if name.startswith((*USES_FITTED, "resnet", "mobilenet", "densenet")):
                found.append(Case(name, family, measured[name], build, True))
    for folder, operators in (("", OPERATORS), ("second/", second.OPERATORS)):
        measured = measure.load(f"{folder}operator_memory.json")
        for name, operator in operators.items():
            if name.startswith(USES_FITTED):
                family = conv if name.startswith("conv") else rnn
                found.append(Case(name, family, measured[name], operator, False))
    return found


@contextmanager
def limits(module: Any, **changed: int) -> Iterator[None]:
    """Other limits than the fitted ones for a while."""
    kept = module.FITTED
    module.FITTED = kept | changed
    try:
        yield
    finally:
        module.FITTED = kept


def errors(of: list[Case], module: Any, **changed: int) -> dict[str, float]:
    """Case -> error with these limits, for the cases that depend on `module`."""
    with limits(module, **changed):
        return {case.name: case.error() for case in of if case.family is module}


def total(found: dict[str, float], without: str) -> float:
    """The sum of all errors but one, signs dropped."""
    return round(sum(abs(error) for name, error in found.items() if name != without), _DIGITS)


def leave_one_out(of: list[Case]) -> Iterator[tuple[str, float, float, list[str]]]:
    """(case, its error by the rules as they are, its error by rules without it, the limits that only it knows)."""
    for module, table in ALTERNATIVES.items():
        mine = [case for case in of if case.family is module]
        fitted = errors(mine, module)
        tried = {limit: {value: errors(mine, module, **{limit: value}) for value in table[limit]} for limit in table}
        for case in mine:
            name, chosen, known = case.name, {}, []
            for limit, found in tried.items():
                best = min(found, key=lambda value, name=name, found=found: total(found[value], name))
                if total(found[best], name) <= total(fitted, name):
                    chosen[limit] = best
                    known += [limit] * (found[best][name] != fitted[name])
            yield name, fitted[name], errors([case], module, **chosen)[name], known


def table() -> list[str]:
    """One line per case, the largest error first."""
    rows = sorted(leave_one_out(cases()), key=lambda row: -abs(row[2]))
    lines = [f"{'error of the peak':24} as fitted   without the case   limits that only this case knows"]
    for name, fitted, without, known in rows:
        lines.append(f"{name:24} {100 * fitted:+8.2f} %     {100 * without:+8.2f} %        {', '.join(known)}".rstrip())
    sizes = sorted(abs(without) for _, _, without, _ in rows)
    within = sum(size <= compare.OPERATOR_LIMIT for size in sizes)
    return [
        *lines,
        "",
        f"Without the case: {within} of {len(sizes)} within 3 %, median {100 * sizes[len(sizes) // 2]:.2f} %",
    ]
