"""Checks of lesson 07: right answers pass, mistakes are explained, hostile answers never raise."""

import pytest

from helpers.check import lesson07 as check


def share(one, many, gpus):
    return (many / one - 1 / gpus) / (1 - 1 / gpus)


def cheapest(hours, deadline):
    in_time = [gpus for gpus, each in hours.items() if each <= deadline]
    return min(in_time, key=lambda gpus: gpus * hours[gpus], default=0)


def ddp_bytes(parameters, states, per_sample, batch, gpus):
    return 4 * parameters * (2 + states) + max(4 * parameters, batch / gpus * per_sample)


CHOSEN = {"A": ("DDP", 8), "B": ("more GPUs", 0), "C": ("DDP", 16)}
CHECKS = {check.serial_share: share, check.cheapest: cheapest, check.fits: ddp_bytes, check.choices: CHOSEN}


@pytest.mark.parametrize(("test", "answer"), CHECKS.items())
def test_solutions_pass(test, answer, capsys):
    assert test(answer)
    assert capsys.readouterr().out.startswith("correct: ")


@pytest.mark.parametrize("test", CHECKS)
@pytest.mark.parametrize(
    "answer",
    [..., None, 3, lambda *a: ..., lambda *a: None, lambda *a: "x", lambda *a: 1 / 0, lambda: 0,
     lambda *a: float("nan"), lambda *a: -1, lambda *a: exit(), lambda *a: [], lambda *a: float("inf")],
)  # fmt: skip
def test_anything_else_is_not_yet(test, answer, capsys):
    assert not test(answer)
    assert capsys.readouterr().out.startswith("not yet: ")


W = 4


@pytest.mark.parametrize(
    ("test", "answer", "said"),
    [
        (check.serial_share, lambda one, many, n: many / one, "parallel work"),
        (check.serial_share, lambda one, many, n: many / one - 1 / n, "solve for it"),
        (check.serial_share, lambda one, many, n: one / many / n, "efficiency"),
        (check.serial_share, lambda one, many, n: 0.3, "Amdahl's law would give"),
        (check.cheapest, lambda hours, deadline: 1, "not done in time|0 is asked for"),
        (check.cheapest, lambda hours, deadline: min(hours, key=hours.get), "0 is asked for"),
        (
            check.cheapest,
            lambda hours, deadline: max((n for n in hours if hours[n] <= deadline), default=0),
            "GPU-hours",
        ),
        (check.fits, lambda p, k, s, b, n: ddp_bytes(p / 4, k, s / 4, b, n), "four bytes"),
        (check.fits, lambda p, k, s, b, n: ddp_bytes(p, k, s, b * n, n), "share of the batch"),
        (check.fits, lambda p, k, s, b, n: ddp_bytes(p, k - 1, s, b, n), "buckets|2 % of"),
        (check.choices, CHOSEN | {"A": ("DDP", 64)}, "efficiency of 4 %|takes longer than the samples"),
        (check.choices, CHOSEN | {"B": ("sharding", 4)}, "no copy fits"),
        (check.choices, CHOSEN | {"C": ("DDP", 8)}, "it fits"),
        (check.choices, {"A": ...}, "still holds"),
        (check.choices, CHOSEN | {"C": "DDP"}, "a method and a number of GPUs"),
        (check.fits, lambda p, k, s, b, n: W * p * (3 + k) + b / n * s, "only the larger"),
    ],
)
def test_mistakes_are_explained(test, answer, said, capsys):
    import re

    assert not test(answer)
    assert re.search(said, capsys.readouterr().out)
