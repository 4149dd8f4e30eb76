"""Checks of lesson 01, device placement: they take the learner's functions and modules to several GPUs."""

import gc
import itertools
import re
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear

from helpers.exercises import compare
from helpers.exercises.core import NotYet, call, exercise, require, show, where, words
from helpers.exercises.gpus import need_gpus
from helpers.measure import MiB, format_bytes


def _places() -> list[torch.device]:
    """The CPU and two GPUs, the current one not first: what works only there is noticed."""
    gpus = need_gpus(2)
    return [torch.device("cpu"), gpus[0], gpus[-1]]


@exercise
def with_positions(answer):
    """Exercise 1: `answer(x)` appends to each row its number, in the dtype and on the device of `x`."""
    for place, dtype in itertools.product(_places(), (torch.float32, torch.float64)):
        x = torch.linspace(-1, 1, 15, dtype=dtype).reshape(5, 3).to(place)
        found = call(answer, x)
        compare.tensor(found, torch.cat([x, torch.arange(5.0).to(x)[:, None]], dim=1))
        compare.device(found, place)
        why = "The new column should have the dtype of x"
        require(found.dtype == dtype, f"For {dtype} the result is {found.dtype}.", f"{why}.")
    return "The numbers, the device and the dtype follow x."


# Exercise 2: five programs meant for cuda:1. Each: how net and batch are made, what was left behind, and where.
GPU, PARTS = torch.device("cuda", 1), ("batch", "net", "labels")


def _linear() -> tuple[nn.Module, Tensor]:
    return nn.Linear(4, 3), torch.zeros(2, 4)


_PROGRAMS: dict[str, tuple[Callable[[], tuple[nn.Module, Tensor]], str, str]] = {
    "a": (_linear, "net", "cpu"),
    "b": (_linear, "batch", "cuda:0"),
    "c": (_linear, "labels", "cuda:0"),
    "d": (lambda: (nn.Embedding(10, 3), torch.tensor([1, 7])), "net", "cuda:0"),
    "e": (lambda: (nn.Sequential(nn.Conv2d(1, 3, 3), nn.Flatten()), torch.zeros(2, 1, 3, 3)), "batch", "cpu"),
}


def errors() -> dict[str, str]:
    """The words of five errors, by the letter of their program, which runs now. Needs two GPUs."""
    return {letter: _error_of(letter) for letter in _PROGRAMS}


def _error_of(letter: str, brought: str | None = None) -> str:
    """What program `letter` dies of when the part `brought` has come to cuda:1; "" if it runs."""
    make, left, elsewhere = _PROGRAMS[letter]
    at = {part: torch.device(elsewhere) if part == left != brought else GPU for part in PARTS}
    net, batch = make()
    try:
        output = net.to(at["net"])(batch.to(at["batch"]))
        cross_entropy(output, torch.tensor([0, 2]).to(at["labels"])).backward()
    except RuntimeError as error:
        return words(error)
    return ""


@exercise
def left_behind(answer):
    """Exercise 2: `answer[letter]` names what was left behind in that program of `errors`. It is brought along."""
    need_gpus(2)
    compare.names(answer, _PROGRAMS, "a part")
    for letter, said in errors().items():
        part = answer[letter]
        require(part in PARTS, f"{show(part)} for {letter!r}.", f"It is one of {', '.join(PARTS)}.")
        what = f"{letter!r} ends as before when its {part} is brought to {GPU}"
        require(not _error_of(letter, brought=part), f"{what}.", _told(said))
    return f"Brought to {GPU}, they let all five programs run."


# What a device error names: what its word stands for, and what was looked at before it.
_NAMED = {
    "mat1": ("the input of a linear layer", "the layer's bias"),
    "target": ("the labels of a loss", "the net's output"),
    "index": ("the words to look up", "the embedding's table"),
}
_ARGUMENT = r"got (mat1|target|index) is on (\S+), different from other tensors on (\S+) "
_OPERANDS = r"found at least two devices, (\S+) and (\S+)!"


