"""The stored lessons are whole: run, in order, on the GPUs they ask for, and the same for every reader.

nbval runs the lessons and compares what they print; here is what nbval does not look at. `problems` finds
what is wrong with one lesson; the tests below it give it a small lesson broken in every way it must notice.
"""

import ast
import copy
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import run_all

HEADINGS = {
    "goals (what you will be able to do)": r"goals|you will be able to",
    "take-aways": r"take-?aways|take away",
    "where to read on": r"read(ing)? on|further reading",
}
TIMES = re.compile(
    r"\d\s?(it/s|s/it)|\[\d+:\d\d<\d|Wall time|CPU times|\b\d\d:\d\d:\d\d\b|\b20\d\d-\d\d-\d\d\b|per loop"
)
PATHS = re.compile(
    r"(?<![\w.])/(home|root|tmp|Users|work|opt|usr|var|mnt|private|content)/|\b[A-Z]:\\|~[/\\]|ipykernel_"
)
ASKED = re.compile(r"^[^#\n]*\buse_gpus\(\s*(?:count\s*=\s*)?(\d+)", re.MULTILINE)
GIVEN = re.compile(r"^(\d+) (?:virtual|real) GPUs?\b", re.MULTILINE)


def problems(notebook):
    """Everything wrong with a stored lesson (the file's content as a dict), one sentence each."""
    found = (
        []
        if run_all.written(run_all.tidy(notebook)) == run_all.written(notebook)
        else ["it is not stored as run_all.py stores it (metadata, cell ids, widget views or machine paths)"]
    )
    found += missing_headings(notebook)
    place, predicted = 0, False
    for cell in notebook["cells"]:
        if cell["cell_type"] == "markdown":
            predicted = "**Prediction" in source(cell)
            continue
        place += 1
        found += [f"code cell {place}: {problem}" for problem in cell_problems(cell, place, predicted)]
    return found + [f"a solution assigns {name}, which is the learner's" for name in names_taken(notebook)]


def names_taken(notebook):
    """Names of a learner's answers that a solution assigns: the check would then see the solution's."""
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    learners = {name for cell in code if not run_all.is_solution(cell) for name in answers(cell)}
    return sorted(learners & {name for cell in code if run_all.is_solution(cell) for name in assigned(cell)})


def answers(cell):
    """The names that a cell passes to checks: `check.total(total)`."""
    calls = [node for node in ast.walk(syntax(cell)) if isinstance(node, ast.Call)]
    checks = [call for call in calls if ast.unparse(call.func).startswith("check.")]
    passed = [value for call in checks for value in [*call.args, *(keyword.value for keyword in call.keywords)]]
    return {node.id for value in passed for node in ast.walk(value) if isinstance(node, ast.Name)}


def assigned(cell):
    """The names that the lines of a cell define or assign, not those within functions."""
    lines = syntax(cell).body
    found = {line.name for line in lines if isinstance(line, (ast.FunctionDef, ast.ClassDef))}
    targets = [target for line in lines if isinstance(line, ast.Assign) for target in line.targets]
    return found | {node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)}


def syntax(cell):
    try:
        return ast.parse(source(cell))
    except SyntaxError:  # lines of IPython
        return ast.Module([], [])


def missing_headings(notebook):
    headings = [heading for cell in notebook["cells"] for heading in run_all.headings(cell)]
    for name, pattern in HEADINGS.items():
        if not any(re.search(pattern, heading, re.IGNORECASE) for heading in headings):
            yield f"no heading for its {name}"


def cell_problems(cell, place, predicted=False):
    printed, solves = printed_text(cell), run_all.is_solution(cell)
    if cell["execution_count"] != place:
        yield f"execution count {cell['execution_count']}: run_all.py did not run it from top to bottom"
    folded = cell["metadata"].get("jupyter", {})
    if bool(folded.get("source_hidden")) != (solves or source(cell).startswith("# Panel:")):
        yield "the code of a cell is folded (jupyter.source_hidden) if it begins with '# Solution' or '# Panel:'"
    if bool(folded.get("outputs_hidden")) != (solves or (predicted and bool(cell["outputs"]))):
        yield "the outputs of solutions and of what answers a prediction are collapsed (jupyter.outputs_hidden)"
    if match := TIMES.search(printed):
        yield f"its output holds a time of day or a duration: {match[0]!r}"
    if match := PATHS.search(printed):
        yield f"its output holds a path of the machine that ran it: {match[0]!r}"
    if solves and "check." in source(cell) and not re.search(r"^Correct\b", printed, re.MULTILINE):
        yield f"its solution is not accepted: {printed!r}"
    yield from error_problems(cell)
    yield from gpu_problems(cell)


