"""Copies of lessons: cut to a plan of the guide for instructors, and restored."""

import sys

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from notebooks.checks import __main__ as checks
from tests.programs import ROOT

sys.path.insert(0, str(ROOT / "notebooks"))
import run_all  # noqa: E402


def test_a_plan_of_the_guide():
    taken = run_all.plan("one day")
    assert taken["00"] == (None, {1, 2}) and taken["04"] == ({1, 2, 3, 4, 5, 6}, {4}) and "05" not in taken
    with pytest.raises(SystemExit, match="The plans are: Half a day; One day; Two days"):
        run_all.plan("a week")


def lesson():
    cells = [
        new_markdown_cell("# 77 Cut"),
        new_code_cell("import torch"),
        new_markdown_cell("## 1. One"),
        new_code_cell("def double(x):\n    return factor * x"),
        new_code_cell("unused = [double for double in range(3)]"),
        new_markdown_cell("## 2. Two\n\n**Prediction.** Why?"),
        new_code_cell("factor = 2"),
        new_code_cell("%timeit factor = 3"),
        new_code_cell("factor += 1\nsize = torch.ones(factor)", metadata={"tags": ["raises-exception"]}),
        new_markdown_cell("## 3. Three"),
        new_code_cell("for i, x in enumerate(size):\n    print(i, double(x))"),
        new_markdown_cell("## 4. Four"),
        new_code_cell("size = 4"),
        new_markdown_cell("## Exercises\n\n### 1. First"),
        new_code_cell("from x import check\n\nanswer = ..."),
        new_code_cell("# Solution\nsecret = 1"),
        new_markdown_cell("### 2. Second"),
        new_code_cell("check.second(size)"),
        new_code_cell("# Solution\ncheck.second(4)"),
        new_markdown_cell("## Going further"),
        new_code_cell("further = 1"),
    ]
    return new_notebook(cells=cells)


def test_a_cut_lesson_keeps_the_code_whose_names_it_needs():
    found = run_all.learners_copy(run_all.cut(lesson(), {3}, {2}))
    folded = [cell.source.splitlines()[0] for cell in found.cells if "left-out" in cell.metadata.get("tags", [])]
    assert folded == ["def double(x):", "factor = 2", "factor += 1", "size = 4", "from x import check"]
    hidden = [cell.metadata.get("jupyter", {}).get("source_hidden", False) for cell in found.cells]
    assert sum(hidden) == len(folded)
    text = "\n".join(cell.source for cell in found.cells if cell.cell_type == "markdown")
    assert "*Not today: 1. One; 2. Two. Run the folded cells" in text and "Prediction" not in text
    assert "## Exercises" in text and "## 3. Three" in text and "Going further" not in text
    assert run_all.answers(run_all.cut(lesson(), {3}, {2})).count("```python") == 1


def test_without_exercises_and_with_all_sections():
    found = run_all.cut(lesson(), None, set())
    assert [cell["source"] for cell in found["cells"]][:13] == [cell.source for cell in lesson().cells][:13]
    assert found["cells"][-1]["source"] == "*Not today: 1. First; 2. Second.*"


def test_restored_lessons_keep_what_the_learner_did(tmp_path, monkeypatch, capsys):
    path = tmp_path / "77_cut.ipynb"
    path.write_text(nbformat.writes(lesson()))
    own = tmp_path / "workshop"
    with pytest.raises(SystemExit, match="There is no folder"):
        run_all.restore(own, [path])
    own.mkdir()
    for text in ("mine", "mine again"):
        (own / path.name).write_text(text)
        run_all.restore(own, [path])
    assert (own / "77_cut-Copy1.ipynb").read_text() == "mine"
    assert (own / "77_cut-Copy2.ipynb").read_text() == "mine again" and "Copy2" in capsys.readouterr().out
    assert "# Solution" not in (own / path.name).read_text()
    with pytest.raises(SystemExit):
        run_all.main(["--restore", str(own)])


def test_the_report_of_chosen_lessons(tmp_path):
    for name in ("00_start_here", "F_final_task"):
        (tmp_path / "ana").mkdir(exist_ok=True)
        (tmp_path / "ana" / f"{name}.ipynb").write_text("{}")
    assert list(checks.learners(tmp_path, ("F",))["ana"]) == ["F_final_task.ipynb"]
    with pytest.raises(ValueError, match="No lesson begins with 77 or 78"):
        checks.learners(tmp_path, ("77", "78"))
