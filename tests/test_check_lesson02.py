"""The checks of lesson 02: solutions pass, typical mistakes are explained, nothing raises."""

from collections import OrderedDict
from functools import partial
from operator import itemgetter

import numpy as np
import pytest
import torch
from torch import nn
from virtual_gpus import virtual_gpus

from notebooks.checks import lesson02 as check
from tests.check_answers import Answers, answers_test, measured_once, stored

LESSON = "02_data_parallel"
pytestmark = pytest.mark.usefixtures("workspaces_given_back", "small_program")


@pytest.fixture
def rtx(monkeypatch):
    """Four GPUs of 24 GB and a Llama of one layer; the lesson's solutions run with all of them."""
    monkeypatch.setattr(check, "LLAMA_1B", check.LLAMA_1B | {"layers": 1})
    with virtual_gpus(4, kind="RTX 4090", shapes_only=True) as gpus:
        yield gpus


sizes = stored(LESSON, "piece_sizes_solution", np=np)


def even(batch, gpus):
    return [size for size in (batch // gpus + (i < batch % gpus) for i in range(gpus)) if size]


TENSOR = torch.zeros(200)
TABLE = {pair: sizes()(*pair) for pair in ((64, 4), (3, 4), (10, 4), (9, 4), (34, 8), (1, 2), (100, 7))}
SAME = "DataParallel makes all pieces of the same size, except the last"
PIECE_SIZES = [
    (lambda batch, gpus: [batch // gpus] * gpus, "is [2, 2, 2, 2]. These are 8 samples, and the batch has 10."),
    (even, f"piece_sizes(10, 4) is [3, 3, 2, 2]. {SAME}"),
    (sizes("math.ceil(batch / gpus)", "max(1, batch // gpus)"), "piece_sizes(10, 4) is [2, 2, 2, 2, 2]. The first"),
    (sizes("return sizes", "return sizes + [0] * (gpus - len(sizes))"), "no samples has no entry"),
    (lambda batch, gpus: [True] * batch, "Return a list of integers"),
    (lambda batch, gpus: [len(each) for each in torch.zeros(batch).chunk(gpus)], "You call PyTorch's `zeros`"),
    (lambda batch, gpus: [len(TENSOR[:batch])], "You use a tensor of PyTorch. Compute the sizes"),
    (lambda batch, gpus: TABLE[batch, gpus], "KeyError"),
]


without_prefix = stored(LESSON, "without_prefix_solution")


def in_place(state):
    if all(key.startswith("module.") for key in state):
        nn.modules.utils.consume_prefix_in_state_dict_if_present(state, "module.")
    return state


def keys(change):
    return lambda state: {change(key): value for key, value in state.items()}


WITHOUT_PREFIX = [
    (lambda state: state, "['module.0.weight', 'module.0.bias', 'module.1.weight', 'module.1.bias']"),
    (keys(lambda key: key.replace("module.", "")), "may have a layer that is called `module`"),
    (keys(lambda key: key.removeprefix("module.")), "The keys of a plain net"),
    (without_prefix("if not all", "while all", "        return state_dict\n    return", "        state_dict =",
                    "items()}", "items()}\n    return state_dict"),
     "['module.module.weight', 'module.module.bias'], became ['weight', 'bias']. Remove only what"),
    (in_place, "Your function changes the state dict that it is given"),
    (without_prefix(": value for", ": value.zero_() for"), "Your function changes the state dict"),
    (without_prefix(": value for", ": value + 1 for"), "`0.weight` has other numbers"),
    (without_prefix(": value for", ": value.cpu() for"), "on cuda:0 and became torch.float32"),
    (without_prefix(": value for", ": value.tolist() for"), "and became a list. Change only"),
    (list, "Return a state dict"),
]  # fmt: skip


def recipe(batch, vocabulary, logits=3, share=4, states=2, copies=2, size=2, both=max, gathered=1.0, activations=1.43):
    """The solution of exercise 3 and, by the arguments, the mistakes that are made."""
    parameters = size * (973_146_112 + vocabulary * 2048) / 2**30
    outputs = gathered * size * batch * 1024 * vocabulary / 2**30
    moments = activations * batch / share + logits * outputs, copies * parameters + 10 / 1024
    return (1 + states) * parameters + both(moments)


first, second = itemgetter(0), itemgetter(1)  # of the two moments


@pytest.fixture
def calculated(monkeypatch):
    """Two cases, whose peaks the recipe gives. In the lesson, the check measures them, and finds the recipe right."""
    monkeypatch.setattr(check, "_peak", lambda gpus, *case: recipe(*case) * 2**30)
    monkeypatch.setattr(check, "_cases", lambda: [(12, 110_592), (4, 8_192)])


OTHER, THRICE = "is the other one of the two moments", "has one part of the parameters' size too many. Gradients count"
PEAK = [
    ({"logits": 2}, ("With 12 sequences and 110,592 tokens, ", "has two tensors of the outputs' size")),
    ({"logits": 4}, "has four tensors"),
    ({"activations": 0}, "leaves out the activations of GPU 0's own piece"),
    ({"states": 3}, THRICE),
    ({"share": 1}, "has the activations of all sequences"),
    ({"states": 1}, "lacks one part of the parameters' size: the parameters, or one of AdamW's two states"),
    ({"states": 0}, "leaves out AdamW's state"),
    ({"states": -1}, "leaves out the parameters and AdamW's state"),
    ({"size": 4}, "counts 4 bytes per number"),
    ({"both": sum}, "is the sum of the two moments"),
    ({"both": first}, OTHER),
    ({"copies": 1}, "has the gradients once"),
    ({"gathered": 0.25}, "has only GPU 0's own piece of the outputs"),
]


def test_the_peak_is_measured(rtx):
    for batch, vocabulary in ((4, 8192), (12, 110_592)):
        parameters = 2 * (60_823_552 + 2048 * vocabulary)
        loss, end = 2 * 3 * batch * 1024 * vocabulary, 2 * parameters
        assert check._peak(rtx, batch, vocabulary) == pytest.approx(3 * parameters + max(loss, end), rel=0.05)


def test_the_cases_are_drawn_and_lie_on_both_sides():
    drawn = [check._cases() for _ in range(20)]
    assert len({str(cases) for cases in drawn}) > 1
    for (batch, vocabulary), (few, words) in drawn:
        assert recipe(batch, vocabulary) > 1.2 * recipe(batch, vocabulary, both=second)
        assert recipe(few, words) > 1.1 * recipe(few, words, both=first)


MOST = 56  # with one layer


@pytest.fixture
def fits_once(monkeypatch):
    measured_once(monkeypatch, check, "_fits")


LARGEST = [
    (MOST + 4, f"With {MOST + 4} sequences, a GPU runs out of memory"),
    (MOST - 4, f"{MOST - 4} sequences are not the most: 4 more still fit"),
    (36.5, "sequences is not a multiple of 4"),
    (0, "sequences is not a multiple of 4"),
    (10**6, "No RTX 4090 holds 1,000,000 sequences"),
]

damaged = stored(LESSON, "damaged_solution")
RECEIVED, FOUND = "send(sent.to(source), target)", "found.append((source, target))"
ON_SOURCE = "sent = torch.randn(1000)", "sent = torch.randn(1000, device=source)"
DAMAGED = [
    (damaged(*ON_SOURCE, "received.cpu(), sent", "received, sent.to(target)"), "You copy from cuda:0 to cuda:1"),
    (damaged(*ON_SOURCE, "received.cpu()", "received.to(source)"), "You copy from cuda:1 to cuda:0 without `send`"),
    (damaged(FOUND, "found.append((target, source))"), "Your pairs are the wrong way round"),
    (damaged(RECEIVED, "send(sent, target)"), "You send a tensor that is on the CPU"),
    (damaged(RECEIVED, f"send({RECEIVED}, source)"),
     "damage on 1 of the 2 pairs in your list. Each direction is a pair of its own"),
    (damaged("source != target", "source.index < target.index"), "2 of 3 damaged pairs"),
    (damaged(FOUND, "found.append(source)"), "is not a pair (source, target)"),
    (lambda gpus, send: len(gpus), "Return a list"),
    (lambda gpus, send: [("cuda:1", "cuda:2")], "of two of `gpus`"),
]  # fmt: skip
ANSWERS = {
    "sizes": Answers(check.piece_sizes, [sizes("return sizes", "return list(np.array(sizes))")], PIECE_SIZES),
    "prefix": Answers(
        check.without_prefix,
        [lambda state: in_place(OrderedDict(state)), without_prefix(": value for", ": value.detach().clone() for")],
        WITHOUT_PREFIX,
        fixtures="four",
    ),
    "peak": Answers(
        lambda answer: check.peak(partial(recipe, **answer) if type(answer) is dict and answer else answer),
        [recipe],
        PEAK,
        fixtures="rtx calculated",
    ),
    "largest": Answers(check.largest, [MOST], LARGEST, fixtures="rtx fits_once"),
    "damaged": Answers(
        check.damaged,
        [
            damaged(FOUND, "found.append([source.index, target.index])", "return found", "return tuple(found)"),
            damaged(RECEIVED, f"torch.empty_like(sent, device=target).copy_({RECEIVED})"),
        ],
        DAMAGED,
        fixtures="four",
    ),
}
test_answers = answers_test(ANSWERS)
