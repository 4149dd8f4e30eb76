"""Run the lessons on virtual GPUs and store them with their outputs.

    python notebooks/run_all.py                  # all lessons
    python notebooks/run_all.py 01 02            # those whose names begin so
    python notebooks/run_all.py --check          # store nothing; fail if a lesson would change
    python notebooks/run_all.py --learners workshop     # copies for learners in ./workshop; runs nothing
    python notebooks/run_all.py --learners workshop --plan "half a day"   # with no more than a plan of the guide has
    python notebooks/run_all.py --restore workshop 04   # a new copy of lesson 04 there; the learner's own is kept, too
    python notebooks/run_all.py --outline               # print all headings; runs nothing
    python notebooks/run_all.py --minutes               # print a reader's minutes for each section; runs nothing

What is stored is what any other run gives byte for byte: no times, no widget state, no machine's paths.
Running it twice leaves an empty `git diff`. Learners' copies have no outputs and no solutions; the solutions are in
answer_key.md beside them.
"""

import argparse
import ast
import difflib
import functools
import hashlib
import importlib.util
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import nbformat
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbval.plugin import get_sanitize_patterns

FOLDER = Path(__file__).resolve().parent
SANITIZE = FOLDER.parent / "tests" / "nbval_sanitize.cfg"
CELL_TIMEOUT_S = 300
METADATA = {
    "kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
    "language_info": {"file_extension": ".py", "name": "python", "pygments_lexer": "ipython3"},
}
KEPT_CELL_METADATA = ("tags", "jupyter")
# Packages outside requirements.txt, by the beginning of the lesson's name: the group `frameworks` of pyproject.toml.
NEEDS = {"10": ("lightning", "accelerate", "transformers")}
LEFT_OUT = "left-out"  # the tag of code that a plan leaves out, and later code needs
WIDGET_TYPES = ("application/vnd.jupyter.widget-view+json", "application/vnd.jupyter.widget-state+json")
# Matplotlib writes its version and address into each PNG, which would change with every release.
KERNEL_ARGUMENTS = ["--InlineBackend.print_figure_kwargs={'bbox_inches': 'tight', 'metadata': {'Software': None}}"]


def lessons(names=()):
    """The lessons' files in order; with `names`, those that begin with one of them."""
    wanted = tuple(Path(name).stem for name in names)
    found = [path for path in sorted(FOLDER.glob("*.ipynb")) if not wanted or path.stem.startswith(wanted)]
    unknown = [name for name in wanted if not any(path.stem.startswith(name) for path in found)]
    if unknown:
        raise SystemExit(f"no lesson begins with {', '.join(unknown)}")
    return found


def number_of(path):
    """What a lesson's name begins with: "03", and "A" for the appendix."""
    return path.name.partition("_")[0]


def missing(path):
    """A sentence that says which packages a lesson lacks and how to install them; "" if it can run."""
    needed = [name for name in NEEDS.get(path.stem[:2], ()) if importlib.util.find_spec(name) is None]
    if not needed:
        return ""
    return f"Not installed: {', '.join(needed)}. Put `python3 -m uv run --group frameworks` before the command."


def kernel_environment(gpus="virtual"):
    """The environment of a lesson's kernel: everything in it that could show in an output is fixed."""
    env = dict(os.environ)
    # ipykernel does not capture what child processes print when it believes that pytest does.
    for name in (
        "PYTEST_CURRENT_TEST",
        "MPLBACKEND",
        *(["CUDA_VISIBLE_DEVICES"] if gpus == "virtual" else []),
    ):
        env.pop(name, None)
    # Sums depend on the number of threads in their last digits.
    fixed = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    return env | fixed | {"GPUS": gpus, "COURSE_PROGRESS": "off"}  # a reader's own scores are not stored


def client_of(notebook, **options):
    """What executes `notebook` in place, in this Python, whatever kernels the machine has installed."""
    manager = AsyncKernelManager(kernel_name="python3")
    manager.kernel_spec_manager = KernelSpecManager(kernel_dirs=[])
    return NotebookClient(notebook, km=manager, coalesce_streams=True, startup_timeout=180, **options)


