"""Checks of lesson 01, device placement: they take the learner's functions and modules to several GPUs."""

import gc
import itertools

import numpy as np
import torch
from torch import nn

from helpers.exercises import compare
from helpers.exercises.core import call, exercise, not_yet, require, show
from helpers.exercises.device_errors import GPU, PARTS, error_of, errors, explained, told
from helpers.measure import MiB, format_bytes

FILLING = 256 * MiB  # bytes by which one GPU is fuller than the next in `emptiest_gpu`


@exercise
def with_positions(answer):
    """Exercise 1: `answer(x)` appends to each row its number, in the dtype and on the device of `x`."""
    for place, dtype in itertools.product(_places(), (torch.float32, torch.float64)):
        x = torch.linspace(-1, 1, 15, dtype=dtype).reshape(5, 3).to(place)
        found = call(answer, x)
        expected = torch.cat([x, torch.arange(5.0).to(x)[:, None]], dim=1)
        compare.tensor(found, expected)
        compare.device(found, place)
        require(
            found.dtype == dtype,
            f"for {dtype} the result is {found.dtype}",
            "the new column should have the dtype of x",
        )
    return "the numbers, the device and the dtype follow x"


@exercise
def left_behind(answer):
    """Exercise 2: `answer[letter]` names what was left behind in that program of `errors`. It is brought along."""
    _gpu_count()
    require(isinstance(answer, dict), f"{show(answer)} is no dict", "one part for each letter is asked for")
    for letter, said in errors().items():
        part = answer.get(letter)
        require(part in PARTS, f"{show(part)} for {letter!r}", f"it is one of {', '.join(PARTS)}")
        again = error_of(letter, brought=part)
        what = f"{letter!r} ends as before when its {part} is brought to {GPU}"
        require(not again, what, told(said))
    return f"brought to {GPU}, they let all five programs run"


@exercise
def mended(net_class, train):
    """Exercise 3: `train(net, device, x, y)` trains a `net_class()` anywhere; what the net then says, as NumPy."""
    is_class = isinstance(net_class, type) and issubclass(net_class, nn.Module)
    why = "the check makes the module itself: give the class, without brackets"
    require(is_class, f"{show(net_class)} is no module class", why)
    x, y = torch.linspace(-2, 2, 24).sin().reshape(6, 4), torch.tensor([0, 1, 2, 0, 1, 2])
    for place in reversed(_places()):
        with explained(f"on {place}"):
            net = net_class()
            start = {tuple(weights.shape): weights.detach().clone() for weights in net.parameters()}
            found = call(train, net, place, x.clone(), y.clone())
        _layers_are_known(start)
        _scale_is_a_buffer(net)
        compare.device(net, place)
        _trained_as_on_the_cpu(net, found, start, x, y)
    return "the same weights and classes on every device. (SGD before .to was no mistake: it has no state yet)"


@exercise
def one_per_gpu(answer):
    """Exercise 4: `answer(layers, gpus)` is a module with layer i on gpus[i]; a batch goes through all."""
    gpus = [torch.device("cuda", i) for i in reversed(range(_gpu_count()))]  # not in order: gpus must be read
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4) for _ in gpus]
    x = torch.linspace(-1, 1, 8).reshape(2, 4)
    expected = nn.Sequential(*layers)(x).detach()
    net = answer(layers, gpus)
    require(isinstance(net, nn.Module), f"it made {show(net)}", "a subclass of nn.Module is asked for")
    _layers_are_placed(net, layers, gpus)
    found = call(net, x)
    compare.tensor(found, expected)
    compare.device(found, gpus[-1])
    _gradients_are_at_home(found, layers)
    return f"{len(gpus)} layers on {len(gpus)} GPUs, values and gradients as on one device"


@exercise
def emptiest_gpu(answer):
    """Exercise 5: `answer()` is the GPU with the most free memory; asked once per way of filling them."""
    _gpu_count()
    for fullest in range(torch.cuda.device_count()):
        held = _fill(fullest)
        try:
            _is_emptiest(call(answer))
        finally:
            del held
            gc.collect()
            torch.cuda.empty_cache()
    return "it named the emptiest GPU every time"


@exercise
def batch_bytes(answer):
    """Exercise 6: the bytes that 30 float16 images of 3 x 224 x 224 and 30 int64 labels take on a GPU."""
    _gpu_count()
    torch.cuda.empty_cache()  # a cached piece that is a little too large would be counted whole
    before = torch.cuda.memory_allocated(0)
    images = torch.empty(30, 3, 224, 224, dtype=torch.float16, device="cuda:0")
    after_images = torch.cuda.memory_allocated(0)
    labels = torch.empty(30, dtype=torch.int64, device="cuda:0")
    measured = torch.cuda.memory_allocated(0) - before
    mistakes = {
        images.nbytes + labels.nbytes: "that is the payload: each tensor is rounded up to 512 bytes",
        after_images - before: "the labels were left out",
        2 * images.nbytes + 512: "each float16 takes two bytes, not four",
        2 * images.nbytes + labels.nbytes: "each float16 takes two bytes, not four",
        images.numel() + labels.numel(): "that counts the elements: bytes are asked for",
    }
    compare.number(answer, measured, unit="bytes", rel=1e-9, mistakes=mistakes)
    return f"{measured:,} bytes, {format_bytes(measured)}, as measured on cuda:0"


def _gpu_count() -> int:
    count = torch.cuda.device_count()
    require(count >= 2, f"PyTorch sees {count} GPU(s)", "two are needed: run the lesson's first cell")
    return count