def error_problems(cell):
    tagged = "raises-exception" in cell["metadata"].get("tags", [])
    stored = any(output["output_type"] == "error" for output in cell["outputs"])
    if tagged and not stored:
        yield "tagged raises-exception, but no error is stored"
    if stored and not tagged:
        yield "an error is stored, but the tag raises-exception is missing"


def gpu_problems(cell):
    """`use_gpus(4)` must have printed the line of at least four GPUs."""
    if "raises-exception" in cell["metadata"].get("tags", []):
        return
    asked = [int(count) for count in ASKED.findall(source(cell))]
    given = [int(count) for count in GIVEN.findall(printed_text(cell))]
    if len(given) < len(asked) or any(got < wanted for wanted, got in zip(asked, given, strict=False)):
        yield f"asked for {asked} GPUs and ran on {given or 'none'}"


def source(cell):
    return "".join(cell["source"])


def printed_text(cell):
    """All text among the outputs: streams, results, errors."""
    parts = []
    for output in cell["outputs"]:
        parts += [output.get("text", ""), output.get("evalue", ""), output.get("traceback", "")]
        parts += [content for kind, content in output.get("data", {}).items() if kind.startswith("text/")]
    return "\n".join("".join(part) for part in parts)


# --- the lessons -----------------------------------------------------------------------------------------

LESSONS = run_all.lessons()
OUTLINE = Path(__file__).parent / "outline.md"
lesson_by_lesson = pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)


@lesson_by_lesson
def test_the_lesson_is_stored_whole(path):
    assert problems(json.loads(path.read_text(encoding="utf-8"))) == []


def test_no_section_is_lost():
    """To change a heading, change the outline: `python notebooks/run_all.py --outline > tests/outline.md`."""
    found = "".join(run_all.outline(json.loads(path.read_text(encoding="utf-8"))) for path in LESSONS)
    assert found == OUTLINE.read_text(encoding="utf-8")


MOST_MINUTES, NEAR, MOST_WORDS = {"00": 30}, 0.10, 600


