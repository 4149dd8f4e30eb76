"""The monitor's benchmark runs and prints its table. Times are never asserted."""

from tests.benchmarks import monitor_cost
from tests.benchmarks.test_benchmarks import tiny


def test_the_table_has_a_row_per_job(monkeypatch):
    rows = {"tiny": (tiny, 1, False), "tiny, two GPUs": (tiny, 2, False), "tiny, shapes": (tiny, 1, True)}
    monkeypatch.setattr(monitor_cost, "ROWS", rows)
    table = monitor_cost.table(rounds=2, steps=2)
    assert [line.split(" | ")[0] for line in table[2:]] == ["| tiny", "| tiny, two GPUs", "| tiny, shapes"]
    assert all(line.count(" to ") == 2 for line in table[2:])
