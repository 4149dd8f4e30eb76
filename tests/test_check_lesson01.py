"""Lesson 01's checks: the solutions pass, stubs and usual mistakes are told apart, nothing raises."""

import copy

import GPUtil
import pytest
import torch
from torch import nn

from notebooks.checks import lesson01 as check
from tests.check_answers import STRANGE, Answers, answers_test, stored

LESSON = "01_device_placement"
pytestmark = pytest.mark.usefixtures("four_of_16_gib")


def with_positions(x):
    return torch.cat([x, torch.arange(len(x), device=x.device, dtype=x.dtype)[:, None]], dim=1)


def in_a_block(x):
    with x.device:
        return torch.hstack([x, torch.arange(len(x), dtype=x.dtype).unsqueeze(1)])


POSITIONS = [
    (lambda x: torch.cat([x, torch.arange(len(x), device="cuda")[:, None]], 1), "is on cuda:0"),
    (lambda x: torch.cat([x, torch.arange(len(x), device=x.device)[:, None]], 1), "an x of torch.int32, the result"),
    (lambda x: with_positions(x.cpu()).to(x.device), "For an x on cuda:0, the function copies from there to cpu."),
    (lambda x: with_positions(x.detach()).requires_grad_(x.requires_grad), "The gradient does not reach x"),
    (lambda x: (with_positions(x) + with_positions(x.detach())) / 2, "The gradient of x is off by 50.0%"),
    (lambda x: with_positions(x.detach().add_(1) - 1), "The function changed x itself."),
    (lambda x: with_positions(x).roll(1, 1), "The row numbers are in the first column."),
    (lambda x: torch.cat([x, x.new_ones(len(x), 1).cumsum(0)], 1), "At [0, 1], yours is 1 and the right one is 0."),
]


LEFT = {"a": "model", "b": "batch", "c": "labels", "d": "model", "e": "batch"}
LEFT_BEHIND = [
    (LEFT | {"a": "batch"}, ("after you move its batch to cuda:1, with RuntimeError", "input of a linear layer")),
    (LEFT | {"c": "batch"}, "`target` stands for the labels of a loss"),
    (LEFT | {"d": "batch"}, "it was compared with the embedding's table"),
    (LEFT | {"e": "model"}, "Input type (torch.FloatTensor) and weight type"),
    (LEFT | {"e": "weights"}, "'weights' is not a part of program e. Choose from batch, model, labels."),
    ({"a": "model"}, "a dict with a part for each of a, b, c, d, e"),
]


program = stored(LESSON, "NetSolution", "train_solution", copy=copy)
LAYERS, SCALE = "[nn.Linear(4, 8), nn.ReLU()]", "self.scale = torch.tensor([1.0, 2.0, 3.0])"
BUFFER = 'self.register_buffer("scale", torch.tensor([1.0, 2.0, 3.0]))'
PARAMETER = "self.scale = nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))"
FAULTS = {  # in the order in which the errors come: (the right text, the fault): the words of its error
    ("    x = x.to(device)", "    x.to(device)"): "mat1 is on cpu, different from other tensors on cuda:3",
    ("torch.arange(4, device=x.device)", "torch.arange(4)"): "got mask on cpu and self on cuda:3",
    (f"nn.ModuleList({LAYERS})", LAYERS): "mat1 is on cuda:3, different from other tensors on cpu",
    (BUFFER, SCALE): "Print the `.device` of each tensor in that line.",
    ("y.to(device)", "y.cuda()"): "`target` stands for the labels of a loss",
    (".cpu().numpy()", ".numpy()"): "can't convert cuda:",
}


def trained_elsewhere(net, device, x, y):
    classes = program()[1](net, "cuda:0", x, y)
    net.to(device)
    return classes


MENDED = [
    *(  # where the first faults are mended
        (program(*[text for pair in list(FAULTS)[i:] for text in pair]), (words, "on cuda:3 your code stopped at `"))
        for i, words in enumerate(FAULTS.values())
    ),
    (program("y.to(device)", 'y.to("cuda:3")'), "on cuda:0 your code stopped at `loss = nn.functional.cross_entropy"),
    (program(".cpu().numpy()", ".tolist()"), "Return the classes as a NumPy array"),
    (program(".numpy()", ".numpy() * 0"), "the classes are"),
    (program(f"nn.ModuleList({LAYERS})", LAYERS, "layer(x)", "layer.to(x.device)(x)"), "(8, 4) and (8,). A plain list"),
    (program(BUFFER, PARAMETER), "`scale` is a parameter that the optimizer trains"),
    (program("3.0]))", "3.0]), persistent=False)"), "so a checkpoint loses it"),
    (program("* self.scale", "* torch.tensor([1.0, 2.0, 3.0], device=x.device)"), "does not use the `scale` of"),
    (program("torch.tensor([1.0, 2.0, 3.0])", "torch.zeros(3)"), "`scale` is [0.0, 0.0, 0.0], and it should be"),
    (program("masked_fill(", "masked_fill_("), "Your code changes the caller's x."),
    (program("    model.to(", "    model = copy.deepcopy(model).to("), "layers.0.weight is on cpu. Move the model"),
    (program("lr=0.1", "lr=0.2"), ("the weights after training on cuda:3 are off by", "Change only devices.")),
    ((program()[0], trained_elsewhere), "With cuda:3 as device, the model computed on cuda:0. Move the model, x and y"),
    ((program()[0](), program()[1]), "Pass the class itself"),
]  # fmt: skip


