"""The checks of the exercises: they tell right from wrong, explain, and survive whatever a learner passes."""

import sys

import pytest
import torch
from torch import nn
from virtual_gpus import virtual_gpus

from helpers.exercises import compare
from helpers.exercises.core import NotYet, call, exercise, not_yet, require, show
from helpers.measure import GiB, MiB
from tests.check_answers import Hostile


class Unprintable(Exception):
    def __str__(self):
        raise RuntimeError("no text")


class Bare(BaseException):
    pass


def failing():
    raise ZeroDivisionError("by nothing")


def leaving():
    sys.exit(3)


def speechless():
    raise Unprintable


def bare():
    raise Bare


def surrogate():
    raise ValueError("half \ud83d pair")


def endless():
    return endless()


LOOP = []
LOOP.append(LOOP)
STRANGE = [
    None, ..., "", "text", b"bytes", "\ud83d", True, 0, -1, 2**70, 10**400, 1e400, float("nan"), 3 + 4j,
    [], {}, (), set(), LOOP, [...], {"a": None}, (i for i in range(3)), object, int, len, print, torch,
    torch.tensor([]), torch.ones(3), torch.ones((), dtype=torch.bool), torch.tensor(float("nan")),
    torch.ones(2, device="meta"), torch.Size([2]), nn.Identity(), nn.Linear(2, 2),
    failing, leaving, speechless, bare, surrogate, endless, lambda: None, Hostile(), Hostile,
    Exception("error"), "cuda", "cuda:99999", "nonsense:0", ["cuda:0", None], ["cpu", 7, "x"],
]  # fmt: skip
COMPARISONS = {
    "number": lambda answer: compare.number(answer, 12.5),
    "memory": lambda answer: compare.memory(answer, 10 * MiB, gpus=4, parts={"the gradients": 2 * MiB}),
    "device": lambda answer: compare.device(answer, "cuda:1"),
    "devices": lambda answer: compare.devices(answer, ["cuda:0", "cuda:1"]),
    "shape": lambda answer: compare.shape(answer, (7, 7, 7)),
    "tensor": lambda answer: compare.tensor(answer, torch.arange(6.0)),
    "choice": lambda answer: compare.choice(answer, "right", {"wrong": "it is wrong"}),
    "error": lambda answer: compare.error(answer, KeyError),
    "same_function": lambda answer: compare.same_function(answer, lambda: 17.0, [()]),
    "call": lambda answer: require(call(answer) == "seventeen", "that is not it", "it is seventeen"),
}


@pytest.mark.parametrize("name", COMPARISONS)
@pytest.mark.parametrize("place", range(len(STRANGE)))
def test_nothing_a_learner_passes_raises_and_nothing_of_it_is_correct(name, place, capsys):
    verdict = exercise(COMPARISONS[name])(STRANGE[place])
    printed = capsys.readouterr().out.strip().splitlines()[-1]
    assert not verdict and printed == verdict.text
    assert printed.startswith("not yet: ") and ", because " in printed
    assert len(printed) < 600


def test_a_right_answer_is_told_and_true(capsys):
    @exercise
    def answer_of_all(answer):
        compare.number(answer, 42)
        return "and six times seven"

    assert answer_of_all(42)
    assert capsys.readouterr().out == "correct: and six times seven\n"
    assert exercise(lambda answer: None)(1).text == "correct: well done"


def test_ctrl_c_is_not_swallowed():
    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        exercise(call)(interrupted)


def test_the_wrong_number_of_answers_is_explained(capsys):
    check = exercise(COMPARISONS["number"])
    assert "missing a required argument" in check().text
    assert "too many" in check(1, 2).text


def test_stubs_are_recognised_inside_lists_and_dicts():
    check = exercise(lambda answer: None)
    for stub in (..., [1, ...], {"a": (1, ...)}):
        assert "still holds ..." in check(stub).text
    assert "is None" in check([1, None]).text
    assert check([1, 2])


def test_an_error_names_the_learners_own_line():
    check = exercise(lambda fn: call(fn))
    assert check(failing).text == (
        'not yet: your code stopped at `raise ZeroDivisionError("by nothing")`, because of '
        "ZeroDivisionError: by nothing"
    )
    wrong_shapes = check(lambda: nn.Linear(2, 2)(torch.ones(3, 3))).text
    assert "nn.Linear(2, 2)(torch.ones(3, 3))" in wrong_shapes and "shapes cannot be multiplied" in wrong_shapes


class Breaks(nn.Module):
    def forward(self, x):
        return self.how(x)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        (lambda x: x.nonsense, "AttributeError: 'Tensor' object has no attribute 'nonsense'"),
        (lambda x: torch.empty(2**40, device=x.device), "OutOfMemoryError: CUDA out of memory. Tried to allocate 4096"),
    ],
    ids=["attribute", "memory"],
)
def test_an_error_in_a_thread_of_data_parallel_is_told_in_its_own_words(how, words):
    """Its text is a whole traceback, whose end would be cut off."""
    module = Breaks()
    module.how = how
    with virtual_gpus(2):
        verdict = exercise(lambda answer: nn.DataParallel(answer)(torch.ones(4, 2, device="cuda")))(module)
    assert verdict.text.startswith("not yet: your code stopped at `") and f"because of {words}" in verdict.text
    assert "Traceback" not in verdict.text and "lambda x: " in verdict.text