def _places() -> list[torch.device]:
    """The CPU and two GPUs, the current one not first: what works only there is noticed."""
    return [torch.device("cpu"), torch.device("cuda", 0), torch.device("cuda", _gpu_count() - 1)]


def _layers_are_known(start: dict[tuple, torch.Tensor]) -> None:
    missing = [shape for shape in _SHAPES if shape not in start]
    what = f"net.parameters() lacks those of shape {' and '.join(map(str, missing))}"
    require(not missing, what, "a plain list hides a layer from .to and from the optimizer: take nn.ModuleList")


def _trained_as_on_the_cpu(net: nn.Module, found: object, start: dict, x: torch.Tensor, y: torch.Tensor) -> None:
    """Three steps of SGD from the same start, written out for the CPU, must end with the same weights and classes."""
    require(isinstance(found, np.ndarray), f"train returned {show(found)}", "a NumPy array of classes is asked for")
    weights = [start[shape].cpu().requires_grad_() for shape in _SHAPES]
    sgd = torch.optim.SGD(weights, lr=0.1, momentum=0.9)
    for _ in range(3):
        sgd.zero_grad()
        nn.functional.cross_entropy(_scores(weights, x), y).backward()
        sgd.step()
    ended = {tuple(each.shape): each for each in net.parameters()}
    for shape, right in zip(_SHAPES, weights, strict=True):
        same = torch.allclose(ended[shape].detach().cpu(), right.detach(), rtol=1e-3, atol=1e-4)
        require(same, f"the weights of shape {shape} are others than after three steps on the CPU", _UNLIKE)
    same = found.tolist() == _scores(weights, x).argmax(1).tolist()
    require(same, f"the classes are {show(found)}", "after the same three steps on the CPU they are others")


_SHAPES = [(8, 4), (8,), (3, 8), (3,)]
_UNLIKE = "only places were to be mended: net, loss, rate, momentum and number of steps are right as they are"


def _scores(weights: list[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    hidden = nn.functional.linear(x * torch.tensor([1.0, 1.0, 0.0, 1.0]), *weights[:2]).relu()
    return nn.functional.linear(hidden, *weights[2:]) * torch.tensor([1.0, 2.0, 3.0])


def _scale_is_a_buffer(net: nn.Module) -> None:
    trained = "scale" in dict(net.named_parameters())
    require(not trained, "scale became a parameter", "the optimizer trains it: it should be a buffer")
    require(
        "scale" in dict(net.named_buffers()),
        "the values are right, but scale is no buffer",
        ".to does not move it: either every forward copies it again, or it is made anew each time",
    )
    require(
        "scale" in net.state_dict(),
        "state_dict does not hold scale",
        "the buffer was made with persistent=False",
    )


def _layers_are_placed(net: nn.Module, layers: list[nn.Module], gpus: list[torch.device]) -> None:
    mine = {id(parameter) for parameter in net.parameters()}
    require(
        bool(mine),
        "net.parameters() is empty",
        "the layers are not kept, or in a plain list: take nn.ModuleList",
    )
    missing = [i for i, layer in enumerate(layers) if id(layer.weight) not in mine]
    require(
        not missing,
        f"net.parameters() lacks those of layer(s) {', '.join(map(str, missing))}",
        "a plain list hides layers from PyTorch: keep them in an nn.ModuleList",
    )
    for i, (layer, gpu) in enumerate(zip(layers, gpus, strict=True)):
        found = layer.weight.device
        require(found == gpu, f"layer {i} is on {found}", f"gpus[{i}], which is {gpu} in this check, is its place")


def _gradients_are_at_home(found: torch.Tensor, layers: list[nn.Module]) -> None:
    require(found.requires_grad, "the output has no graph", "a detach or no_grad cut it off from the layers")
    found.sum().backward()
    for i, layer in enumerate(layers):
        gradient = layer.weight.grad
        require(gradient is not None, f"layer {i} got no gradient", "a detach cut the graph before it")
        compare.device(gradient, layer.weight.device)


def _fill(fullest: int) -> list[torch.Tensor]:
    """From GPU `fullest` on each gets less than the one before, the last nothing: each is the emptiest once.

    The fullest one's memory is freed, but PyTorch keeps it: who asks for allocated memory is misled.
    """
    count = torch.cuda.device_count()
    sizes = {(fullest + place) % count: (count - 1 - place) * FILLING for place in range(count)}
    held = {
        gpu: torch.empty(size, dtype=torch.uint8, device=torch.device("cuda", gpu))
        for gpu, size in sizes.items()
        if size
    }
    del held[fullest]
    return list(held.values())


def _is_emptiest(answer: object) -> None:
    try:
        device = torch.device("cuda", answer) if type(answer) is int else torch.device(answer)
    except (TypeError, RuntimeError):
        not_yet(f"{show(answer)} is no device", "a torch.device is asked for")
    free = [torch.cuda.mem_get_info(i)[0] for i in range(torch.cuda.device_count())]
    most = max(free)
    numbered = device.type == "cuda" and device.index is not None and device.index < len(free)
    require(numbered, f"{device} is not one of the GPUs", f"they are cuda:0 to cuda:{len(free) - 1}")
    chosen = free[device.index]
    if chosen >= most - FILLING // 4:  # other programs on a real GPU come and go meanwhile
        return
    why = f"another GPU has {format_bytes(most)} free"
    if chosen == min(free):
        why += "; yours is the fullest, where freed memory that PyTorch keeps is taken too: ask mem_get_info"
    not_yet(f"you chose {device} with {format_bytes(chosen)} free", why)


__all__ = ["batch_bytes", "emptiest_gpu", "errors", "left_behind", "mended", "one_per_gpu", "with_positions"]
