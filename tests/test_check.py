"""The core of the checks, their comparisons and scores: they tell right from wrong, explain, and survive any answer."""

import importlib
import json
import sys
from types import ModuleType, SimpleNamespace

import matplotlib.pyplot as plt
import pytest
import torch
from IPython.core.formatters import DisplayFormatter
from torch import nn
from virtual_gpus import virtual_gpus

from helpers.measure import GiB, MiB
from helpers.parallel import one_f_one_b
from notebooks.checks import core, scores
from notebooks.checks.compare import alike, device, gradients, memory, names, number, tensor
from notebooks.checks.core import NotYet, call, exercise, require, show
from notebooks.checks.par import Score, compare_with_par, measured
from tests.check_answers import raises, survives_strange_answers, told
from tests.pictures import alt_text

CPU, GPU_1 = torch.device("cpu"), torch.device("cuda", 1)


def test_nothing_a_learner_passes_raises_and_nothing_of_it_is_correct():
    comparisons = (
        lambda answer: number(answer, 12.5),
        lambda answer: memory(answer, 10 * MiB, "MiB"),
        lambda answer: device(answer, GPU_1),
        lambda answer: tensor(answer, torch.arange(6.0)),
        lambda answer: names(answer, ("a", "b"), "a number"),
        lambda answer: require(call(answer) == "seventeen", "That is not it.", "It is seventeen."),
    )
    assert survives_strange_answers(*map(exercise, comparisons))


def test_what_is_printed_is_the_verdict_and_it_displays_nothing(capsys):
    right = exercise(lambda answer: "That is six times seven.")(42)
    assert right and DisplayFormatter().format(right) == ({}, {})
    assert not exercise(lambda answer: require(answer == 42, "41 is too small.", "Add one."))(41)
    assert capsys.readouterr().out == "Correct: That is six times seven.\nNot yet: 41 is too small. Add one.\n"


@pytest.fixture
def own_scores(tmp_path, monkeypatch):
    """A learner who has not begun."""
    monkeypatch.delenv("COURSE_PROGRESS", raising=False)
    monkeypatch.setattr(scores, "FOLDER", tmp_path / "progress")
    monkeypatch.setattr(scores, "_here", {})
    yield
    plt.close("all")


@pytest.fixture
def notebook(monkeypatch, own_scores):
    """Checks run as in a notebook whose cell is given; what they display comes back."""
    shell, shown = SimpleNamespace(user_ns={"In": [""]}, kernel=True), []
    monkeypatch.setattr(core, "_shell", lambda: shell)
    monkeypatch.setattr("IPython.display.display", lambda bundle, raw: shown.append(bundle))

    def run(check, answer, cell="check.it(answer)"):
        shell.user_ns["In"].append(cell)
        check(answer)
        return shown[-1]["text/plain"], shown[-1]["text/html"]

    return run


def test_a_notebook_shows_a_box_and_counts_what_is_solved(notebook, monkeypatch):
    lesson = ModuleType("notebooks.checks.lesson99")
    lesson.first = exercise(lambda answer: require(answer == 42, "<41> is small.") or "Right.")
    lesson.second = exercise(lambda answer: "Right.")
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
    assert "is None" in check([1, None]).text and check([1, 2])
    assert "missing 1 required" in check().text and "2 were given" in check(1, 2).text
    assert "still returns `...`. Replace the dots" in exercise(call)(lambda: ...).text
    assert "Does it end with `return`" in exercise(call)(lambda: None).text


class Breaks(nn.Module):
    def forward(self, x):
        return x.nonsense


def test_an_error_names_the_learners_own_line():
    """Also in a thread of DataParallel, where its text is a whole traceback, whose end would be cut off."""
    wrong_shapes = exercise(call)(lambda: nn.Linear(2, 2)(torch.ones(3, 3))).text
    assert wrong_shapes.startswith("Not yet: Your code stopped at `") and "` with RuntimeError: " in wrong_shapes
    assert "nn.Linear(2, 2)(torch.ones(3, 3))" in wrong_shapes and "shapes cannot be multiplied" in wrong_shapes
    with virtual_gpus(2):
        verdict = exercise(lambda answer: nn.DataParallel(answer)(torch.ones(4, 2, device="cuda")))(Breaks())
    right = "at `return x.nonsense` with AttributeError: 'Tensor' object has no attribute 'nonsense'."
    assert right in verdict.text, verdict.text  # Python 3.15 adds a guess at the right name


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
    assert show("a\nb") == "'a\\nb'" and len(show(list(range(1000)))) == 80


