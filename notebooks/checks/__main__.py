"""Progress: which exercises are solved, from the saved outputs of the checks. Nothing is run.

    python -m notebooks.checks --report             # the lessons of this course, if you work in them
    python -m notebooks.checks --report workshop    # a learner's copies
    python -m notebooks.checks --report handed_in   # a folder with a folder for each learner: a table

"solved" means that the checks of an exercise printed "Correct" when they were last run. "not begun" means that they
printed nothing, or that the answer still consists of dots. All else is "not solved yet". Save the notebooks first.
Folded solutions do not count.
"""

import argparse
import json
import re
from pathlib import Path

LESSONS = Path(__file__).resolve().parents[2] / "notebooks"
CHECK = re.compile(r"^check\.(\w+)\(", re.MULTILINE)
VERDICT = re.compile(r"^(Correct|Not yet): (.*)", re.MULTILINE)
STUB = "Replace the dots with your answer."  # as notebooks.checks.core says it

Cells = list[dict]  # as nbformat describes them: {"cell_type": "code", "source": ..., "outputs": [...]}


def read(path: Path) -> Cells:
    """The cells of a notebook. Raises ValueError for a file that is damaged, or not a notebook."""
    try:
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        return [cell | {"source": "".join(cell["source"])} for cell in cells]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged, or not a notebook.") from error


def exercises(lesson: Cells) -> dict[str, list[str]]:
    """The names of the checks of each exercise of a lesson, by its title. They are those that the solutions call."""
    found: dict[str, list[str]] = {}
    title = ""
    for cell in lesson:
        if cell["cell_type"] == "markdown":
            title = next(reversed(re.findall(r"^#{2,} (.+)", cell["source"], re.MULTILINE)), title)
        elif cell["source"].startswith("# Solution"):
            found.setdefault(title, []).extend(CHECK.findall(cell["source"]))
    return found


def states(lesson: Cells, copy: Cells) -> dict[str, str]:
    """What a learner's copy says of each exercise of the lesson: "solved", "not solved yet" or "not begun"."""
    marks = {}
    for cell in copy:
        if cell["cell_type"] == "code" and not cell["source"].startswith("# Solution"):
            printed = "".join(_text(output) for output in cell.get("outputs", []))
            word, text = next(reversed(VERDICT.findall(printed)), ("", STUB))
            marks |= dict.fromkeys(CHECK.findall(cell["source"]), "not begun" if STUB in text else word)
    found = {}
    for title, checks in exercises(lesson).items():
        said = {marks.get(check, "not begun") for check in checks}
        found[title] = {("Correct",): "solved", ("not begun",): "not begun"}.get(tuple(said), "not solved yet")
    return found


def _number(name: str) -> str:
    """What a lesson's name begins with: "03", and "A" for the appendix."""
    return name.partition("_")[0]


def _text(output: dict) -> str:
    """What an output says as text. A check displays a box, and printed a line before."""
    return "".join(output.get("text") or output.get("data", {}).get("text/plain", "")) + "\n"


def learners(folder: Path) -> dict[str, list[Path]]:
    """The lessons of each learner, by the name of the learner's folder. Raises ValueError if there are none."""
    if not folder.is_dir():
        raise ValueError(f"There is no folder {folder}.")
    names = {path.name for path in LESSONS.glob("*.ipynb")}
    found: dict[str, list[Path]] = {}
    for path in sorted(folder.rglob("*.ipynb")):
        if path.name in names and ".ipynb_checkpoints" not in path.parts:
            found.setdefault(path.parent.relative_to(folder).as_posix(), []).append(path)
    if not found:
        raise ValueError(
            f"The folder {folder} has no lessons in it, such as {min(names, default='00_start_here.ipynb')}."
        )
    return found


def report(paths: list[Path]) -> str:
    """The state of each exercise of one learner, a line each."""
    lines, every = [], []
    for path in paths:
        found = states(read(LESSONS / path.name), read(path))
        lines += [path.stem, *(f"  {state:16}{title}" for title, state in found.items())]
        every += found.values()
    return "\n".join([*lines, f"{every.count('solved')} of {len(every)} exercises are solved."])


def table(copies: dict[str, list[Path]]) -> str:
    """How many exercises each learner has solved in each lesson, and what most learners tried and did not solve."""
    names = sorted({path.name for paths in copies.values() for path in paths})
    lessons = {name: read(LESSONS / name) for name in names}
    totals = [len(exercises(lesson)) for lesson in lessons.values()]
    rows = [["", *(_number(name) for name in names), "all"], ["exercises", *map(str, totals), str(sum(totals))]]
    stuck: dict[str, int] = {}
    for learner, paths in copies.items():
        solved = dict.fromkeys(names, "-")
        for path in paths:
            try:
                found = states(lessons[path.name], read(path))
            except ValueError:
                solved[path.name] = "damaged"
                continue
            solved[path.name] = str(list(found.values()).count("solved"))
            for title in (title for title, state in found.items() if state == "not solved yet"):
                exercise = f"{_number(path.name)}, {title}"
                stuck[exercise] = stuck.get(exercise, 0) + 1
        rows.append([learner, *solved.values(), str(sum(int(count) for count in solved.values() if count.isdigit()))])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows]
    if stuck:
        most = sorted(stuck.items(), key=lambda item: -item[1])
        lines += ["", "Learners who began an exercise and have not solved it yet:"]
        lines += [f"{number:4}  {exercise}" for exercise, number in most]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m notebooks.checks", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--report", metavar="FOLDER", nargs="?", const=LESSONS, type=Path, required=True)
    try:
        copies = learners(parser.parse_args().report)
        print(report(copies["."]) if list(copies) == ["."] else table(copies))
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
