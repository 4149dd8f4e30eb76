"""The explorer answers far sooner than a run, and its benchmark prints its tables."""

import statistics

import torch

from helpers.show.widgets.bert_memory import Job
from tests.benchmarks import explorer_time


def test_an_answer_takes_a_small_part_of_a_shapes_only_run():
    torch.set_num_threads(1)
    _, ratios = explorer_time.answer_times(Job(), rounds=3)
    assert statistics.median(ratios) < 0.3


def test_the_table_has_a_row_per_job(monkeypatch):
    job = Job(gpus=2, batch=8, length=32, vocabulary=2000, hidden=128, layers=1)
    monkeypatch.setattr(explorer_time, "JOBS", {"one": job, "other": job})
    table = explorer_time.table(rounds=2)
    assert [line.split(" | ")[0] for line in table[2:]] == ["| one", "| other"]
    assert all(line.count(" to ") == 2 for line in table[2:])


def test_the_live_panel_looks_for_a_small_part_of_the_time():
    assert explorer_time.look_share(looks=5) < 0.2
