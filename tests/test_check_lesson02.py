"""The checks of lesson 02: solutions pass, typical mistakes are explained, nothing raises."""

import gc

import pytest
import torch
from torch.nn.parallel import scatter
from virtual_gpus import virtual_gpus

from helpers.exercises import lesson02 as check
from tests.check_answers import explains, measured_once, survives_strange_answers, told

pytestmark = pytest.mark.usefixtures("workspaces_given_back")


def test_no_answer_makes_a_check_raise(titans):
    assert survives_strange_answers(check.piece_sizes, check.without_prefix, check.peak_moved)
    assert survives_strange_answers(check.largest_vocabulary, check.damaged)
    with virtual_gpus(4):
        assert survives_strange_answers(check.damaged)


def sizes(batch, gpus):
    size = -(-batch // gpus)
    full, rest = divmod(batch, size)
    return [size] * full + ([rest] if rest else [])


def test_piece_sizes():
    assert check.piece_sizes(sizes)
    assert check.piece_sizes(lambda batch, gpus: [len(each) for each in torch.zeros(batch).chunk(gpus)])
    with virtual_gpus(8) as gpus:
        for batch in (1, 9, 34):
            assert sizes(batch, 8) == [len(each) for each in scatter(torch.zeros(batch, 1), gpus)]
    explains(
        check.piece_sizes,
        (lambda batch, gpus: [batch // gpus] * gpus, "[0, 0, 0, 0] with 0 samples"),
        (lambda batch, gpus: [batch / gpus] * gpus, "rounded up"),
        (lambda batch, gpus: sizes(batch, gpus) + [0] * (gpus - len(sizes(batch, gpus))), "no piece is empty"),
        (lambda batch, gpus: [len(x) for x in torch.zeros(batch).tensor_split(gpus) if len(x)], "has the same size"),
        (lambda batch, gpus: sizes(batch, gpus)[::-1], "every piece but the last"),
        (lambda batch, gpus: tuple(sizes(batch, gpus)), "is not a list"),
    )


def without_prefix(state):
    if not all(key.startswith("module.") for key in state):
        return state
    return {key.removeprefix("module."): value for key, value in state.items()}


def test_without_prefix(four):
    assert check.without_prefix(without_prefix)


def test_without_prefix_explains():
    explains(
        check.without_prefix,
        (lambda state: state, "['module.0.weight', 'module.0.bias', 'module.1.weight', 'module.1.bias']"),
        (lambda state: {key.replace("module.", ""): value for key, value in state.items()}, "very front"),
        (lambda state: {key.removeprefix("module."): value for key, value in state.items()}, "every key has it"),
        (lambda state: {key.rpartition(".")[2]: value for key, value in state.items()}, "became ['weight', 'bias']"),
        (lambda state: {key: value * 0 for key, value in without_prefix(state).items()}, "0 times"),
        (lambda state: list(state), "a state dict is asked for"),
    )


def test_peak_moved(titans, monkeypatch):
    measured_once(monkeypatch, check, "_peak")
    logits = 100 * 163 * 20_000 * 4 / 2**30
    assert check.peak_moved(2.75 * logits)
    assert told(check.peak_moved(logits), "the size of the logits")
    assert told(check.peak_moved(3 * logits), "its own quarter")
    assert torch.cuda.memory_allocated(0) == 0


def test_a_large_job_is_not_computed():
    for count, words in ((2, "the exercise needs 4"), (4, "shapes_only=True")):
        with virtual_gpus(count, memory="12 GiB"):
            assert told(check.peak_moved(3.3), words)
            assert told(check.largest_vocabulary(20_000), words)
    assert told(check.peak_moved(3.3), "the number of GPUs is 0")


def test_largest_vocabulary_and_what_did_not_fit_leaves_nothing_that_spoils_the_next(titans):
    gc.collect()
    gc.disable()  # when it comes by itself is chance
    try:
        assert told(check.largest_vocabulary(30_000), "30,000 words", "a GPU runs out of memory")
        assert told(check.largest_vocabulary(22_000), "2,000 words more still fit")
        assert check.largest_vocabulary(24_000)
    finally:
        gc.enable()


def test_largest_vocabulary_wants_thousands_and_the_articles_gpus(titans):
    for wrong in (24, 24.5, 25_000, 0, -2_000):
        assert told(check.largest_vocabulary(wrong), "a multiple of 2,000 words")
    assert told(check.largest_vocabulary(10**9), "no GPU of 12 GB holds so many")
    with virtual_gpus(4, memory="24 GiB", shapes_only=True):
        assert told(check.largest_vocabulary(24_000), "GPUs of 12 GB are asked for")


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
    explains(
        check.damaged,
        (lambda gpus, send: ways(gpus, send, there_and_back), "each direction is a way of its own"),
        (lambda gpus, send: ways(gpus, send, lambda a, b, send: True), "arrive whole"),
        (
            lambda gpus, send: ways(gpus, send, lambda *way: not arrives(*way, torch.zeros(9))),
            "send numbers that are not",
        ),
        (lambda gpus, send: ways(gpus, torch.Tensor.to, one_way), "by `send`"),
        (lambda gpus, send: ways(gpus[:2], send, one_way), "1 of 1 damaged ways"),
        (lambda gpus, send: [a for a, _ in ways(gpus, send, one_way)], "a pair (source, target)"),
        (lambda gpus, send: len(ways(gpus, send, one_way)), "is not a list"),
        (lambda gpus, send: [("cuda:1", "cuda:2")], "two of `gpus`"),
    )


def test_damaged_wants_four_gpus_with_values(titans):
    assert told(check.damaged(print), "these GPUs keep no values")
