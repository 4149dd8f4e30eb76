"""The launcher's benchmark runs and prints its table. Times are never asserted."""

from tests.benchmarks import launch_overhead


def test_the_table_has_a_row_per_number_of_ranks():
    table = launch_overhead.table([1, 2], rounds=1)
    assert [line.split(" | ")[0] for line in table[2:]] == ["| 1", "| 2"]
    assert all(line.count(" to ") == 2 and line.count(" ms") == 3 for line in table[2:])