@lesson_by_lesson
def test_the_stated_minutes_are_those_of_a_reader(path):
    """Without the exercises, the reading list and what goes further, which has 600 words at most."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    minutes = sum(run_all.minutes(notebook).values())
    stated = int(re.search(r"\*\*Time\*\*:? (?:about )?(\d+) minutes", source(notebook["cells"][0]))[1])
    most = MOST_MINUTES.get(path.name[:2], 50)
    assert abs(stated / minutes - 1) <= NEAR and max(stated, minutes) <= most, f"{minutes:.1f} minutes by the count"
    assert run_all.words(run_all.sections(notebook).get("Going further", [])) <= MOST_WORDS
    row = re.search(rf"notebooks/{path.name}\) \| (\d+) \|", (run_all.FOLDER.parent / "README.md").read_text())
    assert int(row[1]) == stated, "README says otherwise"


# --- the checks themselves -------------------------------------------------------------------------------


def markdown(text):
    return {"cell_type": "markdown", "metadata": {}, "source": text}


def code(text, *outputs, **metadata):
    return {"cell_type": "code", "metadata": metadata, "source": text, "outputs": list(outputs)}


def stream(text):
    return {"output_type": "stream", "name": "stdout", "text": text}


ERROR = {
    "output_type": "error",
    "ename": "ZeroDivisionError",
    "evalue": "division by zero",
    "traceback": ["1/0"],
}


FOLDED = {"source_hidden": True, "outputs_hidden": True}


@pytest.fixture
def lesson():
    """A lesson without problems, as a dict; the code cells are numbers 1, 3, 4 and 5."""
    cells = [
        markdown("# A lesson\n## You will be able to\n- count"),
        code("gpus = use_gpus(4)", stream("4 virtual GPUs (NVIDIA H200, 16.00 GiB each): no real ones here\n")),
        markdown("### An idea"),
        code("1 / 0", ERROR, tags=["raises-exception"]),
        code("x = 1"),
        code("# Solution\nx = 2", stream("correct\n"), jupyter=FOLDED),
        markdown("## Take-aways\n## Where to read on"),
    ]
    for count, cell in enumerate((cell for cell in cells if cell["cell_type"] == "code"), start=1):
        cell["execution_count"] = count
    return json.loads(run_all.written(run_all.tidy({"cells": cells, "metadata": {}, "nbformat": 4})))


def test_a_whole_lesson_has_no_problems(lesson):
    assert problems(lesson) == []


def edit(number, **changes):
    return lambda lesson: lesson["cells"][number].update(changes)


BROKEN = {
    "execution count None": edit(4, execution_count=None),
    "execution count 7": edit(4, execution_count=7),
    "no error is stored": edit(3, outputs=[]),
    "tag raises-exception is missing": edit(3, metadata={}),
    "the code of a cell is folded": edit(5, metadata={"jupyter": {"outputs_hidden": True}}),
    "the code of a cell is folded .*source_hidden": edit(4, metadata={"jupyter": {"source_hidden": True}}),
    "the code of a cell is .*'# Panel:'": edit(4, source="# Panel: run this cell"),
    "outputs of solutions": edit(5, metadata={"jupyter": {"source_hidden": True}}),
    "outputs of solutions .*outputs_hidden": edit(4, metadata={"jupyter": {"outputs_hidden": True}}),
    "outputs of .*a prediction are collapsed": edit(0, source="# A lesson\n## Goals\n**Prediction.** How many?"),
    "a solution assigns x": edit(4, source="check.number(x)"),
    "solution is not accepted": edit(5, source="# Solution\ncheck.count(1)"),
    "goals": edit(0, source="# A lesson"),
    "take-aways": edit(6, source="## Where to read on"),
    "where to read on": edit(6, source="## Take-aways"),
    r"asked for \[4\] GPUs and ran on \[2\]": edit(1, outputs=[stream("2 real GPUs (K80): ...\n")]),
    r"asked for \[4\] GPUs and ran on none": edit(1, outputs=[]),
    r"asked for \[4, 2\] GPUs and ran on \[4\]": edit(1, source="use_gpus(4)\nuse_gpus(count=2)"),
    "duration: '3it/s'": edit(4, outputs=[stream("at 2.93it/s\n")]),
    r"duration: '\[00:01<0'": edit(4, outputs=[stream("100% 3/3 [00:01<00:00, 2.93it/s]\n")]),
    "duration: 'Wall time'": edit(4, outputs=[stream("Wall time: 3 s\n")]),
    "duration: '05:33:12'": edit(4, outputs=[stream("Fri Nov 20 05:33:12 2026\n")]),
    "a path of the machine .*: '/home/'": edit(4, outputs=[stream("saved to /home/me/x.pt\n")]),
    r"a path of the machine .*: 'C:": edit(4, outputs=[stream("saved to C:\\Users\\me\n")]),
    "not stored as run_all": lambda lesson: lesson["metadata"].update(widgets={}),
    "not stored as run_all.*": lambda lesson: lesson["metadata"]["kernelspec"].update(name="my-env"),
    "not stored as run_all.py": edit(4, metadata={"execution": {"iopub.status.busy": "now"}}),
    "not stored as run_all.py stores": edit(4, id=""),
}


@pytest.mark.parametrize("expected", BROKEN)
def test_each_break_is_noticed(lesson, expected):
    BROKEN[expected](lesson)
    assert re.search(expected, "\n".join(problems(lesson)))


@pytest.mark.parametrize(
    "printed",
    [
        "step 3 modelled at 1.25 ms",
        "GPU 00000000:1A:00.0",
        "0/3 [00:00<?, ?it/s]",
        "loss 0.69 and/or 2/3",
        "a/tmp/b",
    ],
)
def test_what_lessons_do_print_is_no_problem(lesson, printed):
    edit(4, outputs=[stream(printed)])(lesson)
    assert problems(lesson) == []


def test_a_lesson_may_talk_of_use_gpus(lesson):
    edit(4, source="# use_gpus(8) would ask for eight")(lesson)
    assert problems(lesson) == []


# --- notebooks/run_all.py --------------------------------------------------------------------------------


def test_frames_of_the_patches_are_left_out_of_stored_tracebacks(lesson):
    mine, torchs = (
        "File /course/virtual_gpus/dispatch/mode.py:7\n  raise",
        "File /lib/torch/nn/x.py:1\n  virtual_gpus/",
    )
    error = {"output_type": "error", "ename": "E", "evalue": "e", "traceback": ["Cell In[1]", mine, torchs, "E: e"]}
    lesson["cells"][4]["outputs"] = [error]
    stored = run_all.tidy(lesson).cells[4].outputs[0]["traceback"]
    assert len(stored) == 3 and "mode.py" not in "".join(stored) and stored[0] == "Cell In[1]" and stored[-1] == "E: e"


def test_tidying_twice_changes_nothing(lesson):
    once = run_all.written(run_all.tidy(lesson))
    assert run_all.written(run_all.tidy(json.loads(once))) == once


def test_solutions_stay_folded(lesson):
    assert [cell.metadata.get("jupyter") for cell in run_all.tidy(lesson).cells] == [None] * 5 + [FOLDED, None]


def test_missing_and_doubled_cell_ids_are_made_from_the_text(lesson):
    bare = copy.deepcopy(lesson)
    for cell in bare["cells"]:
        del cell["id"]
    bare["cells"].append(copy.deepcopy(bare["cells"][0]))
    ids = [cell.id for cell in run_all.tidy(bare).cells]
    assert len(set(ids)) == len(ids)
    assert ids == [cell.id for cell in run_all.tidy(bare).cells]
    lesson["cells"][1]["id"] = lesson["cells"][0]["id"] = "mine"
    assert [cell.id for cell in run_all.tidy(lesson).cells[:2]] == ["mine", ids[1]]


def test_outputs_lose_what_belongs_to_one_machine(lesson):
    printed = (
        "<object at 0x7f5d33b41290> in /home/me/.venv/lib/python3.11/site-packages/torch/nn/linear.py, "
        "~/miniforge3/lib/python3.12/threading.py, /srv/course/helpers/data.py and /tmp/ipykernel_42/7.py:1"
    )
    view = {"application/vnd.jupyter.widget-view+json": {"model_id": "0"}, "text/plain": "IntSlider()"}
    edit(4, outputs=[stream(printed), {"output_type": "display_data", "data": view, "metadata": {}}])(lesson)
    outputs = run_all.tidy(lesson).cells[4].outputs
    assert outputs[0].text == (
        "<object at 0x...> in .../torch/nn/linear.py, .../threading.py, helpers/data.py and <cell>:1"
    )
    assert outputs[1].data == {"text/plain": "IntSlider()"}


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
def folder(tmp_path, monkeypatch, lesson):
    """A folder of lessons for run_all.py with one in it, never run."""
    cells = [code(text) | {"execution_count": None} for text in RUNNABLE]
    cells += [code("import json\njson.loads('{')", tags=["raises-exception"]) | {"execution_count": None}]
    cells += [code("# Solution\n2 + 2", jupyter=FOLDED) | {"execution_count": None}]
    notebook = {"cells": cells, "metadata": {"kernelspec": {"name": "elsewhere"}}, "nbformat": 4}
    (tmp_path / "00_small.ipynb").write_text(json.dumps(notebook))
    monkeypatch.setattr(run_all, "FOLDER", tmp_path)
    return tmp_path


def test_a_lesson_without_its_packages_is_not_run(folder, monkeypatch, capfd):
    monkeypatch.setattr(run_all, "NEEDS", {"00": ("json", "no_such_package")})
    before = (folder / "00_small.ipynb").read_bytes()
    assert run_all.main([]) == 0 and run_all.main(["00"]) == 1  # only whoever names the lesson is told by the exit code
    printed = capfd.readouterr().out
    assert printed.count("not run. Not installed: no_such_package. Put `python3 -m uv run --group") == 2
    assert (folder / "00_small.ipynb").read_bytes() == before


def test_a_run_is_stored_and_the_next_one_changes_nothing(folder, monkeypatch, capfd):
    monkeypatch.setenv("GPUS", "real")
    assert run_all.main(["--check"]) == 1 and "WOULD CHANGE" in capfd.readouterr().out
    assert run_all.main(["00"]) == 0 and "stored" in capfd.readouterr().out
    stored = (folder / "00_small.ipynb").read_bytes()
    assert run_all.main(["--check", "00_small.ipynb"]) == 0 and "unchanged" in capfd.readouterr().out
    assert (folder / "00_small.ipynb").read_bytes() == stored
    cells = json.loads(stored)["cells"]
    assert printed_text(cells[0]).strip() == "virtual None"
    assert printed_text(cells[1]).strip() == "42"
    assert "image/png" in cells[2]["outputs"][0]["data"]
    assert cells[5]["outputs"][0]["ename"] == "JSONDecodeError"
    assert [list(cell_problems(cell, place)) for place, cell in enumerate(cells, 1)] == [[]] * 7
    assert cells[6]["metadata"] == {"jupyter": FOLDED} and cells[6]["outputs"]
    assert [path.name for path in folder.iterdir()] == ["00_small.ipynb"]


def test_a_lesson_that_fails_is_left_as_it_was(folder, capfd):
    notebook = {"cells": [code("1 / 0") | {"execution_count": None}], "metadata": {}, "nbformat": 4}
    path = folder / "00_small.ipynb"
    path.write_text(json.dumps(notebook))
    before = path.read_bytes()
    assert run_all.main([]) == 1
    assert "FAILED, nothing stored" in capfd.readouterr().out and path.read_bytes() == before


@pytest.fixture(scope="module")
def workshop():
    """Learners' copies of all lessons, beside the lessons."""
    made = run_all.FOLDER.parent / "workshop-of-the-tests"
    shutil.rmtree(made, ignore_errors=True)
    assert run_all.main(["--learners", str(made)]) == 0
    yield made
    shutil.rmtree(made)


