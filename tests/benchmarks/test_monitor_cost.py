"""The monitor's benchmark runs and prints its table. Times are never asserted."""

from benchmarks.jobs import tiny

from tests.benchmarks import monitor_cost


def test_the_table_has_a_row_per_job(monkeypatch):
    rows = {"tiny": (tiny, 1, False), "tiny, two GPUs": (tiny, 2, False), "tiny, shapes": (tiny, 1, True)}
    monkeypatch.setattr(monitor_cost, "ROWS", rows)
    table = list(monitor_cost.table(rounds=2, seconds=0.01))
    assert [line.split(" | ")[0] for line in table[2:]] == ["| tiny", "| tiny, two GPUs", "| tiny, shapes"]
    assert all(line.count(" to ") == 2 for line in table[2:])


def test_the_median_is_shown_with_the_quartiles():
    assert monitor_cost.show([1.0, 9.0, 1.1, 1.2, 1.3]) == "1.20 (1.10 to 1.30)"


def test_the_worst_case_trains():
    step, net, _ = monitor_cost.tiny_mlp("cpu")
    before = [parameter.detach().clone() for parameter in net.parameters()]
    assert monitor_cost.steps_for(step, 0.0) == 2
    assert all(not now.equal(was) for now, was in zip(net.parameters(), before, strict=True))
