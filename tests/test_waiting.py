"""The four steps of lesson 07's exercise: each waits for one thing, and one argument changes that."""

import pytest
import torch

from helpers.lesson07.waiting import JOBS, record_job
from helpers.measure.timeline import time_use

WAITS = {"A": "nothing", "B": "collective", "C": "others", "D": "copying"}
CURES = {"A": {"micro_batches": 4}, "B": {"shares": (4096, 4096)}, "C": {"micro_batches": 8}, "D": {"average_on": 0}}


def longest(timelines):
    """The time of the GPU that waits longest."""
    return max((time_use(each, gpu) for each in timelines.values() for gpu in each.gpus), key=lambda used: used.waiting)


@pytest.mark.parametrize("job", JOBS)
def test_one_cause_is_most_of_the_wait(job):
    used = longest(record_job(job))
    assert getattr(used, WAITS[job]) > 0.8 * used.waiting > 0.3 * sum(used)


@pytest.mark.parametrize("job", JOBS)
def test_one_argument_halves_the_wait_and_the_other_does_not(job):
    before, after, fused = (longest(record_job(job, **change)) for change in ({}, CURES[job], {"fused": True}))
    assert after.waiting < before.waiting / 2 and sum(after) < 0.75 * sum(before)
    assert fused.waiting > 0.9 * before.waiting


def test_ranks_have_a_timeline_each_with_a_gpu_of_its_own():
    timelines = record_job("B")
    assert {name: each.gpus for name, each in timelines.items()} == {"B, rank 0": [0], "B, rank 1": [1]}
    assert all(each.modelled for each in timelines.values())


@pytest.mark.parametrize(
    ("job", "change", "said"),
    [
        ("A", {"shares": (1, 1)}, "Job A has no argument 'shares'. It has micro_batches, fused"),
        ("A", {"micro_batches": 0}, "cannot run with micro_batches=0. micro_batches=16 would be possible"),
        ("A", {"micro_batches": True}, "Job A cannot run with"),
        ("A", {"fused": 1}, "Job A cannot run with"),
        ("B", {"shares": (8192, 0)}, "Job B cannot run with"),
        ("B", {"shares": (4096, 2048)}, r"cannot run with shares=\(4096, 2048\)"),
        ("D", {"average_on": 2}, "cannot run with average_on=2"),
    ],
)
def test_what_is_no_step_is_refused(job, change, said):
    with pytest.raises(ValueError, match=said):
        record_job(job, **change)


def test_a_job_is_recorded_once_and_leaves_no_gpus_on():
    before = torch.cuda.device_count()
    assert record_job("C")["C"] is record_job("C", micro_batches=1)["C"]
    assert torch.cuda.device_count() == before
