"""The tables of `python -m benchmarks.memory`: lines of text, sizes in MiB, errors in % of the real figure."""

from __future__ import annotations

from benchmarks.reference import compare
from benchmarks.reference.compare import GOAL, KNOWN_DIFFERENCES, OPERATOR_FIGURES, OPERATOR_LIMIT, OPERATORS_WITHIN
from benchmarks.reference.measure import FIGURES

MIB = 1 << 20


def mib(nbytes: float) -> str:
    """'1234.56', ten wide."""
    return f"{nbytes / MIB:10.2f}"


def percent(part: float) -> str:
    """'  +1.23 %': ten wide."""
    return f"{100 * part:+8.2f} %"


def peak(case: dict) -> int:
    """The highest peak of a case's steps, in bytes."""
    return max(step["peak_allocated"] for step in case["memory"])


def peaks(real: dict, virtual: dict, tracker: dict) -> list[str]:
    """One line per case: its highest peak by everybody."""
    width = max(len(name) for name in real)
    lines = [
        "Peak of allocated memory in the first three steps",
        "",
        f"{'':{width}}  real, MiB   virtual, MiB      error" + "   MemTracker, MiB      error" * bool(tracker),
    ]
    for name, measured in real.items():
        highest, modelled = peak(measured), peak(virtual[name])
        line = f"{name:{width}} {mib(highest)}     {mib(modelled)} {percent(modelled / highest - 1)}"
        if name in tracker:
            line += f"        {mib(tracker[name])} {percent(tracker[name] / highest - 1)}"
        lines.append(line)
    return lines


def steps(real: dict, virtual: dict) -> list[str]:
    """Per case a line for each step: real, virtual and error of all four figures."""
    heading = "".join(f"{name.replace('_', ' ') + ', MiB':^30}" for name in FIGURES)
    lines = ["Every step", "", f"{'':6}{heading}".rstrip(), "step  " + "      real   virtual     error" * len(FIGURES)]
    for name, measured in real.items():
        lines.append(name)
        errors = compare.step_errors(measured, virtual[name])
        for number, error in enumerate(errors):
            pairs = [(measured["memory"][number][f], virtual[name]["memory"][number][f], error[f]) for f in FIGURES]
            cells = "".join(f"{mib(a)}{mib(b)}{percent(e)}" for a, b, e in pairs)
            lines.append(f"{number + 1:4}  {cells}")
    return lines


def summary(real: dict, virtual: dict, tracker: dict) -> list[str]:
    """The largest and the median error of each figure beside the goal; MemTracker's range."""
    errors = [step for name in real for step in compare.step_errors(real[name], virtual[name])]
    lines = [f"{'Error':16}   largest      goal    median      goal"]
    for name, goal in GOAL.items():
        found = compare.spread([error[name] for error in errors])
        reached = found.largest <= goal.largest and found.median <= goal.median
        cells = "".join(f"{100 * part:8.2f} %" for part in (found.largest, goal.largest, found.median, goal.median))
        lines.append(f"{name.replace('_', ' '):16}{cells}   {'reached' if reached else 'missed'}")
    if tracker:
        off = sorted(tracker[name] / peak(real[name]) - 1 for name in tracker)
        lines.append(f"MemTracker's peaks: {100 * off[0]:+.0f} % to {100 * off[-1]:+.0f} %")
    return lines


def operators(real: dict, virtual: dict) -> list[str]:
    """One line per operator: its larger peak, and the worst errors as parts of it."""
    width = max(len(name) for name in real)
    titles = ("kept", "forward peak", "after backward", "backward peak", "at the end")
    heading = "".join(f"{title:>16}" for title in titles)
    lines = [f"{'Errors in % of the larger peak':{width}}", "", f"{'':{width}}  peak, MiB{heading}"]
    within = 0
    for name, measured in real.items():
        errors = compare.operator_errors(measured, virtual[name])
        good = compare.worst(errors) <= OPERATOR_LIMIT
        within += good
        highest = max(max(step["peak_forward"], step["peak_backward"]) for step in measured["steps"])
        cells = "".join(f"{percent(errors[figure]):>16}" for figure in OPERATOR_FIGURES)
        remark = "" if good else f"   off: {KNOWN_DIFFERENCES.get(name, 'not explained')}"
        lines.append(f"{name:{width}} {mib(highest)}{cells}{remark}")
    share = f"{within} of {len(real)} operators are within {100 * OPERATOR_LIMIT:.0f} % of their larger peak"
    return [*lines, "", f"{share} (goal: {100 * OPERATORS_WITHIN:.0f} %)."]
