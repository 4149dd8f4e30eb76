"""Comparisons for checks: each is quiet when the answer is right, else says "not yet" and what is wrong.

They do not give the answer away: they say how far off it is, and name the mistake where a known one was made.
"""

from collections.abc import Iterable, Mapping
from math import isclose, isfinite

import torch
from torch import Tensor, nn

from helpers.exercises.core import NotYet, require, show
from helpers.measure import GiB, MiB

UNITS = {"bytes": 1, "MiB": MiB, "GiB": GiB, "MB": 10**6, "GB": 10**9}


def as_number(answer: object) -> float:
    """`answer` as a float; a tensor of one element counts as a number, text and truth values do not."""
    if isinstance(answer, str):
        raise NotYet(f"{show(answer)} is text", "a number is asked for: write it without quotes and without a unit")
    if isinstance(answer, bool):
        raise NotYet(f"{answer} is a truth value", "a number is asked for")
    try:
        value = float(answer.detach() if isinstance(answer, Tensor) else answer)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise NotYet(f"{show(answer)} is not a number", f"it is of type {type(answer).__name__}") from error
    require(isfinite(value), f"the answer is {value}", "a finite number is asked for")
    return value


def number(
    answer: object,
    expected: float,
    unit: str = "",
    rel: float = 0.01,
    mistakes: Mapping[float, str] | None = None,
) -> None:
    """`answer` must be `expected` (above 0) within the share `rel`; `mistakes` maps wrong numbers to what led there."""
    value = as_number(answer)
    if isclose(value, expected, rel_tol=rel):
        return
    why = "it should be more than 0"
    if value > 0:
        much = "more than twice " if max(value / expected, expected / value) > 2 else ""
        why = f"it is {much}too {'large' if value > expected else 'small'}"
    nearest = min(mistakes or {}, key=lambda wrong: abs(wrong - value), default=expected)
    if isclose(value, nearest, rel_tol=rel):
        why = mistakes[nearest]
    shown = f"{value:,.0f}" if abs(value) >= 1e5 else f"{value:,.6g}"
    raise NotYet(f"{shown} {unit}".strip(), why)


def memory(
    answer: object,
    expected: float,
    unit: str,
    rel: float = 0.02,
    mistakes: Mapping[float, str] | None = None,
    what: str = "",
) -> None:
    """`answer`, in `unit`, must be `expected` bytes within the share `rel`; `what` stands behind it in the sentence.

    Knows another unit and elements taken for bytes. `mistakes` adds others: bytes, and what led to them.
    """
    size = UNITS[unit]
    known = {wrong / size: because for wrong, because in (mistakes or {}).items()}
    for name, other in UNITS.items():
        if name != unit:
            known.setdefault(expected / other, f"those are {name}: give {unit}. A {unit} has {size:,} bytes")
    known.setdefault(expected / 4 / size, "that counts the elements: each float32 takes four bytes")
    number(answer, expected / size, f"{unit} {what}".strip(), rel, known)


def device(answer: Tensor | nn.Module, expected: torch.device) -> None:
    """`answer` must be on the device `expected`, a module with all its parameters and buffers."""
    tensors = [answer] if isinstance(answer, Tensor) else [*answer.parameters(), *answer.buffers()]
    for each in tensors:
        require(each.device == expected, f"the device is {each.device}", f"it should be {expected}")


def tensor(answer: object, expected: Tensor, rel: float = 1e-4, absolute: float = 1e-6) -> None:
    """`answer` must have the shape and, within rounding, the values of `expected`; on any device."""
    if not isinstance(answer, Tensor):
        raise NotYet(f"{show(answer)} is not a tensor", "a tensor is asked for")
    why = f"{tuple(expected.shape)} is asked for"
    require(answer.shape == expected.shape, f"the shape is {tuple(answer.shape)}", why)
    found, right = answer.detach().cpu().to(torch.double), expected.detach().cpu().to(torch.double)
    if torch.allclose(found, right, rtol=rel, atol=absolute):
        return
    require(bool(found.isfinite().all()), "some values are nan or infinite", "all should be finite")
    factor = float((found * right).sum() / (right * right).sum())
    if torch.allclose(found, factor * right, rtol=rel, atol=absolute):
        why = "one factor for all is often a sum taken for a mean, or a mean for a sum"
        raise NotYet(f"every value is {factor:.3g} times what it should be", why)
    wrong = (~torch.isclose(found, right, rtol=rel, atol=absolute)).nonzero()
    first = tuple(wrong[0].tolist())
    both = f"at {list(first)} there is {found[first]:.4g}, and {right[first]:.4g} is right"
    raise NotYet(f"{len(wrong)} of {right.numel()} values differ", both)


def names(answer: object, expected: Iterable[str], what: str) -> None:
    """`answer` must be a dict with `what` for each of the keys in `expected`, and no others."""
    whole = isinstance(answer, Mapping) and set(answer) == set(expected)
    require(whole, show(answer), f"a dict with {what} for each of {', '.join(expected)} is asked for")
