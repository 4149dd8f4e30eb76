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
from tests.check_answers import Answers, answers_test, measured_once

pytestmark = pytest.mark.usefixtures("workspaces_given_back", "small_program")


@pytest.fixture
def rtx(monkeypatch):
    """Four GPUs of 24 GB and a Llama of one layer; the lesson's solutions run with all of them."""
    monkeypatch.setattr(check, "LLAMA_1B", check.LLAMA_1B | {"layers": 1})
    with virtual_gpus(4, kind="RTX 4090", shapes_only=True) as gpus:
        yield gpus


def sizes(batch, gpus):
    return sized(batch, -(-batch // gpus))


def sized(batch, size):
    full, rest = divmod(batch, size)
    return [size] * full + ([rest] if rest else [])


def even(batch, gpus):
    return [size for size in (batch // gpus + (i < batch % gpus) for i in range(gpus)) if size]


TENSOR = torch.zeros(200)
TABLE = {pair: sizes(*pair) for pair in ((64, 4), (3, 4), (10, 4), (9, 4), (34, 8), (1, 2), (100, 7))}
SAME = "DataParallel makes all pieces of the same size, except the last"
PIECE_SIZES = [
    (lambda batch, gpus: [batch // gpus] * gpus, "is [2, 2, 2, 2]. These are 8 samples, and the batch has 10."),
    (even, f"piece_sizes(10, 4) is [3, 3, 2, 2]. {SAME}"),
    (lambda batch, gpus: sized(batch, max(1, batch // gpus)), "piece_sizes(10, 4) is [2, 2, 2, 2, 2]. The first"),
    (lambda batch, gpus: sizes(batch, gpus) + [0] * (gpus - len(sizes(batch, gpus))), "no samples has no entry"),
    (lambda batch, gpus: [True] * batch, "Return a list of integers"),
    (lambda batch, gpus: [len(each) for each in torch.zeros(batch).chunk(gpus)], "You call PyTorch's `zeros`"),
    (lambda batch, gpus: [len(TENSOR[:batch])], "You use a tensor of PyTorch. Compute the sizes"),
    (lambda batch, gpus: TABLE[batch, gpus], "KeyError"),
]


def without_prefix(state, change=lambda value: value):
    if not all(key.startswith("module.") for key in state):
        return {key: change(value) for key, value in state.items()}
    return {key.removeprefix("module."): change(value) for key, value in state.items()}


def in_place(state):
    if all(key.startswith("module.") for key in state):
        nn.modules.utils.consume_prefix_in_state_dict_if_present(state, "module.")
    return state


def with_while(state):
    while all(key.startswith("module.") for key in state):
        state = {key.removeprefix("module."): value for key, value in state.items()}
    return state


def keys(change):
    return lambda state: {change(key): value for key, value in state.items()}


def values(change):
    return partial(without_prefix, change=change)


WITHOUT_PREFIX = [
    (lambda state: state, "['module.0.weight', 'module.0.bias', 'module.1.weight', 'module.1.bias']"),
    (keys(lambda key: key.replace("module.", "")), "may have a layer that is called `module`"),
    (keys(lambda key: key.removeprefix("module.")), "The keys of a plain net"),
    (with_while, "['module.module.weight', 'module.module.bias'], became ['weight', 'bias']. Remove only what"),
    (in_place, "Your function changes the state dict that it is given"),
    (values(torch.Tensor.zero_), "Your function changes the state dict"),
    (values(lambda value: value + 1), "`0.weight` has other numbers"),
    (values(lambda value: value.cpu()), "on cuda:0 and became torch.float32"),
    (values(torch.Tensor.tolist), "and became a list. Change only"),
    (list, "Return a state dict"),
]


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
    (lambda batch: 19.98, "TypeError"),
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


def ways(fails):
    """An answer that tests all ways (a, b) with `fails(a, b, send)`."""
    return lambda gpus, send: [(a, b) for a in gpus for b in gpus if a != b and fails(a, b, send)]


def one_way(a, b, send, sent="cpu", back="cpu"):
    sent = torch.randn(100, device=a if sent == "a" else "cpu")
    arrived = send(sent.to(a), b)
    return not torch.equal(arrived.to(back), sent.to(back))


def there_and_back(a, b, send):
    sent = torch.randn(1000)
    return not torch.equal(send(send(sent.to(a), b), a).cpu(), sent)


def into_like(a, b, send):
    sent = torch.randn(100, device=a)
    received = torch.empty_like(sent, device=b)
    received.copy_(send(sent, b))
    return received.tolist() != sent.tolist()


def changed(change):
    """The right list, with every pair changed."""
    return lambda gpus, send: [change(a, b) for a, b in ways(one_way)(gpus, send)]


DAMAGED = [
    (ways(lambda a, b, send: one_way(a, b, send, "a", back=b)), "You copy from cuda:0 to cuda:1 without `send`"),
    (ways(lambda a, b, send: one_way(a, b, send, "a", back=a)), "You copy from cuda:1 to cuda:0 without `send`"),
    (lambda gpus, send: ways(one_way)(gpus, torch.Tensor.to), "without `send`, over a link that may be broken"),
    (changed(lambda a, b: (b, a)), "Your pairs are the wrong way round"),
    (ways(lambda a, b, send: send(torch.ones(9), b)), "You send a tensor that is on the CPU"),
    (ways(there_and_back), "damage on 1 of the 2 pairs in your list. Each direction is a pair of its own"),
    (ways(lambda a, b, send: False), "1 of 1 damaged pairs are missing from your list. Test both directions"),
    (ways(lambda a, b, send: a.index < b.index and one_way(a, b, send)), "2 of 3 damaged pairs"),
    (changed(lambda a, b: a), "is not a pair (source, target)"),
    (lambda gpus, send: len(gpus), "Return a list"),
    (lambda gpus, send: [("cuda:1", "cuda:2")], "of two of `gpus`"),
]
ANSWERS = {
    "sizes": Answers(check.piece_sizes, [sizes, lambda batch, gpus: list(np.array(sizes(batch, gpus)))], PIECE_SIZES),
    "prefix": Answers(
        check.without_prefix,
        [without_prefix, lambda state: in_place(OrderedDict(state)), values(lambda value: value.detach().clone())],
        WITHOUT_PREFIX,
        fixtures="four",
    ),
    "peak": Answers(
        lambda answer: check.peak(partial(recipe, **answer) if type(answer) is dict and answer else answer),
        [recipe, lambda *case: torch.tensor(recipe(*case))],
        PEAK,
        fixtures="rtx calculated",
    ),
    "largest": Answers(check.largest, [MOST, torch.tensor(MOST)], LARGEST, fixtures="rtx fits_once"),
    "damaged": Answers(
        check.damaged,
        [
            ways(one_way),
            changed(lambda a, b: [a.index, b.index]),
            lambda gpus, send: frozenset(ways(into_like)(gpus, send)),
            ways(lambda a, b, send: one_way(a, b, send, back=b)),
        ],
        DAMAGED,
        fixtures="four",
    ),
}
test_answers = answers_test(ANSWERS)
