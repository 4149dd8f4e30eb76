"""The benchmarks run and print their tables. Times are never asserted: CI's machines are busy."""

from benchmarks import operator_cost, step_cost
from benchmarks.jobs import tiny
from virtual_gpus import virtual_gpus


def test_the_tables_have_a_row_per_job_and_per_count(monkeypatch):
    monkeypatch.setattr(step_cost, "JOBS", {"tiny": tiny})
    monkeypatch.setattr(step_cost, "resnet18_b64", tiny)
    monkeypatch.setattr(step_cost, "LEAST", 0)
    steps = step_cost.table_of_steps(rounds=2, steps=2)
    gpus = step_cost.table_of_gpus(rounds=1, steps=1, counts=(2, 3))
    assert len(steps) == 3 and steps[-1].startswith("| tiny | ") and " to " in steps[-1]
    assert [line.split(",")[0] for line in gpus[3:]] == ["| 2 GPUs", "| 3 GPUs"]


def test_the_table_of_operators_has_a_figure_for_each_way_to_watch():
    best = operator_cost.measure(rounds=1, calls=2)
    assert all(figure > 0 for column in best.values() for figure in column.values())
    lines = operator_cost.table(best)
    assert [line.count("|") for line in lines] == [2 + len(operator_cost.COLUMNS)] * len(lines)
    assert len(lines) == 2 + len(operator_cost.operators("cpu"))


def test_every_job_trains_on_a_virtual_gpu_as_on_the_cpu():
    for job in step_cost.JOBS.values():
        plain = job("meta")[1]
        with virtual_gpus(2, shapes_only=True):
            step, net, _ = job("cuda", 2)
            step()
            assert all(p.grad is not None and p.is_cuda for p in net.parameters())
            assert sum(p.numel() for p in net.parameters()) == sum(p.numel() for p in plain.parameters())
