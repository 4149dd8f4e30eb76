"""The checks of lesson 02: solutions pass, typical mistakes are explained, nothing raises."""

from collections import OrderedDict

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.parallel import scatter
from virtual_gpus import virtual_gpus

from notebooks.checks import lesson02 as check
from tests.check_answers import explains, measured_once, survives_strange_answers, told

pytestmark = pytest.mark.usefixtures("workspaces_given_back", "small_program")


@pytest.fixture
def rtx():
    with virtual_gpus(4, kind="RTX 4090", shapes_only=True) as gpus:
        yield gpus


def test_no_answer_makes_a_check_raise(rtx, monkeypatch):
    monkeypatch.setattr(check, "_peak", lambda gpus, batch, vocabulary: 2**33)
    monkeypatch.setattr(check, "_fits", lambda gpus, batch: batch <= 36)
    assert survives_strange_answers(check.piece_sizes, check.without_prefix, check.peak)
    assert survives_strange_answers(check.largest, check.damaged)
    with virtual_gpus(4):
        assert survives_strange_answers(check.damaged)


def sizes(batch, gpus):
    return sized(batch, -(-batch // gpus))


def sized(batch, size):
    full, rest = divmod(batch, size)
    return [size] * full + ([rest] if rest else [])


def even(batch, gpus):
    return [size for size in (batch // gpus + (i < batch % gpus) for i in range(gpus)) if size]


TENSOR = torch.zeros(200)
TABLE = {pair: sizes(*pair) for pair in ((64, 4), (3, 4), (10, 4), (9, 4), (34, 8), (1, 2), (100, 7))}


def test_piece_sizes():
    assert check.piece_sizes(sizes)
    assert check.piece_sizes(
        lambda batch, gpus: [len(range(batch)[i : i + -(-batch // gpus)]) for i in range(0, batch, -(-batch // gpus))]
    )
    assert check.piece_sizes(lambda batch, gpus: list(np.array(sizes(batch, gpus))))
    with virtual_gpus(8) as gpus:
        for batch in (1, 9, 34):
            assert sizes(batch, 8) == [len(each) for each in scatter(torch.zeros(batch, 1), gpus)]
    explains(
        check.piece_sizes,
        (lambda batch, gpus: [batch // gpus] * gpus, "is [2, 2, 2, 2]. These are 8 samples, and the batch has 10."),
        (
            lambda batch, gpus: [batch // gpus] * (gpus - 1) + [batch - batch // gpus * (gpus - 1)],
            "piece_sizes(10, 4) is [2, 2, 2, 4]. DataParallel makes all pieces of the same size, except the last",
        ),
        (lambda batch, gpus: [batch / gpus] * gpus, "Return a list of integers"),
        (lambda batch, gpus: [len(each) for each in torch.zeros(batch).chunk(gpus)], "You call PyTorch's `zeros`"),
        (
            lambda batch, gpus: [len(TENSOR[:batch])],
            "You use a tensor of PyTorch. Compute the sizes",
        ),
        (lambda batch, gpus: [len(TENSOR + batch)], "You call PyTorch's `add`"),
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
        (lambda batch, gpus: [True] * batch, "Return a list of integers"),
        (lambda batch, gpus: TABLE[batch, gpus], "KeyError"),
    )


def without_prefix(state):
    if not all(key.startswith("module.") for key in state):
        return state
    return {key.removeprefix("module."): value for key, value in state.items()}


def pytorchs_own(state):
    own = OrderedDict(state)
    if all(key.startswith("module.") for key in own):
        nn.modules.utils.consume_prefix_in_state_dict_if_present(own, "module.")
    return own


def by_slices(state):
    if next(iter(state)).startswith("module.") and all(key[:7] == "module." for key in state):
        return {key[7:]: value.detach().clone() for key, value in state.items()}
    return state


def in_place(state):
    if all(key.startswith("module.") for key in state):
        nn.modules.utils.consume_prefix_in_state_dict_if_present(state, "module.")
    return state


def popped(state):
    return {key.removeprefix("module."): state.pop(key) for key in list(state)}


def zeroed(state):
    for value in state.values():
        value.zero_()
    return without_prefix(state)


def with_while(state):
    while all(key.startswith("module.") for key in state):
        state = {key.removeprefix("module."): value for key, value in state.items()}
    return state


def without_dot(state):
    if not all(key.startswith("module") for key in state):
        return state
    return {key.split(".", 1)[1]: value for key, value in state.items()}


def by_first_names(state):
    if len({key.split(".")[0] for key in state}) > 1:
        return state
    return {key.split(".", 1)[1]: value for key, value in state.items()}


def test_without_prefix(four):
    for right in (without_prefix, pytorchs_own, by_slices):
        assert check.without_prefix(right)


def test_without_prefix_explains(four):
    explains(
        check.without_prefix,
        (lambda state: state, "['module.0.weight', 'module.0.bias', 'module.1.weight', 'module.1.bias']"),
        (
            lambda state: {key.replace("module.", ""): value for key, value in state.items()},
            "may have a layer that is called `module`",
        ),
        (lambda state: {key.removeprefix("module."): value for key, value in state.items()}, "The keys of a plain net"),
        (lambda state: {key.rpartition(".")[2]: value for key, value in state.items()}, "became ['weight', 'bias']"),
        (lambda state: {key: value * 0 for key, value in without_prefix(state).items()}, "has other numbers"),
        (
            lambda state: {key: value + 1 for key, value in without_prefix(state).items()},
            "`0.weight` has other numbers",
        ),
        (
            lambda state: {key: value.flatten() for key, value in without_prefix(state).items()},
            "or another shape, than",
        ),
        (with_while, "['module.module.weight', 'module.module.bias'], became ['weight', 'bias']. Remove only what"),
        (lambda state: {key.lstrip("module."): value for key, value in state.items()}, "The keys of a "),
        (in_place, "Your function changes the state dict that it is given"),
        (popped, "Your function changes the state dict"),
        (zeroed, "Your function changes the state dict"),
        (without_dot, "The keys of a plain net, ['modules_.weight', 'modules_.bias'], became ['weight', 'bias']"),
        (by_first_names, "The keys of a plain net, ['modules_.weight', 'modules_.bias'], became ['weight', 'bias']"),
        (lambda state: {key: v.double() for key, v in without_prefix(state).items()}, "became torch.float64 on cuda:0"),
        (
            lambda state: {key: v.cpu() for key, v in without_prefix(state).items()},
            "on cuda:0 and became torch.float32",
        ),
        (lambda state: {key: v.half() for key, v in without_prefix(state).items()}, "became torch.float16 on cuda:0"),
        (lambda state: {key: v.tolist() for key, v in without_prefix(state).items()}, "and became a list. Change only"),
        (lambda state: list(state), "Return a state dict"),
        (lambda state: {}, "became []"),
    )


def recipe(batch, vocabulary, logits=3, share=4, states=2, copies=2, size=2, both=max, gathered=1.0, activations=1.43):
    """The solution of exercise 3 and, by the arguments, the mistakes that are made."""
    parameters = size * (973_146_112 + vocabulary * 2048) / 2**30
    outputs = gathered * size * batch * 1024 * vocabulary / 2**30
    moments = activations * batch / share + logits * outputs, copies * parameters + 10 / 1024
    return (1 + states) * parameters + both(moments)


def wrong(**mistake):
    return lambda batch, vocabulary: recipe(batch, vocabulary, **mistake)


@pytest.fixture
def measured(monkeypatch):
    """Two cases, which are measured once for all answers."""
    measured_once(monkeypatch, check, "_peak")
    monkeypatch.setattr(check, "_cases", lambda: [(12, 110_592), (4, 8_192)])


def test_peak(rtx, measured):
    assert check.peak(recipe)
    assert check.peak(lambda batch, vocabulary: torch.tensor(recipe(batch, vocabulary)))
    assert check.peak(wrong(both=lambda moments: sorted(moments)[-1]))
    explains(
        check.peak,
        (wrong(logits=1), "has one tensor of the outputs' size"),
        (wrong(logits=2), "With 12 sequences and 110,592 tokens, "),
        (wrong(logits=2), "has two tensors of the outputs' size"),
        (wrong(logits=4), "has four tensors"),
        (wrong(activations=0), "leaves out the activations of GPU 0's own piece"),
        (wrong(states=3), "has one part of the parameters' size too many. Gradients count at one moment only"),
        (lambda *case: recipe(*case, states=3, copies=1), "has one part of the parameters' size too many"),
        (
            lambda *case: recipe(*case, states=3, both=lambda moments: moments[0]),
            "has one part of the parameters' size",
        ),
        (wrong(share=1), "has the activations of all sequences"),
        (wrong(states=1), "lacks one part of the parameters' size: the parameters, or one of AdamW's two states"),
        (wrong(states=0), "leaves out AdamW's state"),
        (wrong(states=-1), "leaves out the parameters and AdamW's state"),
        (wrong(size=4), "counts 4 bytes per number"),
        (wrong(both=sum), "is the sum of the two moments"),
        (wrong(both=min), "is the other one of the two moments"),
        (wrong(both=lambda moments: moments[0]), "is the other one of the two moments"),
        (wrong(both=lambda moments: moments[1]), "is the other one of the two moments"),
        (wrong(copies=1), "has the gradients once"),
        (wrong(gathered=0.25), "has only GPU 0's own piece of the outputs"),
        (lambda batch, vocabulary: recipe(batch, vocabulary) * 1024, "would be right in MiB"),
        (lambda batch, vocabulary: recipe(batch, vocabulary) * 2**30, "would be right in bytes"),
        (lambda batch, vocabulary: recipe(batch, vocabulary) * 2**30 / 1e9, "would be right in GB"),
        (lambda batch, vocabulary: 20.2, "is too large"),
        (lambda batch: 19.98, "TypeError"),
    )
    assert torch.cuda.memory_allocated(0) == 0


def test_the_cases_are_drawn_and_lie_on_both_sides():
    drawn = [check._cases() for _ in range(20)]
    assert len({str(cases) for cases in drawn}) > 1
    for (batch, vocabulary), (few, words) in drawn:
        assert recipe(batch, vocabulary) > 1.2 * recipe(batch, vocabulary, both=lambda moments: moments[1])
        assert recipe(few, words) > 1.1 * recipe(few, words, both=lambda moments: moments[0])


def test_a_large_job_is_not_computed():
    for count, words in ((2, "the exercise needs 4"), (4, "shapes_only=True")):
        with virtual_gpus(count, memory="24 GiB"):
            assert told(check.peak(recipe), words)
            assert told(check.largest(36), words)
    assert told(check.peak(recipe), "the number of GPUs is 0")


def test_largest(rtx, monkeypatch):
    measured_once(monkeypatch, check, "_fits")
    assert check.largest(36) and check.largest(torch.tensor(36))
    assert told(check.largest(40), "With 40 sequences, a GPU runs out of memory")
    assert told(check.largest(32), "32 sequences are not the most: 4 more still fit")
    for answer in (35, 36.5, 0, -4, 2):
        assert told(check.largest(answer), "sequences is not a multiple of 4")
    assert told(check.largest(10**6), "No RTX 4090 holds 1,000,000 sequences")


def test_nothing_is_measured_beside_a_kept_model_or_on_other_gpus(rtx):
    kept = nn.Linear(10_000, 10_000, device="cuda:0")
    for verdict in (check.largest(36), check.peak(recipe)):
        assert told(verdict, "Your cells still hold 382 MiB on a GPU", "keep no model")
    del kept
    with virtual_gpus(4, memory="12 GiB", shapes_only=True):
        assert told(check.largest(36), "the exercise asks for RTX 4090")


def arrives(source, target, send, sent):
    return torch.equal(send(sent.to(source), target).cpu(), sent)


def ways(gpus, send, fails):
    return [(a, b) for a in gpus for b in gpus if a != b and fails(a, b, send)]


def one_way(a, b, send):
    return not arrives(a, b, send, torch.randn(1000))


def there_and_back(a, b, send):
    sent = torch.randn(1000)
    return not torch.equal(send(send(sent.to(a), b), a).cpu(), sent)


def by_a_second_way(a, b, send):
    sent = torch.randn(100, device=a)
    return not torch.equal(send(sent, b), sent.to(b))


def by_the_way_back(a, b, send):
    sent = torch.randn(100, device=a)
    return not torch.equal(send(sent, b).to(a), sent)


def by_copy_(a, b, send):
    sent = torch.randn(100, device=a)
    there = torch.empty_like(sent, device=b)
    return not torch.equal(there.copy_(sent), send(sent, b))


def of_zeros(a, b, send):
    sent = torch.randn(100, device=a)
    before = sent.cpu()
    return not torch.equal(send(sent.zero_(), b).cpu(), before)


def into_like(a, b, send):
    sent = torch.randn(100, device=a)
    received = torch.empty_like(sent, device=b)
    received.copy_(send(sent, b))
    return received.tolist() != sent.tolist()


def on_the_target(a, b, send):
    sent = torch.randn(100)
    return not torch.equal(send(sent.to(a), b), sent.to(b))


def test_damaged(four):
    assert check.damaged(lambda gpus, send: ways(gpus, send, one_way))
    assert check.damaged(lambda gpus, send: [[a.index, b.index] for a, b in ways(gpus, send, one_way)])
    assert check.damaged(lambda gpus, send: set(ways(gpus, send, one_way)))
    assert check.damaged(lambda gpus, send: frozenset(ways(gpus, send, into_like)))
    assert check.damaged(lambda gpus, send: ways(gpus, send, on_the_target))
    explains(
        check.damaged,
        (lambda gpus, send: ways(gpus, send, by_a_second_way), "You copy from cuda:0 to cuda:1 without `send`"),
        (lambda gpus, send: ways(gpus, send, by_copy_), "You copy from cuda:0 to cuda:1 without `send`"),
        (lambda gpus, send: ways(gpus, send, of_zeros), "12 pairs in your list. Compare what arrived with"),
        (lambda gpus, send: ways(gpus, send, by_the_way_back), "You copy from cuda:1 to cuda:0 without `send`"),
        (lambda gpus, send: [(b, a) for a, b in ways(gpus, send, one_way)], "Your pairs are the wrong way round"),
        (
            lambda gpus, send: ways(gpus, send, lambda a, b, send: arrives("cpu", b, send, torch.ones(9))),
            "You send a tensor that is on the CPU",
        ),
        (
            lambda gpus, send: ways(gpus, send, there_and_back),
            "arrive without damage on 1 of the 2 pairs in your list. Each direction is a pair of its own",
        ),
        (lambda gpus, send: ways(gpus, send, lambda a, b, send: True), "on 12 of the 12 pairs"),
        (
            lambda gpus, send: ways(gpus, send, lambda *way: not arrives(*way, torch.zeros(9))),
            "1 of 1 damaged pairs are missing from your list. Test both directions between every two GPUs",
        ),
        (lambda gpus, send: ways(gpus, torch.Tensor.to, one_way), "without `send`, over a link that may be broken"),
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


def test_damaged_wants_four_gpus_with_values(rtx):
    assert told(check.damaged(print), "these GPUs keep no values")
