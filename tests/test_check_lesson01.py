"""Lesson 01's checks: the solutions pass, stubs and usual mistakes are told apart, nothing raises."""

import copy
import functools
import linecache

import GPUtil
import pytest
import torch
from torch import nn
from virtual_gpus import virtual_gpus

from notebooks.checks import lesson01 as check
from tests.check_answers import STRANGE, explains, survives_strange_answers, told


@pytest.fixture(autouse=True)
def gpus():
    with virtual_gpus(4, memory="16 GiB") as devices:
        yield devices


def test_no_answer_makes_a_check_raise():
    assert survives_strange_answers(check.with_positions, check.left_behind, check.one_per_gpu, check.emptiest_gpu)
    net, train = program()
    for answer in STRANGE:
        assert told(check.mended(answer, train)) and told(check.mended(net, answer))


def test_without_gpus_the_checks_say_what_to_do(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert told(check.one_per_gpu(OnePerGPU), "The exercise needs 2 GPUs", "Run the cell with use_gpus above again.")


def with_positions(x):
    return torch.cat([x, torch.arange(len(x), device=x.device, dtype=x.dtype)[:, None]], dim=1)


def in_a_block(x):
    with x.device:
        return torch.hstack([x, torch.arange(len(x), dtype=x.dtype).unsqueeze(1)])


def filled(x):
    result = nn.functional.pad(x, (0, 1))
    result[:, -1] = torch.arange(len(x))
    return result


def default_device_left(x):
    torch.set_default_device(x.device)
    return torch.cat([x, torch.arange(len(x), dtype=x.dtype)[:, None]], 1)


def test_with_positions():
    assert check.with_positions(with_positions)
    assert check.with_positions(lambda x: torch.cat([x, x.new_tensor(range(len(x)))[:, None]], dim=1))
    assert check.with_positions(lambda x: torch.cat([x, torch.arange(len(x)).to(x).reshape(-1, 1)], 1))
    assert check.with_positions(lambda x: torch.column_stack([x, torch.arange(len(x)).to(x)]))
    assert check.with_positions(in_a_block) and check.with_positions(filled)
    explains(
        check.with_positions,
        (lambda x: torch.cat([x, torch.arange(len(x))[:, None]], 1), "is on cpu, different from"),
        (lambda x: torch.cat([x, torch.arange(len(x), device="cuda")[:, None]], 1), "is on cuda:0"),
        (lambda x: with_positions(x.cpu()), "For an x on cuda:0, the result is on cpu. Keep the device of x."),
        (lambda x: with_positions(x.float()), "Keep the dtype of x"),
        (
            lambda x: torch.cat([x, torch.arange(len(x), device=x.device)[:, None]], 1),
            "an x of torch.int32, the result",
        ),
        (lambda x: torch.cat([x, torch.arange(float(len(x)), device=x.device)[:, None]], 1), "Keep the dtype of x"),
        (
            lambda x: torch.cat([x, torch.arange(5, device=x.device, dtype=x.dtype)[:, None]], 1),
            "sizes of tensors must",
        ),
        (lambda x: with_positions(x.cpu()).to(x.device), "For an x on cuda:0, the function copies from there to cpu."),
        (lambda x: with_positions(x.to("cuda:0")).to(x.device), "For an x on cpu, the function copies from there to"),
        (lambda x: with_positions(x.detach()).requires_grad_(x.requires_grad), "No gradient reaches x"),
        (lambda x: (with_positions(x) + with_positions(x.detach())) / 2, "The gradient that reaches x is wrong"),
        (default_device_left, "leaves PyTorch's default device at cuda:0"),
        (lambda x: with_positions(x.detach()), "No gradient reaches x"),
        (torch.no_grad()(with_positions), "No gradient reaches x"),
        (lambda x: torch.tensor(with_positions(x).tolist()).to(x), "No gradient reaches x"),
        (lambda x: with_positions(x.detach().add_(1) - 1), "The function changed x itself."),
        (lambda x: with_positions(x).roll(1, 1), "The row numbers are in the first column."),
        (lambda x: torch.cat([x, x.new_ones(len(x), 1).cumsum(0)], 1), "At [0, 1], yours is 1 and the right one is 0."),
        (lambda x: x, "it should be (3, 2)"),
    )


LEFT = {"a": "model", "b": "batch", "c": "labels", "d": "model", "e": "batch"}


def test_the_five_errors_are_pytorch_s_own():
    said = check.errors()
    assert "mat1 is on cuda:1, different from other tensors on cpu" in said["a"]
    assert "mat1 is on cuda:0, different from other tensors on cuda:1" in said["b"]
    assert "target is on cuda:0" in said["c"] and "nll_loss_forward" in said["c"]
    assert "index is on cuda:1, different from other tensors on cuda:0" in said["d"]
    assert "Input type (torch.FloatTensor) and weight type (torch.cuda.FloatTensor)" in said["e"]


def test_left_behind():
    assert check.left_behind(LEFT)
    for letter, right in LEFT.items():
        for part in {"batch", "model", "labels"} - {right}:
            words = f"Program {letter} still fails after you move its {part} to cuda:1, with RuntimeError: "
            assert told(check.left_behind(LEFT | {letter: part}), words)
    explains(
        check.left_behind,
        (LEFT | {"a": "batch"}, "`mat1` is the input of a linear layer"),
        (LEFT | {"c": "batch"}, "`target` stands for the labels of a loss"),
        (LEFT | {"d": "batch"}, "it was compared with the embedding's table"),
        (LEFT | {"e": "model"}, "Input type (torch.FloatTensor) and weight type"),
        (LEFT | {"e": "weights"}, "'weights' is not a part of program e. Choose from batch, model, labels."),
        ({"a": "model"}, "a dict with a part for each of a, b, c, d, e"),
        (LEFT | {"b": ...}, "still contains `...`"),
    )


BROKEN = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = [nn.Linear(4, 8), nn.ReLU()]
        self.last = nn.Linear(8, 3)
        self.scale = torch.tensor([1.0, 2.0, 3.0])

    def forward(self, x):
        x = x.masked_fill(torch.arange(4) == 2, 0.0)
        for layer in self.layers:
            x = layer(x)
        return self.last(x) * self.scale


def train(model, device, x, y):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model.to(device)
    x.to(device)
    for _ in range(3):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y.cuda())
        loss.backward()
        optimizer.step()
    return model(x).argmax(1).numpy()