def test_a_check_leaves_the_random_state_alone():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    assert exercise(lambda fn: require(call(fn).numel() == 3, "no", "no"))(lambda: torch.rand(3))
    assert torch.equal(before, torch.get_rng_state())


def test_a_verdict_displays_nothing_in_a_notebook(capsys):
    from IPython.core.formatters import DisplayFormatter

    verdict = exercise(lambda answer: None)(1)
    assert DisplayFormatter().format(verdict) == ({}, {})


def test_show_is_one_short_line():
    assert show("a\nb") == "'a\\nb'"
    assert len(show(list(range(1000)))) == 80
    assert "repr raises ValueError" in show(type("Odd", (), {"__repr__": Hostile.__repr__})())


def said(compare_, *args, **kwargs) -> str:
    """What the comparison objects to; empty if it is content."""
    try:
        compare_(*args, **kwargs)
    except NotYet as reason:
        return str(reason)
    return ""


def test_not_yet_reads_as_a_sentence():
    assert said(not_yet, "this", "of that") == "this, because of that"


@pytest.mark.parametrize("right", [100, 100.4, torch.tensor(100), torch.tensor([100.0]), torch.tensor(99.5).numpy()])
def test_numbers_within_tolerance_pass(right):
    assert said(compare.number, right, 100) == ""


@pytest.mark.parametrize(
    "wrong, reason",
    [
        (105, "105 ms, because it is a little too large"),
        (150, "150 ms, because it is too large"),
        (30, "30 ms, because it is more than twice too small"),
        (2_000, "2,000 ms, because it is more than ten times too large"),
        (-100, "because its sign is wrong"),
        (0, "because zero it cannot be"),
        (25, "because you took a quarter"),
        (True, "is a truth value"),
        ("100", "write it without quotes"),
        (float("inf"), "a finite number"),
        (torch.ones(2), "is no number"),
    ],
)
def test_wrong_numbers_are_explained(wrong, reason):
    assert reason in said(compare.number, wrong, 100, unit="ms", mistakes={25: "you took a quarter"})


def test_zero_can_be_expected():
    assert said(compare.number, 0, 0) == ""
    assert "it should be zero" in said(compare.number, 1e-3, 0)


def test_memory_returns_bytes():
    assert compare.memory(10, 10 * MiB) == 10 * MiB
    assert compare.memory(16.3, 16.3 * GiB, unit="GiB") == 16.3 * GiB


@pytest.mark.parametrize(
    "wrong, reason",
    [
        (1200 * MiB, "those are bytes: give MiB"),
        (1200 / 1024, "those are GiB: give MiB"),
        (1200 * 1.048576, "those are MB of 1,000,000 bytes: a MiB has 1,048,576"),
        (300, "each float32 takes four bytes"),
        (4800, "one GPU's share is asked for"),
        (1600, "that is one of 3 shares: there are 4 GPUs"),
        (960, "that is one of 5 shares: there are 4 GPUs"),
        (1000, "it looks as if the gradients were left out"),
        (1400, "it looks as if the gradients were counted twice"),
        (500, "it looks as if the gradients and the optimizer's states were left out"),
        (777, "it is too small"),
        (1100, "that is Adam's step count"),
    ],
)
def test_the_usual_mistakes_with_memory_are_named(wrong, reason):
    parts = {"the weights": 333 * MiB, "the gradients": 200 * MiB, "the optimizer's states": 500 * MiB}
    mistakes = {1100 * MiB: "that is Adam's step count"}
    told = said(compare.memory, wrong, 1200 * MiB, gpus=4, parts=parts, mistakes=mistakes)
    assert told.endswith(reason), told


def test_parts_of_one_size_cannot_be_told_apart():
    parts = {"the parameters": 100 * MiB, "the gradients": 100 * MiB, "the states": 200 * MiB}
    told = said(compare.memory, 300, 400 * MiB, parts=parts)
    assert told.endswith("it looks as if the parameters were left out, or the gradients were left out")


def test_devices_of_names_tensors_and_modules():
    assert said(compare.device, torch.ones(2), "cpu") == ""
    assert said(compare.device, nn.Linear(2, 2), "cpu") == ""
    assert said(compare.device, 1, "cuda:1") == said(compare.device, "cuda:1", "cuda:1") == ""
    assert "still on the CPU" in said(compare.device, torch.ones(2), "cuda:1")
    assert "another GPU" in said(compare.device, "cuda:0", "cuda:1")
    assert "whichever GPU is current" in said(compare.device, torch.device("cuda"), "cuda:1")
    assert "neither parameters nor buffers" in said(compare.device, nn.ReLU(), "cuda:1")
    spread = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    assert "lies on 2 devices" in said(compare.device, spread, "cpu")


