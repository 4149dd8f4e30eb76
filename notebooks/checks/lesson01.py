"""Checks of lesson 01, device placement: they take the learner's functions and modules to several GPUs."""

import copy
import itertools
import random
from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear

from helpers.measure import format_bytes
from helpers.parallel import launch
from notebooks.checks import compare
from notebooks.checks.core import NotYet, call, exercise, require, show, where, words
from notebooks.checks.gpus import Copies, need_gpus


def _places() -> list[torch.device]:
    """The CPU and two GPUs, the current one not first: what works only there is noticed."""
    gpus = need_gpus(2)
    return [torch.device("cpu"), gpus[0], gpus[-1]]


@exercise
def with_positions(answer):
    """Exercise 1: `answer(x)` appends to each row its number, in the dtype and on the device of `x`."""
    cases = itertools.product((torch.float32, torch.float64, torch.float16, torch.int32), _places())
    for case, (dtype, place) in enumerate(cases):
        rows, columns = 3 + case % 5, 1 + case % 3  # neither can be written as a constant
        x = torch.linspace(-8, 8, rows * columns).to(dtype).reshape(rows, columns).to(place)
        twin = x.clone()
        for each in (x, twin):
            each.requires_grad_(dtype.is_floating_point)
        right = torch.cat([twin, torch.arange(float(rows)).to(x)[:, None]], dim=1)
        with Copies() as copies:
            found = call(answer, x)
        swapped = isinstance(found, Tensor) and torch.equal(found.cpu(), right.roll(1, dims=1).cpu())
        require(not swapped, "The row numbers are in the first column. Append them as the last one.")
        compare.tensor(found, right)
        moved = f"For an x on {place}, the result is on {found.device}. Keep the device of x."
        require(found.device == place, moved)
        require(found.dtype == dtype, f"For an x of {dtype}, the result is {found.dtype}. Keep the dtype of x.")
        kept = torch.equal(x, twin)
        require(kept, "The function changed x itself. Leave x as it is, and return a new tensor.")
        away = [str(end) for start, end in copies.seen if start == place]
        detour = f"For an x on {place}, the function copies from there to {' and '.join(away)}."
        require(not away, detour, "That works, but it takes two copies where none is needed. Follow x with `x.device`.")
        if x.requires_grad:
            why = "Does the function call `detach`, or copy the numbers of x into a new tensor?"
            compare.gradients(found, right, {"x": (x, twin)}, why)
    return "The values are right, and the result has the device and the dtype of x."


# Exercise 2: five programs meant for cuda:1. Each: how model and batch are made, what was left behind, and where.
GPU, PARTS = torch.device("cuda", 1), ("batch", "model", "labels")


def _linear() -> tuple[nn.Module, Tensor]:
    return nn.Linear(4, 3), torch.zeros(2, 4)


_PROGRAMS: dict[str, tuple[Callable[[], tuple[nn.Module, Tensor]], str, str]] = {
    "a": (_linear, "model", "cpu"),
    "b": (_linear, "batch", "cuda:0"),
    "c": (_linear, "labels", "cuda:0"),
    "d": (lambda: (nn.Embedding(10, 3), torch.tensor([1, 7])), "model", "cuda:0"),
    "e": (lambda: (nn.Sequential(nn.Conv2d(1, 3, 3), nn.Flatten()), torch.zeros(2, 1, 3, 3)), "batch", "cpu"),
}


def errors() -> dict[str, str]:
    """The words of five errors, by the letter of their program, which runs now. Needs two GPUs."""
    return {letter: _error_of(letter) for letter in _PROGRAMS}


def _error_of(letter: str, brought: str | None = None) -> str:
    """The error of program `letter` when the part `brought` has come to cuda:1; "" if it runs."""
    make, left, elsewhere = _PROGRAMS[letter]
    at = {part: torch.device(elsewhere) if part == left != brought else GPU for part in PARTS}
    model, batch = make()
    try:
        output = model.to(at["model"])(batch.to(at["batch"]))
        cross_entropy(output, torch.tensor([0, 2]).to(at["labels"])).backward()
    except RuntimeError as error:
        return words(error).removesuffix(".")
    return ""


@exercise
def left_behind(answer):
    """Exercise 2: `answer[letter]` names what was left behind in that program of `errors`. It is brought along."""
    need_gpus(2)
    compare.names(answer, _PROGRAMS, "a part")
    for letter, said in errors().items():
        part = answer[letter]
        require(part in PARTS, f"{show(part)} is not a part of program {letter}. Choose from {', '.join(PARTS)}.")
        same = f"Program {letter} still fails after you move its {part} to {GPU}, with {said}."
        require(not _error_of(letter, brought=part), same, *_meaning(said))
    return f"With these parts on {GPU}, all five programs run."