def _told(said: str) -> str:
    """An error's words and, where it names devices by PyTorch's own terms, what they mean; a whole sentence."""
    meaning = ""
    if match := re.search(_ARGUMENT, said):
        word, there, elsewhere = match.groups()
        this, other = _NAMED[word]
        meaning = f"{word} stands for {this}, on {there}, and {other}, looked at before it, is on {elsewhere}"
    elif match := re.search(_OPERANDS, said):
        places = "a tensor on {} and one on {}".format(*match.groups())
        meaning = f"an element-wise operation met {places}: ask each in that line for its .device"
    return f"{said} In other words: {meaning}." if meaning else said


_SHAPES = [(8, 4), (8,), (3, 8), (3,)]  # of the weights and biases of exercise 3


@exercise
def mended(net_class, train):
    """Exercise 3: `train(net, device, x, y)` trains a `net_class()` anywhere; what the net then says, as NumPy."""
    why = "The check makes the module itself: give the class, without brackets"
    require(isinstance(net_class, type), f"{show(net_class)} is not a class.", f"{why}.")
    x, y = torch.linspace(-2, 2, 24).sin().reshape(6, 4), torch.tensor([0, 1, 2, 0, 1, 2])
    for place in reversed(_places()):
        net = net_class()
        start = {tuple(weights.shape): weights.detach().clone() for weights in net.parameters()}
        try:
            found = call(train, net, place, x.clone(), y.clone())
        except (RuntimeError, TypeError) as error:
            raise NotYet(f"On {place} your code stopped{where(error)}.", _told(words(error))) from error
        missing = [shape for shape in _SHAPES if shape not in start]
        what = f"net.parameters() lacks those of shape {' and '.join(map(str, missing))}"
        require(
            not missing, f"{what}.", "A plain list hides a layer from .to and from the optimizer: take nn.ModuleList."
        )
        why = "Parameters are for what the optimizer trains: make it a buffer with register_buffer"
        require("scale" not in dict(net.named_parameters()), "`scale` is a parameter.", f"{why}.")
        why = "A buffer is asked for, which .to moves and a checkpoint holds: register_buffer without persistent=False"
        require("scale" in net.state_dict(), "The net's state_dict does not hold scale.", f"{why}.")
        compare.device(net, place)
        require(
            isinstance(found, np.ndarray), f"`train` returned {show(found)}.", "A NumPy array of classes is asked for."
        )
        # The same three steps of SGD, written out for the CPU, end with the same weights and classes.
        weights = [start[shape].cpu().requires_grad_() for shape in _SHAPES]
        sgd = torch.optim.SGD(weights, lr=0.1, momentum=0.9)
        for _ in range(3):
            sgd.zero_grad()
            cross_entropy(_scores(weights, x), y).backward()
            sgd.step()
        ended = {tuple(each.shape): each.detach().cpu() for each in net.parameters()}
        for shape, right in zip(_SHAPES, weights, strict=True):
            same = torch.allclose(ended[shape], right.detach(), rtol=1e-3, atol=1e-4)
            why = "Only places were to be mended: net, loss, rate, momentum and number of steps are right as they are"
            require(same, f"The weights of shape {shape} are others than after three steps on the CPU.", f"{why}.")
        same = found.tolist() == _scores(weights, x).argmax(1).tolist()
        require(same, f"The classes are {show(found)}.", "After the same three steps on the CPU they are others.")
    return "The same weights and classes on every device. (SGD before .to was no mistake: it has no state yet.)"


def _scores(weights: list[Tensor], x: Tensor) -> Tensor:
    hidden = linear(x * torch.tensor([1.0, 1.0, 0.0, 1.0]), *weights[:2]).relu()
    return linear(hidden, *weights[2:]) * torch.tensor([1.0, 2.0, 3.0])