def test_lists_of_devices():
    right = ["cuda:0", "cuda:1", "cuda:2"]
    assert said(compare.devices, right, right) == said(compare.devices, (0, 1, 2), right) == ""
    assert "that is 2 in number, and 3 are asked for" in said(compare.devices, right[:2], right)
    assert "their order is not" in said(compare.devices, right[::-1], right)
    assert "entry 2 is on another device" in said(compare.devices, ["cuda:0", "cuda:1", "cpu"], right)
    assert "is one thing" in said(compare.devices, "cuda:0", right)


def test_shapes():
    assert said(compare.shape, torch.ones(4, 2), (4, 2)) == said(compare.shape, [4, 2], (4, 2)) == ""
    assert "their order is not" in said(compare.shape, torch.ones(2, 4), (4, 2))
    assert "it has 1 dimension(s), and 2 are asked for" in said(compare.shape, torch.ones(8), (4, 2))
    assert "the size of dimension 1 is not right" in said(compare.shape, (4, 3), (4, 2))


def test_tensors():
    right = torch.linspace(-1, 1, 8)
    assert said(compare.tensor, right * (1 + 1e-6), right) == said(compare.tensor, right.double(), right) == ""
    partly = said(compare.tensor, right + 0.5 * (right > 0), right)
    assert "4 of 8 values differ, because the largest gap is 0.5" in partly
    assert "every value is 4 times what it should be" in said(compare.tensor, right * 4, right)
    assert "nan or infinite" in said(compare.tensor, right * float("nan"), right)
    assert "the shape is (1, 8)" in said(compare.tensor, right[None], right)
    assert "8 of 8 values differ" in said(compare.tensor, torch.ones(8), torch.zeros(8))


def test_choices():
    reasons = {"scatter": "it splits the batch"}
    assert said(compare.choice, " Gather ", "gather", reasons) == ""
    assert "because it splits the batch" in said(compare.choice, "scatter", "gather", reasons)
    assert "they are gather, scatter" in said(compare.choice, "reduce", "gather", reasons)


def test_an_expected_error():
    assert compare.error(failing, ZeroDivisionError, "nothing") == "by nothing"
    assert "another error is asked for" in said(compare.error, failing, ZeroDivisionError, "everything")
    assert "without an error" in said(compare.error, lambda: 1, ZeroDivisionError)


def test_functions_are_measured_on_inputs():
    inputs = [(torch.arange(3.0), 2), (torch.arange(4.0), 3)]
    assert said(compare.same_function, lambda x, n: x * n, torch.mul, inputs) == ""
    assert "values differ" in said(compare.same_function, lambda x, n: x + n, torch.mul, inputs)
    assert "has no `return`" in said(compare.same_function, lambda x, n: None, torch.mul, inputs)
    assert "still returns ..., because your answer" in said(compare.same_function, lambda x, n: ..., torch.mul, inputs)


@pytest.mark.parametrize("shapes_only", [False, True])
def test_checks_on_virtual_gpus_see_devices_and_leave_the_machine_as_it_was(shapes_only):
    def learner():
        torch.cuda.set_device(3)
        return torch.rand(3, device="cuda:1")

    with virtual_gpus(4, memory="16 GiB", shapes_only=shapes_only):
        torch.cuda.set_device(2)
        torch.ones(1, device="cuda:2")
        before = torch.cuda.get_rng_state_all()
        assert exercise(lambda fn: compare.device(call(fn), "cuda:1"))(learner)
        assert "another GPU" in exercise(lambda fn: compare.device(call(fn), "cuda:0"))(learner).text
        assert torch.cuda.current_device() == 2
        assert all(map(torch.equal, before, torch.cuda.get_rng_state_all()))
        assert said(compare.shape, learner(), (3,)) == ""


def test_errors_of_virtual_gpus_are_told_in_their_own_words():
    with virtual_gpus(2, memory="1 GiB"):
        mixed = exercise(call)(lambda: torch.ones(2, device="cuda:0") + torch.ones(2, device="cuda:1")).text
        full = exercise(call)(lambda: torch.empty(2**30, device="cuda:0")).text
    assert "at least two devices, cuda:0 and cuda:1" in mixed
    assert "OutOfMemoryError: CUDA out of memory. Tried to allocate 4.00 GiB" in full


def test_tensors_are_compared_across_devices():
    with virtual_gpus(1, memory="1 GiB"):
        assert said(compare.tensor, torch.ones(3, device="cuda:0"), torch.ones(3)) == ""
        assert "every value is 2 times" in said(compare.tensor, 2 * torch.ones(3, device="cuda:0"), torch.ones(3))
        assert said(compare.number, torch.ones(1, device="cuda:0"), 1) == ""
