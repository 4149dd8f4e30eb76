"""The checks of lesson 02: solutions pass, typical mistakes are explained, nothing raises."""

import gc

import pytest
import torch
from torch import nn
from torch.nn.parallel import scatter
from virtual_gpus import virtual_gpus

from helpers.exercises import lesson02 as check
from tests.check_answers import Hostile, measured_once, told

pytestmark = pytest.mark.usefixtures("workspaces_given_back")

CHECKS = (check.piece_sizes, check.without_prefix, check.peak_moved, check.largest_vocabulary, check.damaged)


# --- 1: uneven batches ----------------------------------------------------------------------------------


def sizes(batch, gpus):
    size = -(-batch // gpus)
    full, rest = divmod(batch, size)
    return [size] * full + ([rest] if rest else [])


def test_piece_sizes():
    assert check.piece_sizes(sizes)
    assert check.piece_sizes(lambda batch, gpus: [len(each) for each in torch.zeros(batch).chunk(gpus)])


@virtual_gpus(8)
def test_piece_sizes_are_those_of_scatter():
    gpus = list(range(8))
    for batch in (1, 7, 8, 9, 34, 100):
        assert sizes(batch, 8) == [len(each) for each in scatter(torch.zeros(batch, 1), gpus)]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda batch, gpus: [batch // gpus] * gpus, "none may be lost"),
        (lambda batch, gpus: [batch / gpus] * gpus, "whole number of samples"),
        (lambda batch, gpus: sizes(batch, gpus) + [0] * (gpus - len(sizes(batch, gpus))), "no piece at all"),
        (
            lambda batch, gpus: [len(x) for x in torch.zeros(batch).tensor_split(gpus) if len(x)],
            "as evenly as it could",
        ),
        (lambda batch, gpus: sizes(batch, gpus)[::-1], "every piece but the last"),
        (lambda batch, gpus: tuple(sizes(batch, gpus)), "is no list"),
        (lambda batch, gpus: ..., "still returns ..."),
    ],
)
def test_piece_sizes_explains(wrong, words):
    assert told(check.piece_sizes(wrong), words)


# --- 2: `module.` in the keys ---------------------------------------------------------------------------


def without_prefix(state):
    if not all(key.startswith("module.") for key in state):
        return state
    return {key.removeprefix("module."): value for key, value in state.items()}


@pytest.mark.parametrize("count", [0, 1, 4])
def test_without_prefix(count):
    if count == 0:
        assert check.without_prefix(without_prefix)
        return
    with virtual_gpus(count):
        assert check.without_prefix(without_prefix)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda state: state, "still there"),
        (lambda state: {key.replace("module.", ""): value for key, value in state.items()}, "very front"),
        (
            lambda state: {key.removeprefix("module."): value for key, value in state.items()},
            "every key has it",
        ),
        (
            lambda state: {key.rpartition(".")[2]: value for key, value in state.items()},
            "overwrite each other",
        ),
        (lambda state: {key: value * 0 for key, value in without_prefix(state).items()}, "0 times"),
        (lambda state: list(state), "a state dict is asked for"),
        (lambda state: None, "no `return` with a value"),
    ],
)
def test_without_prefix_explains(wrong, words):
    assert told(check.without_prefix(wrong), words)


# --- 3: output_device -----------------------------------------------------------------------------------


def test_peak_moved(titans, monkeypatch):
    measured_once(monkeypatch, check, "_peak")
    logits = 100 * 163 * 20_000 * 4 / 2**30
    assert check.peak_moved(2.75 * logits)
    assert told(check.peak_moved(logits), "the logits once")
    assert told(check.peak_moved(3 * logits), "its own quarter")
    assert torch.cuda.memory_allocated(0) == 0


def test_a_large_job_is_not_computed():
    for count, words in ((2, "four are asked for"), (4, "shapes_only=True")):
        with virtual_gpus(count, memory="12 GiB"):
            assert told(check.peak_moved(3.3), words)
            assert told(check.largest_vocabulary(20_000), words)
    assert told(check.peak_moved(3.3), "there are 0 GPUs")


# --- 4: the largest vocabulary --------------------------------------------------------------------------