@exercise
def one_per_gpu(answer):
    """Exercise 4: `answer(layers, gpus)` is a module with layer i on gpus[i]; a batch goes through all."""
    gpus = need_gpus(2)[::-1]  # not in order: gpus must be read
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4) for _ in gpus]
    x = torch.linspace(-1, 1, 8).reshape(2, 4)
    expected = nn.Sequential(*layers)(x).detach()
    net = answer(layers, gpus)
    require(isinstance(net, nn.Module), f"It made {show(net)}.", "A subclass of nn.Module is asked for.")
    known = {id(parameter) for parameter in net.parameters()}
    why = "The layers are not kept, or in a plain list: take nn.ModuleList"
    require(bool(known), "`net.parameters()` is empty.", f"{why}.")
    for i, (layer, gpu) in enumerate(zip(layers, gpus, strict=True)):
        require(id(layer.weight) in known, f"`net.parameters()` lacks those of layer {i}.", f"{why}.")
        place = layer.weight.device
        require(place == gpu, f"Layer {i} is on {place}.", f"`gpus[{i}]`, which is {gpu} in this check, is its place.")
    found = call(net, x)
    compare.tensor(found, expected)
    compare.device(found, gpus[-1])
    require(found.requires_grad, "The output has no graph.", "A detach or no_grad cut it off from the layers.")
    found.sum().backward()
    for i, layer in enumerate(layers):
        require(layer.weight.grad is not None, f"Layer {i} got no gradient.", "A detach cut the graph before it.")
    return f"{len(gpus)} layers on {len(gpus)} GPUs, values and gradients as on one device."


FILLING = 256 * MiB  # bytes by which one GPU is fuller than the next in `emptiest_gpu`


@exercise
def emptiest_gpu(answer):
    """Exercise 5: `answer()` is the GPU with the most free memory; asked once per way of filling them."""
    gpus = need_gpus(2)
    for fullest in gpus:
        # From `fullest` on each GPU holds less than the one before, and the last nothing. What the fullest holds is
        # free again for PyTorch, which keeps it: who asks for allocated memory is misled.
        order = gpus[fullest.index :] + gpus[: fullest.index]
        sizes = [FILLING * (len(gpus) - 1 - place) for place in range(len(gpus))]
        held = [torch.empty(size, dtype=torch.uint8, device=gpu) for gpu, size in zip(order, sizes, strict=True)]
        del held[0]
        try:
            _is_emptiest(call(answer), gpus)
        finally:
            del held
            gc.collect()
            torch.cuda.empty_cache()
    return "It named the emptiest GPU every time."


def _is_emptiest(answer: object, gpus: list[torch.device]) -> None:
    name = f"cuda:{answer}" if type(answer) is int else str(answer)
    require(name in map(str, gpus), f"{show(answer)} is not one of the GPUs.", "A torch.device of `gpus` is asked for.")
    device = torch.device(name)
    free = [torch.cuda.mem_get_info(gpu)[0] for gpu in gpus]
    chosen, most = free[device.index], max(free)
    why = f"Another GPU has {format_bytes(most)} free"
    if chosen == min(free):
        why += "; yours is the fullest, where freed memory that PyTorch keeps is taken too: ask mem_get_info"
    close = chosen >= most - FILLING // 4  # other programs on a real GPU come and go meanwhile
    require(close, f"You chose {device} with {format_bytes(chosen)} free.", f"{why}.")


@exercise
def batch_bytes(answer):
    """Exercise 6: the bytes that 30 float16 images of 3 x 224 x 224 and 30 int64 labels take on a GPU."""
    need_gpus(2)
    torch.cuda.empty_cache()  # a cached piece that is a little too large would be counted whole
    before = torch.cuda.memory_allocated(0)
    images = torch.empty(30, 3, 224, 224, dtype=torch.float16, device="cuda:0")
    labels = torch.empty(30, dtype=torch.int64, device="cuda:0")
    measured = torch.cuda.memory_allocated(0) - before
    mistakes = {
        images.nbytes + labels.nbytes: "is the payload. Each tensor is rounded up to a multiple of 512 bytes.",
        images.nbytes: "leaves out the labels.",
        2 * images.nbytes + 512: "counts four bytes per pixel. A float16 takes two.",
        images.numel() + labels.numel(): "is the number of elements. Give bytes.",
    }
    compare.number(answer, measured, unit="bytes", rel=1e-9, mistakes=mistakes)
    return f"{measured:,} bytes, {format_bytes(measured)}, as measured on cuda:0."
