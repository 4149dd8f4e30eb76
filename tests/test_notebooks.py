"""The stored lessons are whole; run_all.py runs, stores, cuts and copies them. nbval compares what they print."""

import json
import os
import runpy
import shutil

import pytest
import run_all

from docs.tools.stored import cell_problems, printed_text, problems, source
from notebooks.checks import __main__ as checks

LESSONS = run_all.lessons()
ROOT = run_all.FOLDER.parent


def read(path):
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_the_lesson_is_stored_whole(path):
    assert problems(read(path)) == []


def test_no_section_is_lost():
    """To change a heading, change the outline: `python notebooks/run_all.py --outline > tests/outline.md`."""
    stored = (ROOT / "tests" / "outline.md").read_text(encoding="utf-8")
    assert "".join(run_all.outline(read(path)) for path in LESSONS) == stored


def test_the_lint_finds_nothing_in_the_texts_but_a_fault(monkeypatch, capsys, tmp_path):
    def lint(*names):
        monkeypatch.setattr("sys.argv", ["lint.py", *names])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(ROOT / "docs" / "lint.py"), run_name="__main__")
        return ended.value.code, capsys.readouterr().out

    assert lint() == (0, "No findings.\n")
    notebook = read(LESSONS[0])
    notebook["cells"][2]["source"] = "The card is slow."
    (tmp_path / LESSONS[0].name).write_text(json.dumps(notebook), encoding="utf-8")
    monkeypatch.setattr(run_all, "FOLDER", tmp_path)
    assert lint("00") == (1, f"{LESSONS[0].name}: cell 2: 'card': write GPU\n")


def code(text, *outputs, **metadata):
    cell = {"cell_type": "code", "metadata": metadata, "source": text}
    return cell | {"outputs": list(outputs), "execution_count": None}


def stream(text):
    return {"output_type": "stream", "name": "stdout", "text": text}


def lesson(*cells):
    text = {"cell_type": "markdown", "metadata": {}}
    cells = [text | {"source": each} if isinstance(each, str) else each for each in cells]
    return {"cells": cells, "metadata": {"kernelspec": {"name": "elsewhere"}}, "nbformat": 4}


FOLDED = {"source_hidden": True, "outputs_hidden": True}


def test_outputs_lose_what_belongs_to_one_machine():
    printed = (
        "<object at 0x7f5d33b41290> in /home/me/.venv/lib/python3.11/site-packages/torch/nn/linear.py, "
        "~/miniforge3/lib/python3.12/threading.py, /srv/course/helpers/data.py and /tmp/ipykernel_42/7.py:1"
    )
    view = {"application/vnd.jupyter.widget-view+json": {"model_id": "0"}, "text/plain": "IntSlider()"}
    mine, torchs = "File /course/virtual_gpus/dispatch/mode.py:7\n  raise", "File /lib/torch/nn/x.py:1\n  virtual_gpus/"
    error = {"output_type": "error", "ename": "E", "evalue": "e", "traceback": ["Cell In[1]", mine, torchs, "E: e"]}
    shown = {"output_type": "display_data", "data": view, "metadata": {}}
    once = run_all.tidy(lesson(code("x = 1", stream(printed), shown, error)))
    outputs = once.cells[0].outputs
    kept = "<object at 0x...> in .../torch/nn/linear.py, .../threading.py, helpers/data.py and <cell>:1"
    assert outputs[0].text == kept
    assert outputs[1].data == {"text/plain": "IntSlider()"}
    stored = outputs[2].traceback
    assert len(stored) == 3 and "mode.py" not in "".join(stored) and stored[0] == "Cell In[1]" and stored[-1] == "E: e"
    assert run_all.written(run_all.tidy(json.loads(run_all.written(once)))) == run_all.written(once)


def test_missing_and_doubled_cell_ids_are_made_from_the_text():
    bare = lesson("# A lesson", code("x = 1"), "# A lesson")
    ids = [cell.id for cell in run_all.tidy(bare).cells]
    assert len(set(ids)) == 3 and ids == [cell.id for cell in run_all.tidy(bare).cells]
    bare["cells"][0]["id"] = bare["cells"][1]["id"] = "mine"
    assert [cell.id for cell in run_all.tidy(bare).cells[:2]] == ["mine", ids[1]]


