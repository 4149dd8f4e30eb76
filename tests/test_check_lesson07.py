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


def by_amdahl(seconds):
    gpus, _ = judge(seconds)
    return [float(gpus), amdahl({1: seconds[1], gpus: seconds[gpus]})]


def fullest_rank(parameters, states, per_sample, batch, gpus):
    """Right in another form: with the samples of the fullest rank, and what is there summed up apart."""
    gradients = buckets = 4 * parameters
    resting = 4 * parameters + 4 * parameters * states + buckets
    return max(resting + gradients, resting + -(-batch // gpus) * per_sample)


def test_solutions_pass():
    assert check.judge(judge) and check.fits(ddp_bytes) and check.choices(CHOSEN)
    assert check.causes(CAUSES) and check.changes(CHANGES)


def test_right_answers_of_another_form_pass():
    assert check.judge(by_amdahl) and check.fits(fullest_rank)
    assert check.choices({"A": ["ddp", 8], "B": ("More GPUs", 0.0), "C": (" DDP", 16)})
    assert check.causes({job: cause.title() for job, cause in CAUSES.items()})
    assert check.changes(CHANGES | {"B": {"shares": [4096, 4096]}, "C": {"micro_batches": 16}})


def test_no_answer_makes_a_check_raise():
    assert survives_strange_answers(check.judge, check.fits, check.choices, check.causes, check.changes)


@pytest.mark.parametrize(
    ("test", "answer", "said"),
    [
        (check.judge, lambda seconds: judge(seconds)[0], r"returned 8\. Return two numbers, \(gpus, share\)"),
        (check.judge, lambda seconds: (min(seconds, key=seconds.get), 0), "from 8 to 16 GPUs a step gets 0.58 times"),
        (check.judge, lambda seconds: (max(seconds), 0), "0.58 times as fast, and 1.5 times is the limit"),
        (check.judge, lambda seconds: (2 * judge(seconds)[0], 0), "1.5 times is the limit|should be one of 1, 2"),
        (check.judge, lambda seconds: (judge(seconds, 1.9)[0], 0), "from 4 to 8 GPUs a step gets 1.86 times as fast"),
        (check.judge, lambda seconds: (judge(seconds)[0], amdahl(seconds)), "doubling does not pay in all of it"),
        (check.judge, lambda seconds: (8, seconds[8] / seconds[1]), "A part of that time is parallel work"),
        (check.judge, lambda seconds: (8, seconds[8] / seconds[1] - 1 / 8), "The serial work is not divided"),
        (check.judge, lambda seconds: (8, seconds[1] / seconds[8] / 8), "is the efficiency"),
        (check.judge, lambda seconds: (8, 0.3), "the share of 0.3 is more than twice the right value"),
        (check.judge, lambda seconds: (7, 0.3), "should be one of 1, 2, 4, 8, 16, 32, 64"),
        (check.judge, lambda seconds: (8, "a"), "is text"),
        (check.fits, lambda p, k, s, b, n: p * (2 + k) + max(p, b / n * s), "a byte for each number"),
        (check.fits, lambda p, k, s, b, n: 8 * p + max(4 * p, b / n * s), "lacks the optimizer's states"),
        (check.fits, lambda p, k, s, b, n: ddp_bytes(p, k, s, b * n, n), "a GPU has only its share"),
        (check.fits, lambda p, k, s, b, n: ddp_bytes(p, k, s, b // n * n, n), "batch of 31 on 8 GPUs.*divide evenly"),
        (check.fits, lambda p, k, s, b, n: ddp_bytes(p, k - 1, s, b, n), "lacks DDP's buckets"),
        (check.fits, lambda p, k, s, b, n: 4 * p * (3 + k) + b / n * s, "Only the larger is there at the peak"),
        (check.choices, CHOSEN | {"A": ("DDP", 64)}, "DDP on 64 GPUs .*5 % efficiency"),
        (check.choices, CHOSEN | {"A": ("sharding", 64)}, "sharding on 64 GPUs .*4 % efficiency"),
        (check.choices, CHOSEN | {"B": ("sharding", 4)}, "sharding on 4 GPUs needs at least 44.1 GiB on each"),
        (check.choices, CHOSEN | {"B": ("pipeline", 4)}, "pipeline on 4 GPUs needs at least 96.9 GiB on each"),
        (
            check.choices,
            CHOSEN | {"B": ("DDP", 4)},
            "needs at least 143 GiB on each, and a GPU has 39.1",
        ),
        (check.choices, CHOSEN | {"C": ("DDP", 8)}, "96 % efficiency.*the most GPUs that keep an efficiency"),
        (check.choices, CHOSEN | {"C": ("pipeline", 16)}, "17 % efficiency.*takes DDP where a copy fits"),
        (check.choices, CHOSEN | {"C": ("more GPUs", 0)}, "DDP on 16 GPUs needs at least 407 MiB on each"),
        (check.choices, CHOSEN | {"C": "DDP"}, "Give one of one GPU, DataParallel, .* and a number of GPUs"),
        (check.choices, CHOSEN | {"C": ("FSDP", 16)}, "Give one of one GPU, DataParallel"),
    ],
)
def test_mistakes_are_explained(test, answer, said):
    verdict = test(answer)
    assert told(verdict) and re.search(said, verdict.text, re.IGNORECASE), verdict.text


def test_a_refused_choice_does_not_name_the_right_one():
    assert "DDP on 8" not in check.choices(CHOSEN | {"A": ("DDP", 64)}).text
    assert "Neither" not in check.choices(CHOSEN | {"B": ("sharding", 4)}).text


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
        words = f"does not compute for {1e3 * used.waiting:.1f} modelled ms, and "
        assert said.startswith(f"Not yet: {job}: {cause!r} is not the main cause. cuda:{gpu} {words}")
        assert f"in only {1e3 * part[cause]:.1f} of them." in said
        assert ("A slow link would keep both ranks" in said) == ((job, cause) == ("B", "link"))


def test_a_change_that_does_not_help_is_measured():
    explains(
        lambda change: check.changes(CHANGES | change),
        ({"A": {"micro_batches": 12}}, "no GPU of its process does anything most of the time"),
        ({"A": {"fused": True}}, "no GPU of its process does anything most of the time"),
        ({"B": {"shares": (2048, 6144)}}, "it is in a collective most of the time"),
        ({"B": {"shares": (1024, 1024)}}, "Job B cannot run with shares=(1024, 1024)"),
        ({"B": {"micro_batches": 2}}, "Give a dict with one of these arguments: shares, fused"),
        ({"C": {"micro_batches": 2}}, "another GPU of its process works most of the time"),
        ({"C": {"micro_batches": 64}}, "A step takes 144.9 modelled ms, and took 71.2 before"),
        ({"C": {"micro_batches": 2.0}}, "Job C cannot run with micro_batches=2.0"),
        ({"D": {"micro_batches": 16}}, "a copy from or to it runs most of the time"),
        (
            {"D": {"average_on": 0, "fused": True}},
            "Give a dict with one of these arguments: micro_batches, average_on, fused",
        ),
        ({"D": "average_on"}, "Give a dict with one of these arguments: micro_batches, average_on, fused"),
        ({"D": {3: 4}}, "Give a dict with one of these arguments"),
    )


def test_a_cause_for_each_job_is_asked_for():
    for answer in ({"A": "host"}, CAUSES | {"E": "host"}):
        assert told(check.causes(answer), "a cause for each of A, B, C, D")
    for answer in ("fate", 3):
        assert told(check.causes(CAUSES | {"A": answer}), "Choose one of slower rank, link, other stage, host")
