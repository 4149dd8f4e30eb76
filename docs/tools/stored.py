"""What is wrong with a stored lesson: run, in order, on the GPUs it asks for, and the same for every reader.

`docs/lint.py` breaks a lesson in the ways that `problems` must notice.
"""

import ast
import re

import run_all

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
    found = []
    if run_all.written(run_all.tidy(notebook)) != run_all.written(notebook):
        found = ["it is not stored as run_all.py stores it (metadata, cell ids, widget views or machine paths)"]
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
