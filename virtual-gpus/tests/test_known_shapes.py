"""Answers of meta kernels that are kept, and rules instead of meta kernels: always what PyTorch itself answers."""

from contextlib import nullcontext

import pytest
import torch
from pairwise import pairwise, product, title
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode
from virtual_gpus import virtual_gpus
from virtual_gpus.dispatch.call import OpCall
from virtual_gpus.ops import normalization
from virtual_gpus.shapes import known, rules

aten = torch.ops.aten
META = {"device": "meta"}


def t(*shape, dtype=torch.float32, form=torch.contiguous_format):
    return torch.empty(shape, dtype=dtype, memory_format=form, **META)


@pytest.fixture(autouse=True)
def ask(monkeypatch):
    """Asks as the engine does, of which nothing is known yet, and counts how often the meta kernel answers."""
    monkeypatch.setattr(known, "_known", {})

    def ask(func, *args, **kwargs):
        def kernel():
            ask.times += 1
            return func(*args, **kwargs)

        return known.ask(OpCall(func, args, kwargs), kernel)

    ask.times = 0
    return ask


def forms(result):
    if isinstance(result, (list, tuple)):
        return type(result), [forms(part) for part in result]
    if result is None:
        return None
    return result.shape, result.stride(), result.dtype, result.storage_offset(), result.untyped_storage().nbytes()


LAST = torch.channels_last


def factors(factor):
    """What an optimizer does in place: its factors may differ, but not their type."""
    x, lists = t(4, 3), ([t(4, 3), t(2)], [t(4, 3), t(2)])
    by_number = (aten._foreach_mul_.Scalar, [t(3)], factor), (aten._foreach_div_.ScalarList, [t(3), t(2)], [factor] * 2)
    return [(aten.add_.Tensor, x, t(3)), (aten._foreach_add_.List, *lists), *by_number]


def adds(*pairs):
    return [(aten.add.Tensor, *pair) for pair in pairs]


ONCE = {  # calls of which each is asked for one time, however often it is made
    "add to a column": lambda: [(aten.add.Tensor, t(4, 3), t(5, 4).t()[:, :1])],
    "addmm": lambda: [(aten.addmm.default, t(5), t(4, 3), t(5, 3).t())],
    "channels last": lambda: [(aten.relu.default, t(2, 3, 4, 5, form=LAST))],
    "convolution": lambda: [(aten.convolution.default, t(2, 3, 9, 9), t(4, 3, 3, 3), None, [2, 2], [1, 1], [1, 1],
                             False, [0, 0], 1)],
    "its gradients": lambda: [(aten.convolution_backward.default, t(2, 4, 9, 9), t(2, 3, 9, 9), t(4, 3, 3, 3), None,
                               [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, False, False])],
    "dropout": lambda: [(aten.native_dropout.default, t(6, 5), 0.5, True)],
    "lookup": lambda: [(aten.index.Tensor, t(6, 5), [None, t(7, dtype=torch.int64)])],
    "cat": lambda: [(aten.cat.default, [t(6, 5), t(2, 5)])],
    "one of each": lambda: [(aten._foreach_sqrt.default, [t(6, 5), t(2)])],
    "of a gradient that is one number": lambda: [(aten.threshold_backward.default, t(1).expand(3, 4), t(3, 4), 0)],
    "forms": lambda: adds((t(4, 3), 1), (t(4, 4), 1), (t(4, 4).t(), 1), (t(4, 3, dtype=torch.float64), 1)),
    "numbers": lambda: adds(*((t(4, dtype=torch.int64), n) for n in (1, 1.0, True))),
    "in place": lambda: factors(0.1),
}  # fmt: skip


