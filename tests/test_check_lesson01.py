"""Lesson 01's checks: the solutions pass, stubs and usual mistakes are told apart, nothing raises."""

import linecache

import GPUtil
import pytest
import torch
from torch import nn
from virtual_gpus import virtual_gpus

from helpers.exercises import lesson01 as check
from helpers.exercises.core import NotYet
from helpers.exercises.device_errors import explained, reading

CHECKS = [check.with_positions, check.left_behind, check.one_per_gpu, check.emptiest_gpu, check.batch_bytes]


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

LEFT = {"a": "net", "b": "batch", "c": "labels", "d": "net", "e": "batch"}


def test_the_five_errors_are_pytorch_s_own():
    said = check.errors()
    assert list(said) == list(LEFT)
    assert "mat1 is on cuda:1, different from other tensors on cpu" in said["a"]
    assert "mat1 is on cuda:0, different from other tensors on cuda:1" in said["b"]
    assert "target is on cuda:0" in said["c"] and "nll_loss_forward" in said["c"]
    assert "index is on cuda:1, different from other tensors on cuda:0" in said["d"]
    assert "Input type (torch.FloatTensor) and weight type (torch.cuda.FloatTensor)" in said["e"]


def test_what_was_left_behind_is_right():
    assert check.left_behind(LEFT)


@pytest.mark.parametrize("letter", LEFT)
@pytest.mark.parametrize("part", ["batch", "net", "labels"])
def test_only_the_part_that_was_left_behind_mends_a_program(letter, part):
    verdict = check.left_behind(LEFT | {letter: part})
    assert bool(verdict) == (part == LEFT[letter])
    assert verdict or f"{letter!r} ends as before when its {part} is brought to cuda:1" in verdict.text


@pytest.mark.parametrize(
    "answer, said",
    [
        (LEFT | {"a": "batch"}, "mat1 stands for the input of a linear layer, on cuda:1"),
        (
            LEFT | {"c": "batch"},
            "the labels of a loss, on cuda:0, and the net's output, looked at before it, is on cuda:1",
        ),
        (LEFT | {"d": "batch"}, "the embedding's table, looked at before it, is on cuda:0"),
        (LEFT | {"e": "net"}, "the input of a convolution is on the CPU"),
        (LEFT | {"e": "weights"}, "'weights' for 'e', because it is one of batch, net, labels"),
        ({"a": "net"}, "None for 'b'"),
        (list(LEFT.values()), "is no dict"),
        (LEFT | {"b": ...}, "still holds ..."),
    ],
)
def test_a_wrong_reading_is_explained(answer, said):
    assert said in check.left_behind(answer).text


# --- exercise 3 ------------------------------------------------------------------------------------------

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


def train(net, device, x, y):
    sgd = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    net.to(device)
    x.to(device)
    for _ in range(3):
        sgd.zero_grad()
        nn.functional.cross_entropy(net(x), y.cuda()).backward()
        sgd.step()
    return net(x).argmax(1).numpy()