"""
MENDS = {  # in the order in which the errors come: the fault, its repair, the words of its error
    "    x.to(device)": ("    x = x.to(device)", "mat1 is on cpu, different from other tensors on cuda:3"),
    "torch.arange(4)": ("torch.arange(4, device=x.device)", "got mask on cpu and self on cuda:3"),
    "[nn.Linear(4, 8), nn.ReLU()]": (
        "nn.ModuleList([nn.Linear(4, 8), nn.ReLU()])",
        "mat1 is on cuda:3, different from other tensors on cpu",
    ),
    "self.scale = torch.tensor([1.0, 2.0, 3.0])": (
        'self.register_buffer("scale", torch.tensor([1.0, 2.0, 3.0]))',
        "Print the `.device` of each tensor in that line.",
    ),
    "y.cuda()": ("y.to(device)", "`target` stands for the labels of a loss"),
    ".numpy()": (".cpu().numpy()", "can't convert cuda:"),
}


def program(changes=None, **more):
    """Net and train, with all repairs, or with those in `changes` (fault -> other text) in place of the right ones."""
    text = BROKEN
    for fault, (repair, _) in MENDS.items():
        text = text.replace(fault, (changes or {}).get(fault, repair))
    for old, new in more.items():
        assert old in text
        text = text.replace(old, new)
    file = f"<cell {hash(text)}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)  # so that errors know their line
    names = {"torch": torch, "nn": nn, "copy": copy}
    exec(compile(text, file, "exec"), names)  # noqa: S102
    return names["Net"], names["train"]


def test_the_mended_training_is_right():
    assert check.mended(*program())
    assert check.mended(*program(**{"optimizer = torch": "model.to(device)\n    optimizer = torch"}))


def trained_on(place, net, device, x, y):
    """Trains on `place`, whatever `device` is, and moves the model in the end."""
    _, train = program()
    classes = train(net, place, x, y)
    net.to(device)
    return classes


def test_each_mend_leads_to_the_next_error():
    for count, (_, words) in enumerate(MENDS.values()):
        left = list(MENDS)[count:]
        verdict = check.mended(*program({fault: fault for fault in left}))
        assert told(verdict, words, "on cuda:3 your code stopped at `")


SCALE = "self.scale = torch.tensor([1.0, 2.0, 3.0])"
PARAMETER = "self.scale = nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))"


def test_other_mends():
    assert check.mended(*program({SCALE: PARAMETER.replace("]))", "]), requires_grad=False)")}))
    assert check.mended(*program({"torch.arange(4)": "x.new_tensor([0, 1, 2, 3])"}))
    assert check.mended(*program({SCALE: "self.scale = nn.Buffer(torch.tensor([1.0, 2.0, 3.0]))"}))
    assert check.mended(*program({".numpy()": ".numpy(force=True)", "y.cuda()": "y.to(x.device)"}))
    assert check.mended(*program({"    x.to(device)": "    x, model = x.to(device), model.to(device)"}))
    layers = "[nn.Linear(4, 8), nn.ReLU()]"
    buffer = 'self.register_buffer("scale", torch.tensor([1.0, 2.0, 3.0]), persistent=False)'
    explains(
        lambda mends: check.mended(*program(mends[0], **mends[1])),
        (({"y.cuda()": 'y.to("cuda:3")'}, {}), "on cuda:0 your code stopped at `loss = nn.functional.cross_entropy"),
        (({"torch.arange(4)": 'torch.arange(4, device="cuda")'}, {}), "got mask on cuda:0 and self on"),
        (({".numpy()": ".tolist()"}, {}), "Return the classes as a NumPy array"),
        (({".numpy()": ".cpu().numpy() * 0"}, {}), "the classes are"),
        (
            ({layers: layers}, {"x = layer(x)": "x = layer.to(x.device)(x)"}),
            "lacks the parameters of shape (8, 4) and (8,). A plain list",
        ),
        (({SCALE: SCALE}, {"* self.scale": "* self.scale.to(x.device)"}), "state_dict does not contain `scale`"),
        (({SCALE: PARAMETER}, {}), "`scale` is a parameter that the optimizer trains"),
        (({SCALE: buffer}, {}), "so a checkpoint loses it"),
        (({}, {"* self.scale": "* torch.tensor([1.0, 2.0, 3.0], device=x.device)"}), "does not use the `scale` of"),
        (
            ({SCALE: 'self.register_buffer("scale", torch.zeros(3))'}, {}),
            "`scale` is [0.0, 0.0, 0.0], and it should be",
        ),
        (({}, {"masked_fill(": "masked_fill_("}), "Your code changes the caller's x."),
        (
            ({}, {"model.to(device)": "torch.set_default_device(device)\n    model.to(device)"}),
            "default device at cuda:3",
        ),
        (
            ({}, {"model.to(device)": "model = copy.deepcopy(model).to(device)"}),
            "layers.0.weight is on cpu. Move the model",
        ),
        (({}, {"lr=0.1": "lr=0.2"}), "differ from those of the CPU. Change only devices."),
        (({}, {"optimizer.step()": "1 / 0"}), "ZeroDivisionError"),
    )


def test_training_elsewhere_is_told():
    net, _ = program()
    for place in ("cpu", "cuda:0"):
        verdict = check.mended(net, functools.partial(trained_on, place))
        assert told(verdict, f"With cuda:3 as device, the model computed on {place}. Move the model, x and y")


def test_the_class_is_asked_for():
    net, train = program()
    assert told(check.mended(net(), train), "Pass the class itself")
    assert told(check.mended(net, "train"), "cannot be called")


class OnePerGPU(nn.Module):
    def __init__(self, layers, gpus):
        super().__init__()
        self.layers = nn.ModuleList(layer.to(gpu) for layer, gpu in zip(layers, gpus, strict=True))
        self.gpus = gpus

    def forward(self, x):
        for layer, gpu in zip(self.layers, self.gpus, strict=True):
            x = layer(x.to(gpu))
        return x


class Stub(nn.Module):
    def __init__(self, layers, gpus):
        super().__init__()

    def forward(self, x): ...


class HiddenInAList(OnePerGPU):
    def __init__(self, layers, gpus):
        super().__init__(layers, gpus)
        del self.layers
        self.layers = list(layers)


class NumbersInOrder(OnePerGPU):
    def __init__(self, layers, gpus):
        super().__init__(layers, [f"cuda:{i}" for i in range(len(layers))])


class Returned(OnePerGPU):
    def forward(self, x):
        return super().forward(x).to(x.device)


class Registered(nn.Module):
    def __init__(self, layers, gpus):
        super().__init__()
        for i, layer in enumerate(layers):
            self.add_module(str(i), layer.to(gpus[i]))

    def forward(self, x):
        for layer in self.children():
            x = layer(x.to(layer.weight.device))
        return x


class Detached(OnePerGPU):
    def forward(self, x):
        for layer, gpu in zip(self.layers, self.gpus, strict=True):
            x = layer(x.detach().to(gpu))
        return x


class Copied(OnePerGPU):
    def __init__(self, layers, gpus):
        super().__init__(copy.deepcopy(layers), gpus)


class HalfDetached(OnePerGPU):
    def forward(self, x):
        return (super().forward(x) + super().forward(x).detach()) / 2


class AllOnOne(OnePerGPU):
    def forward(self, x):
        for layer in self.layers:
            layer.to(self.gpus[0])
        x = nn.Sequential(*self.layers)(x.to(self.gpus[0]))
        for layer, gpu in zip(self.layers, self.gpus, strict=True):
            layer.to(gpu)
        return x


class OverTheCPU(OnePerGPU):
    def forward(self, x):
        for layer, gpu in zip(self.layers, self.gpus, strict=True):
            x = layer(x.cpu().to(gpu))
        return x


class OnTheCPU(OnePerGPU):
    def forward(self, x):
        x = x.cpu()
        for layer in self.layers:
            x = nn.functional.linear(x, layer.weight.cpu(), layer.bias.cpu())
        return x


class FourLayers(OnePerGPU):
    def forward(self, x):
        for i in range(4):
            x = self.layers[i](x.to(self.gpus[i]))
        return x


class FromTheCPUOnly(OnePerGPU):
    def forward(self, x):
        return super().forward(x.pin_memory())


class Zeroes(OnePerGPU):
    def forward(self, x):
        found = super().forward(x.clone())
        x.zero_()
        return found


def test_one_per_gpu():
    assert check.one_per_gpu(OnePerGPU) and check.one_per_gpu(Returned) and check.one_per_gpu(Registered)
    explains(
        check.one_per_gpu,
        (Stub, "`model.parameters()` lacks the parameters of layer 0"),
        (HiddenInAList, "Keep the layers where the module finds them"),
        (NumbersInOrder, "Layer 0 is on cuda:0, and in this check gpus[0] is cuda:3."),
        (Detached, "layer 0 got no gradient"),
        (Copied, "The module holds a copy of layer 0. Keep the layer itself"),
        (HalfDetached, "The gradient of layer 0 differs from that of the same layers on one device."),
        (AllOnOne, "makes 13 copies between devices: cuda:2 to cuda:3"),
        (OverTheCPU, "makes 7 copies between devices: cpu to cuda:3, cuda:3 to cpu, cpu to cuda:2"),
        (OnTheCPU, "makes 8 copies"),
        (FourLayers, "With 2 layers on cuda:1, cuda:2, your class stopped at `"),
        (FromTheCPUOnly, "your class stopped at `"),
        (Zeroes, "The module changes the batch that it is given."),
    )


def most_free(figure):
    values = [figure(i) for i in range(torch.cuda.device_count())]
    return torch.device("cuda", values.index(max(values)))


def test_emptiest_gpu():
    assert check.emptiest_gpu(lambda: most_free(lambda i: torch.cuda.mem_get_info(i)[0]))
    assert check.emptiest_gpu(lambda: torch.device("cuda", GPUtil.getFirstAvailable(order="memory")[0]))
    assert check.emptiest_gpu(lambda: most_free(lambda i: -torch.cuda.device_memory_used(i)))
    explains(
        check.emptiest_gpu,
        *((lambda i=i: torch.device("cuda", i), f"cuda:{i} has") for i in range(4)),
        (lambda: most_free(lambda i: -torch.cuda.memory_allocated(i)), "or that PyTorch keeps in reserve, is not free"),
        (lambda: most_free(lambda i: -torch.cuda.memory_reserved(i)), "Memory that other programs hold"),
        (lambda: most_free(lambda i: torch.cuda.mem_get_info(i)[1]), "and another GPU has"),
        (lambda: torch.device("cuda"), "is not the torch.device of a GPU"),
        (lambda: "cuda:1", "'cuda:1' is not the torch.device of a GPU"),
        (lambda: GPUtil.getFirstAvailable(order="memory")[0], "is not the torch.device of a GPU"),
    )
