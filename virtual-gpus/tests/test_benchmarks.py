"""The published rows: each is whole, one is computed, and bad ones are refused by a clear error. The other benchmarks
run and print their tables. Times are never asserted: CI's machines are busy."""

import copy
import json

import pytest
from benchmarks import operator_cost, published, step_cost
from benchmarks.jobs import tiny
from benchmarks.published_jobs import seconds_of
from virtual_gpus import virtual_gpus

CONTENT = json.loads(published.ROWS.read_text(encoding="utf-8"))
BAD = {"needs 'measured'": {"measured": "12"}, "needs a measured figure above 0": {"measured": 0},
       "has the job 'cobol'": {"job": "cobol"}, "no data sheet": {"gpu": "H99"}}  # fmt: skip


def test_every_row_is_whole_and_half_of_the_new_ones_are_held_apart():
    rows = published.checked(CONTENT)
    halves = published.halves(rows)
    new = [half for row, half in zip(rows, halves, strict=True) if not (row.get("seen") or row.get("fitted"))]
    assert len(new) >= 75 and new.count("held") >= 35
    assert all(half == "fit" for row, half in zip(rows, halves, strict=True) if row.get("seen") or row.get("fitted"))
    assert all(source["address"].startswith("https://") and source["licence"] for source in CONTENT["sources"].values())


def test_a_row_is_computed_and_drawn(tmp_path):
    row = next(row for row in CONTENT["rows"] if row["name"] == "ELECTRA base generator, 2 x 32")
    seconds, busy = seconds_of(row)
    assert 0.005 < seconds < 0.1 and 0 < busy < 0.6  # the host's 1,300 operators, measured at 24 ms
    compared = published.Compared(row, "held", published.speed(row, seconds), busy)
    assert compared.error == pytest.approx(row["measured"] / seconds - 1)
    assert published.table([compared])[-1].count("|") == 9
    pytest.importorskip("matplotlib")
    from benchmarks.published_plot import drawn

    drawn([compared]).savefig(tmp_path / "rows.png")


@pytest.mark.parametrize("words", BAD)
def test_bad_rows_are_refused(words):
    content = copy.deepcopy(CONTENT)
    content["rows"][0].update(BAD[words])
    with pytest.raises(ValueError, match=words):
        published.checked(content)


def test_the_tables_have_a_row_per_job_count_and_operator(monkeypatch):
    monkeypatch.setattr(step_cost, "JOBS", {"tiny": tiny})
    monkeypatch.setattr(step_cost, "resnet18_b64", tiny)
    monkeypatch.setattr(step_cost, "LEAST", 0)
    steps = step_cost.table_of_steps(rounds=2, steps=2)
    gpus = step_cost.table_of_gpus(rounds=1, steps=1, counts=(2, 3))
    races = step_cost.table_of_races(rounds=1, steps=1)
    assert len(steps) == 3 and steps[-1].startswith("| tiny | ") and " to " in steps[-1]
    assert len(races) == 3
    assert [line.split(",")[0] for line in gpus[3:]] == ["| 2 GPUs", "| 3 GPUs"]
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
