"""Checks of lesson 07: right answers pass, mistakes are explained, hostile answers never raise."""

import re

import pytest

from helpers.exercises import lesson07 as check
from helpers.lesson07 import amdahl, record_job
from helpers.measure.timeline import time_use
from tests.check_answers import explains, survives_strange_answers, told


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


def test_solutions_pass():
    assert check.judge(judge) and check.fits(ddp_bytes) and check.choices(CHOSEN)
    assert check.choices(CHOSEN | {"A": ["ddp", 8]})
    assert check.causes(CAUSES) and check.changes(CHANGES)
    assert check.changes(CHANGES | {"B": {"shares": [4096, 4096]}})


def test_no_answer_makes_a_check_raise():
    assert survives_strange_answers(check.judge, check.fits, check.choices, check.causes, check.changes)


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
        (check.judge, lambda seconds: (8, 0.3), "too large"),
        (check.judge, lambda seconds: (8.0, 0.3), "one of 1, 2, 4, 8, 16, 32, 64 is asked for"),
        (check.judge, lambda seconds: (8, "a"), "is text"),
        (check.fits, lambda p, k, s, b, n: p * (2 + k) + max(p, b / n * s), "four bytes"),
        (check.fits, lambda p, k, s, b, n: 8 * p + max(4 * p, b / n * s), "states are missing"),
        (check.fits, lambda p, k, s, b, n: ddp_bytes(p, k, s, b * n, n), "share of the batch"),
        (check.fits, lambda p, k, s, b, n: ddp_bytes(p, k - 1, s, b, n), "buckets"),
        (check.choices, CHOSEN | {"A": ("DDP", 64)}, "because exchanging"),
        (check.choices, CHOSEN | {"B": ("sharding", 4)}, "no copy fits"),
        (check.choices, CHOSEN | {"C": ("DDP", 8)}, "it fits"),
        (check.choices, CHOSEN | {"C": "DDP"}, "a method and a number of GPUs"),
        (check.fits, lambda p, k, s, b, n: 4 * p * (3 + k) + b / n * s, "only the larger"),
    ],
)
def test_mistakes_are_explained(test, answer, said):
    assert told(test(answer)) and re.search(said, test(answer).text)


# ---- why does it wait? ----------------------------------------------------------------------------------------------


def figures(job):
    """Of its GPU that waits longest."""
    every = [(gpu, time_use(each, gpu)) for each in record_job(job).values() for gpu in each.gpus]
    return max(every, key=lambda each: each[1].waiting)


@pytest.mark.parametrize("job", CAUSES)
def test_a_wrong_cause_is_refuted_by_the_timelines_own_figures(job):
    gpu, used = figures(job)
    part = {"host": used.nothing, "other stage": used.others, "slower rank": used.collective, "link": used.copying}
    for cause in set(part) - {CAUSES[job]}:
        said = check.causes(CAUSES | {job: cause}).text
        words = f" {1e3 * part[cause]:.1f} of the {1e3 * used.waiting:.1f} modelled ms in which cuda:{gpu} does not"
        assert said.startswith(f"Not yet: {job}: {cause!r}") and words in said
        assert ("other rank enters late" in said) == ((job, cause) == ("B", "link"))


def test_a_change_that_does_not_help_is_measured():
    explains(
        lambda change: check.changes(CHANGES | change),
        ({"A": {"micro_batches": 12}}, "mostly while no GPU of its process does anything"),
        ({"A": {"fused": True}}, "mostly while no GPU of its process does anything"),
        ({"B": {"shares": (2048, 6144)}}, "mostly while it is in a collective"),
        ({"B": {"shares": (1024, 1024)}}, "makes another step or none"),
        ({"B": {"micro_batches": 2}}, "Job B has no argument 'micro_batches', only shares, fused"),
        ({"C": {"micro_batches": 2}}, "mostly while another GPU of its process works"),
        ({"C": {"micro_batches": 64}}, "a step takes"),
        ({"C": {"micro_batches": 2.0}}, "makes another step or none"),
        ({"D": {"micro_batches": 16}}, "mostly while a copy from or to it runs"),
        ({"D": {"average_on": 0, "fused": True}}, "a dict with one argument"),
        ({"D": "average_on"}, "a dict with one argument"),
        ({"D": {3: 4}}, "keywords must be strings"),
    )


def test_a_cause_for_each_job_is_asked_for():
    for answer in ({"A": "host"}, CAUSES | {"E": "host"}):
        assert told(check.causes(answer), "a cause for each of A, B, C, D")
    for answer in ("fate", 3):
        assert told(check.causes(CAUSES | {"A": answer}), "the words to choose from")