def in_ms(answer):
    number(answer, 100, unit="ms", mistakes={25.2: "is another quarter.", 25: "is a quarter."})


def in_mib(answer):
    memory(answer, 1200 * MiB, "MiB", mistakes={1100 * MiB: "is Adam's step count."}, case="Here, ")


LINE = torch.linspace(-1, 1, 8)
LEAF = torch.ones(3, requires_grad=True)
OTHERS = {"It is half of it.": [LINE / 2], "It is twice as much.": [2 * LINE]}


def on_a_line(answer):
    tensor(answer, LINE)


def alike_a_line(answer):
    alike(answer, LINE, "The gradient is", "Why?", OTHERS)


def gradient_of(answer):
    gradients(answer, 2 * LEAF, {"x": (LEAF, LEAF)}, "Why?", "Here, ")


@pytest.mark.parametrize(
    ("comparison", "answer", "reason"),
    [
        *(
            (in_ms, right, "")
            for right in (100, 100.4, LEAF[:1] * 100, torch.tensor(99.5).numpy(), torch.tensor([99.5]).numpy())
        ),
        (in_ms, 105, "105 ms is too large."),
        (in_ms, 30, "30 ms is less than half the right value."),
        (in_ms, 2_000_000, "2,000,000 ms is more than twice the right value."),
        (in_ms, -100, "-100 ms is wrong: it should be more than 0."),
        (in_ms, 25.05, "25.05 ms is a quarter."),
        (in_ms, True, "is a truth value"),
        (in_ms, "100", "without quotes"),
        (in_ms, float("inf"), "a finite number"),
        (in_ms, torch.ones(2), "is of type Tensor. Give a number."),
        (in_mib, 1200 / 1024, "would be right in GiB. Give MiB"),
        (in_mib, 1200 * 1.048576, "would be right in MB. Give MiB: 1 MiB is 1,048,576 bytes."),
        (in_mib, 300, "A float32 takes four bytes."),
        (in_mib, 1100, "Here, 1,100 MiB is Adam's step count."),
        (in_mib, 777, "Here, 777 MiB is too small."),
        (lambda answer: device(answer, CPU), nn.Linear(2, 2), ""),
        (lambda answer: device(answer, GPU_1), torch.ones(2), "The device is cpu, and it should be cuda:1."),
        (lambda answer: device(answer, CPU), nn.Sequential(nn.ReLU(), nn.Linear(2, 2, device="meta")), "is meta"),
        (on_a_line, LINE * (1 + 1e-6), ""),
        (on_a_line, LINE + 0.5 * (LINE > 0), "4 of 8 values are wrong. At [4], yours is 0.6429 and the right one is"),
        (on_a_line, LINE + 2e-4 * (LINE > 0.9), "yours is 1.0002"),  # not "1", which is the right one
        (on_a_line, LINE * 4, "Every value is 4 times what it should be"),
        (on_a_line, LINE * float("nan"), "nan or infinite"),
        (on_a_line, LINE[None], "The shape is (1, 8), and it should be (8,)."),
        (lambda answer: tensor(answer, torch.zeros(8)), torch.ones(8), "8 of 8 values are wrong"),
        (alike_a_line, [LINE[:3] * 1.0005, LINE[3:].double()], ""),
        (alike_a_line, LINE + 0.002, "The gradient is off by 0.3%. Why?"),
        (alike_a_line, 2 * LINE, "The gradient is off by 100.0%. It is twice as much."),
        (alike_a_line, LINE / 0, "The gradient is nan or infinite. Why?"),
        (alike_a_line, LINE[:3], "The gradient is 3 numbers, and should be 8. Why?"),
        (gradient_of, 2 * LEAF[None], ""),
        (gradient_of, 2 * LEAF.detach(), "Here, the output has no graph. Why?"),
        (gradient_of, torch.ones(3, requires_grad=True), "Here, the gradient does not reach x. Why?"),
        (gradient_of, LEAF * torch.tensor([2, 2, 3]), "Here, the gradient of x is off by"),
        (gradient_of, 2 * LEAF.flip(0), "Here, the gradient of x is off by"),
        (lambda answer: names(answer, ("a", "b"), "a number"), {"b": 1, "a": 2}, ""),
        (lambda answer: names(answer, ("a", "b"), "a number"), {"a": 1, "b": 2, "c": 3}, "Give a dict with"),
    ],
)
def test_comparisons_are_quiet_or_say_what_is_wrong(comparison, answer, reason):
    try:
        said = comparison(answer) or ""
    except NotYet as wrong:
        said = str(wrong)
    assert reason in said and bool(reason) == bool(said)


