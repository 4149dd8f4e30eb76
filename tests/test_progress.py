"""`python -m notebooks.checks --report`: which exercises are solved in learners' copies."""

import csv
import json
import re
import sys

import pytest
import run_all

from notebooks.checks import __main__ as progress

STUB = "Not yet: `held` still returns `...`. Replace the dots with your answer.\n"


@pytest.fixture
def copy(tmp_path):
    """A function that writes a learner's copy of a lesson, in which the checks have printed what is given."""

    def write(learner, number, **printed):
        (path,) = run_all.lessons([number])
        notebook = run_all.learners_copy(json.loads(path.read_text(encoding="utf-8")))
        for cell in notebook.cells:
            if cell.cell_type == "code":
                texts = [text for name, text in printed.items() if cell.source.endswith(f"check.{name}({name})")]
                cell.outputs = [{"output_type": "stream", "name": "stdout", "text": text} for text in texts]
        (tmp_path / learner).mkdir(exist_ok=True)
        target = tmp_path / learner / path.name
        target.write_text(run_all.written(notebook), encoding="utf-8")
        return target

    return write


@pytest.fixture
def report(monkeypatch, capsys, tmp_path):
    """A function that makes the report of a folder, the one with the learners' copies unless told, and returns it."""

    def make(*arguments):
        monkeypatch.setattr(sys, "argv", ["progress", "--report", *map(str, arguments or [tmp_path])])
        progress.main()
        return capsys.readouterr().out

    return make


def test_every_exercise_of_every_lesson_is_found():
    for path in run_all.lessons():
        cells = progress.read(path)
        headings = [heading for cell in cells for heading in run_all.headings(cell)]
        exercises = headings[headings.index("## Exercises") + 1 :]
        numbered = [heading[4:] for heading in exercises if re.match(r"### \d\. ", heading)]
        found = progress.exercises(cells)
        assert [title for title in found if title in numbered] == numbered != [] and all(found.values())


def test_one_learner(copy, report):
    sent = "A print of mine\nCorrect: Yes.\nNot yet: 4 is.\n"
    copy("", "08", held="Correct: A 64th.\n", sent=sent, plan=STUB)
    assert report().splitlines() == [
        "08_sharding",
        "  solved          1. What a rank holds",
        "  not solved yet  2. What a rank sends",
        "  not begun       3. A plan",
        "  not begun       4. Shard it",
        "  not begun       5. Par: 70 billion parameters on 256 H100s",
        "1 of 5 exercises are solved.",
    ]


def test_an_exercise_with_two_checks_is_solved_when_both_are(copy, report):
    for printed, state in (
        ({"causes": "Correct: a\n", "changes": "Correct: b\n"}, "solved"),
        ({"causes": "Correct: a\n", "changes": STUB}, "not solved yet"),
        ({"causes": "Correct: a\n"}, "not solved yet"),
    ):
        copy("", "07", **printed)
        assert f"  {state:16}2. Why does it wait?\n" in report()


def test_folded_solutions_do_not_count(report):
    printed = report(run_all.FOLDER)
    assert "10_frameworks" in printed and re.search(r"^0 of \d+ exercises are solved", printed, re.MULTILINE)
    assert "  not begun       2. A budget\n" in printed  # of lesson 00, whose stored output is that of the dots


def test_many_learners(copy, report, tmp_path):
    copy("ana", "08", held="Correct: A 64th.\n", sent="Correct: Twice.\n")
    copy("ana", "04", tree="Not yet: 63 is too many.\n")
    copy("ben", "08", held="Not yet: 3 is.\n", sent="Not yet: 3 is.\n")
    copy("cleo", "08", sent="Not yet: 3 is.\n")
    copy("cleo", "04").write_text('{"cells": [')
    (tmp_path / "dora").mkdir()
    (tmp_path / "ana" / ".ipynb_checkpoints").mkdir()
    (tmp_path / "ana" / ".ipynb_checkpoints" / "08_sharding.ipynb").write_text("{}")
    assert report().splitlines() == [
        "                04  08  all",
        "exercises        4   5    9",
        "ana              0   2    2",
        "ben              -   0    0",
        "cleo       damaged   0    0",
        "dora             -   -    0",
        "",
        "No lesson was found in: dora",
        "",
        "Learners who began an exercise and have not solved it yet:",
        "   2  08, 2. What a rank sends",
        "   1  04, 1. A broadcast in few steps",
        "   1  08, 1. What a rank holds",
    ]


def test_copies_of_a_lesson_count_together(copy, report, tmp_path):
    copy("", "08", held="Correct: A 64th.\n").rename(tmp_path / "08_sharding-Copy1.ipynb")
    copy("", "08", sent="Correct: Twice.\n", held="Not yet: 3 is.\n").rename(tmp_path / "08_sharding (2).ipynb")
    copy("", "08")
    printed = report()
    assert printed.startswith("08_sharding\n") and printed.endswith("2 of 5 exercises are solved.\n")


def test_a_score_sheet(copy, report, tmp_path):
    copy("ana", "08", held="Correct: A 64th.\n")
    copy("ben", "08").write_text('{"cells": [')
    (tmp_path / "dora").mkdir()
    report(tmp_path, "--csv", tmp_path / "scores.csv")
    with (tmp_path / "scores.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert (rows[0]["learner"], rows[0]["exercise"], rows[0]["points"]) == ("ana", "1. What a rank holds", "1")
    states = [(row["learner"], row["state"]) for row in rows[1:]]
    assert states[:4] == [("ana", "not begun")] * 4
    assert states[4:] == [("ben", "damaged")] * 5 + [("dora", "no lesson found")]


@pytest.mark.parametrize(
    ("file", "words"),
    [(None, "has no lessons in it"), ("notes.ipynb", "has no lessons"), ("08_sharding.ipynb", "damaged")],
)
def test_folders_that_cannot_be_read(file, words, report, capsys, tmp_path):
    if file:
        (tmp_path / file).write_text("[]")
    with pytest.raises(SystemExit) as ended:
        report()
    assert ended.value.code == 2 and words in capsys.readouterr().err
    with pytest.raises(SystemExit):
        report(tmp_path / "nowhere")
    assert "There is no folder" in capsys.readouterr().err
