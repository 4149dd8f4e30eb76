"""The published rows: each is whole, one is computed, and bad ones are refused by a clear error."""

import copy
import json

import pytest
from benchmarks import published
from benchmarks.published_jobs import seconds_of

CONTENT = json.loads(published.ROWS.read_text(encoding="utf-8"))


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


BAD = {"needs 'measured'": {"measured": "12"}, "needs a measured figure above 0": {"measured": 0},
       "has the job 'cobol'": {"job": "cobol"}, "no data sheet": {"gpu": "H99"}}  # fmt: skip


@pytest.mark.parametrize("words", BAD)
def test_bad_rows_are_refused(words):
    content = copy.deepcopy(CONTENT)
    content["rows"][0].update(BAD[words])
    with pytest.raises(ValueError, match=words):
        published.checked(content)
