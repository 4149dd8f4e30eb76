"""Lessons as assignments of nbgrader: marked answers with the solutions, and tests that fail where a check says no."""

import json
import re

import for_nbgrader
import pytest
import run_all
import torch

from notebooks.checks import lesson00

REGION = re.compile(r"### BEGIN SOLUTION.*?### END SOLUTION", re.DOTALL)


def marks(cell):
    return cell.metadata.get("nbgrader", {})


@pytest.mark.parametrize("path", run_all.lessons(), ids=lambda path: path.stem[:2])
def test_every_exercise_is_an_answer_and_a_test(path):
    lesson = json.loads(path.read_text(encoding="utf-8"))
    cells = for_nbgrader.assignment(lesson, points=2).cells
    tests = [place for place, cell in enumerate(cells) if marks(cell).get("grade")]
    solutions = ["".join(cell["source"]) for cell in lesson["cells"] if run_all.is_solution(cell)]
    assert len(tests) == sum("\ncheck." in solution for solution in solutions) > 0
    for place in tests:
        answer, test = cells[place - 1], cells[place]
        assert marks(answer)["solution"] and marks(test)["points"] == 2 and len(REGION.findall(answer.source)) == 1
        asked, given = run_all.names_in(test)[1] - {"check"}, run_all.names_in(answer)[0]
        assert asked & given and "assert check." in test.source
        assert not re.search(r"^check\.", answer.source, re.MULTILINE)  # the solution is not checked twice
    # What learners get, apart from the marks, is the lesson's own copy for learners.
    sources = [REGION.sub("", cell.source).strip().replace("assert check.", "check.") for cell in cells]
    plain = [cell.source for cell in run_all.learners_copy(lesson).cells]
    assert [re.sub(r"\s", "", source) for source in sources] == [re.sub(r"\s", "", source) for source in plain]
    identifiers = [marks(cell)["grade_id"] for cell in cells if marks(cell)]
    assert len(set(identifiers)) == len(identifiers)


def test_the_solution_passes_and_the_stub_does_not(four, tmp_path, capsys):
    assert for_nbgrader.main([str(tmp_path), "00"]) == 0 and (tmp_path / "nbgrader_config.py").exists()
    cells = json.loads((tmp_path / "source/00_start_here/00_start_here.ipynb").read_text(encoding="utf-8"))["cells"]
    place = next(place for place, cell in enumerate(cells) if "assert check.total_memory" in "".join(cell["source"]))
    answer, test = ("".join(cell["source"]) for cell in cells[place - 1 : place + 1])
    names = {"gpus": four, "torch": torch, "check": lesson00}
    exec(f"{answer}\n{test}", names)
    assert "Correct" in capsys.readouterr().out
    with pytest.raises(AssertionError):
        exec(f"{REGION.sub('', answer)}\n{test}", names)
    assert "Not yet" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="has 00_start_here already"):
        for_nbgrader.main([str(tmp_path), "00", "01"])