_NAMED = {  # words of device errors
    "mat1": "`mat1` is the input of a linear layer, and it was compared with the layer's bias and weight.",
    "target": "`target` stands for the labels of a loss, and it was compared with the model's output.",
    "index": "`index` stands for the numbers of the words to look up, and it was compared with the embedding's table.",
    "found at least": "Print the `.device` of each tensor in that line.",
}


def _meaning(said: str) -> list[str]:
    """What PyTorch's own words in a device error stand for, if there are any."""
    return [meaning for word, meaning in _NAMED.items() if f"got {word} is on" in said or f"{word} two devices" in said]


_SHAPES = [(8, 4), (8,), (3, 8), (3,)]  # of the weights and biases of exercise 3


@exercise
def mended(net_class, train):
    """Exercise 3: `train(model, device, x, y)` trains a `net_class()` anywhere; what the model then says, as NumPy."""
    named = f"{show(net_class)} is not a class. Pass the class itself: its name without brackets."
    require(isinstance(net_class, type), named)
    x, y = torch.linspace(-2, 2, 24).sin().reshape(6, 4), torch.tensor([0, 1, 2, 0, 1, 2])
    for place in reversed(_places()):
        model, given, ran_on = net_class(), x.clone(), set()
        start = {shape: weights.detach().clone().cpu() for shape, weights in _trained(model).items()}
        scale = _other_scale(model)
        model.register_forward_hook(lambda module, inputs, output, ran_on=ran_on: ran_on.add(output.device))
        try:
            found = call(train, model, place, given, y.clone())
        except (RuntimeError, TypeError) as error:
            said = words(error)
            raise NotYet(f"On {place} your code stopped{where(error)} with {said}", *_meaning(said)) from error
        missing = " and ".join(str(shape) for shape in _SHAPES if shape not in start)
        hidden = "A plain list hides a layer from `.to` and from the optimizer."
        require(not missing, f"`model.parameters()` lacks the parameters of shape {missing}.", hidden)
        trained = "`scale` is a parameter that the optimizer trains. Register it as a buffer."
        require(not getattr(dict(model.named_parameters()).get("scale"), "requires_grad", False), trained)
        lost = "The model's state_dict does not contain `scale`, so a checkpoint loses it."
        require("scale" in model.state_dict(), lost)
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            left = f"After `train` with {place} as device, the model's {name} is on {tensor.device}."
            require(tensor.device == place, left, "Move the model itself, not a copy.")
        away = ran_on - {place}
        detour = f"With {place} as device, the model computed on {', '.join(sorted(map(str, away)))}."
        require(not away, detour, "Move the model, x and y to `device` before the first step.")
        kept = torch.equal(given, x)
        require(kept, "Your code changes the caller's x. `masked_fill` returns a new tensor, so keep it.")
        array = isinstance(found, np.ndarray)
        require(array, f"`train` returned {show(found)}. Return the classes as a NumPy array.")
        ended, (weights, classes) = _trained(model), _by_hand(start, x, y, scale)
        unused = "`forward` does not use the `scale` of the state_dict, so a checkpoint cannot set it."
        mistakes = {f"{unused} Multiply by `self.scale`.": _by_hand(start, x, y, SCALE)[0]}
        what = f"Compared with those of the CPU, the weights after training on {place} are"
        why = "Change only devices. The model, the loss, the learning rate and the steps are right."
        compare.alike([ended[shape] for shape in _SHAPES], weights, what, why, mistakes)
        same = f"On {place}, the classes are {show(found)}, and they differ from those on the CPU."
        require(found.tolist() == classes, same)
    right = "Building SGD before `.to` was not a mistake, because it has no state yet."
    return f"The weights and classes are the same on every device. {right}"


SCALE = torch.tensor([1.0, 2.0, 3.0])


def _other_scale(model: nn.Module) -> Tensor:
    """Put other numbers into the model's `scale`, as a checkpoint would; the numbers that it has then."""
    scale = model.state_dict().get("scale")
    if scale is None:  # told later, after the errors to which this leads
        return SCALE
    shown = f"The model's `scale` is {show(scale.tolist())}, and it should be {SCALE.tolist()}."
    require(scale.tolist() == SCALE.tolist(), shown)
    return scale.copy_(SCALE.roll(1)).cpu().clone()


def _trained(model: nn.Module) -> dict[tuple[int, ...], Tensor]:
    """What the optimizer trains, by shape."""
    return {tuple(each.shape): each for each in model.parameters() if each.requires_grad}


def _by_hand(start: Mapping, x: Tensor, y: Tensor, scale: Tensor) -> tuple[list[Tensor], list[int]]:
    """The weights after the same three steps of SGD, written out for the CPU, and the classes of x."""

    def scores():
        hidden = linear(x * torch.tensor([1.0, 1.0, 0.0, 1.0]), *weights[:2]).relu()
        return linear(hidden, *weights[2:]) * scale

    weights = [start[shape].clone().requires_grad_() for shape in _SHAPES]
    sgd = torch.optim.SGD(weights, lr=0.1, momentum=0.9)
    for _ in range(3):
        sgd.zero_grad()
        cross_entropy(scores(), y).backward()
        sgd.step()
    return weights, scores().argmax(1).tolist()