@lesson_by_lesson
def test_learners_copies_are_the_lessons_without_outputs_and_solutions(workshop, path):
    stored, copied = (json.loads(p.read_text(encoding="utf-8"))["cells"] for p in (path, workshop / path.name))
    solutions = [source(cell) for cell in stored if source(cell).startswith("# Solution")]
    assert [source(cell) for cell in copied] == [source(cell) for cell in stored if source(cell) not in solutions]
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in copied if "outputs" in cell)
    key = (workshop / "answer_key.md").read_text(encoding="utf-8")
    assert len(solutions) > 2 and all(f"```python\n{solution}\n```" in key for solution in solutions)


def test_the_answer_key_names_lesson_and_exercise_and_has_what_is_printed(lesson):
    edit(4, cell_type="markdown", source="### 2. Count")(lesson)
    assert run_all.answers(lesson) == (
        "# A lesson\n\n### 2. Count\n\n```python\n# Solution\nx = 2\n```\n\n```text\ncorrect\n```\n"
    )


def test_learners_copies_have_the_programs_and_replace_nothing(workshop, tmp_path):
    assert (workshop / "scripts" / "ddp.py").exists()
    with pytest.raises(SystemExit, match="exists already"):
        run_all.main(["--learners", str(workshop)])
    with pytest.raises(SystemExit, match="is not beside"):
        run_all.main(["--learners", str(tmp_path / "workshop")])


def test_an_unknown_lesson_is_named(folder):
    with pytest.raises(SystemExit, match="no lesson begins with 99"):
        run_all.main(["99"])


def test_nbval_kernels_capture_child_processes_and_get_virtual_gpus(folder, request):
    """What conftest.py is for: stored lessons pass under pytest itself."""
    assert run_all.main([]) == 0
    root = request.config.rootpath
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", "-p", "conftest"]
    command += ["-c", root / "pyproject.toml", "--rootdir", root, folder]
    result = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    said = result.stdout + result.stderr
    assert f"{len(RUNNABLE) + 2} passed" in said and result.returncode == 0, said
