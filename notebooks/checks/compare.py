"""Comparisons for checks: each is quiet when the answer is right, else says "Not yet" and what is wrong.

They do not give the answer away: they say how far off it is, and name the mistake where a known one was made.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import isclose, isfinite

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector

from helpers.measure import GiB, MiB
from notebooks.checks.core import NotYet, require, show

Mistakes = Mapping[float, str] | None
Tensors = Tensor | Iterable[Tensor]
UNITS = {"bytes": 1, "MiB": MiB, "GiB": GiB, "MB": 10**6, "GB": 10**9}


def as_number(answer: object) -> float:
    """`answer` as a float; a tensor or array of one element counts as a number, text and truth values do not."""
    if type(answer).__module__ == "numpy" and answer.size == 1:
        answer = answer.item()
    if isinstance(answer, str):
        raise NotYet(f"{show(answer)} is text. Write a number, without quotes and without a unit.")
    if isinstance(answer, bool):
        raise NotYet(f"{answer} is a truth value. Give a number.")
    try:
        value = float(answer.detach() if isinstance(answer, Tensor) else answer)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise NotYet(f"{show(answer)} is of type {type(answer).__name__}. Give a number.") from error
    require(isfinite(value), f"The answer is {value}. Give a finite number.")
    return value


def number(
    answer: object, expected: float, unit: str = "", rel: float = 0.01, mistakes: Mistakes = None, case: str = ""
) -> None:
    """`answer` must be `expected` (above 0) within the share `rel`.

    `mistakes` maps wrong numbers to what follows them in the sentence, such as "is the memory of one GPU. Add up all.";
    `case` stands before the number, such as "With 30,000 words, ".
    """
    value = as_number(answer)
    if isclose(value, expected, rel_tol=rel):
        return
    fault = "is too large." if value > expected else "is too small."
    if value <= 0:
        fault = "is wrong: it should be more than 0."
    elif value > 2 * expected:
        fault = "is more than twice the right value."
    elif value < expected / 2:
        fault = "is less than half the right value."
    nearest = min(mistakes or {}, key=lambda wrong: abs(wrong - value), default=expected)
    if isclose(value, nearest, rel_tol=rel / 2):
        fault = mistakes[nearest]
    shown = f"{value:,.0f}" if abs(value) >= 1e5 else f"{value:,.6g}"
    raise NotYet(" ".join(f"{case}{shown} {unit} {fault}".split()))


def memory(
    answer: object, expected: float, unit: str, rel: float = 0.02, mistakes: Mistakes = None, case: str = ""
) -> None:
    """`answer`, in `unit`, must be `expected` bytes within the share `rel`.

    Knows another unit and elements taken for bytes. `mistakes` adds others, by bytes; `case` is that of `number`.
    """
    size = UNITS[unit]
    known = {wrong / size: fault for wrong, fault in (mistakes or {}).items()}
    for name, other in UNITS.items():
        if name != unit:
            known.setdefault(expected / other, f"would be right in {name}. Give {unit}: 1 {unit} is {size:,} bytes.")
    known.setdefault(expected / 4 / size, "counts each element as one byte. A float32 takes four bytes.")
    number(answer, expected / size, unit, rel, known, case)


def largest(answer: object, step: int, fits: Callable[[int], bool], why: str) -> None:
    """`answer` must be the largest number of sequences, in steps of `step`, for which `fits(number)` holds."""
    value = as_number(answer)
    shown = f"{value:,.10g} sequences"
    require(value >= step and value % step == 0, f"{shown} is not a multiple of {step}.")
    require(value <= 1000, f"No RTX 4090 holds {shown}.")
    require(fits(int(value)), f"With {shown}, a GPU runs out of memory.", why)
    require(not fits(int(value) + step), f"{shown} are not the most: {step} more still fit.")


def device(answer: Tensor | nn.Module, expected: torch.device) -> None:
    """`answer` must be on the device `expected`, a module with all its parameters and buffers."""
    tensors = [answer] if isinstance(answer, Tensor) else [*answer.parameters(), *answer.buffers()]
    for each in tensors:
        require(each.device == expected, f"The device is {each.device}, and it should be {expected}.")


def tensor(answer: object, expected: Tensor, rel: float = 1e-4, absolute: float = 1e-6) -> None:
    """`answer` must have the shape and, within rounding, the values of `expected`; on any device."""
    if not isinstance(answer, Tensor):
        raise NotYet(f"{show(answer)} is not a tensor. Return a tensor.")
    shapes = f"The shape is {tuple(answer.shape)}, and it should be {tuple(expected.shape)}."
    require(answer.shape == expected.shape, shapes)
    found, right = answer.detach().cpu().to(torch.double), expected.detach().cpu().to(torch.double)
    if torch.allclose(found, right, rtol=rel, atol=absolute):
        return
    require(bool(found.isfinite().all()), "Some values are nan or infinite. All should be finite.")
    require(bool(found.any()), "All values are 0.")
    factor = float((found * right).sum() / (right * right).sum())
    if abs(factor - 1) > 0.005 and torch.allclose(found, factor * right, rtol=rel, atol=absolute):
        often = "One factor for all values often means a sum in place of a mean, or a mean in place of a sum."
        raise NotYet(f"Every value is {factor:.3g} times what it should be.", often)
    wrong = (~torch.isclose(found, right, rtol=rel, atol=absolute)).nonzero()
    first = tuple(wrong[0].tolist())
    digits = 4 if f"{found[first]:.4g}" != f"{right[first]:.4g}" else 9
    both = f"At {list(first)}, yours is {found[first]:.{digits}g} and the right one is {right[first]:.{digits}g}."
    raise NotYet(f"{len(wrong)} of {right.numel()} values are wrong.", both)


def alike(
    found: Tensors, right: Tensors, what: str, why: str, mistakes: Mapping[str, Tensors] | None = None, rel=1e-3
) -> None:
    """`found` must be what the stored solution makes of the same inputs, `right`, within the share `rel`.

    `what` begins the sentence, such as "The gradient is". The words of that of `mistakes` which is alike follow, or
    else `why`.
    """
    values, expected = _flat(found), _flat(right)
    sizes = f"{what} {len(values):,} numbers, and should be {len(expected):,}."
    require(len(values) == len(expected), sizes, why)
    off = float((values - expected).norm() / expected.norm().clamp(min=1e-12))
    if off < rel:
        return
    size = f"off by {off:.{1 if off > 1e-3 else 4}%}" if isfinite(off) else "nan or infinite"
    named = (words for words, wrong in (mistakes or {}).items() if torch.allclose(values, _flat(wrong), rel, rel / 100))
    raise NotYet(f"{what} {size}.", next(named, why))


def _flat(tensors: Tensors) -> Tensor:
    each = [tensors] if isinstance(tensors, Tensor) else tensors
    return torch.cat([tensor.detach().flatten().cpu().double() for tensor in each])


def gradients(
    found: Tensor, right: Tensor, leaves: Mapping[str, tuple[Tensor, Tensor]], why: str, case: str = ""
) -> None:
    """The gradients of the output `found` must be those of the stored solution's output, `right`.

    `leaves` has, by name, pairs of what the two came from. `why` follows what is wrong, `case` is that of `number`.
    """
    the = f"{case}the" if case else "The"
    require(found.requires_grad, f"{the} output has no graph.", why)
    rising = torch.linspace(1, 2, right.numel()).reshape(right.shape)  # a gradient of its own for each value
    yours, own = zip(*leaves.values(), strict=True)
    reached = torch.autograd.grad(found, yours, rising.to(found).reshape(found.shape), allow_unused=True)
    wanted = torch.autograd.grad(right, own, rising.to(right))
    for name, gradient, expected in zip(leaves, reached, wanted, strict=True):
        require(gradient is not None, f"{the} gradient does not reach {name}.", why)
        alike(gradient, expected, f"{the} gradient of {name} is", why)


def accumulated(net: nn.Module, batches: Sequence[tuple[Tensor, Tensor]]) -> None:
    """The gradients in `net` must be those of the mean cross entropy over all of `batches`, pairs (x, labels).

    Where they are a sum of the batches' own gradients, the sentence tells how much each batch counts in it.
    """
    parameters = list(net.parameters())
    left = all(parameter.grad is not None for parameter in parameters)
    require(left, "Some parameters have no gradient. Was backward() called, and were the gradients kept?")
    found = parameters_to_vector([parameter.grad for parameter in parameters]).cpu().double()
    parts = [torch.autograd.grad(cross_entropy(net(x), labels), parameters) for x, labels in batches]
    each = torch.stack([parameters_to_vector(part).cpu().double() for part in parts], dim=1)
    sizes = [len(labels) for _, labels in batches]
    right = torch.tensor(sizes).double() / sum(sizes)
    counts = torch.linalg.lstsq(each, found[:, None]).solution[:, 0]
    if torch.allclose(each @ counts, found, rtol=1e-3, atol=1e-5) and not torch.allclose(counts, right, rtol=1e-3):
        shown = [round(count, 3) + 0.0 for count in counts.tolist()]
        what = f"The gradients of the micro-batches of {sizes} samples count {shown}."
        raise NotYet(what, "Every sample must count the same, and all of them together 1.")
    tensor(found, each @ right, rel=1e-3, absolute=1e-5)


def names(answer: object, expected: Iterable[str], what: str) -> None:
    """`answer` must be a dict with `what` for each of the keys in `expected`, and no others."""
    whole = isinstance(answer, Mapping) and set(answer) == set(expected)
    require(whole, f"The answer is {show(answer)}. Give a dict with {what} for each of {', '.join(expected)}.")