def test_solutions_panels_and_what_answers_a_prediction_are_folded():
    solution, panel, answer = code("# Solution\nx = 2"), code("# Panel: run this"), code("x", stream("1\n"))
    tidied = run_all.tidy(lesson(solution, panel, "**Prediction.** How many?", answer, "So many.", answer)).cells
    folded = [FOLDED, {"source_hidden": True}, None, {"outputs_hidden": True}, None, None]
    assert [cell.metadata.get("jupyter") for cell in tidied] == folded


RUNNABLE = [
    "import os, sys\nprint(os.environ['GPUS'], os.environ.get('PYTEST_CURRENT_TEST'))",
    # What a child prints reaches the kernel through a thread of its own, which may be late: the cell waits for it.
    "import subprocess, threading\ncame, write = threading.Event(), sys.stdout.write\n"
    "sys.stdout.write = lambda text: (write(text), '\\n' in text and came.set())[0]\n"
    "_ = subprocess.run([sys.executable, '-c', 'print(42)'])\nassert came.wait(60)\ndel sys.stdout.write",
    "import matplotlib.pyplot as plt\nplt.plot([1, 2])\nplt.show()",
    "hash('a'), object()",
    "from ipywidgets import IntProgress\nbar = IntProgress(max=2)\ndisplay(bar)\n"
    "for bar.value in (1, 2):\n    print('.', end='', flush=True)",
]


@pytest.fixture
def stored(tmp_path, monkeypatch):
    """The path of a lesson, never run, in a folder of lessons for run_all.py."""
    fails, solution = code("import json\njson.loads('{')", tags=["raises-exception"]), code("# Solution\n2 + 2")
    path = tmp_path / "00_small.ipynb"
    path.write_text(json.dumps(lesson(*map(code, RUNNABLE), fails, solution)))
    monkeypatch.setattr(run_all, "FOLDER", tmp_path)
    return path


def test_a_lesson_that_cannot_be_run_is_left_as_it_was(stored, monkeypatch, capfd):
    before = stored.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(run_all, "NEEDS", {"00": ("json", "no_such_package")})
        assert run_all.main([]) == 0 and run_all.main(["00"]) == 1  # who names the lesson is told by the exit code
    printed = capfd.readouterr().out
    assert printed.count("not run. Not installed: no_such_package. Put `python3 -m uv run --group") == 2
    assert stored.read_bytes() == before
    stored.write_text(json.dumps(lesson(code("1 / 0"))))
    before = stored.read_bytes()
    assert run_all.main([]) == 1
    assert "FAILED, nothing stored" in capfd.readouterr().out and stored.read_bytes() == before
    with pytest.raises(SystemExit, match="no lesson begins with 99"):
        run_all.main(["99"])


def test_a_run_is_stored_and_the_next_one_changes_nothing(stored, monkeypatch, capfd):
    monkeypatch.setenv("GPUS", "real")
    assert run_all.main(["00"]) == 0 and "stored" in capfd.readouterr().out
    before = stored.read_bytes()
    assert run_all.main(["00_small.ipynb"]) == 0 and "unchanged" in capfd.readouterr().out
    cells = json.loads(before)["cells"]
    assert [printed_text(cell).strip() for cell in cells[:2]] == ["virtual None", "42"]
    assert "image/png" in cells[2]["outputs"][0]["data"]
    assert cells[5]["outputs"][0]["ename"] == "JSONDecodeError"
    assert [list(cell_problems(cell, place)) for place, cell in enumerate(cells, 1)] == [[]] * 7
    assert cells[6]["metadata"] == {"jupyter": FOLDED} and cells[6]["outputs"]
    monkeypatch.setattr(run_all, "run", lambda notebook: notebook.cells.pop())
    assert run_all.main(["--check"]) == 1 and "WOULD CHANGE" in capfd.readouterr().out
    assert stored.read_bytes() == before and list(stored.parent.iterdir()) == [stored]


def test_learners_copies_are_the_lessons_without_outputs_and_solutions(tmp_path):
    made = ROOT / f"workshop-of-the-tests-{os.getpid()}"
    try:
        assert run_all.main(["--learners", str(made)]) == 0
        key = (made / "answer_key.md").read_text(encoding="utf-8")
        for path in LESSONS:
            before, copied = read(path)["cells"], read(made / path.name)["cells"]
            solutions = [source(cell) for cell in before if source(cell).startswith("# Solution")]
            assert [source(cell) for cell in copied] == [source(c) for c in before if source(c) not in solutions]
            assert all(not cell["outputs"] and cell["execution_count"] is None for cell in copied if "outputs" in cell)
            assert len(solutions) > 2 and all(f"```python\n{solution}\n```" in key for solution in solutions)
        assert (made / "scripts" / "ddp.py").exists()
        with pytest.raises(SystemExit, match="exists already"):
            run_all.main(["--learners", str(made)])
    finally:
        shutil.rmtree(made)
    with pytest.raises(SystemExit, match="is not beside"):
        run_all.main(["--learners", str(tmp_path / "workshop")])