per_gpu = stored(LESSON, "OnePerGPUSolution", copy=copy)
START, MOVED, MADE, END = "for layer, gpu in zip(self", "x.to(gpu)", "layer.to(gpu)", "return x"
PER_GPU = [
    (lambda layers, gpus: nn.Identity(), "lacks the parameters of layer 0. Keep the layers where the module finds"),
    (per_gpu("layers, gpus,", "layers, gpus[::-1],"), "Layer 0 is on cuda:0, and in this check gpus[0] is cuda:3."),
    (per_gpu(MOVED, "x.detach().to(gpu)"), "does not reach layer 0."),
    (per_gpu(END, "return x.detach()"), "The output has no graph. Is there a detach() or no_grad()"),
    (per_gpu(MADE, "copy.deepcopy(layer).to(gpu)"), "a copy of layer 0. Keep the layer itself"),
    (per_gpu(END, "return (x + x.detach()) / 2"), "gradient of layer 0 is off by 50"),
    (per_gpu(MOVED, "x.cpu().to(gpu)"), "makes 7 copies between devices"),
    (per_gpu("layers, gpus, strict=True", "[layers[i] for i in range(4)], gpus"), "With 2 layers on cuda:1, cuda:2"),
    (per_gpu(START, f"x.pin_memory()\n        {START}"), "your class stopped at `"),
    (per_gpu(START, f"given, x = x, x.clone()\n        {START}", END, "return given.zero_() is x or x"),
     "The module changes the batch that it is"),
    (lambda layers, gpus: layers, "Write a subclass of nn.Module."),
]  # fmt: skip


def most_free(figure):
    values = [figure(i) for i in range(torch.cuda.device_count())]
    return torch.device("cuda", values.index(max(values)))


EMPTIEST = [
    (lambda: torch.device("cuda", 2), "cuda:2 has"),
    (lambda: most_free(lambda i: -torch.cuda.memory_allocated(i)), "or that PyTorch keeps in reserve, is not free"),
    (lambda: most_free(lambda i: -torch.cuda.memory_reserved(i)), "Memory that other programs hold"),
    (lambda: "cuda:1", "'cuda:1' is not the torch.device of a GPU"),
]

ANSWERS = {
    "with_positions": Answers(
        check.with_positions,
        [
            with_positions,
            in_a_block,
            lambda x: torch.column_stack([x, torch.arange(len(x)).to(x)]),
            lambda x: torch.cat([x, x.new_tensor(range(len(x)))[:, None]], dim=1),
        ],
        POSITIONS,
    ),
    "left_behind": Answers(check.left_behind, [LEFT], LEFT_BEHIND),
    "mended": Answers(
        lambda pair: check.mended(*pair),
        [
            program(
                "    model.to(device)\n", "", "    optimizer = torch", "    model.to(device)\n    optimizer = torch"
            ),
            program(BUFFER, PARAMETER.replace("]))", "]), requires_grad=False)")),
            program(BUFFER, "self.scale = nn.Buffer(torch.tensor([1.0, 2.0, 3.0]))"),
            program(".cpu().numpy()", ".numpy(force=True)", "y.to(device)", "y.to(x.device)"),
            program("    x = x.to(device)", "    x, model = x.to(device), model.to(device)"),
        ],
        MENDED,
        strange=[(each, program()[1]) for each in STRANGE] + [(program()[0], each) for each in STRANGE],
    ),
    "one_per_gpu": Answers(
        check.one_per_gpu, [per_gpu(START, f"home = x.device\n        {START}", END, "return x.to(home)")], PER_GPU
    ),
    "emptiest_gpu": Answers(
        check.emptiest_gpu,
        [
            lambda: most_free(lambda i: torch.cuda.mem_get_info(i)[0]),
            lambda: torch.device("cuda", GPUtil.getFirstAvailable(order="memory")[0]),
            lambda: most_free(lambda i: -torch.cuda.device_memory_used(i)),
        ],
        EMPTIEST,
    ),
}
test_answers = answers_test(ANSWERS)
