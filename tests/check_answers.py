"""What tests of checks share: a lesson's table of answers, reading a "Not yet", measuring once, strange answers."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import nn

from helpers.models import Bert


def told(verdict, *words):
    """The check said "Not yet" in whole sentences, with each of `words` in them, in capitals or not."""
    text = verdict.text
    assert not verdict.correct and text.startswith("Not yet: ") and text.endswith((".", "!", "?")), text
    first = text.split()[2]
    assert not first.isalpha() or first[0].isupper() or first == "nan", text
    for word in words:
        assert word.lower() in text.lower(), text
    return True


def explains(check, *wrong):
    """The check says "Not yet" to each wrong answer, with its words."""
    for answer, words in wrong:
        told(check(answer), words)


def survives_strange_answers(*checks, answers=None):
    """None of `checks` raises or accepts anything of `answers` (STRANGE), and none leaves memory on a GPU."""
    before = [torch.cuda.memory_allocated(index) for index in range(torch.cuda.device_count())]
    for check in checks:
        for answer in STRANGE if answers is None else answers:
            verdict = check(answer)
            assert told(verdict) and len(verdict.text) < 1000
    assert before == [torch.cuda.memory_allocated(index) for index in range(len(before))]
    return True


class Answers(NamedTuple):
    """An exercise's rows of a lesson's table. `check` may be a function that makes an answer of a row and checks it.

    scored: answers that pass, with words of the verdict. wrong: answers with words of the message, one string or more.
    strange: what must be refused without raising, `STRANGE` unless given. fixtures: the names of those that are needed.
    """

    check: Callable
    right: Sequence = ()
    wrong: Sequence[tuple] = ()
    scored: Sequence[tuple] = ()
    strange: Sequence | None = None
    fixtures: str = ""


def answers_test(table: Mapping[str, Answers]) -> Callable:
    """The test of a lesson's table, one case per exercise: `test_answers = answers_test({"run_on": Answers(...)})`."""

    @pytest.mark.parametrize("exercise", table)
    def test_answers(exercise, request):
        rows = table[exercise]
        for fixture in rows.fixtures.split():
            request.getfixturevalue(fixture)
        for answer in rows.right:
            verdict = rows.check(answer)
            assert verdict, (answer, verdict.text)
        for answer, words in rows.scored:
            verdict = rows.check(answer)
            assert verdict and words in verdict.text, (answer, verdict.text)
        for answer, words in rows.wrong:
            told(rows.check(answer), *([words] if isinstance(words, str) else words))
        assert survives_strange_answers(rows.check, answers=rows.strange)

    return test_answers


def lesson_cell(name, word):
    """The first code cell of the lesson's notebook with `word` in it."""
    path = Path(__file__).parents[1] / "notebooks" / f"{name}.ipynb"
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    return next(source for source in sources if word in source)


def measured_once(monkeypatch, check, name):
    """Let the check's function `name` measure for the first call with some arguments only: large jobs take seconds."""
    measure, known = getattr(check, name), {}

    def once(*args):
        if repr(args) not in known:
            known[repr(args)] = measure(*args)
        return known[repr(args)]

    monkeypatch.setattr(check, name, once)


def one_layer(monkeypatch, *modules):
    """Let `modules` build the article's BERT with one layer. All eight run in the lessons, with the solutions."""

    def bert(vocabulary=30_000, fused=False):
        return Bert(vocabulary, hidden=256, layers=1, heads=8, length=163, fused=fused)

    for module in modules:
        monkeypatch.setattr(module, "bert_article", bert)


class Hostile:
    """Raises wherever it is touched."""

    def __getattribute__(self, name):
        raise ValueError(f"do not touch {name}")

    def __eq__(self, other):
        raise ValueError("do not compare")

    def __repr__(self):
        raise ValueError("do not look")

    __float__ = __iter__ = __len__ = __call__ = __bool__ = __repr__
    __hash__ = None


class Unprintable(Exception):
    def __str__(self):
        raise RuntimeError("no text")


def raises(kind, *words):
    def function(*_):
        raise kind(*words)

    return function


STRANGE_RESULTS = [
    lambda *_: None, lambda *_: "x", lambda *_: [], lambda *_: [[["F"]]], lambda *_: [Hostile()] * 4,
    lambda *_: torch.ones(2, device="meta"),
]  # fmt: skip
STRANGE = [
    ..., None, "24000", "\ud83d", -1, 10**400, float("nan"), [], {}, [...], object, torch.ones(3),
    torch.ones((), device="meta"), nn.Identity(), Hostile(), Hostile, exit, lambda: 1, lambda *_: ...,
    *STRANGE_RESULTS, raises(ZeroDivisionError, "by nothing"), raises(SystemExit, "gone"),
    raises(Unprintable), raises(ValueError, "half \ud83d pair"),
]  # fmt: skip
