"""Lesson 01's checks: the solutions pass, stubs and usual mistakes are told apart, nothing raises."""

import GPUtil
import pytest
import torch
from torch import nn

from helpers.check import lesson01 as check
from helpers.virtual import virtual_gpus

CHECKS = [check.with_positions, check.scaled, check.one_per_gpu, check.emptiest_gpu, check.batch_bytes]


@pytest.fixture(autouse=True)
def gpus():
    with virtual_gpus(4, memory="16 GiB") as devices:
        yield devices


def failing(*args):
    raise ZeroDivisionError("by nothing")


STRANGE = [
    None, ..., "text", True, -1, 10**400, float("nan"), [], {}, object, torch, torch.ones(3), nn.Identity(),
    nn.Identity, nn.Linear, failing, print, len, lambda *a: None, lambda *a: "cuda:99", lambda *a: 7,
    lambda *a: nn.Identity(), lambda *a: torch.device("cuda"), lambda *a: torch.ones(2, device="meta"),
]  # fmt: skip


@pytest.mark.parametrize("checked", CHECKS, ids=lambda each: each.__name__)
@pytest.mark.parametrize("answer", STRANGE, ids=range(len(STRANGE)))
def test_no_answer_makes_a_check_raise(checked, answer):
    before = [torch.cuda.memory_allocated(i) for i in range(4)]
    verdict = checked(answer)
    assert not verdict and verdict.text.startswith("not yet: ")
    assert [torch.cuda.memory_allocated(i) for i in range(4)] == before


