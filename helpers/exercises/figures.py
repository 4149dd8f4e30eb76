"""Comparisons of numbers and of bytes, which know the usual mistakes. Checks use them through `compare`."""

from collections.abc import Mapping
from itertools import combinations
from math import isclose, isfinite

from helpers.exercises.core import not_yet, require, show
from helpers.measure import GiB, MiB

UNITS = {"bytes": 1, "KiB": 2**10, "MiB": MiB, "GiB": GiB}
DECIMAL = {"KiB": (10**3, "kB"), "MiB": (10**6, "MB"), "GiB": (10**9, "GB")}


def number(
    answer: object,
    expected: float,
    unit: str = "",
    rel: float = 0.01,
    mistakes: Mapping[float, str] | None = None,
) -> float:
    """`answer` must be `expected` within the share `rel`; `mistakes` maps wrong numbers to what led to them.

    A tensor of one element counts as a number. Returns the answer as a float.
    """
    value = _as_number(answer)
    if isclose(value, expected, rel_tol=rel, abs_tol=1e-12):
        return value
    shown = f"{value:,.6g} {unit}".strip()
    for wrong, because in (mistakes or {}).items():
        if isclose(value, wrong, rel_tol=rel):
            not_yet(shown, because)
    not_yet(shown, _how_far(value, expected))


def memory(
    answer: object,
    expected: float,
    unit: str = "MiB",
    rel: float = 0.02,
    gpus: int = 1,
    parts: Mapping[str, float] | None = None,
    mistakes: Mapping[float, str] | None = None,
) -> float:
    """`answer`, in `unit`, must be `expected` bytes within the share `rel`. Returns the answer in bytes.

    Knows the usual mistakes: another unit, elements taken for bytes, the wrong number of GPUs (give `gpus` if
    the figure is one of so many equal shares), and what was left out or counted twice (give `parts`, which
    together make `expected`: {"the gradients": bytes}). `mistakes` adds others: bytes, and what led to them.
    """
    size = UNITS[unit]
    known: dict[float, str] = {}
    for source in (
        mistakes or {},
        _parts(expected, parts or {}),
        _shares(expected, gpus),
        _units(expected, unit),
    ):
        for wrong, because in source.items():
            known.setdefault(wrong / size, because)
    return size * number(answer, expected / size, unit, rel, known)


def _as_number(answer: object) -> float:
    if isinstance(answer, str):
        not_yet(f"{show(answer)} is text", "a number is asked for: write it without quotes and without a unit")
    if isinstance(answer, bool):
        not_yet(f"{answer} is a truth value", "a number is asked for")
    try:
        value = float(answer)
    except Exception:  # noqa: BLE001 - a learner's __float__ may raise anything
        not_yet(f"{show(answer)} is no number", f"it is of type {type(answer).__name__}")
    require(isfinite(value), f"the answer is {value}", "a finite number is asked for")
    return value


def _how_far(value: float, expected: float) -> str:
    if expected == 0:
        return "it should be zero"
    if value / expected <= 0:
        return "zero it cannot be" if value == 0 else "its sign is wrong"
    ratio = max(value / expected, expected / value)
    much = "more than ten times " if ratio > 10 else "more than twice " if ratio > 2 else ""
    much = much or ("a little " if ratio < 1.1 else "")
    return f"it is {much}too {'large' if abs(value) > abs(expected) else 'small'}"


def _units(expected: float, unit: str) -> dict[float, str]:
    """What the answer would be worth in bytes, had it been given in another unit than `unit`."""
    size = UNITS[unit]
    found = {}
    for name, other in UNITS.items():
        if name != unit:
            found[expected * size / other] = f"those are {name}: give {unit}"
    if unit in DECIMAL:
        power, name = DECIMAL[unit]
        found[expected * size / power] = f"those are {name} of {power:,} bytes: a {unit} has {size:,}"
    found.setdefault(expected / 4, "that counts the elements: each float32 takes four bytes")
    return found


def _shares(expected: float, gpus: int) -> dict[float, str]:
    """Totals and shares that come from another number of GPUs than `gpus`."""
    if gpus < 2:
        return {}
    found = {expected * gpus: f"that is all {gpus} GPUs together: one GPU's share is asked for"}
    for wrong in (gpus - 1, gpus + 1):
        found.setdefault(expected * gpus / wrong, f"that is one of {wrong} shares: there are {gpus} GPUs")
    return found


def _parts(expected: float, parts: Mapping[str, float]) -> dict[float, str]:
    """Totals with one or two parts left out, or one counted twice; parts of one size cannot be told apart."""
    found: dict[float, list[str]] = {}
    for name, part in parts.items():
        found.setdefault(expected - part, []).append(f"{name} were left out")
        found.setdefault(expected + part, []).append(f"{name} were counted twice")
    for one, two in combinations(parts, 2):
        found.setdefault(expected - parts[one] - parts[two], []).append(f"{one} and {two} were left out")
    return {total: "it looks as if " + ", or ".join(whys) for total, whys in found.items() if total > 0}