@exercise
def one_per_gpu(answer):
    """Exercise 4: `answer(layers, gpus)` is a module with layer i on gpus[i]; a batch goes through all."""
    all_gpus = need_gpus(2)
    for gpus in (all_gpus[::-1], all_gpus[1:3]):  # not in order, and not always as many
        try:
            _one_per_gpu(answer, gpus)
        except (RuntimeError, TypeError, IndexError, ValueError) as error:
            case = f"With {len(gpus)} layers on {', '.join(map(str, gpus))}"
            raise NotYet(f"{case}, your class stopped{where(error)} with {words(error)}") from error
    count = len(all_gpus)
    return f"{count} layers on {count} GPUs give the values and gradients of one device."


def _one_per_gpu(answer: Callable, gpus: list[torch.device]) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4) for _ in gpus]
    right = copy.deepcopy(nn.Sequential(*layers))
    model = answer(layers, gpus)
    require(isinstance(model, nn.Module), f"The class made {show(model)}. Write a subclass of nn.Module.")
    weights = [parameter.detach().cpu() for parameter in model.parameters()]
    known = {id(parameter) for parameter in model.parameters()}
    for i, (layer, gpu) in enumerate(zip(layers, gpus, strict=True)):
        lacks = f"`model.parameters()` lacks the parameters of layer {i}. Keep the layers where the module finds them."
        if any(torch.equal(layer.weight.detach().cpu(), each) for each in weights):
            lacks = f"The module holds a copy of layer {i}. Keep the layer itself, because others may refer to it."
        require(id(layer.weight) in known, lacks)
        place = layer.weight.device
        require(place == gpu, f"Layer {i} is on {place}, and in this check gpus[{i}] is {gpu}.")
    for place in (torch.device("cpu"), gpus[-1]):
        given = torch.linspace(-1, 1, 8).reshape(2, 4)
        x = given.clone().to(place)
        with Copies() as copies:
            found = call(model, x)
        expected = right(given)
        compare.tensor(found, expected)
        kept = torch.equal(x.cpu(), given)
        require(kept, "The module changes the batch that it is given. Leave it as it is.")
        leaves = {f"layer {i}": (layer.weight, right[i].weight) for i, layer in enumerate(layers)}
        biases = {f"the bias of layer {i}": (layer.bias, right[i].bias) for i, layer in enumerate(layers)}
        compare.gradients(found, expected, leaves | biases, "Is there a detach() or no_grad() on the way?")
        most = len(gpus) + 1  # also back to where the batch was
        paths = ", ".join(f"{start} to {end}" for start, end in copies.seen[:4])
        many = f"With {len(gpus)} layers, `forward` makes {len(copies.seen)} copies between devices: {paths} ..."
        require(len(copies.seen) <= most, many, "One copy for each layer is enough: its input, straight to its GPU.")


@exercise
def emptiest_gpu(answer):
    """Exercise 5: `answer()` is the GPU with the most free memory, whoever holds the rest."""
    gpus = need_gpus(2)
    _choose(answer)  # what does not name a GPU is told before a process starts
    piece = min(torch.cuda.get_device_properties(gpu).total_memory for gpu in gpus) // 16
    for empty in random.Random().sample(gpus, 2):  # a function that always names the same GPU is wrong once
        held = [torch.empty(4 * piece, dtype=torch.uint8, device=gpu) for gpu in gpus if gpu != empty]
        ((chosen, free),) = launch(_choose_elsewhere, answer, empty, piece, ranks=1, show=False)
        del held
        torch.cuda.empty_cache()
        most = f"{chosen} has {format_bytes(free[chosen.index])} free, and another GPU has {format_bytes(max(free))}."
        counted = "Memory that other programs hold, or that PyTorch keeps in reserve, is not free."
        require(free[chosen.index] >= max(free) - piece, most, counted)  # other programs on real GPUs come and go
    return "The function named the emptiest GPU twice, although other programs filled the others."


def _choose(answer: Callable) -> tuple[torch.device, list[int]]:
    """The GPU that the learner's function names, and how much each GPU has free."""
    gpus, chosen = need_gpus(2), call(answer)
    device = isinstance(chosen, torch.device) and chosen in gpus
    require(device, f'{show(chosen)} is not the torch.device of a GPU, such as torch.device("cuda", 1).')
    return chosen, [torch.cuda.mem_get_info(gpu)[0] for gpu in gpus]


def _choose_elsewhere(rank: int, answer: Callable, empty: torch.device, piece: int) -> tuple[torch.device, list[int]]:
    """The same in another process, where PyTorch keeps a little of the emptiest GPU and nothing of the others."""
    torch.empty(piece, dtype=torch.uint8, device=empty)
    return _choose(answer)
