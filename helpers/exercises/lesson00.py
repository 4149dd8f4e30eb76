"""The exercises of lesson 00: memory of the machine, a net on a chosen GPU, a budget, the pieces of a batch."""

import torch
from torch import Tensor, nn

from helpers.exercises import compare
from helpers.exercises.core import call, exercise, not_yet, require, show
from helpers.measure import GiB

__all__ = ["budget", "pieces", "run_on", "total_memory"]

BATCH = 14  # images in the exercise on pieces; lesson 02 asks for 10
GPUS = 4


@exercise
def total_memory(answer):
    """The memory of all GPUs together, in GiB."""
    sizes = [torch.cuda.get_device_properties(gpu).total_memory for gpu in _gpus()]
    one = {sizes[0]: f"that is one GPU, and there are {len(sizes)}"}
    compare.memory(answer, sum(sizes), unit="GiB", rel=0.01, mistakes=one)
    return f"{len(sizes)} GPUs, {sizes[0] / GiB:.2f} GiB on the first"


@exercise
def run_on(answer):
    """`answer(gpu, net, images)` gives the output of `net` for CPU `images`, computed on `gpu`."""
    for gpu in reversed(_gpus()):  # the current GPU last: code that ignores `gpu` would pass there
        torch.manual_seed(gpu.index)
        net, images = nn.Sequential(nn.Flatten(), nn.Linear(16, 3)), torch.randn(5, 1, 4, 4)
        expected = net(images).detach()
        output = call(answer, gpu, net, images)
        require(isinstance(output, Tensor), f"it returned a {type(output).__name__}", "the output is a tensor")
        compare.device(output, gpu)
        compare.tensor(output.detach(), expected, rel=1e-4)
    return "the net's own answers, on each GPU in turn"


@exercise
def budget(answer):
    """`answer(net)` gives the MiB of parameters, gradients and Adam's state, as one step leaves them."""
    gpu = _gpus()[0]
    for net in (
        nn.Linear(1000, 500),
        nn.Sequential(nn.Linear(300, 700), nn.ReLU(), nn.Linear(700, 40, bias=False)),
    ):
        value = call(answer, net)
        parts = _held_after_a_step(net.to(gpu))
        compare.memory(value, sum(parts.values()), rel=0.01, parts=parts)
    return "four times the parameters, as measured after a step of Adam"


@exercise
def pieces(answer):
    """How many of 14 images each of four GPUs gets, GPU 0 first."""
    gpus = _gpus()[:GPUS]
    expected = [len(piece) for piece in nn.parallel.scatter(torch.zeros(BATCH, 1), gpus)]
    given = _counts(answer)
    require(len(given) == GPUS, f"there are {len(given)} numbers", f"there are {GPUS} GPUs")
    require(sum(given) == BATCH, f"{show(given)} are {show(sum(given))} images", f"the batch has {BATCH}")
    rounded_up = -(-BATCH // GPUS)
    if given != expected and sorted(given) == sorted(expected):
        not_yet(show(given), "the first GPUs are filled first: the pieces are these, their order is not")
    require(
        given == expected,
        show(given),
        f"a piece is {BATCH} / {GPUS} rounded up, {rounded_up} images, until none are left for the last GPU",
    )
    return "the last GPU gets less, so it waits for the others"


def _gpus() -> list[torch.device]:
    """All GPUs, the four of the lesson at least."""
    count = torch.cuda.device_count()
    require(
        count >= GPUS,
        f"PyTorch sees {count} GPU(s)",
        "the first cell, `gpus = use_gpus(4)`, has not been run",
    )
    return [torch.device("cuda", index) for index in range(count)]


def _held_after_a_step(net: nn.Module) -> dict[str, int]:
    """Bytes on the GPU after one step of Adam on `net`, by what they are for."""
    optimizer = torch.optim.Adam(net.parameters())
    weight = next(net.parameters())
    net(weight.new_ones(1, weight.shape[1])).sum().backward()
    optimizer.step()
    states = [state for each in optimizer.state.values() for state in each.values() if state.is_cuda]
    parameters = list(net.parameters())
    kinds = {
        "the parameters": parameters,
        "the gradients": [p.grad for p in parameters],
        "Adam's state": states,
    }
    return {kind: sum(t.numel() * t.element_size() for t in tensors) for kind, tensors in kinds.items()}


def _counts(answer: object) -> list[float]:
    """The answer as a list of numbers of images."""
    answer = answer.tolist() if isinstance(answer, Tensor) else answer
    require(
        isinstance(answer, list | tuple),
        f"{show(answer)} is one thing",
        f"a list of {GPUS} numbers is asked for",
    )
    for each in answer:
        require(type(each) in (int, float), f"{show(each)} is no number of images", "4 or 0 would be one")
        require(each == each // 1, f"{show(each)} images cannot be sent", "an image stays in one piece")
    return list(answer)
