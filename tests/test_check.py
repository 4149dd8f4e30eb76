"""The core of the checks and their comparisons: they tell right from wrong, explain, and survive any answer."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn
from virtual_gpus import virtual_gpus

from helpers.measure import GiB, MiB
from notebooks.checks import compare, core, scores
from notebooks.checks.core import NotYet, call, exercise, require, show
from tests.check_answers import raises, survives_strange_answers

CPU, GPU_1 = torch.device("cpu"), torch.device("cuda", 1)


def said(compare_, *args, **kwargs) -> str:
    """What the comparison objects to; empty if it is content."""
    try:
        compare_(*args, **kwargs)
    except NotYet as reason:
        return str(reason)
    return ""


def test_nothing_a_learner_passes_raises_and_nothing_of_it_is_correct():
    comparisons = (
        lambda answer: compare.number(answer, 12.5),
        lambda answer: compare.memory(answer, 10 * MiB, "MiB"),
        lambda answer: compare.device(answer, GPU_1),
        lambda answer: compare.tensor(answer, torch.arange(6.0)),
        lambda answer: compare.names(answer, ("a", "b"), "a number"),
        lambda answer: require(call(answer) == "seventeen", "That is not it.", "It is seventeen."),
    )
    assert survives_strange_answers(*map(exercise, comparisons))


def test_what_is_printed_is_the_verdict(capsys):
    assert exercise(lambda answer: "That is six times seven.")(42)
    assert not exercise(lambda answer: require(answer == 42, "41 is too small.", "Add one."))(41)
    assert capsys.readouterr().out == "Correct: That is six times seven.\nNot yet: 41 is too small. Add one.\n"


def test_a_verdict_displays_nothing_in_a_notebook():
    from IPython.core.formatters import DisplayFormatter

    assert DisplayFormatter().format(exercise(lambda answer: "right")(1)) == ({}, {})


@pytest.fixture
def notebook(monkeypatch, tmp_path):
    """Checks run as in a notebook whose cell is given; what they display comes back."""
    shell, shown = SimpleNamespace(user_ns={"In": [""]}, kernel=True), []
    monkeypatch.setattr(core, "_shell", lambda: shell)
    monkeypatch.setattr("IPython.display.display", lambda bundle, raw: shown.append(bundle))
    monkeypatch.setattr(scores, "FOLDER", tmp_path / "progress")
    monkeypatch.setattr(scores, "_here", {})
    monkeypatch.delenv("COURSE_PROGRESS", raising=False)

    def run(check, answer, cell="check.it(answer)"):
        shell.user_ns["In"].append(cell)
        check(answer)
        return shown[-1]["text/plain"], shown[-1]["text/html"]

    return run


def test_a_notebook_shows_a_box_and_counts_what_is_solved(notebook, monkeypatch):
    first = exercise(lambda answer: require(answer == 42, "<41> is small.") or "Right.")
    lesson = ModuleType("notebooks.checks.lesson99")
    lesson.first, lesson.second = first, exercise(lambda answer: "Right.")
    for name in ("first", "second"):
        getattr(lesson, name).__wrapped__.__module__ = lesson.__name__
        getattr(lesson, name).__wrapped__.__name__ = name
    monkeypatch.setitem(sys.modules, lesson.__name__, lesson)

    plain, box = notebook(lesson.first, 41)
    assert plain == "Not yet: <41> is small." and "✘ Not yet</b>" in box and "&lt;41&gt; is small." in box
    assert notebook(lesson.first, 42, "# Solution\ncheck.first(x)")[0] == "Correct: Right."
    assert notebook(lesson.first, 42) == notebook(lesson.first, 42)  # once counted, once only
    plain, box = notebook(lesson.second, 1)
    assert plain == "Correct: Right. (2 of 2 solved)" and "✔ Correct</b> &nbsp; 2 of 2 solved<br>Right." in box
    monkeypatch.setattr(scores, "_here", {})  # another day
    assert scores.read("solved") == {"lesson99": ["first", "second"]}
    monkeypatch.setenv("COURSE_PROGRESS", "off")  # as when lessons are stored and tested
    assert notebook(lesson.first, 42)[0] == "Correct: Right."


def test_scores_survive_a_damaged_file_and_can_be_switched_off(notebook, monkeypatch):
    scores.FOLDER.mkdir()
    (scores.FOLDER / "solved.json").write_text("{")
    assert scores.add("solved", "lesson99", "first") == {"first"}
    assert (scores.FOLDER / "solved.damaged").read_text() == "{"
    stored = (scores.FOLDER / "solved.json").read_text()
    monkeypatch.setenv("COURSE_PROGRESS", "off")
    assert scores.add("solved", "lesson99", "second") == {"first", "second"}
    assert (scores.FOLDER / "solved.json").read_text() == stored


def test_ctrl_c_is_not_swallowed():
    with pytest.raises(KeyboardInterrupt):
        exercise(call)(raises(KeyboardInterrupt))


def test_stubs_are_recognised_inside_lists_and_dicts():
    check = exercise(lambda answer: "right")
    for stub in (..., [1, ...], {"a": (1, ...)}):
        assert "still contains `...`" in check(stub).text
    assert "is None" in check([1, None]).text
    assert check([1, 2])
    assert "missing 1 required" in check().text and "2 were given" in check(1, 2).text
    assert "still returns `...`. Replace the dots" in exercise(call)(lambda: ...).text
    assert "Does it end with `return`" in exercise(call)(lambda: None).text


def test_an_error_names_the_learners_own_line():
    check = exercise(call)
    wrong_shapes = check(lambda: nn.Linear(2, 2)(torch.ones(3, 3))).text
    assert wrong_shapes.startswith("Not yet: Your code stopped at `") and "` with RuntimeError: " in wrong_shapes
    assert "nn.Linear(2, 2)(torch.ones(3, 3))" in wrong_shapes and "shapes cannot be multiplied" in wrong_shapes


class Breaks(nn.Module):
    def forward(self, x):
        return x.nonsense


def test_an_error_in_a_thread_of_data_parallel_is_told_in_its_own_words():
    """Its text is a whole traceback, whose end would be cut off."""
    with virtual_gpus(2):
        verdict = exercise(lambda answer: nn.DataParallel(answer)(torch.ones(4, 2, device="cuda")))(Breaks())
    right = "at `return x.nonsense` with AttributeError: 'Tensor' object has no attribute 'nonsense'."
    assert verdict.text.endswith(right), verdict.text


@pytest.mark.parametrize("shapes_only", [False, True])
def test_a_check_leaves_random_states_and_current_gpu_as_they_were(shapes_only):
    def learner():
        torch.cuda.set_device(3)
        return torch.rand(3), torch.rand(3, device="cuda:1")

    with virtual_gpus(4, memory="16 GiB", shapes_only=shapes_only):
        torch.cuda.set_device(2)
        torch.ones(1, device="cuda:2")
        before = [torch.get_rng_state(), *torch.cuda.get_rng_state_all()]
        assert exercise(lambda fn: call(fn) and "right")(learner)
        assert torch.cuda.current_device() == 2
        assert all(map(torch.equal, before, [torch.get_rng_state(), *torch.cuda.get_rng_state_all()]))


def test_settings_that_an_answer_leaves_behind_are_told_and_undone():
    def learner():
        torch.set_default_device("cuda:1")
        torch.set_default_dtype(torch.float64)
        torch.set_grad_enabled(False)
        return torch.ones(1)

    check = exercise(lambda fn: str(call(fn).dtype))
    with virtual_gpus(2):
        assert "leaves PyTorch's default device at cuda:1" in check(learner).text
        assert (torch.get_default_device(), torch.get_default_dtype()) == (CPU, torch.float32)
        assert torch.is_grad_enabled()
        torch.set_default_device(GPU_1)  # a cell's own setting does not reach the check, and stays
        assert check(lambda: torch.ones(1).cpu() + torch.ones(1)) and torch.get_default_device() == GPU_1
        torch.set_default_device(None)


def test_show_is_one_short_line():
    assert show("a\nb") == "'a\\nb'"
    assert len(show(list(range(1000)))) == 80


@pytest.mark.parametrize(
    "right",
    [100, 100.4, torch.tensor([100.0], requires_grad=True), torch.tensor(99.5).numpy(), torch.tensor([100.0]).numpy()],
)
def test_numbers_within_tolerance_pass(right):
    assert said(compare.number, right, 100) == ""


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (105, "105 ms is too large."),
        (150, "150 ms is too large."),
        (30, "30 ms is less than half the right value."),
        (2_000_000, "2,000,000 ms is more than twice the right value."),
        (-100, "-100 ms is wrong: it should be more than 0."),
        (25, "25 ms is a quarter."),
        (True, "is a truth value"),
        ("100", "without quotes"),
        (float("inf"), "a finite number"),
        (torch.ones(2), "is of type Tensor. Give a number."),
    ],
)
def test_wrong_numbers_are_explained(wrong, reason):
    mistakes = {25.2: "is another quarter.", 25: "is a quarter."}
    assert reason in said(compare.number, wrong, 100, unit="ms", mistakes=mistakes)


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (1200 * MiB, "would be right in bytes. Give MiB"),
        (1200 / 1024, "would be right in GiB. Give MiB"),
        (1200 * 1.048576, "would be right in MB. Give MiB: 1 MiB is 1,048,576 bytes."),
        (300, "A float32 takes four bytes."),
        (1100, "Here, 1,100 MiB is Adam's step count."),
        (777, "Here, 777 MiB is too small."),
    ],
)
def test_the_usual_mistakes_with_memory_are_named(wrong, reason):
    mistakes = {1100 * MiB: "is Adam's step count."}
    assert said(compare.memory, 16.3, 16.3 * GiB, "GiB") == ""
    assert reason in said(compare.memory, wrong, 1200 * MiB, "MiB", mistakes=mistakes, case="Here, ")


def test_devices_of_tensors_and_modules():
    assert said(compare.device, torch.ones(2), CPU) == said(compare.device, nn.Linear(2, 2), CPU) == ""
    assert "The device is cpu, and it should be cuda:1." in said(compare.device, torch.ones(2), GPU_1)
    spread = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    assert "The device is meta" in said(compare.device, spread, CPU)


def test_tensors():
    right = torch.linspace(-1, 1, 8)
    assert said(compare.tensor, right * (1 + 1e-6), right) == said(compare.tensor, right.double(), right) == ""
    partly = said(compare.tensor, right + 0.5 * (right > 0), right)
    assert "4 of 8 values are wrong. At [4], yours is 0.6429 and the right one is 0.1429." in partly
    assert "Every value is 4 times what it should be" in said(compare.tensor, right * 4, right)
    assert "nan or infinite" in said(compare.tensor, right * float("nan"), right)
    assert "The shape is (1, 8), and it should be (8,)." in said(compare.tensor, right[None], right)
    assert "8 of 8 values are wrong" in said(compare.tensor, torch.ones(8), torch.zeros(8))
    with virtual_gpus(1, memory="1 GiB"):
        assert said(compare.tensor, right.cuda(), right) == ""


def test_names():
    assert said(compare.names, {"b": 1, "a": 2}, ("a", "b"), "a number") == ""
    for wrong in ({"a": 1}, {"a": 1, "b": 2, "c": 3}, [1, 2]):
        assert "Give a dict with a number for each of a, b." in said(compare.names, wrong, ("a", "b"), "a number")