def run(notebook, arguments=KERNEL_ARGUMENTS):
    """Execute `notebook` in place, from the lessons' folder. arguments: those of the kernel."""
    client = client_of(
        notebook,
        timeout=CELL_TIMEOUT_S,
        resources={"metadata": {"path": str(FOLDER)}},
        extra_arguments=arguments,
        record_timing=False,
        store_widget_state=False,
    )
    client.execute(env=kernel_environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def tidy(notebook):
    """The notebook as it is stored: only what a reader needs and every run reproduces."""
    notebook = nbformat.v4.reads(json.dumps(notebook))  # a copy; its lists of lines become strings
    notebook.metadata = nbformat.from_dict(METADATA)
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    seen = set()
    for cell in notebook.cells:
        cell.id = _cell_id(cell, seen)
        cell.metadata = {key: cell.metadata[key] for key in KEPT_CELL_METADATA if cell.metadata.get(key)}
        for output in cell.get("outputs", []):
            _tidy_output(output)
    _fold(notebook)
    return notebook


def _fold(notebook):
    """Fold solutions and the code of panels, and collapse what answers a prediction."""
    predicted = False
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            predicted = "**Prediction" in cell.source
            continue
        folds = {
            "source_hidden": is_solution(cell)
            or cell.source.startswith("# Panel:")
            or LEFT_OUT in cell.metadata.get("tags", ()),
            "outputs_hidden": is_solution(cell) or (predicted and bool(cell.outputs)),
        }
        folds = {key: True for key, folded in folds.items() if folded}
        cell.metadata.pop("jupyter", None)
        if folds:
            cell.metadata["jupyter"] = nbformat.from_dict(folds)


def _cell_id(cell, seen):
    """The cell's own id; where it has none, or another cell's, one made from its text."""
    name, copies = cell.get("id"), 0
    while not name or name in seen:
        text = f"{copies}{cell.source}"
        name, copies = hashlib.sha256(text.encode()).hexdigest()[:8], copies + 1
    seen.add(name)
    return name


def _tidy_output(output):
    for kind in WIDGET_TYPES:
        output.get("data", {}).pop(kind, None)
    for kind in set(output.get("data", {})) - {"image/png", "image/jpeg"}:
        output.data[kind] = _sanitize(output.data[kind])
    if "traceback" in output:
        # A real GPU's error has no frame of the stand-ins, and their line numbers change with every edit of them.
        output["traceback"] = [frame for frame in output["traceback"] if not _is_of_a_stand_in(frame)]
    for key in {"text", "evalue", "traceback"} & set(output):
        output[key] = _sanitize(output[key])


def _is_of_a_stand_in(frame):
    return re.search(r"virtual_gpus[/\\]", frame.split("\n", 1)[0]) is not None


def _sanitize(content):
    if isinstance(content, list):
        return [_sanitize(part) for part in content]
    if isinstance(content, str):
        for pattern, replacement in _sanitize_patterns():
            content = re.sub(pattern, replacement, content)
    return content


@functools.cache
def _sanitize_patterns():
    return get_sanitize_patterns(SANITIZE.read_text(encoding="utf-8"))


def written(notebook):
    """The text of the notebook's file."""
    return nbformat.writes(nbformat.from_dict(notebook)).rstrip("\n") + "\n"


def store(path, text):
    """Replace the file in one step: an interrupted run leaves the old one whole."""
    unfinished = path.with_name(f"{path.name}.tmp")
    unfinished.write_text(text, encoding="utf-8", newline="\n")
    os.replace(unfinished, path)


def difference(before, after, lines=12, width=160):
    """The first lines of the diff, cut to a screen's width: enough to see which cell and what."""
    diff = list(difflib.unified_diff(before.splitlines(), after.splitlines(), "stored", "now", lineterm="", n=1))
    cut = [line if len(line) <= width else line[:width] + " ..." for line in diff[:lines]]
    return "\n".join([*cut, f"... {len(diff) - lines} more lines"] if len(diff) > lines else cut)


def renew(path, check):
    """Run one lesson; store it unless `check`. Returns what happened, in a word or two."""
    before = path.read_text(encoding="utf-8")
    notebook = tidy(json.loads(before))
    run(notebook)
    after = written(tidy(notebook))
    if after == before:
        return "unchanged"
    if check:
        return "WOULD CHANGE:\n" + difference(before, after)
    store(path, after)
    return "stored"


def headings(cell):
    """The headings of a cell, as they are written: "## Exercises"."""
    if cell["cell_type"] != "markdown":
        return []
    return [line for line in "".join(cell["source"]).splitlines() if re.match(r"#{1,6} ", line)]


def outline(notebook):
    """All headings of a lesson as a nested list in Markdown."""
    found = [heading.partition(" ") for cell in notebook["cells"] for heading in headings(cell)]
    return "".join(f"{'  ' * (len(level) - 1)}- {title}\n" for level, _, title in found)


UNCOUNTED = ("Exercises", "Going further", "Where to read on")  # parts of a lesson that its minutes do not include
# As fresh readers needed it who ran every cell and wrote every prediction down.
WORDS_PER_MINUTE, LINES_PER_MINUTE, MINUTES_PER_PREDICTION = 150, 10, 1.5


def sections(notebook, heading="##? "):
    """The cells of each section by its title. A cell of text is cut where a section begins in it."""
    found, section = {}, ""
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        markdown = cell["cell_type"] == "markdown"
        for part in filter(None, re.split(f"^(?={heading})", source, flags=re.MULTILINE)) if markdown else [source]:
            if markdown and re.match(heading, part):
                section = part.partition("\n")[0].lstrip("# ")
            found.setdefault(section, []).append(cell | {"source": part})
    return found


def words(cells):
    """How many words a reader reads in these cells, without the alternative texts of pictures."""
    texts = [cell["source"] for cell in cells if cell["cell_type"] == "markdown"]
    return sum(len(re.sub(r"!\[.*?\]\(.*?\)", "", text, flags=re.DOTALL).split()) for text in texts)


def minutes(notebook):
    """A reader's minutes for each section, by its title: words, lines of code, and predictions to write down."""
    found = {}
    for section, cells in sections(notebook).items():
        code = [cell["source"] for cell in cells if cell["cell_type"] == "code" and not is_solution(cell)]
        lines = sum(bool(line.strip()) for source in code for line in source.splitlines())
        predictions = sum(cell["source"].count("**Prediction") for cell in cells if cell["cell_type"] == "markdown")
        found[section] = words(cells) / WORDS_PER_MINUTE + lines / LINES_PER_MINUTE
        found[section] += predictions * MINUTES_PER_PREDICTION
    return {section: counted for section, counted in found.items() if section not in UNCOUNTED}


def minutes_table(notebook):
    """The minutes of a lesson and of its sections as a table in Markdown."""
    found = minutes(notebook)
    lesson = next(iter(found))
    rows = [f"| {'Introduction' if name == lesson else name} | {counted:.1f} |" for name, counted in found.items()]
    total = f"| **together** | **{sum(found.values()):.0f}** |"
    further = f"Going further has {words(sections(notebook).get('Going further', []))} words."
    return "\n".join([f"## {lesson}", "", "| section | minutes |", "|---|---:|", *rows, total, "", further, ""])


def is_solution(cell):
    """True for the folded cell that solves an exercise."""
    return cell["cell_type"] == "code" and "".join(cell["source"]).startswith("# Solution")


def learners_copy(notebook, solutions=False):
    """The notebook without outputs, and without solutions unless told. What it will print is not collapsed."""
    copy = tidy(notebook)
    copy.cells = [cell for cell in copy.cells if solutions or not is_solution(cell)]
    for cell in copy.cells:
        if cell.cell_type == "code":
            cell.execution_count, cell.outputs = None, []
            if not is_solution(cell):
                cell.metadata.get("jupyter", {}).pop("outputs_hidden", None)
    return copy


def plan(name):
    """What a plan of the guide for instructors takes of the lessons: {"02": ({1, 2, 6}, {1})}, sections and exercises.

    name: the beginning of the plan's title. None in the place of sections means all. Raises SystemExit for other names.
    """
    guide = (FOLDER.parent / "docs" / "teaching" / "README.md").read_text(encoding="utf-8")
    plans = dict(re.findall(r"^### ([^\n]+): \d+ minutes\n(.*?)(?=^##)", guide, re.MULTILINE | re.DOTALL))
    table = next((table for title, table in plans.items() if title.lower().startswith(name.lower())), None)
    if table is None:
        raise SystemExit(f"There is no plan {name!r}. The plans are: {'; '.join(plans)}.")
    taken = {}
    for lesson, kind, which in re.findall(
        r"^\| \[(\w+)\]\(.*?\), (all|section|exercise)s? ([^|]*)", table, re.MULTILINE
    ):
        chosen, exercises = taken.get(lesson, (set(), set()))
        if kind == "exercise":
            exercises = exercises | numbers_of(which)
        else:
            chosen = None if kind == "all" else chosen | numbers_of(which)
        taken[lesson] = chosen, exercises
    return taken


def numbers_of(text):
    """The numbers that a row of a plan names: those of "1 to 3, 9" are 1, 2, 3 and 9."""
    spans = re.findall(r"(\d+)(?: to (\d+))?", text)
    return {number for first, last in spans for number in range(int(first), int(last or first) + 1)}


def cut(notebook, chosen, exercises):
    """The notebook with these sections (None: all) and exercises, by their numbers, and without "Going further".

    Of what is left out, the cells stay, folded, whose names later cells need.
    """
    parts = []
    for title, cells in sections(notebook).items():
        for name, part in sections({"cells": cells}, "#{2,3} ").items() if title == "Exercises" else [(title, cells)]:
            numbers = exercises if title == "Exercises" else chosen
            number = re.match(r"\d+(?=\. )", name)
            wanted = number is None or numbers is None or int(number[0]) in numbers
            parts.append((name, part, wanted and name != "Going further" and (name != "Exercises" or bool(exercises))))
    made, folded, titles, needed = [], [], [], set()
    for name, part, wanted in reversed(parts):
        if wanted:
            made += _not_today(titles, folded)
            folded, titles = [], []
        elif name[:1].isdigit():
            titles.insert(0, name)
        for cell in reversed(part):
            bound, used = names_in(cell)
            if wanted or bound & needed:
                needed = needed - bound | used
                (made if wanted else folded).append(cell)
    return notebook | {"cells": made[::-1]}


def _not_today(titles, cells):
    """What stands in the place of parts that are left out, in reversed order."""
    if not titles:
        return []
    hint = " Run the folded cells all the same, because later ones use their names." if cells else ""
    folded = [
        cell | {"metadata": cell["metadata"] | {"tags": [*cell["metadata"].get("tags", []), LEFT_OUT]}}
        for cell in cells
    ]
    return [*folded, nbformat.v4.new_markdown_cell(f"*Not today: {'; '.join(titles)}.{hint}*")]


def names_in(cell):
    """The names that a cell gives a value, and those that it takes from the cells before: two sets."""
    code = "" if cell["cell_type"] == "markdown" else re.sub(r"^\s*[%!].*", "", cell["source"], flags=re.MULTILINE)
    names = _Names()
    names.visit(ast.parse(code))
    return names.bound, names.used | (names.later - names.bound)


class _Names(ast.NodeVisitor):
    """Names in the order in which Python meets them. What functions use counts when the cell has ended."""

    def __init__(self):
        self.bound, self.used, self.later = set(), set(), set()

    def visit_Name(self, node):
        if isinstance(node.ctx, ast.Store):
            self.bound.add(node.id)
        elif node.id not in self.bound:
            self.used.add(node.id)

    def visit_Assign(self, node):
        for part in (node.value, *node.targets):
            self.visit(part)

    def visit_AugAssign(self, node):
        self.used |= {name.id for name in ast.walk(node.target) if isinstance(name, ast.Name)} - self.bound
        self.visit(node.value)

    def visit_For(self, node):
        for part in (node.iter, node.target, *node.body, *node.orelse):
            self.visit(part)

    def visit_alias(self, node):
        self.bound.add(node.asname or node.name.partition(".")[0])

    def visit_scope(self, node):
        """A function, a class or a comprehension: what it binds stays inside."""
        inner = _Names()
        inner.bound = {argument.arg for argument in ast.walk(node) if isinstance(argument, ast.arg)}
        for part in (*getattr(node, "generators", ()), *ast.iter_child_nodes(node)):
            inner.visit(part)
        found = inner.used | (inner.later - inner.bound)
        if isinstance(node, (ast.FunctionDef, ast.Lambda, ast.ClassDef)):
            self.later |= found
            self.bound |= {node.name} if hasattr(node, "name") else set()
        else:
            self.used |= found - self.bound

    visit_FunctionDef = visit_ClassDef = visit_Lambda = visit_scope
    visit_ListComp = visit_SetComp = visit_DictComp = visit_GeneratorExp = visit_scope


def answers(notebook):
    """The notebook's solutions in Markdown: each under the headings of its lesson and exercise, with what it prints."""
    parts, exercise = [], ""
    for cell in tidy(notebook).cells:
        found = headings(cell)
        parts += [heading for heading in found if heading.startswith("# ")]
        exercise = next((heading for heading in reversed(found) if heading.startswith("##")), exercise)
        if is_solution(cell):
            if exercise not in parts:
                parts.append(exercise)
            printed = [output.get("text") or output.get("data", {}).get("text/plain", "") for output in cell.outputs]
            text = "".join(printed).rstrip()
            parts += [f"```python\n{cell.source}\n```", *([f"```text\n{text}\n```"] if text else [])]
    return "\n\n".join(parts) + "\n"


def write_learners_copies(folder, paths, taken=None):
    """Write the copies, the answer key, and the programs and pictures that the lessons use, into a new `folder`.

    taken: what a `plan` takes of the lessons. Without it, the copies have everything.
    """
    folder = Path(folder).resolve()
    if folder.parent != FOLDER.parent:
        raise SystemExit(
            f"{folder} is not beside {FOLDER}. Give a folder there, such as {FOLDER.parent / 'workshop'}: "
            "the lessons' programs look for the images in ../data."
        )
    if folder.exists():
        raise SystemExit(f"{folder} exists already, and a learner may have worked in it. Give another name.")
    with tempfile.TemporaryDirectory(dir=folder.parent) as unfinished:
        made = Path(unfinished) / folder.name
        for needed in ("scripts", "images"):
            shutil.copytree(FOLDER / needed, made / needed, ignore=shutil.ignore_patterns("__pycache__"))
        chosen = {}
        for path in paths:
            number, notebook = number_of(path), json.loads(path.read_text(encoding="utf-8"))
            if taken is None:
                chosen[path.name] = notebook
            elif number in taken:
                chosen[path.name] = cut(notebook, *taken[number])
        for name, notebook in chosen.items():
            store(made / name, written(learners_copy(notebook)))
        (made / "answer_key.md").write_text("\n".join(map(answers, chosen.values())), encoding="utf-8")
        os.replace(made, folder)


def restore(folder, paths):
    """Write new copies of lessons into a learner's `folder`. The learner's own stay there as Copy1, Copy2, …"""
    folder = Path(folder)
    if not folder.is_dir():
        raise SystemExit(f"There is no folder {folder}. Make one with --learners {folder}.")
    for path in paths:
        own = folder / path.name
        if own.exists():
            number = next(n for n in itertools.count(1) if not (folder / f"{path.stem}-Copy{n}.ipynb").exists())
            print(f"{own} is now {own.rename(folder / f'{path.stem}-Copy{number}.ipynb').name}.")
        store(own, written(learners_copy(json.loads(path.read_text(encoding="utf-8")))))


def main(arguments):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="store nothing; fail if a lesson would change")
    parser.add_argument("--learners", metavar="FOLDER", help="write copies without outputs and solutions; run nothing")
    parser.add_argument("--plan", help="with --learners: only what this plan of docs/teaching/README.md has")
    parser.add_argument("--restore", metavar="FOLDER", help="write new copies of the named lessons; keep the old ones")
    parser.add_argument("--outline", action="store_true", help="print all headings; run nothing")
    parser.add_argument("--minutes", action="store_true", help="print the minutes of each section; run nothing")
    parser.add_argument("names", nargs="*", help="lessons, by the beginning of their names")
    options = parser.parse_intermixed_args(arguments)
    if options.plan and not options.learners:
        parser.error("--plan needs --learners FOLDER")
    if options.learners:
        taken = plan(options.plan) if options.plan else None
        write_learners_copies(options.learners, lessons(options.names), taken)
        return 0
    if options.restore:
        if not options.names:
            parser.error("Name the lessons to restore, for example: --restore workshop 04")
        restore(options.restore, lessons(options.names))
        return 0
    if options.outline:
        for path in lessons(options.names):
            print(outline(json.loads(path.read_text(encoding="utf-8"))), end="")
        return 0
    if options.minutes:
        print("\n".join(minutes_table(json.loads(path.read_text(encoding="utf-8"))) for path in lessons(options.names)))
        return 0
    good = True
    for path in lessons(options.names):
        if lacks := missing(path):
            print(f"{path.stem:32}    -    not run. {lacks}", flush=True)
            good &= not options.names  # whoever names the lesson wants it to run
            continue
        start = time.perf_counter()
        try:
            result = renew(path, options.check)
        except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
            result = f"FAILED, nothing stored:\n{error}"
        good &= result in ("unchanged", "stored")
        print(f"{path.stem:32} {time.perf_counter() - start:6.1f} s  {result}", flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
