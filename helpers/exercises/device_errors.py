"""PyTorch's device errors: five programs that end in one, and what an error's words say. For lesson 01's exercises."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from helpers.exercises.core import NotYet, not_yet, where, words

GPU = torch.device("cuda", 1)  # where the five programs should run
PARTS = ("batch", "net", "labels")

_Made = tuple[nn.Module, torch.Tensor]


def _linear() -> _Made:
    return nn.Linear(4, 3), torch.zeros(2, 4)


def _embedding() -> _Made:
    return nn.Embedding(10, 3), torch.tensor([1, 7])


def _convolution() -> _Made:
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.Flatten()), torch.zeros(2, 1, 3, 3)


# Each: how net and batch are made, which part was left behind, and where.
_PROGRAMS: dict[str, tuple[Callable[[], _Made], str, str]] = {
    "a": (_linear, "net", "cpu"),
    "b": (_linear, "batch", "cuda:0"),
    "c": (_linear, "labels", "cuda:0"),
    "d": (_embedding, "net", "cuda:0"),
    "e": (_convolution, "batch", "cpu"),
}


def errors() -> dict[str, str]:
    """The words of five errors, by the letter of their program. Each ran just now, meant for cuda:1, two of whose
    three parts (batch, net, labels) were there. Needs two GPUs."""
    return {letter: error_of(letter) for letter in _PROGRAMS}


def error_of(letter: str, brought: str | None = None) -> str:
    """What program `letter` dies of when the part `brought` has come to cuda:1; "" if it runs."""
    make, left, elsewhere = _PROGRAMS[letter]
    at = {part: torch.device(elsewhere) if part == left != brought else GPU for part in PARTS}
    net, batch = make()
    try:
        output = net.to(at["net"])(batch.to(at["batch"]))
        nn.functional.cross_entropy(output, torch.tensor([0, 2]).to(at["labels"])).backward()
    except RuntimeError as error:
        return words(error)
    return ""


def told(said: str) -> str:
    """An error's words and what they mean, to stand behind "because"."""
    return f"of {said.rstrip('.')}. In other words: {reading(said)}"


@contextmanager
def explained(what: str) -> Iterator[None]:
    """A device error in the block ends the check: `what`, the line, the error's own words, and how to read them."""
    try:
        yield
    except NotYet:
        raise
    except Exception as error:
        said = words(error)
        if reading(said):
            not_yet(f"{what} your code stopped{where(error)}", told(said))
        raise


# ------------------------------------------------------------------------------------------- what the words say

# An operator's argument: what that is in a training, and what was looked at before it.
_ARGUMENTS = {
    "mat1": ("the input of a linear layer", "the layer's bias"),
    "mat2": ("the second matrix of a product", "the first one"),
    "target": ("the labels of a loss", "the net's output"),
    "index": ("the words to look up", "the embedding's table"),
}


def reading(said: str) -> str:
    """What a device error says, in a sentence; "" if it is another error."""
    for pattern, sentence in _READINGS.items():
        if match := re.search(pattern, said):
            return sentence(*match.groups())
    return ""


def _argument(name: str, place: str, others: str, operator: str) -> str:
    what, before = _ARGUMENTS.get(name, (f"an argument of {operator}", "another"))
    return f"{name} stands for {what}, on {place}, and {before}, looked at before it, is on {others}"


def _convolved(batch: str, weight: str) -> str:
    places = ["a GPU" if ".cuda." in kind else "the CPU" for kind in (batch, weight)]
    return f"the input of a convolution is on {places[0]}, and its weights are on {places[1]}"


_READINGS: dict[str, Callable[..., str]] = {
    r"got (\w+) is on (\S+), different from other tensors on (\S+) \(.* wrapper_CUDA_+(\w+)\)": _argument,
    r"found at least two devices, (\S+) and (\S+)!": lambda one, other: (
        f"an element-wise operation met a tensor on {one} and one on {other}: ask each in that line for its .device"
    ),
    r"got mask on (\S+) and self on (\S+)": lambda mask, self: f"the mask was made on {mask}, and x is on {self}",
    r"Input type \((\S+)\) and weight type \((\S+)\)": _convolved,
    r"indices should be either on cpu": lambda: "an index may be on the CPU or beside its tensor, nowhere else",
    r"can't convert (\S+) device type tensor to numpy": lambda _: "NumPy knows the computer's own memory only",
    r"invalid device ordinal": lambda: "there is no GPU of that number: they are counted from 0",
    r"empty parameter list": lambda: "the net knows none of its layers, which a plain list hides from PyTorch",
}
