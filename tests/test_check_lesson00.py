"""The checks of lesson 00: the solutions pass, stubs and the usual mistakes are explained, nothing raises."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import linear

from notebooks.checks import lesson00 as check
from tests.check_answers import Answers, answers_test, then

pytestmark = pytest.mark.usefixtures("four_of_16_gib", "workspaces_given_back")


def run_on(gpu, net, images):
    return net.to(gpu)(images.to(gpu))


def on_the_current_gpu(gpu, net, images):
    with torch.cuda.device(gpu):
        return net.cuda().forward(images.cuda())


def budget(net):
    return 4 * sum(parameter.numel() * parameter.element_size() for parameter in net.parameters()) / 2**20


RUN_ON = [
    (lambda gpu, net, images: run_on("cuda:0", net, images), "is on cuda:0, and it should be on cuda:3."),
    (lambda gpu, net, images: net(images).to(gpu), "but the model ran on cpu"),
    (lambda gpu, net, images: run_on(gpu, net, images.to("cuda:2")), "on cuda:2 before. Move both straight"),
    (torch.no_grad()(run_on), "has no graph. Use neither `detach` nor `no_grad`"),
    (lambda *given: (run_on(*given) + run_on(*given).detach()) / 2, "The gradient of `model` is off by 50.0%"),
    (lambda gpu, net, images: run_on(gpu, copy.deepcopy(net), images), "`model` is on cpu. Move it"),
    (lambda gpu, net, images: run_on(gpu, copy.deepcopy(net.to(gpu)), images), "and no copy of the model"),
    (lambda *given: run_on(*given).double(), "torch.float64, and the model and the images are"),
    (lambda gpu, net, images: run_on(gpu, net.eval(), images), "leaves the model in evaluation mode"),
    (
        lambda gpu, net, x: linear(x.flatten(1), *map(torch.Tensor.cpu, net.to(gpu)[1].parameters())).to(gpu),
        "to cpu. C",
    ),
    (then(lambda gpu, net, images: images.zero_(), run_on), "The function changed `images` itself"),
    (then(lambda gpu, net, images: net[1].weight.data.zero_(), run_on), "changed the weights of `model`"),
    (lambda *given: (run_on(*given).sum().backward(), run_on(*given))[1], "calls `backward()`. Leave that to the"),
    (lambda *given: run_on(*given).softmax(1), "values are wrong"),
]
BUDGET = [
    (lambda net: budget(net) / 4, "is the size of the parameters alone. Add the gradients"),
    (lambda net: budget(net) / 2, "is twice the size of the parameters. Add the optimizer state"),
    (lambda net: budget(net) * 3 / 4, "How many values does Adam keep for each"),
    (lambda net: budget(net) * 1.02, "is too large"),
    (lambda net: 16 * sum(p.numel() for p in net.parameters()) / 2**20, "and this model is in bfloat16"),
    (lambda net: sum(p.nbytes for p in net.parameters() if p.ndim > 1) / 2**18, "counts the weights"),
]
PIECES = [
    ([...] * 4, "still contains `...`"),
    ([4, 4, 3, 3], "[4, 4, 3, 3] is not how DataParallel divides the batch. Divide one with `scatter`."),
    ([4, 4, 4, 4], "adds up to 16 images, and the batch has 14."),
    ([14], "Give a list of 4 numbers, one for each GPU."),
]
ANSWERS = {
    "total_memory": Answers(
        check.total_memory,
        [64, 64.0],
        [(16, "16 GiB is the memory of one GPU. Add up all 4."), (68.719, "in GB. Give GiB")],
    ),
    "run_on": Answers(
        check.run_on,
        [run_on, on_the_current_gpu, lambda gpu, net, images: nn.DataParallel(net.to(gpu), [gpu])(images)],
        RUN_ON,
    ),
    "budget": Answers(check.budget, [budget], BUDGET),
    "pieces": Answers(check.pieces, [np.array([4, 4, 4, 2]), (4, 4, 4, 2), torch.tensor([4, 4, 4, 2])], PIECES),
}
test_answers = answers_test(ANSWERS)


def test_right_answers_leave_no_memory_behind():
    assert check.run_on(run_on) and check.budget(budget)
    assert [torch.cuda.memory_allocated(index) for index in range(4)] == [0] * 4
