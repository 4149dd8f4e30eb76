"""Comparisons for checks: each is quiet when the answer is right, else says "not yet" and what is wrong.

They do not give the answer away: they say how far off it is, and name the mistake where a known one was made.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from helpers.exercises.core import call, not_yet, require, show
from helpers.exercises.figures import memory, number

__all__ = ["choice", "device", "devices", "error", "memory", "number", "same_function", "shape", "tensor"]


def device(answer: object, expected: object) -> None:
    """`answer` (a tensor, a module, a torch.device or its name) must be on, or be, the device `expected`."""
    found, right = _as_device(answer), torch.device(expected)
    if found == right:
        return
    if found.type == "cuda" and found.index is None:
        not_yet("the device is cuda", "without a number it means whichever GPU is current: give it, as in cuda:1")
    if found.type != right.type:
        place = "still on the CPU" if found.type == "cpu" else "not on the CPU"
        not_yet(f"the device is {found}", f"that is {place}")
    not_yet(f"the device is {found}", "that is another GPU than the one asked for")


def devices(answer: object, expected: Sequence[object]) -> None:
    """`answer`, a list of devices or of tensors, must match `expected` place by place."""
    if isinstance(answer, (str, torch.Tensor, nn.Module)) or not isinstance(answer, Sequence):
        not_yet(f"{show(answer)} is one thing", "a list is asked for, one entry per device")
    found, right = [_as_device(each) for each in answer], [torch.device(each) for each in expected]
    if found == right:
        return
    shown = "[" + ", ".join(map(str, found)) + "]"
    if len(found) != len(right):
        not_yet(shown, f"that is {len(found)} in number, and {len(right)} are asked for")
    if sorted(map(str, found)) == sorted(map(str, right)):
        not_yet(shown, "the devices are right but their order is not")
    first = next(place for place, pair in enumerate(zip(found, right, strict=True)) if pair[0] != pair[1])
    not_yet(shown, f"entry {first} is on another device than asked for")


def shape(answer: object, expected: Sequence[int]) -> None:
    """`answer`, a tensor or a shape, must have the shape `expected`."""
    found = getattr(answer, "shape", answer)
    try:
        found = tuple(int(size) for size in found)
    except (TypeError, ValueError):
        not_yet(f"{show(answer)} has no shape", "a tensor or a shape, as in (64, 10), is asked for")
    right = tuple(expected)
    if found == right:
        return
    if len(found) != len(right):
        not_yet(f"the shape is {found}", f"it has {len(found)} dimension(s), and {len(right)} are asked for")
    if sorted(found) == sorted(right):
        not_yet(f"the shape is {found}", "the sizes are right but their order is not")
    wrong = [place for place, pair in enumerate(zip(found, right, strict=True)) if pair[0] != pair[1]]
    not_yet(f"the shape is {found}", f"the size of dimension {wrong[0]} is not right")


def tensor(answer: object, expected: torch.Tensor, rel: float = 1e-4, absolute: float = 1e-6) -> None:
    """`answer` must have the shape and, within rounding, the values of `expected`; on any device."""
    if not isinstance(answer, torch.Tensor):
        not_yet(f"{show(answer)} is no tensor", "a tensor is asked for")
    shape(answer, expected.shape)
    found, right = answer.detach().cpu().to(torch.double), expected.detach().cpu().to(torch.double)
    if torch.allclose(found, right, rtol=rel, atol=absolute):
        return
    require(bool(found.isfinite().all()), "there are values that are nan or infinite", "the sum went wrong before")
    factor = float((found * right).sum() / (right * right).sum())
    if torch.allclose(found, factor * right, rtol=rel, atol=absolute):
        why = "one factor for all is often a sum taken for a mean, or a mean for a sum"
        not_yet(f"every value is {factor:.3g} times what it should be", why)
    wrong = int((~torch.isclose(found, right, rtol=rel, atol=absolute)).sum())
    gap = float((found - right).abs().max())
    not_yet(
        f"{wrong} of {right.numel()} values differ",
        f"the largest gap is {gap:.2g}, more than rounding explains",
    )


def choice(answer: object, right: str, reasons: Mapping[str, str]) -> None:
    """`answer` must be `right`; `reasons` holds, for each of the other options, why it is not the answer."""
    options = {option.lower(): option for option in (right, *reasons)}
    told = answer.strip().lower() if isinstance(answer, str) else None
    if told not in options:
        not_yet(f"{show(answer)} is none of the options", f"they are {', '.join(sorted(options.values()))}")
    if options[told] != right:
        not_yet(f"{options[told]!r} is not the answer", reasons[options[told]])


def error(fn: object, kind: type[Exception], text: str = "") -> str:
    """Calling `fn()` must raise `kind` with `text` in its message. Returns the message."""
    require(callable(fn), f"{show(fn)} cannot be called", "the check needs a function that it can call")
    try:
        fn()
    except kind as found:
        require(text in str(found), f"the error says {show(str(found))}", "another error is asked for")
        return str(found)
    not_yet("your function ended without an error", f"it should meet a {kind.__name__}")


def same_function(answer: object, right: Callable, inputs: Sequence[tuple], rel: float = 1e-4) -> None:
    """The learner's function must give the same tensors or numbers as `right` on every tuple of `inputs`."""
    for args in inputs:
        expected, found = right(*args), call(answer, *args)
        if isinstance(expected, torch.Tensor):
            tensor(found, expected, rel)
        else:
            number(found, expected, rel=rel)


def _as_device(answer: object) -> torch.device:
    if isinstance(answer, nn.Module):
        found = {each.device for each in (*answer.parameters(), *answer.buffers())}
        require(bool(found), "the module holds no tensor", "it has neither parameters nor buffers")
        require(len(found) == 1, f"the module lies on {len(found)} devices", "all of it should be on one")
        return found.pop()
    if isinstance(answer, torch.Tensor):
        return answer.device
    try:
        return torch.device("cuda", answer) if isinstance(answer, int) else torch.device(answer)
    except (TypeError, RuntimeError):
        not_yet(
            f"{show(answer)} is no device",
            "a device is asked for, as in 'cuda:0', or a tensor that lies on it",
        )
