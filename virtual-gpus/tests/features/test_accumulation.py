"""What hangs on the instruction that called PyTorch, and on who else holds a tensor: reuse of memory in place. Where
two paths join, autograd adds gradients in place under the conditions of C++, and so do virtual GPUs. PyTorch decides on
the CPU as it does on a GPU. Each case runs there without virtual GPUs, where the profiler tells `add_` from `add`, and
then on a virtual GPU."""

import pathlib
import sys

import pytest
import torch
from measuring import function, sizes_of
from torch.utils.checkpoint import checkpoint
from virtual_gpus import entrance, virtual_gpus
from virtual_gpus.features import accumulation

PACKAGE = str(pathlib.Path(entrance.__file__).parent)
kept = []


def keep_the_gradient(ctx, gradient):
    kept.append(gradient * 2)
    return kept[-1]


def compare(ctx, gradient):
    ones = torch.ones_like(gradient[0])
    return gradient * torch.nn.functional.cosine_embedding_loss(gradient, gradient, ones, reduction="none")


keeping = function(lambda ctx, x: x * 2, keep_the_gradient)
gapped = function(lambda ctx, x: x.clone(), lambda ctx, g: g.new_empty_strided(g.shape, (2 * len(g), 1)).fill_(1))
comparing = function(lambda ctx, x: x.clone(), compare)


def gradient_of(outputs, *args):
    return lambda: torch.autograd.grad(outputs, *args)


def joined(*branches, hook=lambda node: None):
    """A case: the gradients of these branches meet at one tensor. hook: called with the node of each branch."""

    def case(x):
        hidden = x * 1
        results = [branch(hidden) for branch in branches]
        for result in results:
            hook(result.grad_fn)
        return gradient_of(sum((result * 2).sum() for result in results), x)

    return case


def shared(x):
    """The gradient of a sum goes to both terms, which have other paths too."""
    one, two = x * 2, x * 3
    return gradient_of((one * 3).sum() + (two * 5).sum() + ((one + two) * 2).sum(), x)


def held_by_the_caller(x):
    hidden = x * 1
    kept.append(torch.ones_like(hidden))
    return gradient_of([hidden, hidden, hidden * 2], x, kept * 3)


def kept_as_grad(x):
    hidden = x * 1
    hidden.retain_grad()
    return (hidden * 2 + hidden * 3).sum().backward


def to_a_leaf(x):
    (x * 2 + x * 3).sum().backward()
    return (x * 2 + x * 3 + x * 4).sum().backward


def of_a_gradient(x):
    hidden = x * x
    (gradient,) = torch.autograd.grad((hidden * 2 + hidden * hidden).sum(), x, create_graph=True)
    return lambda: torch.autograd.grad(gradient.sum(), x, create_graph=True)


def recomputed(x):
    hidden = x * 1
    steps = [checkpoint(torch.sin, hidden, use_reentrant=True) for _ in range(3)]
    return (steps[0] * 2 + steps[1] * 3 + steps[2]).sum().backward


def times(number):
    return lambda x: x * number


def keep(node):
    node.register_hook(lambda inputs, outputs: kept.append(inputs))


CASES = {
    "three paths": joined(times(3), times(4), times(5)),
    "a view of a gradient": joined(lambda x: x.t().contiguous().t(), times(3)),
    "expanded from one number": joined(times(3), torch.sum),
    "part of a tensor and all": joined(lambda x: x[0] * 2, times(3)),
    "kept by a hook": joined(times(3), times(4), hook=keep),
    "made in Python, and kept": joined(keeping, keeping),
    "with gaps between its rows": joined(times(3), gapped),
    "held by two paths": shared,
    "held by the caller": held_by_the_caller,
    "kept as .grad": kept_as_grad,
    "to a leaf": to_a_leaf,
    "of a gradient": of_a_gradient,
    "checkpoints": recomputed,
}


@pytest.fixture(autouse=True)
def forget():
    yield
    kept.clear()


def sums_on_the_cpu(case) -> list[str]:
    """How the engine itself adds gradients without virtual GPUs, in order: "add_" or "add"."""
    backward = case(torch.ones(8, 8, requires_grad=True))
    with torch.autograd.profiler.profile(use_kineto=False) as profile:
        backward()
    sums = [event for event in profile.function_events if event.name in ("aten::add", "aten::add_")]
    engine = "autograd::engine::evaluate_function"
    of_engine = [event for event in sums if event.cpu_parent and event.cpu_parent.name.startswith(engine)]
    return [event.name.removeprefix("aten::") for event in of_engine]


def sums_on_a_gpu(case, monkeypatch) -> list[str]:
    found, decide = [], accumulation._engine_adds

    def noted(*args):
        in_place = decide(*args)
        found.append("add_" if in_place else "add")
        return in_place

    with virtual_gpus(1) as (gpu,), monkeypatch.context() as patch:
        backward = case(torch.ones(8, 8, device=gpu, requires_grad=True))
        patch.setattr(accumulation, "_engine_adds", noted)
        backward()
    return found


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_added_as_without_virtual_gpus(name, monkeypatch):
    expected = sums_on_the_cpu(CASES[name])
    kept.clear()
    assert expected and sums_on_a_gpu(CASES[name], monkeypatch) == expected


def test_what_an_operator_adds_up_for_itself_is_no_sum_of_the_engine(monkeypatch):
    """`cosine_embedding_loss` adds two tensors that only C++ holds (aten/src/ATen/native/Loss.cpp)."""
    assert sums_on_a_gpu(lambda x: comparing(x).sum().backward, monkeypatch) == ["add"]


def test_what_hangs_on_the_calling_instruction():
    with virtual_gpus(2) as (gpu, _):
        x = torch.arange(4.0, device=gpu)
        for made in (x.quantile(0.3), torch.combinations(x), torch.vander(x), torch.nn.functional.one_hot(x.long())):
            assert made.device == gpu, "what C++ makes on the way is adopted"
        for _ in range(2):
            with pytest.raises(RuntimeError, match="at least two devices"):  # a learner's own tensor is not
                x + torch.zeros(4)
        assert torch.zeros(4).device.type == "cpu"

        weight, x = torch.zeros(512, 512, device=gpu), torch.zeros(1024, 512, device=gpu, requires_grad=True)
        hidden = x * 1
        loss = (((hidden * 1) @ weight + hidden) * 2).sum()
        gradients = sizes_of(lambda: torch.autograd.grad(loss, x)).count(1024 * 512 * 4)
        assert gradients == 4  # of the product with 2, of both factors on the way to x, of x; the sum takes no fifth


def test_a_warm_operator_takes_few_calls_through_few_modules():
    """Python calls are what an operator costs here, and what a reader of its way has to follow."""
    entered = []

    def note(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            entered.append((frame.f_code.co_filename.removeprefix(PACKAGE), frame.f_code.co_qualname))

    with virtual_gpus(2):
        x = torch.ones(4, 4, device="cuda")
        for _ in range(3):
            y = x @ x
        before = sys.getprofile()
        sys.setprofile(note)
        try:
            y = x @ x  # noqa: F841 - the product before goes, which is part of the cost
        finally:
            sys.setprofile(before)
    assert "OpCall.compute" in dict(map(reversed, entered)) and len(entered) <= 35, entered
    assert len({module for module, _ in entered}) <= 12, entered
