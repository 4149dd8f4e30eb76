"""Hold the beginning of the half-day plan in docs/teaching/README.md as its words say, in JupyterLab in a real browser.

    python -m docs.tools.first_hour            # the rows of the plan's first hour
    python -m docs.tools.first_hour 120        # of its first two hours

The lessons are learners' copies. Cells run one after the other with Shift+Enter. Before a section that does not follow
the one before it, everything above it runs (`Run All Above Selected Cell`). An exercise's check runs twice, first on
the learner's copy and then with the stored solution. For each row stand the planned minutes, a reader's minutes
(`run_all.py --minutes`), and the seconds that the cells took here. The command fails if reading and cells together take
longer than planned, if a cell fails that does not fail in the stored lesson, or if a check answers otherwise.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "notebooks"))  # as pytest's setting `pythonpath` does

from run_all import headings, is_solution, learners_copy, minutes, numbers_of

from tests.browser.lab import ROOT, Lab, jupyterlab

GUIDE = ROOT / "docs" / "teaching" / "README.md"
_NOTEBOOK = "window.jupyterapp.shell.currentWidget.content"
_SELECT = f"""
(index) => {{
    const notebook = {_NOTEBOOK};
    notebook.deselectAll();
    notebook.activeCellIndex = index;
    notebook.mode = "command";
    notebook.activate();
}}
"""
_RUN_ABOVE = '() => { window.jupyterapp.commands.execute("notebook:run-all-above"); }'
_EDIT = f"([index, text]) => {_NOTEBOOK}.widgets[index].model.sharedModel.setSource(text)"
_COUNT = f"(index) => {_NOTEBOOK}.widgets[index].model.executionCount"
_OUTPUTS = f"(index) => {_NOTEBOOK}.widgets[index].model.outputs.toJSON()"


@dataclass
class Row:
    """A row of a plan: which sections or exercises of which lesson, in how many minutes. No `lesson`: the welcome."""

    text: str
    lesson: str
    sections: list[int] | None  # None: all of them
    exercises: list[int]
    planned: int

    @classmethod
    def read(cls, line: str) -> Row:
        """From a line of the guide's table."""
        part, _, planned, _ = (cell.strip() for cell in line.strip("|").split("|"))
        link = re.search(r"notebooks/(\w+)\.ipynb", part)
        text = re.sub(r"\[(.*?)\]\(.*?\)", r"\1", part)
        numbers = sorted(numbers_of(text.partition(",")[2]))
        exercises = numbers if "exercise" in text else []
        sections = None if "all sections" in text else [] if exercises else numbers
        return cls(text, link[1] if link else "", sections, exercises, int(planned))


def plan(first: int) -> list[Row]:
    """The half-day plan's rows that begin within its first `first` minutes."""
    table = GUIDE.read_text(encoding="utf-8").split("### Half a day", 1)[1].split("\n### ", 1)[0]
    lines = [line for line in table.splitlines() if line.startswith("| ")][1:-1]  # without titles and sum
    rows: list[Row] = []
    for row in map(Row.read, lines):
        if sum(before.planned for before in rows) >= first:
            break
        rows.append(row)
    return rows


class Lesson:
    """A lesson as it is stored, with the cells that a learner's copy has."""

    def __init__(self, name: str):
        self.name = name
        self._stored = json.loads((ROOT / "notebooks" / f"{name}.ipynb").read_text(encoding="utf-8"))
        self.cells = learners_copy(self._stored).cells
        found = [(index, heading) for index, cell in enumerate(self.cells) for heading in headings(cell)]
        self._sections = [(index, heading[3:]) for index, heading in found if heading.startswith("## ")]
        self._exercises = {int(heading[4]): index for index, heading in found if re.match(r"### \d\. ", heading)}
        self._fail = {cell["id"] for cell in self._stored["cells"] for output in cell.get("outputs", [])
                      if output["output_type"] == "error"}  # fmt: skip
        self.first_code = next(index for index, cell in enumerate(self.cells) if cell.cell_type == "code")
        self.end = next(index for index, title in self._sections if title == "Exercises")

    def section(self, number: int) -> tuple[str, range]:
        """Its title and its cells."""
        place = next(n for n, (_, title) in enumerate(self._sections) if title.startswith(f"{number}. "))
        return self._sections[place][1], range(self._sections[place][0], self._sections[place + 1][0])

    def exercise(self, number: int) -> tuple[range, str]:
        """Its cells and its solution."""
        start = self._exercises[number]
        end = self._exercises.get(number + 1) or next(index for index, _ in self._sections if index > start)
        stored = self._stored["cells"]
        place = next(index for index, cell in enumerate(stored) if cell["id"] == self.cells[start]["id"])
        return range(start, end), "".join(next(cell["source"] for cell in stored[place:] if is_solution(cell)))

    def fails(self, index: int) -> bool:
        """Whether the cell fails in the stored lesson, as part of what it teaches."""
        return self.cells[index]["id"] in self._fail

    def reading(self, titles: list[str] | None = None) -> float:
        """A reader's minutes for these sections, or for all."""
        found = minutes(self._stored)
        return sum(counted for title, counted in found.items() if titles is None or title in titles)