"""
MENDS = {  # in the order in which the errors come: the fault, its repair, the words of its error
    "    x.to(device)": ("    x = x.to(device)", "mat1 is on cpu, different from other tensors on cuda:3"),
    "torch.arange(4)": ("torch.arange(4, device=x.device)", "the mask was made on cpu, and x is on cuda:3"),
    "[nn.Linear(4, 8), nn.ReLU()]": (
        "nn.ModuleList([nn.Linear(4, 8), nn.ReLU()])",
        "mat1 is on cuda:3, different from other tensors on cpu",
    ),
    "self.scale = torch.tensor([1.0, 2.0, 3.0])": (
        'self.register_buffer("scale", torch.tensor([1.0, 2.0, 3.0]))',
        "an element-wise operation met a tensor on cuda:3 and one on cpu",
    ),
    "y.cuda()": ("y.to(device)", "the labels of a loss, on cuda:0"),
    ".numpy()": (".cpu().numpy()", "NumPy knows the computer's own memory only"),
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
    names = {"torch": torch, "nn": nn}
    exec(compile(text, file, "exec"), names)  # noqa: S102
    return names["Net"], names["train"]


def test_the_mended_training_is_right():
    assert check.mended(*program())
    before = {"sgd = torch": "net.to(device)\n    sgd = torch"}
    assert check.mended(*program(**before))


@pytest.mark.parametrize("count", range(len(MENDS)))
def test_each_mend_leads_to_the_next_error(count):
    left = list(MENDS)[count:]
    said = check.mended(*program({fault: fault for fault in left})).text
    assert MENDS[left[0]][1] in said and "on cuda:3 your code stopped at `" in said and "In other words: " in said


@pytest.mark.parametrize(
    "fault, repair, said",
    [
        ("y.cuda()", 'y.to("cuda:3")', "on cuda:0 your code stopped at `nn.functional.cross_entropy"),
        ("torch.arange(4)", 'torch.arange(4, device="cuda")', "the mask was made on cuda:0, and x is on cuda:3"),
        ("torch.arange(4)", "x.new_tensor([0, 1, 2, 3])", ""),
        ("    x.to(device)", "    x, net = x.to(device), net.to(device)", ""),
        ("    x.to(device)", '    x, device = x.to("cpu"), net.to("cpu") and "cpu"', "still on the CPU"),
        (".numpy()", ".tolist()", "a NumPy array of classes is asked for"),
        (".numpy()", ".cpu().numpy() * 0", "the classes are"),
    ],
)
def test_other_mends(fault, repair, said):
    verdict = check.mended(*program({fault: repair}))
    assert said in verdict.text if said else verdict


def test_layers_moved_by_hand_are_still_unknown():
    by_hand = {"x = layer(x)": "x = layer.to(x.device)(x)"}
    plain = {"[nn.Linear(4, 8), nn.ReLU()]": "[nn.Linear(4, 8), nn.ReLU()]"}
    assert "lacks those of shape (8, 4) and (8,)" in check.mended(*program(plain, **by_hand)).text


def test_a_scale_that_is_no_buffer_is_explained():
    fault, made = "self.scale = torch.tensor([1.0, 2.0, 3.0])", "torch.tensor([1.0, 2.0, 3.0])"
    copied = {"* self.scale": "* self.scale.to(x.device)"}
    assert "scale is no buffer" in check.mended(*program({fault: fault}, **copied)).text
    for frozen in ("", ", requires_grad=False"):
        parameter = f"self.scale = nn.Parameter({made}{frozen})"
        assert "scale became a parameter" in check.mended(*program({fault: parameter})).text
    forgotten = f'self.register_buffer("scale", {made}, persistent=False)'
    assert "persistent=False" in check.mended(*program({fault: forgotten})).text


def test_another_training_is_explained():
    assert "others than after three steps" in check.mended(*program(**{"lr=0.1": "lr=0.2"})).text
    assert "ZeroDivisionError" in check.mended(*program(**{"sgd.step()": "1 / 0"})).text
    assert "no `return`" in check.mended(*program(**{"return net(x).argmax": "net(x).argmax"})).text


def test_the_class_is_asked_for():
    net, train = program()
    assert "give the class" in check.mended(net(), train).text
    assert "cannot be called" in check.mended(net, "train").text


@pytest.mark.parametrize("number", range(len(STRANGE)))
def test_no_pair_of_answers_makes_mended_raise(number):
    net, train = program()
    assert not check.mended(STRANGE[number], train) and not check.mended(net, STRANGE[number])


# --- the words of errors ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fails, said",
    [
        (lambda x: x @ torch.ones(3, 1), "mat2 stands for the second matrix of a product, on cpu"),
        (lambda x: torch.cat([x, torch.ones(2, 3)]), "tensors stands for an argument of cat, on cpu"),
        (lambda x: x[torch.tensor([0], device="cuda:2")], "an index may be on the CPU or beside its tensor"),
        (lambda x: x.to("cuda:4"), "counted from 0"),
        (lambda x: torch.optim.SGD(nn.Identity().parameters()), "a plain list hides"),
    ],
)
def test_the_words_of_an_error_are_read(fails, said):
    with pytest.raises(NotYet, match=f"^here your code stopped at .* because of .*{said}"), explained("here"):
        fails(torch.ones(2, 3, device="cuda:1"))


def test_other_errors_pass_unread():
    assert reading("RuntimeError: mat1 and mat2 shapes cannot be multiplied (2x3 and 4x1)") == ""
    with pytest.raises(ZeroDivisionError), explained("here"):
        failing()


# --- exercise 4 ------------------------------------------------------------------------------------------


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


# --- exercise 5 ------------------------------------------------------------------------------------------


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


# --- exercise 6 ------------------------------------------------------------------------------------------

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
