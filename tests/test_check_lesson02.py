"""The checks of lesson 02: solutions pass, typical mistakes are explained, nothing raises."""

import gc

import pytest
import torch
from torch import nn
from torch.nn.parallel import scatter
from virtual_gpus import virtual_gpus

from helpers import lesson04
from helpers.exercises import lesson02 as check
from tests.check_answers import explains, measured_once, one_layer, survives_strange_answers, told

pytestmark = pytest.mark.usefixtures("workspaces_given_back", "small_program", "small_jobs")


@pytest.fixture
def small_jobs(monkeypatch):
    one_layer(monkeypatch, check, lesson04)


def test_no_answer_makes_a_check_raise(titans, monkeypatch):
    measured_once(monkeypatch, check, "_peak")
    assert survives_strange_answers(check.piece_sizes, check.without_prefix, check.peak_moved)
    assert survives_strange_answers(check.largest_vocabulary, check.damaged)
    with virtual_gpus(4):
        assert survives_strange_answers(check.damaged)


def sizes(batch, gpus):
    return sized(batch, -(-batch // gpus))


def sized(batch, size):
    full, rest = divmod(batch, size)
    return [size] * full + ([rest] if rest else [])


def even(batch, gpus):
    return [size for size in (batch // gpus + (i < batch % gpus) for i in range(gpus)) if size]


def test_piece_sizes():
    assert check.piece_sizes(sizes)
    assert check.piece_sizes(
        lambda batch, gpus: [len(range(batch)[i : i + -(-batch // gpus)]) for i in range(0, batch, -(-batch // gpus))]
    )
    with virtual_gpus(8) as gpus:
        for batch in (1, 9, 34):
            assert sizes(batch, 8) == [len(each) for each in scatter(torch.zeros(batch, 1), gpus)]
    explains(
        check.piece_sizes,
        (lambda batch, gpus: [batch // gpus] * gpus, "is [0, 0, 0, 0]. These are 0 samples, and the batch has 3."),
        (lambda batch, gpus: [batch / gpus] * gpus, "Return a list of integers"),
        (lambda batch, gpus: [len(each) for each in torch.zeros(batch).chunk(gpus)], "You call PyTorch's `zeros`"),
        (
            lambda batch, gpus: even(batch, gpus),
            "piece_sizes(10, 4) is [3, 3, 2, 2]. DataParallel makes all pieces of the same size",
        ),
        (lambda batch, gpus: sized(batch, max(1, batch // gpus)), "piece_sizes(10, 4) is [2, 2, 2, 2, 2]. The first"),
        (
            lambda batch, gpus: sizes(batch, gpus) + [0] * (gpus - len(sizes(batch, gpus))),
            "A GPU that gets no samples has no entry",
        ),
        (
            lambda batch, gpus: sizes(batch, gpus)[::-1],
            "is [1, 3, 3, 3]. DataParallel makes all pieces of the same size, except the last",
        ),
        (lambda batch, gpus: tuple(sizes(batch, gpus)), "Return a list"),
    )


def without_prefix(state):
    if not all(key.startswith("module.") for key in state):
        return state
    return {key.removeprefix("module."): value for key, value in state.items()}


def in_place(state):
    if next(iter(state)).startswith("module.") and all(key.startswith("module.") for key in state):
        nn.modules.utils.consume_prefix_in_state_dict_if_present(state, "module.")
    return state


def test_without_prefix(four):
    assert check.without_prefix(without_prefix)
    assert check.without_prefix(in_place)


def test_without_prefix_explains():
    explains(
        check.without_prefix,
        (lambda state: state, "['module.0.weight', 'module.0.bias', 'module.1.weight', 'module.1.bias']"),
        (
            lambda state: {key.replace("module.", ""): value for key, value in state.items()},
            "may have a layer that is called `module`",
        ),
        (lambda state: {key.removeprefix("module."): value for key, value in state.items()}, "The keys of a plain net"),
        (lambda state: {key.rpartition(".")[2]: value for key, value in state.items()}, "became ['weight', 'bias']"),
        (lambda state: {key: value * 0 for key, value in without_prefix(state).items()}, "0 times"),
        (lambda state: list(state), "Return a state dict"),
    )


def test_peak_moved(titans, monkeypatch):
    measured_once(monkeypatch, check, "_peak")
    logits = 100 * 163 * 20_000 * 4 / 2**30
    assert check.peak_moved(2.75 * logits) and check.peak_moved(torch.tensor(4.74 - 1.46))
    explains(
        check.peak_moved,
        (logits, "is the size of the logits. How many tensors"),
        (2 * logits, "is twice the size of the logits"),
        (3 * logits, "Which part of them does GPU 0 still hold"),
        (4 * logits, "is four times the size of the logits"),
        (2.75 * 1.5 * logits, "Here the vocabulary has 20,000"),
        (2.75 * logits + 0.0825, "includes Adam's state"),
        (2.75 * logits * 1024, "would be right in MiB"),
    )
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
        assert told(check.largest_vocabulary(26_000), "26,000 words are not the most: 2,000 more still fit")
        assert check.largest_vocabulary(28_000)
    finally:
        gc.enable()


def test_largest_vocabulary_does_not_measure_beside_a_kept_model(titans):
    kept = nn.Linear(10_000, 10_000, device="cuda:0")
    assert told(check.largest_vocabulary(22_000), "Your cells still hold 382 MiB on a GPU", "keep no model")
    del kept


def test_largest_vocabulary_wants_thousands_and_the_articles_gpus(titans):
    for wrong in (24, 24.5, 25_000, 0, -2_000):
        assert told(check.largest_vocabulary(wrong), "words is not a multiple of 2,000")
    assert told(check.largest_vocabulary(10**9), "No GPU of 12 GB holds")
    with virtual_gpus(4, memory="24 GiB", shapes_only=True):
        assert told(check.largest_vocabulary(24_000), "the exercise asks for GPUs of 12 GB")


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
        (
            lambda gpus, send: ways(gpus, send, there_and_back),
            "arrive without damage on 1 of the 2 pairs in your list. Each direction is a pair of its own",
        ),
        (lambda gpus, send: ways(gpus, send, lambda a, b, send: True), "on 12 of the 12 pairs"),
        (
            lambda gpus, send: ways(gpus, send, lambda *way: not arrives(*way, torch.zeros(9))),
            "1 of 1 damaged pairs are missing from your list. Test both directions between every two GPUs",
        ),
        (lambda gpus, send: ways(gpus, torch.Tensor.to, one_way), "with `send`"),
        (lambda gpus, send: ways(gpus[:2], send, one_way), "1 of 1 damaged pairs"),
        (
            lambda gpus, send: [(a, b) for a, b in ways(gpus, send, one_way) if a.index < b.index],
            "2 of 3 damaged pairs",
        ),
        (lambda gpus, send: [a for a, _ in ways(gpus, send, one_way)], "is not a pair (source, target)"),
        (lambda gpus, send: [{a, b} for a, b in ways(gpus, send, one_way)], "is not a pair (source, target)"),
        (lambda gpus, send: len(ways(gpus, send, one_way)), "Return a list"),
        (lambda gpus, send: [("cuda:1", "cuda:2")], "of two of `gpus`"),
    )


def test_damaged_wants_four_gpus_with_values(titans):
    assert told(check.damaged(print), "these GPUs keep no values")