class Learner:
    """Who does a row of the plan in the browser. `wrong` collects what went otherwise than in the stored lesson."""

    def __init__(self, lab: Lab, lesson: Lesson):
        self.page, self.lesson, self.next, self.wrong = lab.page, lesson, 0, []

    def run(self, cells: range) -> None:
        """Run these cells with Shift+Enter and wait after each; first everything above, if a part was left out."""
        if left_out := self._code(range(self.next, cells.start)):
            self.page.evaluate(_SELECT, cells.start)
            self._wait_for(left_out[-1], lambda: self.page.evaluate(_RUN_ABOVE))
        for index in self._code(cells):
            self.page.evaluate(_SELECT, index)
            self._wait_for(index, lambda: self.page.keyboard.press("Shift+Enter"))
            self._look_for_errors(index)
        self.next = cells.stop

    def solve(self, number: int) -> None:
        """Run an exercise's cells and read the check's "Not yet", then solve it and read "Correct"."""
        cells, solution = self.lesson.exercise(number)
        self.run(cells)
        last = self._code(cells)[-1]
        self._expect(last, "Not yet: ")
        self.page.evaluate(_EDIT, [last, solution])
        self.run(range(last, last + 1))
        self._expect(last, "Correct: ")
        self.next = cells.stop

    def _code(self, cells: range) -> list[int]:
        return [index for index in cells if self.lesson.cells[index].cell_type == "code"]

    def _wait_for(self, index: int, start: Callable[[], object], seconds: float = 180) -> None:
        """Start something, and wait until this cell has run once more. Raises TimeoutError."""
        before, deadline = self.page.evaluate(_COUNT, index), time.monotonic() + seconds
        start()
        while self.page.evaluate(_COUNT, index) in (before, None):
            if time.monotonic() > deadline:
                raise TimeoutError(f"cell {index} still runs after {seconds:.0f} s")
            time.sleep(0.02)

    def _look_for_errors(self, index: int) -> None:
        failed = [output["evalue"] for output in self._outputs(index) if output["output_type"] == "error"]
        if bool(failed) != self.lesson.fails(index):
            self.wrong.append(f"cell {index}: {failed or 'no error, but there is one in the stored lesson'}")

    def _expect(self, index: int, words: str) -> None:
        text = "".join(output.get("text", "") for output in self._outputs(index))
        if words not in text:
            self.wrong.append(f"cell {index}: the check prints {text!r}, not {words!r}")

    def _outputs(self, index: int) -> list[dict]:
        return self.page.evaluate(_OUTPUTS, index)


def do(row: Row, learner: Learner) -> float:
    """Do a row in the browser. Returns a reader's minutes for its sections."""
    lesson = learner.lesson
    if not row.lesson:
        learner.run(range(lesson.first_code + 1))
        return 0.0
    if row.sections is None:
        learner.run(range(learner.next, lesson.end))
        return lesson.reading()
    sections = [lesson.section(number) for number in row.sections]
    for _, cells in sections:
        learner.run(cells)
    for number in row.exercises:
        learner.solve(number)
    return lesson.reading([title for title, _ in sections])


def hold(lab: Lab, rows: list[Row]) -> bool:
    """Do the rows, and print a line for each. False if something went wrong or took longer than planned."""
    good, learner = True, None
    print(f"{'planned':>8}{'reading':>9}{'cells':>9}")
    for number, row in enumerate(rows):
        if number and not row.lesson:
            continue  # a break or a discussion
        start = time.monotonic()
        name = row.lesson or next(later.lesson for later in rows if later.lesson)  # the welcome opens the first lesson
        if learner is None or name != learner.lesson.name:
            lab.open(name)
            learner = Learner(lab, Lesson(name))
        reading = do(row, learner)
        seconds = time.monotonic() - start
        in_time = reading + seconds / 60 <= row.planned
        good &= in_time and not learner.wrong
        print(f"{row.planned:>4} min{reading:>5.0f} min{seconds:>7.1f} s  {row.text}{'' if in_time else '  TOO LONG'}")
        for sentence in learner.wrong:
            print(f"{'':28}{sentence}")
        learner.wrong.clear()
    return good


def main(arguments: list[str]) -> int:
    rows = plan(int(arguments[0]) if arguments else 60)
    with tempfile.TemporaryDirectory() as folder, jupyterlab(Path(folder), solutions=False) as lab:
        return 0 if hold(lab, rows) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