def test_the_answer_key_names_lesson_and_exercise_and_has_what_is_printed():
    solution = code("# Solution\nx = 2", stream("correct\n"))
    found = run_all.answers(lesson("# A lesson\n## You will", code("x = 1"), "### 2. Count", solution))
    assert found == "# A lesson\n\n### 2. Count\n\n```python\n# Solution\nx = 2\n```\n\n```text\ncorrect\n```\n"


def test_a_plan_of_the_guide():
    taken = run_all.plan("one day")
    assert taken["00"] == (None, {1, 2}) and taken["04"] == ({1, 2, 3, 4, 5, 6}, {4}) and "05" not in taken
    with pytest.raises(SystemExit, match="The plans are: Half a day; One day; Two days"):
        run_all.plan("a week")


TO_CUT = [  # each text and the code below it
    ["# 77 Cut", "import torch"],
    ["## 1. One", "def double(x):\n    return factor * x", "unused = [double for double in range(3)]"],
    ["## 2. Two\n\n**Prediction.** Why?", "factor = 2", "%timeit factor = 3", "factor += 1\nsize = torch.ones(factor)"],
    ["## 3. Three", "for i, x in enumerate(size):\n    print(i, double(x))"],
    ["## 4. Four", "size = 4"],
    ["## Exercises\n\n### 1. First", "from x import check\n\nanswer = ...", "# Solution\nsecret = 1"],
    ["### 2. Second", "check.second(size)", "# Solution\ncheck.second(4)"],
    ["## Going further", "further = 1"],
]
TO_CUT = lesson(*(cell for text, *codes in TO_CUT for cell in (text, *map(code, codes))))
TO_CUT["cells"][8]["metadata"]["tags"] = ["raises-exception"]


def test_a_cut_lesson_keeps_the_code_whose_names_it_needs():
    found = run_all.learners_copy(run_all.cut(TO_CUT, {3}, {2}))
    folded = [cell.source.splitlines()[0] for cell in found.cells if "left-out" in cell.metadata.get("tags", [])]
    assert folded == ["def double(x):", "factor = 2", "factor += 1", "size = 4", "from x import check"]
    hidden = [cell.metadata.get("jupyter", {}).get("source_hidden", False) for cell in found.cells]
    assert sum(hidden) == len(folded)
    text = "\n".join(cell.source for cell in found.cells if cell.cell_type == "markdown")
    assert "*Not today: 1. One; 2. Two. Run the folded cells" in text and "Prediction" not in text
    assert "## Exercises" in text and "## 3. Three" in text and "Going further" not in text
    assert run_all.answers(run_all.cut(TO_CUT, {3}, {2})).count("```python") == 1
    found = run_all.cut(TO_CUT, None, set())
    assert [cell["source"] for cell in found["cells"]][:13] == [cell["source"] for cell in TO_CUT["cells"]][:13]
    assert found["cells"][-1]["source"] == "*Not today: 1. First; 2. Second.*"


def test_restored_lessons_keep_what_the_learner_did(tmp_path, capsys):
    path, own = tmp_path / "77_cut.ipynb", tmp_path / "workshop"
    path.write_text(json.dumps(TO_CUT))
    with pytest.raises(SystemExit, match="There is no folder"):
        run_all.restore(own, [path])
    own.mkdir()
    for text in ("mine", "mine again"):
        (own / path.name).write_text(text)
        run_all.restore(own, [path])
    assert [(own / f"77_cut-Copy{n}.ipynb").read_text() for n in (1, 2)] == ["mine", "mine again"]
    assert "Copy2" in capsys.readouterr().out and "# Solution" not in (own / path.name).read_text()
    with pytest.raises(SystemExit):
        run_all.main(["--restore", str(own)])


def test_the_report_of_chosen_lessons(tmp_path):
    (tmp_path / "ana").mkdir()
    for name in ("00_start_here", "F_final_task"):
        (tmp_path / "ana" / f"{name}.ipynb").write_text("{}")
    assert list(checks.learners(tmp_path, ("F",))["ana"]) == ["F_final_task.ipynb"]
    with pytest.raises(ValueError, match="No lesson begins with 77 or 78"):
        checks.learners(tmp_path, ("77", "78"))
