"""Every fault is survived, or told with what to do; `python -m tests.benchmarks.faults` prints the list."""

import pytest

from tests.benchmarks import faults as report
from tests.faults import FAULTS


@pytest.mark.parametrize("name", FAULTS)
def test_fault(name, tmp_path):
    assert FAULTS[name](tmp_path) in ("survived", "told")


def test_the_report_counts(monkeypatch):
    def lose(folder):
        raise AssertionError("it hangs\nfor ever")

    faults = {"a": lambda folder: "survived", "b": lambda folder: "told", "c": lose}
    monkeypatch.setattr(report, "FAULTS", faults)
    assert report.table() == [
        "| fault | outcome |",
        "|---|---|",
        "| a | survived |",
        "| b | told |",
        "| c | lost: it hangs |",
        "",
        "3 faults tried: 1 survived, 1 told with what to do, 1 lost",
    ]
