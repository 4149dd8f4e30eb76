"""Checks of lesson 00: the memory of all GPUs, a model on a chosen GPU, a budget, the pieces of a batch."""

import copy

import numpy as np
import torch
from torch import Tensor, nn

from helpers.measure import GiB
from notebooks.checks import compare
from notebooks.checks.core import call, exercise, require, show
from notebooks.checks.gpus import Copies, need_gpus

BATCH = 14  # images in the exercise on pieces; lesson 02 asks for 10
GPUS = 4


@exercise
def total_memory(answer):
    """The memory of all GPUs together, in GiB."""
    sizes = [torch.cuda.get_device_properties(gpu).total_memory for gpu in need_gpus(GPUS)]
    one = {sizes[0]: f"is the memory of one GPU. Add up all {len(sizes)}."}
    compare.memory(answer, sum(sizes), "GiB", rel=0.01, mistakes=one)
    return f"The {len(sizes)} GPUs have {sum(sizes) / GiB:.2f} GiB together."


@exercise
def run_on(answer):
    """Exercise 1: `answer(gpu, model, images)` gives the output of `model` for CPU `images`, computed on `gpu`."""
    for gpu in reversed(need_gpus(GPUS)):  # the current GPU last: code that ignores `gpu` would pass there
        torch.manual_seed(gpu.index)
        linear, images, ran_on = nn.Linear(16, 3), torch.randn(12 + gpu.index, 1, 4, 4), set()
        model, given = nn.Sequential(nn.Flatten(), linear), images.clone()
        alone = copy.deepcopy(linear)
        expected = alone(images.flatten(1))
        linear.register_forward_hook(lambda module, inputs, output, ran_on=ran_on: ran_on.add(str(output.device)))
        before = _requests()
        with Copies() as copies:
            output = call(answer, gpu, model, images)
        compare.tensor(output, expected)
        require(output.device == gpu, f"The output is on {output.device}, and it should be on {gpu}.")
        dtypes = f"The output is {output.dtype}, and the model and the images are {expected.dtype}."
        require(output.dtype == expected.dtype, dtypes, "Change only the device.")
        places = ", ".join(sorted(ran_on))
        only = f"The output is on {gpu}, but the model ran on {places}. Use no GPU except {gpu}."
        require(ran_on <= {str(gpu)}, only, "Move the model and the images there before you call the model.")
        others = [other for other, count in _requests().items() if count != before[other] and other != gpu]
        detour = f"The model ran on {gpu}, but the model or the images were on {', '.join(map(str, others))} before."
        require(not others, detour, f"Move both straight to {gpu}.")
        _require_kept(images, given, model, linear, alone, gpu)
        away = sorted({str(place) for start, place in copies.seen if start == gpu})
        require(not away, f"Your function copies from {gpu} to {', '.join(away)}. Compute on {gpu}, and return that.")
        why = "Use neither `detach` nor `no_grad`, and no copy of the model, or `model` would not train."
        compare.gradients(output, expected, {"`model`": (linear.weight, alone.weight)}, why)
    return "The model gave the right output on each GPU in turn, and gradients reach it."


def _require_kept(images: Tensor, given: Tensor, model: nn.Module, linear: nn.Module, alone: nn.Module, gpu) -> None:
    """Besides moving the model to `gpu`, the function must have changed nothing."""
    kept = images.device == given.device and torch.equal(images, given)
    require(kept, "The function changed `images` itself. The caller may still need them, so use what `.to` returns.")
    place = linear.weight.device
    require(place == gpu, f"Afterwards `model` is on {place}. Move it to {gpu}, and leave it there.")
    kept = torch.equal(linear.weight.detach().cpu(), alone.weight.detach())
    require(kept, "The function changed the weights of `model`. Only move them.")
    require(linear.weight.grad is None, "The function calls `backward()`. Leave that to the caller, who has a loss.")
    require(model.training and linear.training, "The function leaves the model in evaluation mode. Do not call `eval`.")


def _requests() -> dict[torch.device, int]:
    """How many times each GPU's allocator was asked for memory so far."""
    counted = {gpu: torch.cuda.memory_stats(gpu) for gpu in need_gpus(GPUS)}
    return {gpu: stats.get("allocation.all.allocated", 0) for gpu, stats in counted.items()}


@exercise
def budget(answer):
    """Exercise 2: `answer(model)` gives the MiB of parameters, gradients and optimizer state after a step."""
    gpu = need_gpus(GPUS)[0]
    widest = nn.Sequential(nn.Linear(2, 9000), nn.ReLU(), nn.Linear(9000, 3))  # a quarter of it are biases
    for model in (
        nn.Linear(1000, 500),
        nn.Sequential(nn.Linear(300, 700), nn.ReLU(), nn.Linear(700, 40, bias=False)),
        widest,
        nn.Linear(600, 400, dtype=torch.bfloat16),
    ):
        value = call(answer, copy.deepcopy(model))
        parameters = list(model.to(gpu).parameters())
        adam = torch.optim.Adam(parameters)
        model(torch.ones(1, parameters[0].shape[1], device=gpu, dtype=parameters[0].dtype)).sum().backward()
        adam.step()
        states = [state for each in adam.state.values() for state in each.values() if state.is_cuda]
        held = sum(each.nbytes for each in (*parameters, *(p.grad for p in parameters), *states))
        size = sum(each.nbytes for each in parameters)
        weights = sum(each.nbytes for each in parameters if each.ndim > 1)
        mistakes = {
            size: "is the size of the parameters alone. Add the gradients and the optimizer state.",
            2 * size: "is twice the size of the parameters. Add the optimizer state.",
            3 * size: "is three times the size of the parameters. How many values does Adam keep for each of them?",
            4 * weights: "counts the weights alone. The biases of the linear layers are parameters too.",
        }
        if parameters[0].dtype == torch.bfloat16:
            mistakes[8 * size] = "has 4 bytes per value, and this model is in bfloat16. Does `nbytes` of a tensor help?"
        compare.memory(value, held, "MiB", rel=0.01, mistakes=mistakes)
    return "After a step with Adam, a model takes four times the size of its parameters."


@exercise
def pieces(answer):
    """Exercise 3: how many of 14 images each of four GPUs gets, GPU 0 first."""
    gpus = need_gpus(GPUS)[:GPUS]
    expected = [len(piece) for piece in nn.parallel.scatter(torch.zeros(BATCH, 1), gpus)]
    found = answer.tolist() if isinstance(answer, Tensor | np.ndarray) else answer
    four = isinstance(found, list | tuple) and len(found) == GPUS
    require(four, f"The answer is {show(answer)}. Give a list of {GPUS} numbers, one for each GPU.")
    numbers = [compare.as_number(each) for each in found]
    require(sum(numbers) == BATCH, f"{show(answer)} adds up to {sum(numbers):g} images, and the batch has {BATCH}.")
    wrong = f"{show(answer)} is not how DataParallel divides the batch."
    require(numbers == expected, wrong, "Divide one with `scatter`.")
    return "The last GPU gets fewer images, so it waits for the others."
