"""Checks of lesson 07: right answers pass, mistakes are explained, hostile answers never raise."""

import re

import pytest

from helpers.exercises import lesson07 as check
from helpers.lesson07.scaling import amdahl
from helpers.lesson07.waiting import JOBS, record_job
from helpers.measure.timeline import time_use


def share(one, many, gpus):
    return (many / one - 1 / gpus) / (1 - 1 / gpus)


def judge(seconds, pays=1.5):
    gpus = 1
    while 2 * gpus in seconds and seconds[gpus] / seconds[2 * gpus] >= pays:
        gpus *= 2
    return gpus, share(seconds[1], seconds[gpus], gpus) if gpus > 1 else 0.0


def ddp_bytes(parameters, states, per_sample, batch, gpus):
    return 4 * parameters * (2 + states) + max(4 * parameters, batch / gpus * per_sample)


CHOSEN = {"A": ("DDP", 8), "B": ("more GPUs", 0), "C": ("DDP", 16)}
CAUSES = {"A": "host", "B": "slower rank", "C": "other stage", "D": "link"}
CHANGES = {"A": {"micro_batches": 4}, "B": {"shares": (4096, 4096)}, "C": {"micro_batches": 8}, "D": {"average_on": 0}}
ONE = [(check.judge, judge), (check.fits, ddp_bytes), (check.choices, CHOSEN)]
ONE += [(check.causes, CAUSES), (check.changes, CHANGES)]


@pytest.mark.parametrize(("test", "answer"), ONE)
def test_solutions_pass(test, answer, capsys):
    assert test(answer)
    assert capsys.readouterr().out.startswith("correct: ")


@pytest.mark.parametrize("test", [test for test, _ in ONE])
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
        (check.judge, lambda seconds: judge(seconds)[0], "two numbers"),
        (check.judge, lambda seconds: (min(seconds, key=seconds.get), 0), "from 8 to 16 GPUs the step gets 0.58 times"),
        (check.judge, lambda seconds: (2 * judge(seconds)[0], 0), "and 1.5 is asked for|one of 1, 2"),
        (check.judge, lambda seconds: (judge(seconds, 1.9)[0], 0), "it goes on paying: from 4 to 8"),
        (check.judge, lambda seconds: (judge(seconds)[0], amdahl(seconds)), "also where doubling does not pay"),
        (check.judge, lambda seconds: (8, seconds[8] / seconds[1]), "parallel work"),
        (check.judge, lambda seconds: (8, seconds[8] / seconds[1] - 1 / 8), "solve for it"),
        (check.judge, lambda seconds: (8, seconds[1] / seconds[8] / 8), "efficiency"),
        (check.judge, lambda seconds: (8, 0.3), "Amdahl's law would give"),
        (check.judge, lambda seconds: (8, float("nan")), "Amdahl's law would give"),
        (check.judge, lambda seconds: (8.0, 0.3), "one of 1, 2, 4, 8, 16, 32, 64 is asked for"),
        (check.judge, lambda seconds: (8, "a"), "a share from 0 to 1"),
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
    assert not test(answer)
    assert re.search(said, capsys.readouterr().out)


# ---- why does it wait? ----------------------------------------------------------------------------------------------


def refused(test, answer, capsys):
    assert not test(answer)
    return capsys.readouterr().out


def figures(job):
    """Of its GPU that waits longest."""
    every = [(gpu, time_use(each, gpu)) for each in record_job(job).values() for gpu in each.gpus]
    return max(every, key=lambda each: each[1].waiting)


@pytest.mark.parametrize("job", JOBS)
@pytest.mark.parametrize("cause", check.CAUSES)
def test_a_wrong_cause_is_refuted_by_the_timelines_own_figures(job, cause, capsys):
    if CAUSES[job] == cause:
        return
    said, (gpu, used) = refused(check.causes, CAUSES | {job: cause}, capsys), figures(job)
    part = {"host": used.nothing, "other stage": used.others, "slower rank": used.collective, "link": used.copying}
    if (job, cause) == ("B", "link"):
        part["link"] = used.collective
    assert f"{job}: {cause!r}" in said and f"cuda:{gpu} does not compute" in said
    assert f" {1e3 * part[cause]:.1f} of the {1e3 * used.waiting:.1f} modelled ms in which" in said
    assert CAUSES[job] not in said.replace("slow link", "")  # it does not tell


def test_no_link_where_the_other_rank_does_not_wait(capsys):
    said = refused(check.causes, CAUSES | {"B": "link"}, capsys)
    assert "and the other rank for 0.0 ms: a slow link would hold up both" in said


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"A": {"micro_batches": 12}}, "mostly while nothing runs"),
        ({"A": {"fused": True}}, "mostly while nothing runs"),
        ({"A": {"micro_batches": 64}}, "mostly while nothing runs"),
        ({"B": {"shares": (2048, 6144)}}, "cuda:0 waits for 33.*mostly while it is in a collective"),
        ({"B": {"shares": (1024, 1024)}}, "another step: 8,192 samples together"),
        ({"B": {"micro_batches": 2}}, "job B has no argument 'micro_batches', only shares, fused"),
        ({"C": {"micro_batches": 2}}, "mostly while another GPU works"),
        ({"C": {"micro_batches": 64}}, "are asked for; a step takes|busy is not fast"),
        ({"C": {"micro_batches": 0}}, "makes no step"),
        ({"C": {"micro_batches": 2.0}}, "makes no step"),
        ({"D": {"micro_batches": 16}}, "mostly while copies run"),
        ({"D": {"average_on": 1}}, "mostly while copies run"),
        ({"D": {"average_on": 0, "fused": True}}, "a dict with one argument"),
        ({"D": "average_on"}, "a dict with one argument"),
        ({"D": {"average_on": [0]}}, "makes no step"),
        ({"D": {"average_on": {}}}, "makes no step"),
        ({"D": {3: 4}}, "your code stopped|no argument 3|keywords must be strings"),
    ],
)  # fmt: skip
def test_a_change_that_does_not_help_is_measured(change, said, capsys):
    assert re.search(said, refused(check.changes, CHANGES | change, capsys))


def test_lists_will_do_for_shares(capsys):
    assert check.changes(CHANGES | {"B": {"shares": [4096, 4096]}})


@pytest.mark.parametrize(
    "answer", [{}, {"A": "host"}, CAUSES | {"E": "host"}, CAUSES | {"A": "fate"}, CAUSES | {"A": 3}]
)
def test_a_cause_for_each_job_is_asked_for(answer, capsys):
    assert re.search("for each of A, B, C, D|the words to choose from", refused(check.causes, answer, capsys))
