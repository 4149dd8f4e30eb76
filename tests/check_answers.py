"""What tests of checks share: a lesson's table of answers, reading a "Not yet", measuring once, strange answers."""

import ast
import io
import json
import linecache
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import pytest
import torch
from IPython.core.inputtransformer2 import TransformerManager
from torch import nn

from helpers.parallel import RankError


def told(verdict, *words):
    """The check said "Not yet" in whole sentences, with each of `words` in them, in capitals or not."""
    text = verdict.text
    assert not verdict.correct and text.startswith("Not yet: ") and text.endswith((".", "!", "?")), text
    first = text.split()[2]
    assert not first.isalpha() or first[0].isupper() or first == "nan", text
    for word in words:
        assert word.lower() in text.lower(), text
    return True


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
    ranks: with so many ranks, answers run one after the other in the same ones: all, and the right ones with the next.
    """

    check: Callable
    right: Sequence = ()
    wrong: Sequence[tuple] = ()
    scored: Sequence[tuple] = ()
    strange: Sequence | None = None
    fixtures: str = ""
    ranks: Sequence[int] = ()


def one_launch(monkeypatch, rows):
    """Let the check of `rows`, whose numbers are the same each time, start its ranks once for all answers."""
    check = sys.modules[rows.check.__module__]
    every = [*rows.right, *(rows.strange or ()), *(answer for answer, _ in rows.wrong)]
    together = {ranks: rows.right if number else every for number, ranks in enumerate(rows.ranks)}
    start, known = check.in_ranks, {}

    def in_ranks(work, given, ranks, timeout, **options):
        answer, *numbers = given if isinstance(given, tuple) else [given]
        answers = together.get(ranks, [])
        if answer not in answers:
            return start(work, given, ranks, timeout=300, **options)
        if ranks not in known:
            all_given = [(each, *numbers) for each in answers] if numbers else answers
            known[ranks] = start(_in_turn, (work, all_given), ranks, timeout=300)
        found = [of_rank[answers.index(answer)] for of_rank in known[ranks]]
        if isinstance(found[0], Exception):
            raise RankError(str(found[0]))
        return found

    monkeypatch.setattr(check, "in_ranks", in_ranks)


def _in_turn(rank, job):
    """What the work returned for each answer, or an error with its words."""
    work, every = job
    found = []
    for given in every:
        try:
            found.append(work(rank, given))
        except Exception as error:
            found.append(RuntimeError(f"{type(error).__name__}: {error}"))
    return found


def answers_test(table: Mapping[str, Answers]) -> Callable:
    """The test of a lesson's table, one case per exercise: `test_answers = answers_test({"run_on": Answers(...)})`."""

    @pytest.mark.parametrize("exercise", table)
    def test_answers(exercise, request, monkeypatch):
        rows = table[exercise]
        if hasattr(sys.modules[rows.check.__module__], "in_ranks"):
            one_launch(monkeypatch, rows)
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


@cache
def cells_of(lesson):
    """The code cells of a lesson, and all that they import and define, by name. Nothing else in them is executed."""
    path = Path(__file__).parents[1] / "notebooks" / f"{lesson}.ipynb"
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    names = {}
    for part in (part for source in sources for part in ast.parse(TransformerManager().transform_cell(source)).body):
        if isinstance(part, ast.Import | ast.ImportFrom | ast.FunctionDef | ast.ClassDef):
            # Without what the cells compute, or a framework that is not here. Lightning changes torch.compile.
            with suppress(ImportError, NameError), mock.patch("torch.compile", torch.compile):
                exec(compile(ast.Module([part], []), lesson, "exec"), names)
    return sources, names


def stored(lesson, *names, **known):
    """A function that gives the lesson's stored solution, with texts in it replaced: `make(old, new, old, new, ...)`.

    names: of the function or dict, or of two that an answer consists of. known: what its cells compute, and it needs.
    """
    sources, defined = cells_of(lesson)
    defined |= known
    one = re.compile(rf"^(def |class |)({'|'.join(names)})\b", re.MULTILINE)
    cells = [source for source in sources if source.startswith("# Solution") and one.search(source)]
    text = "\n\n\n".join(re.split(r"\n+(?:check\.|print\()", cell)[0] for cell in cells)

    def make(*changes):
        changed_text = text
        for old, new in zip(changes[::2], changes[1::2], strict=True):
            assert old in changed_text, f"The solution {names} of {lesson} has no {old!r} any more."
            changed_text = changed_text.replace(old, new)
        file = f"<cell {hash(changed_text)}>"
        lines = changed_text.splitlines(keepends=True)
        linecache.cache[file] = (len(changed_text), None, lines, file)  # so that errors know their line
        found = dict(defined)
        exec(compile(changed_text, file, "exec"), found)
        return found[names[0]] if len(names) == 1 else tuple(found[name] for name in names)

    return make


def measured_once(monkeypatch, check, name):
    """Let the check's function `name` measure for the first call with some arguments only: large jobs take seconds."""
    measure, known = getattr(check, name), {}

    def once(*args):
        if repr(args) not in known:
            known[repr(args)] = measure(*args)
        return known[repr(args)]

    monkeypatch.setattr(check, name, once)


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


def then(damage, answer):
    """`answer`, and then `damage` with the same arguments."""

    def function(*job):
        result = answer(*job)
        damage(*job)
        return result

    return function


def from_a_buffer(state, path):
    """A way to save a state. Only a file of another name that is renamed when it is complete is safe."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    path.write_bytes(buffer.getvalue())


def into_an_open_file(state, path):
    with open(path, "wb") as file:
        torch.save(obj=state, f=file)
        os.fsync(file.fileno())


def copied(old, new):
    """In the place of `os.replace`."""
    new.write_bytes(old.read_bytes())
    old.unlink()


class Unprintable(Exception):
    def __str__(self):
        raise RuntimeError("no text")


def changed(right, change):
    """A dict with another value than the right one; what is no dict stays."""
    return right | change if type(change) is dict and change else change


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