def test_without_gpus_the_checks_say_what_to_do(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert "run the lesson's first cell" in check.one_per_gpu(lambda layers, gpus: nn.Identity()).text


# --- exercise 1 ------------------------------------------------------------------------------------------


def with_positions(x):
    return torch.cat([x, torch.arange(len(x), device=x.device, dtype=x.dtype)[:, None]], dim=1)


def test_positions_that_follow_x_are_right():
    assert check.with_positions(with_positions)
    assert check.with_positions(lambda x: torch.cat([x, x.new_tensor(range(len(x)))[:, None]], dim=1))


@pytest.mark.parametrize(
    "answer, said",
    [
        (lambda x: torch.cat([x, torch.arange(len(x))[:, None]], 1), "is on cpu, different from"),
        (lambda x: torch.cat([x, torch.arange(len(x), device="cuda")[:, None]], 1), "is on cuda:0"),
        (lambda x: with_positions(x.cpu()), "still on the CPU"),
        (lambda x: with_positions(x.float()), "the dtype of x"),
        (lambda x: with_positions(x) + 1, "values differ"),
        (lambda x: with_positions(x).T, "their order is not"),
        (lambda x: x, "the size of dimension 1 is not right"),
    ],
)
def test_positions_elsewhere_are_explained(answer, said):
    assert said in check.with_positions(answer).text


# --- exercise 2 ------------------------------------------------------------------------------------------


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.register_buffer("scale", torch.tensor([1.0, 10.0, 100.0]))

    def forward(self, x):
        return self.linear(torch.cat([x, x.new_zeros(len(x), 1)], dim=1)) * self.scale


class Broken(Scaled):
    def forward(self, x):
        return self.linear(torch.cat([x, torch.zeros(len(x), 1)], dim=1)) * self.scale


class CopiedEachTime(Scaled):
    def __init__(self):
        super().__init__()
        del self.scale
        self.scale = torch.tensor([1.0, 10.0, 100.0])

    def forward(self, x):
        return self.linear(torch.cat([x, x.new_zeros(len(x), 1)], dim=1)) * self.scale.to(x.device)


class PlainTensor(CopiedEachTime):
    forward = Scaled.forward


class Trained(CopiedEachTime):
    def __init__(self):
        super().__init__()
        del self.scale
        self.scale = nn.Parameter(torch.tensor([1.0, 10.0, 100.0]))


class Forgotten(CopiedEachTime):
    def __init__(self):
        super().__init__()
        del self.scale
        self.register_buffer("scale", torch.tensor([1.0, 10.0, 100.0]), persistent=False)


class Renamed(nn.Identity):
    pass


def test_a_repaired_module_is_right():
    assert check.scaled(Scaled)


@pytest.mark.parametrize(
    "answer, said",
    [
        (Broken, "is on cpu, different from other tensors on cuda:3"),
        (PlainTensor, "found at least two devices, cuda:3 and cpu"),
        (CopiedEachTime, "scale is no buffer"),
        (Trained, "an optimizer would train it"),
        (Forgotten, "persistent=False"),
        (Renamed, "keep the names"),
        (Scaled(), "give the class"),
    ],
)
def test_a_broken_module_is_explained(answer, said):
    assert said in check.scaled(answer).text


# --- exercise 3 ------------------------------------------------------------------------------------------


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


class ForwardStub(OnePerGPU):
    def forward(self, x):
        return ...


class NothingReturned(OnePerGPU):
    def forward(self, x):
        super().forward(x)


class HiddenInAList(OnePerGPU):
    def __init__(self, layers, gpus):
        super().__init__(layers, gpus)
        del self.layers
        self.layers = list(layers)


class NumbersInOrder(OnePerGPU):
    def __init__(self, layers, gpus):
        super().__init__(layers, [f"cuda:{i}" for i in range(len(layers))])


class NotMovedInForward(OnePerGPU):
    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Detached(OnePerGPU):
    def forward(self, x):
        for layer, gpu in zip(self.layers, self.gpus, strict=True):
            x = layer(x.detach().to(gpu))
        return x


class BackOnTheCPU(OnePerGPU):
    def forward(self, x):
        return super().forward(x).cpu()


class OneTooFew(OnePerGPU):
    def forward(self, x):
        for layer, gpu in zip(self.layers[:-1], self.gpus, strict=False):
            x = layer(x.to(gpu))
        return x.to(self.gpus[-1])


def test_one_layer_per_gpu_is_right():
    assert check.one_per_gpu(OnePerGPU)


@pytest.mark.parametrize(
    "answer, said",
    [
        (Stub, "net.parameters() is empty"),
        (ForwardStub, "ForwardStub still returns ..."),
        (NothingReturned, "no `return`"),
        (HiddenInAList, "nn.ModuleList"),
        (NumbersInOrder, "layer 0 is on cuda:0"),
        (NotMovedInForward, "mat1 is on cpu, different from other tensors on cuda:3"),
        (Detached, "layer 0 got no gradient"),
        (BackOnTheCPU, "still on the CPU"),
        (OneTooFew, "values differ"),
    ],
)
def test_misplaced_layers_are_explained(answer, said):
    assert said in check.one_per_gpu(answer).text


# --- exercise 4 ------------------------------------------------------------------------------------------


def most_free(figure):
    values = [figure(i) for i in range(torch.cuda.device_count())]
    return torch.device("cuda", values.index(max(values)))


def test_the_emptiest_gpu_may_be_found_in_any_way():
    assert check.emptiest_gpu(lambda: most_free(lambda i: torch.cuda.mem_get_info(i)[0]))
    assert check.emptiest_gpu(lambda: torch.device("cuda", GPUtil.getFirstAvailable(order="memory")[0]))
    assert check.emptiest_gpu(lambda: most_free(lambda i: -torch.cuda.memory_reserved(i)).index)


@pytest.mark.parametrize(
    "answer, said",
    [
        (lambda: torch.device("cuda:0"), "another GPU has"),
        (lambda: most_free(lambda i: -torch.cuda.memory_allocated(i)), "ask mem_get_info"),
        (lambda: most_free(lambda i: torch.cuda.mem_get_info(i)[1]), "yours is the fullest"),
        (lambda: torch.device("cuda"), "is not one of the GPUs"),
        (lambda: torch.device("cuda:4"), "is not one of the GPUs"),
        (lambda: torch.device("cpu"), "is not one of the GPUs"),
        (lambda: 0.5, "is no device"),
    ],
)
def test_a_fuller_gpu_is_explained(answer, said):
    assert said in check.emptiest_gpu(answer).text


# --- exercise 5 ------------------------------------------------------------------------------------------

IMAGES = 30 * 3 * 224 * 224


def test_the_bytes_are_right_to_the_byte():
    assert check.batch_bytes(2 * IMAGES + 512)


@pytest.mark.parametrize(
    "answer, said",
    [
        (2 * IMAGES + 240, "rounded up to 512"),
        (2 * IMAGES, "the labels were left out"),
        (4 * IMAGES + 512, "two bytes, not four"),
        (4 * IMAGES + 240, "two bytes, not four"),
        (IMAGES + 30, "counts the elements"),
        (2 * IMAGES + 1024, "a little too large"),
        ("9 MB", "is text"),
    ],
)
def test_wrong_bytes_are_explained(answer, said):
    assert said in check.batch_bytes(answer).text