SHAPES, RTX_4090 = {"shapes_only": True}, {"shapes_only": True, "kind": "RTX 4090"}
WITH_VALUES = "06.validation_loss 06.features 06.halve_until_it_fits 06.accumulate 06.train_with_drift"


@pytest.mark.parametrize(
    ("exercises", "count", "options", "words"),
    [
        ("00.total_memory 00.run_on 00.budget", 1, {}, "the number of GPUs is 1. Run the cell with use_gpus"),
        ("02.largest 05.schedule", 2, SHAPES, "the exercise needs 4"),
        ("02.largest 02.peak 03.largest 05.schedule 06.train", 4, {"memory": "24 GiB"}, "shapes_only=True"),
        ("02.largest 02.peak 03.largest 06.train", 4, SHAPES, "the exercise asks for"),
        ("02.largest 02.peak 03.largest 05.schedule", 4, RTX_4090, "Your cells still hold 1.0"),
        ("02.damaged 03.combine 03.accumulate_words 04.validate 04.ranked", 4, SHAPES, "These GPUs keep no values"),
        (WITH_VALUES, 4, SHAPES, "These GPUs keep no values"),
    ],
)
def test_an_exercise_says_which_gpus_it_needs(exercises, count, options, words):
    answers = {"largest": 64, "schedule": one_f_one_b}
    with virtual_gpus(count, **options):
        held = torch.empty(2**28 if "hold" in words else 1, device="cuda:0")
        for lesson, _, name in (each.partition(".") for each in exercises.split()):
            check = getattr(importlib.import_module(f"notebooks.checks.lesson{lesson}"), name)
            assert told(check(answers.get(name, print)), words)
        assert held.is_cuda


# ---- scores beside a par --------------------------------------------------------------------------------------------

NAIVE, PAR = Score(14 * GiB, 0.0601), Score(10 * GiB, 0.040)


def scored(you, naive=NAIVE, par=PAR, puzzle="03 loss"):
    """The sentence, which is the picture's text as well."""
    words = compare_with_par(puzzle, naive=naive, par=par, you=you, unit_note="modelled")
    assert words in alt_text(plt.gcf())
    return words


@pytest.mark.parametrize("shapes_only", [False, True])
def test_the_last_step_is_measured_on_the_fullest_gpu(shapes_only):
    with virtual_gpus(2, shapes_only=shapes_only):
        sizes = iter((64, 8, 16))  # MiB

        def step():
            torch.empty(next(sizes) * 2**20, dtype=torch.uint8, device="cuda:1").zero_()

        first = measured(step, steps=2)
        assert first.peak == 8 * 2**20
        assert measured(step, gpus=1, steps=1).seconds > first.seconds > 0


def test_the_sentence_has_all_figures_of_par(own_scores):
    others = "Par: 40.0 ms, 10.0 GiB. Naive: 60.1 ms, 14.0 GiB. "
    assert scored(Score(9 * GiB, 1.25)) == (
        f"You: 1.25 s (modelled), 9.00 GiB. {others}You beat par in memory. You are over par in time."
    )
    assert scored(PAR) == f"You: 40.0 ms (modelled), 10.0 GiB. {others}You reach par in memory and time."
    assert len(plt.gcf().axes) == 2
    words = scored(Score(None, 0.5), Score(None, None), Score(None, 1.0), puzzle="time")
    assert words == "You: 500 ms (modelled). Par: 1.00 s. Naive: out of memory. You beat par in time."
    (axes,) = plt.gcf().axes
    assert [text.get_text() for text in axes.texts] == ["out of memory", "1.00 s", "500 ms, better than par"]


def test_the_best_answer_is_kept_and_told_when_a_later_one_is_worse(own_scores, monkeypatch):
    assert "best" not in scored(Score(9 * GiB, 0.030))
    monkeypatch.setattr(scores, "_here", {})  # the next session
    assert scored(Score(9 * GiB, 0.050)).endswith("Your best so far: 30.0 ms, 9.00 GiB.")
    assert "best" not in scored(Score(9 * GiB, 0.050), puzzle="another")
    assert "best" not in scored(Score(8 * GiB, 0.030))
    assert json.loads((scores.FOLDER / "par.json").read_text())["03 loss"] == [8 * GiB, 0.030]


@pytest.mark.parametrize("content", ["{", "[1]", '{"03 loss": [1, 2, 3]}', '{"03 loss": ["a", null]}'])
def test_a_damaged_file_is_no_best(own_scores, content):
    scores.FOLDER.mkdir()
    (scores.FOLDER / "par.json").write_text(content)
    assert "best" not in scored(PAR)
    assert "best" not in scored(PAR)
