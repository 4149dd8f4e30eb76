"""Checks of lesson 00: the memory of all GPUs, a net on a chosen GPU, a budget, the pieces of a batch."""

import torch
from torch import Tensor, nn

from helpers.exercises import compare
from helpers.exercises.core import call, exercise, require, show
from helpers.exercises.gpus import need_gpus
from helpers.measure import GiB

BATCH = 14  # images in the exercise on pieces; lesson 02 asks for 10
GPUS = 4


@exercise
def total_memory(answer):
    """The memory of all GPUs together, in GiB."""
    sizes = [torch.cuda.get_device_properties(gpu).total_memory for gpu in need_gpus(GPUS)]
    one = {sizes[0]: f"is the memory of one GPU. Add up all {len(sizes)}."}
    compare.memory(answer, sum(sizes), "GiB", rel=0.01, mistakes=one)
    return f"There are {len(sizes)} GPUs, and the first has {sizes[0] / GiB:.2f} GiB."


@exercise
def run_on(answer):
    """Exercise 1: `answer(gpu, net, images)` gives the output of `net` for CPU `images`, computed on `gpu`."""
    for gpu in reversed(need_gpus(GPUS)):  # the current GPU last: code that ignores `gpu` would pass there
        torch.manual_seed(gpu.index)
        linear, images, ran_on = nn.Linear(16, 3), torch.randn(5, 1, 4, 4), set()
        net = nn.Sequential(nn.Flatten(), linear)
        expected = net(images).detach()
        linear.register_forward_hook(lambda module, inputs, output, ran_on=ran_on: ran_on.add(str(output.device)))
        output = call(answer, gpu, net, images)
        compare.tensor(output, expected)
        compare.device(output, gpu)
        places = ", ".join(sorted(ran_on))
        only = f"The output is on {gpu}, but the net ran on {places}. Use no GPU except {gpu}."
        require(ran_on <= {str(gpu)}, only, "Move the net and the images there before you call the net.")
    return "The net gave the right output on each GPU in turn."


@exercise
def budget(answer):
    """Exercise 2: `answer(net)` gives the MiB of parameters, gradients and Adam's state, as one step leaves them."""
    gpu = need_gpus(GPUS)[0]
    for net in (nn.Linear(1000, 500), nn.Sequential(nn.Linear(300, 700), nn.ReLU(), nn.Linear(700, 40, bias=False))):
        value = call(answer, net)
        parameters = list(net.to(gpu).parameters())
        adam = torch.optim.Adam(parameters)
        net(torch.ones(1, parameters[0].shape[1], device=gpu)).sum().backward()
        adam.step()
        states = [state for each in adam.state.values() for state in each.values() if state.is_cuda]
        held = sum(each.nbytes for each in (*parameters, *(p.grad for p in parameters), *states))
        size = sum(each.nbytes for each in parameters)
        mistakes = {
            size: "is the size of the parameters alone. Add the gradients and Adam's state.",
            2 * size: "is twice the size of the parameters. Adam keeps a state of its own.",
            3 * size: "is three times the size of the parameters. How many numbers does Adam keep for each of them?",
        }
        compare.memory(value, held, "MiB", rel=0.01, mistakes=mistakes)
    return "The net holds four times the size of its parameters after a step of Adam."


@exercise
def pieces(answer):
    """Exercise 3: how many of 14 images each of four GPUs gets, GPU 0 first."""
    gpus = need_gpus(GPUS)[:GPUS]
    expected = [len(piece) for piece in nn.parallel.scatter(torch.zeros(BATCH, 1), gpus)]
    found = answer.tolist() if isinstance(answer, Tensor) else answer
    four = isinstance(found, list | tuple) and len(found) == GPUS
    require(four, f"The answer is {show(answer)}. Give a list of {GPUS} numbers, one for each GPU.")
    numbers = [compare.as_number(each) for each in found]
    require(sum(numbers) == BATCH, f"{show(answer)} adds up to {sum(numbers):g} images, and the batch has {BATCH}.")
    require(numbers == expected, f"{show(answer)} is not how DataParallel cuts the batch. Cut one with `scatter`.")
    return "The last GPU gets fewer images, so it waits for the others."
