"""Write lessons as assignments of nbgrader, in a course folder of its own.

    python notebooks/for_nbgrader.py ../nbgrader_course 02 03      # lessons by the beginning of their names
    cd ../nbgrader_course && nbgrader generate_assignment 02_data_parallel

Each exercise becomes a cell for the answer, with the solution between nbgrader's marks, and a locked test, which is
worth one point or `--points N`. The checks are the course's: a wrong answer prints its sentence, and the test fails.
"""

import argparse
import ast
import json
import shutil
import sys
from pathlib import Path

import run_all
from nbformat.notebooknode import NotebookNode

# The lesson's own stub stands above each solution. A cell that starts processes can need more than the 30 seconds that
# nbgrader gives it.
CONFIG = """c = get_config()
c.CourseDirectory.course_id = "multi_gpu"
c.ClearSolutions.code_stub = {"python": "# Your answer goes above this line."}
c.ExecutePreprocessor.timeout = 300
"""


def call_of_check(source: str) -> ast.Call | None:
    """The call `check.name(...)` that the cell ends in, or None."""
    calls = [statement.value for statement in ast.parse(source).body if isinstance(statement, ast.Expr)]
    return next((call for call in calls if ast.unparse(call).startswith("check.") and isinstance(call, ast.Call)), None)


def without(source: str, call: ast.Call) -> str:
    """The source without the lines of `call`."""
    lines = source.splitlines()
    del lines[call.lineno - 1 : call.end_lineno]
    return "\n".join(lines).strip()


def marked(identifier: str, **what: object) -> dict:
    """nbgrader's metadata of a cell (its schema 3)."""
    return {
        "nbgrader": {"schema_version": 3, "grade_id": identifier, "grade": False, "solution": False, "locked": False}
        | {"task": False}
        | what
    }


def assignment(notebook: dict, points: float = 1) -> NotebookNode:
    """The lesson with marked answers and tests: what nbgrader calls the source version."""
    copy = run_all.learners_copy(notebook, solutions=True)
    cells, exercises = [], []
    for cell in copy.cells:
        if run_all.is_solution(cell):
            exercises[-1][2].append(cell.source)
            continue
        cells.append(cell)
        call = call_of_check(cell.source) if cell.cell_type == "code" and "check." in cell.source else None
        if call is not None:
            name = ast.unparse(call.func).replace(".", "_")
            cells[-2].metadata |= marked(f"{name}_answer", solution=True)
            cell.metadata |= marked(name, grade=True, locked=True, points=points)
            cell.source = without(cell.source, call) + f"\nassert {ast.unparse(call)}"
            exercises.append((cells[-2], call, []))
    for answer, test, solution in exercises:
        answer.source += f"\n\n\n### BEGIN SOLUTION\n{solved(solution, test)}\n### END SOLUTION"
    copy.cells = cells
    return copy


def solved(solution: list[str], test: ast.Call) -> str:
    """The source of the solution's cells, with the names that the test asks for."""
    source = "\n\n\n".join(solution)
    call = call_of_check(source)
    if call is None:
        return source
    names = [(ast.unparse(a), ast.unparse(b)) for a, b in zip(test.args, call.args, strict=True)]
    return "\n".join([without(source, call), *(f"{asked} = {given}" for asked, given in names if asked != given)])


def write_course(folder: Path, paths: list[Path], points: float = 1) -> None:
    """Write `folder`/source/LESSON for each lesson, and a configuration if there is none. Replaces no assignment."""
    taken = [path.stem for path in paths if (folder / "source" / path.stem).exists()]
    if taken:
        raise SystemExit(f"{folder} has {', '.join(taken)} already. Remove what you want to write again.")
    for path in paths:
        made = folder / "source" / path.stem
        for needed in ("scripts", "images"):
            shutil.copytree(run_all.FOLDER / needed, made / needed, ignore=shutil.ignore_patterns("__pycache__"))
        lesson = json.loads(path.read_text(encoding="utf-8"))
        run_all.store(made / path.name, run_all.written(assignment(lesson, points)))
    if not (folder / "nbgrader_config.py").exists():
        (folder / "nbgrader_config.py").write_text(CONFIG, encoding="utf-8")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the course folder of nbgrader")
    parser.add_argument("names", nargs="*", help="lessons, by the beginning of their names")
    parser.add_argument("--points", type=float, default=1, help="of each exercise")
    options = parser.parse_args(arguments)
    write_course(options.folder, run_all.lessons(options.names), options.points)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