@torch.library.custom_op("test_known_shapes::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


twice.register_fake(torch.empty_like)

UNUSUAL = {
    "a CPU tensor": lambda: [(aten.add.Tensor, t(4, 3), torch.tensor(1.0))],
    "a conjugate": lambda: [(aten.add.Tensor, t(3, dtype=torch.complex64).conj(), 1)],
    "a sparse one": lambda: [(aten.add.Tensor, *[torch.empty(3, 3, layout=torch.sparse_coo, **META)] * 2)],
    "a view": lambda: [(aten.view.default, t(4, 3), [12])],
    "another shape in place": lambda: [(aten.unsqueeze_.default, t(4, 3), 0)],
    "a new size": lambda: [(aten.resize_.default, t(4, 3), [2])],
    "a result that is given": lambda: [(aten.add.out, t(4), t(4))],
    "a mode below": lambda: [(aten.add.Tensor, t(4), t(4))],
    "somebody's own operator": lambda: [(torch.ops.test_known_shapes.twice.default, t(4))],
}


@pytest.mark.parametrize("name", [*ONCE, *UNUSUAL])
def test_what_is_known_is_not_asked_again_and_what_is_unusual_is(name, ask):
    make = (ONCE | UNUSUAL)[name]
    with FlopCounterMode(display=False) if name == "a mode below" else nullcontext():
        for _ in range(2):
            for (func, *args), (_, *again) in zip(make(), make(), strict=True):
                options = {"out": t(0)} if func is aten.add.out else {}
                result = ask(func, *args, **options)
                assert name in UNUSUAL or forms(result) == forms(func(*again))
                if name in ONCE and name != "in place":
                    parts = [part for part in tree_leaves([result, args]) if isinstance(part, torch.Tensor)]
                    assert len({part.untyped_storage()._cdata for part in parts}) == len(parts)
    assert ask.times == len(make()) * (1 if name in ONCE else 2) and (name in ONCE or not known._known)


def test_factors_and_the_default_type(ask):
    for number in (0.1, 0.2, 1):
        assert [ask(*call) is call[1] for call in factors(number)] == [True, False, False, False]
    assert ask.times == 6  # a whole number is of another type
    whole, before = t(3, dtype=torch.int64), torch.get_default_dtype()
    try:
        for dtype in (torch.float32, torch.float64):
            torch.set_default_dtype(dtype)
            assert ask(aten.true_divide.Tensor, whole, whole).dtype == dtype
    finally:
        torch.set_default_dtype(before)


def test_results_that_share_memory_are_asked_every_time():
    x = t(4, 3)
    for result in (x, x[0], t(8, 3)[:4], [t(2)] * 2, 3):
        for _ in range(2):
            known.ask(OpCall(aten.relu.default, (x,), {}), lambda result=result: result)
    assert not known._known


def test_no_end_of_answers(monkeypatch, ask):
    monkeypatch.setattr(known, "_MOST", 3)
    for n in range(1, 12):
        ask(aten.relu.default, t(n))
    assert len(known._known) <= 3


SHAPES = [(8, 3), (8, 3, 5), (4, 3, 5, 6), (2, 3, 2, 3, 4), (1, 3, 5, 5), (4, 1, 5, 5), (4, 3, 1, 1), (1, 1, 4, 1)]


def norm(shape, training, affine=True, tracked=True, **options):
    x, c = t(*shape, **options), shape[1]
    affine = [t(c), t(c)] if affine else [None, None]
    tracked = [t(c), t(c)] if tracked else [None, None]
    return x, *affine, *tracked, training, 0.1, 1e-5


def gradient(x, weight, bias, mean, variance, training, momentum, eps, wanted):
    saved = t(x.shape[1]), t(x.shape[1])
    return torch.empty_like(x), x, weight, mean, variance, *saved, training, eps, wanted


BATCH_NORM = rules.RULES[aten.native_batch_norm.default]
BATCH_NORM_BACKWARD = rules.RULES[aten.native_batch_norm_backward.default]
CASES = pairwise(product(shape=SHAPES, training=[True, False], affine=[True, False]))


@pytest.mark.parametrize("case", CASES, ids=title)
def test_batch_norm_by_rule(case):
    args = norm(**case)
    assert forms(BATCH_NORM(*args)) == forms(aten.native_batch_norm.default(*args))
    for wanted in ([True, True, True], [True, False, False], [False, True, True]):
        args = gradient(*norm(**case), wanted)
        assert forms(BATCH_NORM_BACKWARD(*args)) == forms(aten.native_batch_norm_backward.default(*args))


NOT_PLAIN = [
    norm((4, 3, 5, 6), True, form=LAST),
    norm((4, 3, 5, 6), True, dtype=torch.bfloat16),
    norm((4, 3), False, tracked=False),
    (t(3, 4).t(), *norm((4, 3), True)[1:]),
    (t(4, 2), *norm((4, 3), True)[1:]),
    norm((1, 3), True),
]


def test_no_rule_for_what_is_not_plain():
    for args in NOT_PLAIN:
        assert BATCH_NORM(*args) is None and BATCH_NORM_BACKWARD(*gradient(*args, [True] * 3)) is None
    given = gradient(*norm((4, 3, 5, 6), True), [True] * 3)[1:]
    for made in (t(4, 3, 5, 6, form=LAST), t(1).expand(4, 3, 5, 6)):  # a gradient that lies otherwise
        assert BATCH_NORM_BACKWARD(made, *given) is None


def test_virtual_gpus_ask_once():
    with virtual_gpus(2, shapes_only=True):
        for device in ("cuda:0", "cuda:1"):
            x = torch.empty(4, 3, device=device, requires_grad=True)
            (torch.nn.functional.gelu(x) + 1).sum().backward()
            assert x.grad.device == x.device and torch.cuda.memory_allocated(device) == 1024
        names = {key[0].name for key in known._known}
    assert {"gelu", "gelu_backward", "add.Tensor"} <= names


def test_with_numbers_nothing_is_kept():
    with virtual_gpus(1):
        assert (torch.ones(2, device="cuda") + 1).tolist() == [2, 2]
    assert not known._known


def test_rms_norm_is_taken_apart_once(monkeypatch):
    """PyTorch finds its shapes in Python, operator by operator. What is kept has the forms and the memory of those."""

    def steps():
        found = []
        for x, weight in (((4, 6, 8), 8), ((4, 6, 8), None), ((6, 8), 8)):
            dtype = torch.bfloat16 if len(x) == 2 else torch.float32
            x = torch.empty(x, device="cuda", dtype=dtype, requires_grad=True)
            parts = [x] if weight is None else [x, torch.empty(weight, device="cuda", dtype=dtype, requires_grad=True)]
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            made = torch.rms_norm(x, (8,), *parts[1:])
            gradients = torch.autograd.grad(made.sum(), parts)
            found.append((forms([made.detach(), *gradients]), torch.cuda.max_memory_allocated() - before))
        return found

    with virtual_gpus(1, shapes_only=True):
        first = steps()
        monkeypatch.setattr(normalization, "_raw_rms_norm", None)
        assert steps() == first
        with torch.autocast("cuda"), pytest.raises(TypeError, match="not callable"):
            steps()  # another type may come out, so PyTorch is asked