def test_largest_vocabulary(titans, monkeypatch):
    measured_once(monkeypatch, check, "_fits")
    verdicts = {words: check.largest_vocabulary(words) for words in range(20_000, 30_000, 2_000)}
    right = [words for words, verdict in verdicts.items() if verdict]
    assert len(right) == 1
    for words, verdict in verdicts.items():
        if words < right[0]:
            assert told(verdict, f"{words:,} words", "still fit")
        if words > right[0]:
            assert told(verdict, f"{words:,} words", "GPU 0 runs out of memory")


def test_an_answer_that_did_not_fit_leaves_nothing_that_spoils_the_next(titans):
    gc.collect()
    gc.disable()  # when it comes by itself is chance
    try:
        assert told(check.largest_vocabulary(30_000), "GPU 0 runs out of memory")
        assert told(check.largest_vocabulary(20_000), "still fit")
    finally:
        gc.enable()


@pytest.mark.parametrize("wrong", [24, 24.5, 25_000, 0, -2_000])
def test_largest_vocabulary_wants_thousands(titans, wrong):
    assert told(check.largest_vocabulary(wrong), "a multiple of 2,000 words")


def test_largest_vocabulary_wants_the_articles_cards(titans):
    assert told(check.largest_vocabulary(10**9), "no card of 12 GB holds that")
    with virtual_gpus(4, memory="24 GiB", shapes_only=True):
        assert told(check.largest_vocabulary(24_000), "cards of 12 GB are asked for")


# --- 5: damaged copies ----------------------------------------------------------------------------------


def arrives(source, target, send, sent):
    return torch.equal(send(sent.to(source), target).cpu(), sent)


def ways(gpus, send, fails):
    return [(a, b) for a in gpus for b in gpus if a != b and fails(a, b, send)]


def one_way(a, b, send):
    return not arrives(a, b, send, torch.randn(1000))


def there_and_back(a, b, send):
    sent = torch.randn(1000)
    return not torch.equal(send(send(sent.to(a), b), a).cpu(), sent)


def test_damaged(four):
    assert check.damaged(lambda gpus, send: ways(gpus, send, one_way))
    assert check.damaged(lambda gpus, send: [[a.index, b.index] for a, b in ways(gpus, send, one_way)])


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda gpus, send: ways(gpus, send, there_and_back), "each direction is a way of its own"),
        (lambda gpus, send: ways(gpus, send, lambda a, b, send: True), "all ways are whole"),
        (
            lambda gpus, send: ways(gpus, send, lambda *way: not arrives(*way, torch.zeros(9))),
            "send numbers that are not",
        ),
        (lambda gpus, send: ways(gpus, torch.Tensor.to, one_way), "by `send`"),
        (lambda gpus, send: ways(gpus[:2], send, one_way), "on every way"),
        (lambda gpus, send: [way for way in ways(gpus, send, one_way) if way[0].index < way[1].index], "on every way"),
        (lambda gpus, send: [a for a, _ in ways(gpus, send, one_way)], "a pair (source, target)"),
        (lambda gpus, send: len(ways(gpus, send, one_way)), "is no list"),
        (lambda gpus, send: [("cuda:1", "cuda:2")], "two of `gpus`"),
        (lambda gpus, send: ..., "your answer is missing"),
    ],
)
def test_damaged_explains(four, wrong, words):
    assert told(check.damaged(wrong), words)


def test_damaged_wants_four_gpus_with_values(titans):
    assert told(check.damaged(print), "copies of no values")
    with virtual_gpus(2):
        assert told(check.damaged(print), "four are asked for")


# --- whatever is passed ---------------------------------------------------------------------------------


STRANGE = [
    None, ..., "", "24000", b"", True, -1, 10**400, float("nan"), 3 + 4j, [], {}, [...], object, int, print,
    torch.ones(3), torch.ones((), device="meta"), nn.Identity(), lambda: 1, lambda *_: 1 / 0,
    lambda *_: [...], lambda *_: Hostile(), lambda *_: [Hostile()] * 4, lambda *_: {Hostile: 1}, Hostile(),
    Hostile, exit,
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(STRANGE)))
def test_no_answer_makes_a_check_raise(titans, number):
    for each in CHECKS:
        assert told(each(STRANGE[number]))
