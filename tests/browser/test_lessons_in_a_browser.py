"""A lesson as a learner runs it: JupyterLab in a real browser, Run All Cells, and what then stands on the page."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest

pytest.importorskip("playwright", reason="needs Python's playwright, which the pinned environment has")
from tests.browser.lab import ROOT, chromium, jupyterlab

pytestmark = pytest.mark.skipif(chromium() is None, reason="needs Chromium (Debian: apt install chromium)")
SCREENSHOTS = Path(__file__).parent / "screenshots"  # not in git


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    with jupyterlab(tmp_path_factory.mktemp("jupyterlab")) as lab:
        yield lab


def cells(lesson: str) -> list[dict]:
    return json.loads((ROOT / "notebooks" / f"{lesson}.ipynb").read_text(encoding="utf-8"))["cells"]


def expected_errors(lesson: str) -> list[str]:
    """How the errors that are part of the lesson end, the first line of it."""
    outputs = [output for cell in cells(lesson) for output in cell.get("outputs", [])]
    errors = [output for output in outputs if output["output_type"] == "error"]
    return [f"{error['ename']}: {error['evalue']}".split("\n")[0] for error in errors]


def printed(lesson: str) -> list[str]:
    """Lines with memory figures that are stored in the notebook."""
    streams = [o for cell in cells(lesson) for o in cell.get("outputs", []) if o["output_type"] == "stream"]
    lines = "".join("".join(stream["text"]) for stream in streams).splitlines()
    return [line for line in lines if re.search(r"\d [MG]iB", line)]


@pytest.mark.parametrize(
    ("lesson", "heading"), [("00_start_here", "All four, in one line"), ("01_device_placement", "Take-aways")]
)
def test_all_cells_of_a_lesson_run(lab, lesson, heading):
    """No error but those that belong to the lesson, and the stored figures appear again. A screenshot is kept."""
    lab.open(lesson)
    lab.run_all(timeout=480)
    lab.show(heading)
    SCREENSHOTS.mkdir(exist_ok=True)
    lab.screenshot(SCREENSHOTS / f"{lesson}.png")
    assert (SCREENSHOTS / f"{lesson}.png").stat().st_size > 50_000
    figures = printed(lesson)
    assert len(figures) > 3
    assert lab.missing([*figures, *expected_errors(lesson)]) == []
    assert len(lab.errors()) == len(expected_errors(lesson)), lab.errors()


def test_a_slider_of_lesson_03_moves_and_the_numbers_change(lab):
    """The explorer answers to a slider in the page: another number beside it, another picture, other words."""
    lab.open("03_parallel_loss")
    lab.run_all(timeout=480)
    errors = expected_errors("03_parallel_loss")
    assert lab.missing([*printed("03_parallel_loss"), *errors]) == []
    assert len(lab.errors()) == len(errors), lab.errors()
    before = lab.explorer()
    assert "batch 200" in before and "GPU 0" in before
    number = lab.move_slider("batch", -5)
    deadline = time.monotonic() + 120
    while f"batch {number}" not in lab.explorer() and time.monotonic() < deadline:
        time.sleep(0.2)
    after = lab.explorer()
    lab.screenshot(SCREENSHOTS / "03_parallel_loss.png")
    assert int(number.replace(",", "")) < 200
    assert f"batch {number}" in after and after != before
    assert len(lab.errors()) == len(errors), lab.errors()
