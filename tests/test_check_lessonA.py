"""The checks of the appendix: solutions pass, typical mistakes are explained, nothing raises."""

from functools import cache

import pytest

from notebooks.checks import lessonA as check
from tests.check_answers import Answers, answers_test, stored


def could_be(limit, names=list):
    return named(lambda b, a, added, m, name: abs(100 * added / m[name] - (a - b)) < limit, names)


def named(possible, names=list):
    return lambda b, a, added, m: names(name for name in m if possible(b, a, added, m, name))


COULD_BE = [
    (could_be(0.5), "rounded to whole percent"),
    (could_be(1.1), "cannot come from this GPU"),
    (lambda *_: "T4", "Return a list of names"),
    (lambda *_: [], "can come from this GPU"),
    (lambda b, a, added, m: m, "On K80 with 11,441 MiB, these 3,815 MiB are 33.34 points"),
    (lambda b, a, added, m: [n for n in list(m) if abs(100 * added / m.pop(n) - (a - b)) < 1], "changes the dict"),
]


outside = stored("A_articles_checked", "outside_solution")
RIGHT, RETURN = "(ratio * before - after) / (1 - ratio)", "return seconds"


def explained(formula):
    return outside(RIGHT, formula)


OUTSIDE = [
    (outside("raise ValueError", "return 0 and str"), "Raise a ValueError here"),
    (outside(RETURN, f"{RETURN} or 0.1"), "Our own times have this ratio"),
    (outside(RETURN, "return 1e3 * seconds"), " s is in milliseconds"),
    (explained("before - after"), "what the change saves"),
    (explained("ratio * before - after"), "still to be divided"),
    (explained("(before - after) / (1 - ratio)"), "the whole step before"),
    (explained("((1 - ratio) * before - after) / ratio"), "ratio for what is saved"),
    (outside("seconds < 0", "seconds <= 0"), "raised a ValueError"),
    (outside("raise ValueError", "return None and str"), "returned None"),
    (outside("ratio >= 1", "ratio > 1"), "divides by zero"),
]


@pytest.fixture
def small_job(monkeypatch):
    """A Llama of one layer: the figures are not those of the lesson, which runs with all of them."""
    monkeypatch.setattr(check, "LLAMA_1B", check.LLAMA_1B | {"layers": 1})
    for name in ("_four", "_largest"):
        monkeypatch.setattr(check, name, cache(getattr(check, name).__wrapped__))


VERDICTS = {"A": "holds", "B": "does not hold", "C": "holds", "D": "open"}


def post(changed):
    """The post with another verdict or figure than the right one; a figure of B is a factor of the right one."""
    (name, value), (tensors, shown) = changed, check._four()
    value = tensors / shown if value == "the tensors" else value
    figures = {"A": 9.2, "B": 1.0, "C": check._largest()} | ({name: value} if isinstance(value, float) else {})
    figures["B"] *= shown / 2**30
    return check.post(VERDICTS | ({} if isinstance(value, float) else {name: value}), figures)


POST = [
    (("A", 9.9), "would be right in GB"),
    (("A", 2.3), "the weights alone"),
    (("A", 18.4), "counts float32"),
    (("A", 6.9), "leaves out"),
    (("A", 13.8), "states in float32"),
    (("B", 1.1), "B: "),
    (("B", "the tensors"), "the peak of tensors"),  # which nvidia-smi does not show
    (("C", 6.0), "C: 6 is not"),
    (("A", "open"), "A: 'open' is wrong"),
    (("B", "holds"), ("You found", "GiB")),
    (("C", "open"), "You found "),
    (("D", "holds"), "Which run of yours"),
    (("D", "yes"), "'yes' is no verdict"),
    (("E", "open"), "a verdict for each of A, B, C, D"),
    (("D", 1.0), "a number for each of A, B, C"),
]
ANSWERS = {
    "could_be": Answers(
        check.could_be,
        [
            could_be(1),
            could_be(1, set),
            could_be(1, tuple),
            named(lambda b, a, added, m, name: added / (a - b + 1) * 100 < m[name] < added / (a - b - 1) * 100),
        ],
        COULD_BE,
    ),
    "outside": Answers(check.outside, [explained("(before - after) / (1 - ratio) - before")], OUTSIDE),
    "post": Answers(post, [("A", 9.2), ("A", 9.207), ("D", "open")], POST, fixtures="small_job", strange=[]),
    "strange posts": Answers(lambda answer: check.post(answer, answer)),
}
test_answers = answers_test(ANSWERS)
