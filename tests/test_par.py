"""Scores beside a par: what is measured, said, drawn and kept."""

import json

import matplotlib.pyplot as plt
import pytest
import torch
from virtual_gpus import virtual_gpus

from helpers.measure import GiB
from notebooks.checks import scores
from notebooks.checks.par import Score, compare_with_par, measured
from tests.pictures import alt_text

NAIVE, PAR = Score(14 * GiB, 0.0601), Score(10 * GiB, 0.040)


@pytest.fixture(autouse=True)
def own_scores(tmp_path, monkeypatch):
    """A learner who has not begun."""
    monkeypatch.delenv("COURSE_PROGRESS", raising=False)
    monkeypatch.setattr(scores, "FOLDER", tmp_path / "progress")
    monkeypatch.setattr(scores, "_here", {})
    yield
    plt.close("all")


def said(you, naive=NAIVE, par=PAR, puzzle="03 loss"):
    return compare_with_par(puzzle, naive=naive, par=par, you=you, unit_note="modelled")


@pytest.mark.parametrize("shapes_only", [False, True])
def test_the_last_step_is_measured_on_the_fullest_gpu(shapes_only):
    with virtual_gpus(2, shapes_only=shapes_only):
        sizes = iter((64, 8, 16))  # MiB

        def step():
            torch.empty(next(sizes) * 2**20, dtype=torch.uint8, device="cuda:1").zero_()

        first = measured(step, steps=2)
        assert first.peak == 8 * 2**20
        assert measured(step, gpus=1, steps=1).seconds > first.seconds > 0


@pytest.mark.parametrize(
    ("you", "words"),
    [
        (Score(9 * GiB, 1.25), "You: 1.25 s (modelled), 9.00 GiB. Par: 40.0 ms, 10.0 GiB. Naive: 60.1 ms, 14.0 GiB. "
                               "You beat par in memory. You are over par in time."),
        (PAR, "You: 40.0 ms (modelled), 10.0 GiB. Par: 40.0 ms, 10.0 GiB. Naive: 60.1 ms, 14.0 GiB. "
              "You reach par in memory and time."),
    ],
)  # fmt: skip
def test_the_sentence_has_all_numbers_and_is_the_pictures_text(you, words):
    assert said(you) == words
    assert words in alt_text(plt.gcf())
    assert len(plt.gcf().axes) == 2


def test_a_figure_that_par_lacks_does_not_count_and_naive_may_run_out_of_memory():
    words = said(Score(None, 0.5), Score(None, None), Score(None, 1.0))
    assert words == "You: 500 ms (modelled). Par: 1.00 s. Naive: out of memory. You beat par in time."
    (axes,) = plt.gcf().axes
    assert [text.get_text() for text in axes.texts] == ["out of memory", "1.00 s", "500 ms, better than par"]


def test_the_best_answer_is_kept_and_told_when_a_later_one_is_worse(monkeypatch):
    assert "best" not in said(Score(9 * GiB, 0.030))
    monkeypatch.setattr(scores, "_here", {})  # the next session
    assert said(Score(9 * GiB, 0.050)).endswith("Your best so far: 30.0 ms, 9.00 GiB.")
    assert "best" not in said(Score(9 * GiB, 0.050), puzzle="another")
    assert "best" not in said(Score(8 * GiB, 0.030))
    assert json.loads((scores.FOLDER / "par.json").read_text())["03 loss"] == [8 * GiB, 0.030]


@pytest.mark.parametrize("content", ["{", "[1]", '{"03 loss": [1, 2, 3]}', '{"03 loss": ["a", null]}'])
def test_a_damaged_file_is_no_best(content):
    scores.FOLDER.mkdir()
    (scores.FOLDER / "par.json").write_text(content)
    assert "best" not in said(PAR)
    assert "best" not in said(PAR)
