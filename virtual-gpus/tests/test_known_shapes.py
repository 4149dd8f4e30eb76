"""Answers of meta kernels that are kept, and rules instead of meta kernels: always what PyTorch itself answers."""

from contextlib import nullcontext

import pytest
import torch
from pairwise import pairwise, product, title
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
CALLS = {
    "add to a column": lambda: (aten.add.Tensor, t(4, 3), t(5, 4).t()[:, :1]),
    "addmm": lambda: (aten.addmm.default, t(5), t(4, 3), t(5, 3).t()),
    "channels last": lambda: (aten.relu.default, t(2, 3, 4, 5, form=LAST)),
    "convolution": lambda: (aten.convolution.default, t(2, 3, 9, 9), t(4, 3, 3, 3), None, [2, 2], [1, 1], [1, 1],
                            False, [0, 0], 1),
    "its gradients": lambda: (aten.convolution_backward.default, t(2, 4, 9, 9), t(2, 3, 9, 9), t(4, 3, 3, 3), None,
                              [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, False, False]),
    "dropout": lambda: (aten.native_dropout.default, t(6, 5), 0.5, True),
    "lookup": lambda: (aten.index.Tensor, t(6, 5), [None, t(7, dtype=torch.int64)]),
    "cat": lambda: (aten.cat.default, [t(6, 5), t(2, 5)]),
    "one of each": lambda: (aten._foreach_sqrt.default, [t(6, 5), t(2)]),
    "of a gradient that is one number": lambda: (aten.threshold_backward.default, t(1).expand(3, 4), t(3, 4), 0),
}  # fmt: skip


@pytest.mark.parametrize("call", CALLS)
def test_the_second_answer_is_the_first_in_new_memory(call, ask):
    func, *args = CALLS[call]()
    first, second = ask(func, *args), ask(func, *args)
    assert ask.times == 1
    assert forms(second) == forms(first) == forms(func(*args))
    flat = [r for r in (second if isinstance(second, (list, tuple)) else [second]) if r is not None]
    given = [a for a in args if isinstance(a, torch.Tensor)]
    assert len({r.untyped_storage()._cdata for r in (*flat, *given)}) == len(flat) + len(given)


def test_in_place_and_the_factors_of_an_optimizer(ask):
    x = t(4, 3)
    for factor in (0.1, 0.2):
        assert ask(aten.add_.Tensor, x, t(3)) is x
        assert ask(aten._foreach_add_.List, [x, t(2)], [t(4, 3), t(2)]) is None
        ask(aten._foreach_mul_.Scalar, [t(3)], factor)
        ask(aten._foreach_div_.ScalarList, [t(3), t(2)], [factor, 2 * factor])
    assert ask.times == 4
    ask(aten._foreach_mul_.Scalar, [t(3)], 1)  # factors may differ, but not their type
    assert ask.times == 5


DIFFERENT = [
    [(t(4, 3), 1), (t(4, 4), 1), (t(4, 4).t(), 1), (t(4, 3, dtype=torch.float64), 1)],
    [(t(4, dtype=torch.int64), n) for n in (1, 1.0, True)],
]


@pytest.mark.parametrize("differ", DIFFERENT, ids=["form", "number"])
def test_what_differs_is_asked_again(differ, ask):
    for args in differ:
        assert forms(ask(aten.add.Tensor, *args)) == forms(aten.add.Tensor(*args))
    assert ask.times == len(differ)


def test_the_default_type_is_part_of_the_question(ask):
    whole, before = t(3, dtype=torch.int64), torch.get_default_dtype()
    try:
        for dtype in (torch.float32, torch.float64):
            torch.set_default_dtype(dtype)
            assert ask(aten.true_divide.Tensor, whole, whole).dtype == dtype
    finally:
        torch.set_default_dtype(before)


@torch.library.custom_op("test_known_shapes::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


twice.register_fake(torch.empty_like)

UNUSUAL = {
    "a CPU tensor": lambda: (aten.add.Tensor, t(4, 3), torch.tensor(1.0)),
    "a conjugate": lambda: (aten.add.Tensor, t(3, dtype=torch.complex64).conj(), 1),
    "a sparse one": lambda: (aten.add.Tensor, *[torch.empty(3, 3, layout=torch.sparse_coo, **META)] * 2),
    "a view": lambda: (aten.view.default, t(4, 3), [12]),
    "another shape in place": lambda: (aten.unsqueeze_.default, t(4, 3), 0),
    "a new size": lambda: (aten.resize_.default, t(4, 3), [2]),
    "a result that is given": lambda: (aten.add.out, t(4), t(4)),
    "a mode below": lambda: (aten.add.Tensor, t(4), t(4)),
    "somebody's own operator": lambda: (torch.ops.test_known_shapes.twice.default, t(4)),
}


@pytest.mark.parametrize("what", UNUSUAL)
def test_what_is_unusual_is_asked_every_time(what, ask):
    with FlopCounterMode(display=False) if what == "a mode below" else nullcontext():
        func, *args = UNUSUAL[what]()
        options = {"out": t(0)} if func is aten.add.out else {}
        for _ in range(2):
            ask(func, *args, **options)
    assert ask.times == 2 and not known._known


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


# ---- rules ------------------------------------------------------------------------------------------------------

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


@pytest.mark.parametrize("args", NOT_PLAIN)
def test_no_rule_for_what_is_not_plain(args):
    assert BATCH_NORM(*args) is None
    assert BATCH_NORM_BACKWARD(*gradient(*args, [True] * 3)) is None


def test_no_rule_for_a_gradient_that_lies_otherwise():
    given = gradient(*norm((4, 3, 5, 6), True), [True] * 3)[1:]
    for made in (t(4, 3, 5, 6, form=LAST), t(1).expand(4, 3, 5, 6)):
        assert BATCH_NORM_BACKWARD(made, *given) is None


# ---- on virtual GPUs ------------------------------------------------------------------------------------------------


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
