"""Checks of lesson 01, device placement: they take the learner's functions and modules to several GPUs."""

import gc
import itertools

import torch
from torch import nn

from helpers.check import compare
from helpers.check.core import call, exercise, not_yet, require, show
from helpers.memory.readings import MiB, format_bytes

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
def scaled(answer):
    """Exercise 2: `answer`, a module class: linear(x and a column of zeros) * scale, on every device."""
    require(
        isinstance(answer, type) and issubclass(answer, nn.Module),
        f"{show(answer)} is no module class",
        "the check makes the module itself: give the class, without brackets",
    )
    net = answer()
    weight, bias = _linear_of(net)
    x = torch.linspace(-1, 1, 6).reshape(2, 3)
    expected = (nn.functional.pad(x, (0, 1)) @ weight.T + bias) * torch.tensor([1.0, 10.0, 100.0])
    for place in _places():
        found = net.to(place)(x.to(place))
        compare.tensor(found, expected)
        compare.device(found, place)
    _scale_is_a_buffer(net)
    return "it works on every device, and .to and state_dict know scale"


@exercise
def one_per_gpu(answer):
    """Exercise 3: `answer(layers, gpus)` is a module with layer i on gpus[i]; a batch goes through all."""
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
    """Exercise 4: `answer()` is the GPU with the most free memory; asked once per way of filling them."""
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
    """Exercise 5: the bytes that 30 float16 images of 3 x 224 x 224 and 30 int64 labels take on a GPU."""
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
    """The CPU and two GPUs, the current one last: what works only there is noticed."""
    return [torch.device("cpu"), torch.device("cuda", _gpu_count() - 1), torch.device("cuda", 0)]


def _linear_of(net: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    linear = getattr(net, "linear", None)
    require(isinstance(linear, nn.Linear), "there is no `linear` in it", "keep the names of the exercise")
    return linear.weight.detach().cpu().clone(), linear.bias.detach().cpu().clone()


def _scale_is_a_buffer(net: nn.Module) -> None:
    parameters = [name for name, _ in net.named_parameters() if not name.startswith("linear.")]
    require(
        not parameters,
        f"{', '.join(parameters)} became a parameter",
        "an optimizer would train it: it should be a buffer",
    )
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


__all__ = ["batch_bytes", "emptiest_gpu", "one_per_gpu", "scaled", "with_positions"]
