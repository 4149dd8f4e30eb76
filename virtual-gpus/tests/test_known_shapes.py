"""Answers of meta kernels that are kept: always what PyTorch itself answers."""

from contextlib import nullcontext

import pytest
import torch
from measuring import peak_of
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode
from virtual_gpus import virtual_gpus
from virtual_gpus.dispatch import known
from virtual_gpus.dispatch.operators import operator

aten = torch.ops.aten


def t(*shape, dtype=torch.float32, form=torch.contiguous_format):
    return torch.empty(shape, dtype=dtype, memory_format=form, device="meta")


@pytest.fixture(autouse=True)
def ask(monkeypatch):
    """Asks as the engine does, of which nothing is known yet, and counts how often the meta kernel answers."""
    monkeypatch.setattr(known, "_known", {})

    def ask(func, *args, kernel=None, **kwargs):
        def run():
            ask.times += 1
            return (kernel or func)(*args, **kwargs)

        op = operator(func)
        return known.ask(op, run, args, kwargs, op.by_element, op.in_place) if op.keeps_answers else run()

    ask.times = 0
    return ask


def forms(result):
    if isinstance(result, (list, tuple)):
        return type(result), [forms(part) for part in result]
    if result is None:
        return None
    return result.shape, result.stride(), result.dtype, result.storage_offset(), result.untyped_storage().nbytes()


def factors(factor):
    """What an optimizer does in place: its factors may differ, but not their type."""
    x, lists = t(4, 3), ([t(4, 3), t(2)], [t(4, 3), t(2)])
    by_number = (aten._foreach_mul_.Scalar, [t(3)], factor), (aten._foreach_div_.ScalarList, [t(3), t(2)], [factor] * 2)
    return [(aten.add_.Tensor, x, t(3)), (aten._foreach_add_.List, *lists), *by_number]


def adds(*pairs):
    return [(aten.add.Tensor, *pair) for pair in pairs]


ONCE = {  # calls of which each is asked for one time, however often it is made
    "add to a column": lambda: [(aten.add.Tensor, t(4, 3), t(5, 4).t()[:, :1])],
    "channels last": lambda: [(aten.relu.default, t(2, 3, 4, 5, form=torch.channels_last))],
    "gradients": lambda: [(aten.convolution_backward.default, t(2, 4, 9, 9), t(2, 3, 9, 9), t(4, 3, 3, 3), None,
                           [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, False, False])],
    "lookup": lambda: [(aten.index.Tensor, t(6, 5), [None, t(7, dtype=torch.int64)])],
    "one of each": lambda: [(aten._foreach_sqrt.default, [t(6, 5), t(2)])],
    "of a gradient that is one number": lambda: [(aten.threshold_backward.default, t(1).expand(3, 4), t(3, 4), 0)],
    "forms": lambda: adds((t(4, 3), 1), (t(4, 4), 1), (t(4, 4).t(), 1), (t(4, 3, dtype=torch.float64), 1)),
    "numbers": lambda: adds(*((t(4, dtype=torch.int64), n) for n in (1, 1.0, True))),
    "in place": lambda: factors(0.1),
}  # fmt: skip
UNUSUAL = {
    "a CPU tensor": lambda: [(aten.add.Tensor, t(4, 3), torch.tensor(1.0))],
    "a conjugate": lambda: [(aten.add.Tensor, t(3, dtype=torch.complex64).conj(), 1)],
    "a view": lambda: [(aten.view.default, t(4, 3), [12])],
    "another shape in place": lambda: [(aten.unsqueeze_.default, t(4, 3), 0)],
    "a new size": lambda: [(aten.resize_.default, t(4, 3), [2])],
    "a result that is given": lambda: [(aten.add.out, t(4), t(4))],
    "a mode below": lambda: [(aten.add.Tensor, t(4), t(4))],
    "an operator of somebody else": lambda: [(torch.ops.prims.sin.default, t(4))],
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


def test_results_that_share_memory_are_asked_every_time_and_answers_have_an_end(monkeypatch, ask):
    x = t(4, 3)
    for result in 2 * (x, x[0], t(8, 3)[:4], [t(2)] * 2, 3):
        ask(aten.relu.default, x, kernel=lambda _, result=result: result)
    assert not known._known
    monkeypatch.setattr(known, "_MOST", 3)
    for n in range(1, 12):
        ask(aten.relu.default, t(n))
    assert len(known._known) <= 3


def test_virtual_gpus_ask_once_and_take_rms_norm_apart_once(monkeypatch):
    with virtual_gpus(2, shapes_only=True):
        for device in ("cuda:0", "cuda:1"):
            x = torch.empty(4, 3, device=device, requires_grad=True)
            (torch.nn.functional.gelu(x) + 1).sum().backward()
            assert x.grad.device == x.device and torch.cuda.memory_allocated(device) == 1024
        names = {key[0].name for key in known._known}
    assert {"gelu", "gelu_backward", "add.Tensor"} <= names
    # PyTorch finds its shapes in Python, operator by operator. What is kept has the forms and the memory of those.

    def steps():
        found = []
        for x, weight in (((4, 6, 8), 8), ((4, 6, 8), None), ((6, 8), 8)):
            dtype = torch.bfloat16 if len(x) == 2 else torch.float32
            x = torch.empty(x, device="cuda", dtype=dtype, requires_grad=True)
            parts = [x] if weight is None else [x, torch.empty(weight, device="cuda", dtype=dtype, requires_grad=True)]
            made, forward = peak_of(lambda x=x, parts=parts: torch.rms_norm(x, (8,), *parts[1:]))
            gradients, backward = peak_of(lambda made=made, parts=parts: torch.autograd.grad(made.sum(), parts))
            found.append((forms([made.detach(), *gradients]), forward, backward))
        return found

    with virtual_gpus(1, shapes_only=True):
        first = steps()
        monkeypatch.setattr("virtual_gpus.features.normalization.rms_norm._raw_rms_norm", None)
        assert steps() == first
        with torch.autocast("cuda"), pytest.raises(TypeError, match="not callable"):
            steps()  # another type may come out, so PyTorch is asked
