"""The checks of the appendix: solutions pass, typical mistakes are explained, nothing raises."""

import pytest

from notebooks.checks import lessonA as check
from tests.check_answers import explains, survives_strange_answers, told


def test_no_answer_makes_a_check_raise():
    assert survives_strange_answers(check.could_be, check.outside)
    assert survives_strange_answers(lambda answer: check.post(answer, answer))


def within(limit, names=list):
    def could_be(before, after, added, memories):
        return names(name for name in memories if abs(100 * added / memories[name] - (after - before)) < limit)

    return could_be


def test_could_be():
    assert check.could_be(within(1)) and check.could_be(within(1, set)) and check.could_be(within(1, tuple))
    assert check.could_be(
        lambda b, a, added, m: [n for n in m if added / (a - b + 1) * 100 < m[n] < added / (a - b - 1) * 100]
    )
    explains(
        check.could_be,
        (within(0.5), "rounded to whole percent"),
        (within(0.9), "rounded to whole percent"),
        (within(1.1), "cannot come from this GPU"),
        (within(1.5), "cannot come from this GPU"),
        (within(2), "cannot come from this GPU"),
        (lambda *_: ["T4"], "is not among the names"),
        (lambda *_: "T4", "Return a list of names"),
        (lambda *_: ["A100"], "is not among the names"),
        (lambda *_: [], "can come from this GPU"),
        (lambda b, a, added, m: list(m), "On K80 with 11,441 MiB, these 3,815 MiB are 33.34 points"),
        (lambda b, a, added, m: [min(m, key=lambda n: abs(100 * added / m[n] - (a - b)))], "can come from this GPU"),
        (lambda b, a, added, m: [n for n in m if round(100 * added / m[n]) == a - b], "come from this GPU"),
        (lambda b, a, added, m: [n for n in m if abs(100 * added / m[n] - a) < 1], "from this GPU"),
        (lambda b, a, added, m: [n for n in m if abs(added / m[n] - (a - b)) < 1], "can come from this GPU"),
        (lambda b, a, added, m: [n for n in list(m) if abs(100 * added / m.pop(n) - (a - b)) < 1], "changes the dict"),
        (lambda b, a, added, m: m, "cannot come from this GPU"),
    )  # fmt: skip


def explained(formula):
    def outside(before, after, ratio):
        found = formula(before, after, ratio) if ratio < 1 else -1
        if found < 0:
            raise ValueError
        return found

    return outside


def right(before, after, ratio):
    return (ratio * before - after) / (1 - ratio)


def test_outside():
    assert check.outside(explained(right))
    assert check.outside(explained(lambda b, a, r: (b - a) / (1 - r) - b))
    assert check.outside(explained(lambda b, a, r: (a - r * b) / (r - 1)))
    explains(
        check.outside,
        (right, "Raise a ValueError"),
        (lambda b, a, r: right(b, a, r) if r != 1 else 0, "Raise a ValueError here"),
        (lambda b, a, r: max(0, right(b, a, r)), "Raise a ValueError here"),
        (lambda b, a, r: explained(right)(b, a, r) or 0.1, "Our own times have this ratio"),
        (lambda b, a, r: right(b, a, r) if a / b <= r < 1 else float("nan"), "Raise a ValueError here"),
        (explained(lambda b, a, r: 2 * b - 3 * a), "For"),
        (explained(lambda b, a, r: 1e3 * right(b, a, r)), "milliseconds"),
        (explained(lambda b, a, r: b - a), "what the change saves"),
        (explained(lambda b, a, r: r * b - a), "still to be divided"),
        (explained(lambda b, a, r: (b - a) / (1 - r)), "the whole step before"),
        (explained(lambda b, a, r: right(b, a, 1 - r)), "ratio for what is saved"),
        (explained(lambda b, a, r: 0.629), "For"),
        (lambda b, a, r: "0.6", "is text"),
        (explained(lambda b, a, r: right(b, a, r) or -1), "raised a ValueError"),
        (lambda b, a, r: right(b, a, r) if right(b, a, r) >= 0 else None, "returned None"),
        (lambda b, a, r: right(b, a, r) if r >= a / b else int("no number"), "divides by zero"),
    )  # fmt: skip


def test_the_unit_stands_once_before_what_explains_a_mistake():
    for wrong in (lambda b, a, r: 1e3 * right(b, a, r), lambda b, a, r: b - a, lambda b, a, r: right(b, a, 1 - r)):
        assert " s s " not in check.outside(explained(wrong)).text


VERDICTS = {"A": "holds", "B": "does not hold", "C": "holds", "D": "open"}


@pytest.fixture(scope="module")
def figures():
    return {"A": 9.2, "B": check._four()[1] / 2**30, "C": check._largest()}


def test_post(figures):
    assert check.post(VERDICTS, figures) and check.post(VERDICTS, figures | {"A": 9.207})
    for changed, words in (
        ({"A": 9.9}, "would be right in GB"), ({"A": 2.3}, "the weights alone"), ({"A": 18.4}, "counts float32"),
        ({"A": 6.9}, "leaves out"), ({"A": 13.8}, "states in float32"), ({"A": "9.2"}, "is text"),
        ({"B": 9.2}, "B: 9.2"), ({"B": check._four()[0] / 2**30}, "the peak of tensors"),
        ({"B": 1024 * figures["B"]}, "would be right in MiB"), ({"C": 6}, "C: 6 is not"), ({"C": 8}, "C: 8 is not"),
        ({"C": 7.5}, "C: 7.5 is not"),
    ):  # fmt: skip
        told(check.post(VERDICTS, figures | changed), words)
    for changed, words in (
        ({"A": "open"}, "A: 'open' is wrong"), ({"B": "holds"}, "You found 16.0 GiB"), ({"C": "open"}, "You found 7"),
        ({"D": "holds"}, "Which run of yours"), ({"D": "does not hold"}, "Which run of yours"),
        ({"D": True}, "no verdict"),
        ({"D": "yes"}, "'yes' is no verdict"), ({"E": "open"}, "a verdict for each of A, B, C, D"),
    ):  # fmt: skip
        told(check.post(VERDICTS | changed, figures), words)
    told(check.post(list(VERDICTS.values()), figures), "Give a dict")
    told(check.post(VERDICTS, {"A": 9.2}), "Give a dict")
