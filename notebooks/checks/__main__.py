"""Progress: which exercises are solved, from the saved outputs of the checks. Nothing is run.

    python -m notebooks.checks --report             # the lessons of this course, if you work in them
    python -m notebooks.checks --report workshop    # a learner's copies
    python -m notebooks.checks --report handed_in   # a folder with a folder for each learner: a table
    python -m notebooks.checks --report handed_in --csv scores.csv     # and a score sheet, a row for each exercise
    python -m notebooks.checks --report handed_in F    # only the lessons whose names begin so

"solved" means that the checks of an exercise printed "Correct" when they were last run. "not begun" means that they
printed nothing, or that the answer still consists of dots. All else is "not solved yet". Save the notebooks first.
Folded solutions do not count. Copies of a lesson, such as 00_start_here-Copy1.ipynb, count with it: the best of them.
"""

import argparse
import csv
import json
import os
import re
from pathlib import Path

LESSONS = Path(__file__).resolve().parents[2] / "notebooks"
CHECK = re.compile(r"^check\.(\w+)\(", re.MULTILINE)
VERDICT = re.compile(r"^(Correct|Not yet): (.*)", re.MULTILINE)
STUB = "Replace the dots with your answer."  # as notebooks.checks.core says it

COPY = re.compile(r"(-Copy\d+| ?\(\d+\))+$")  # what JupyterLab and browsers add to the name of a copy

STATES = ("not begun", "not solved yet", "solved")
Cells = list[dict]  # as nbformat describes them: {"cell_type": "code", "source": ..., "outputs": [...]}
Files = dict[str, list[Path]]  # one learner's copies of each lesson, by the lesson's name


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


def best(name: str, files: list[Path]) -> dict[str, str]:
    """The best state of each exercise in several copies of a lesson. Raises ValueError if one is damaged."""
    lesson = read(LESSONS / name)
    every = [states(lesson, read(path)) for path in files]
    return {title: max((found[title] for found in every), key=STATES.index) for title in every[0]}


def _number(name: str) -> str:
    """What a lesson's name begins with: "03", and "A" for the appendix."""
    return name.partition("_")[0]


def _text(output: dict) -> str:
    """What an output says as text. A check displays a box, and printed a line before."""
    return "".join(output.get("text") or output.get("data", {}).get("text/plain", "")) + "\n"


def learners(folder: Path, begin: tuple[str, ...] = ()) -> dict[str, Files]:
    """The lessons of each learner, by the name of the learner's folder. Raises ValueError if there are none.

    begin: how the names of the lessons begin; all of them without it.

    A folder directly in `folder` that has no lesson in it is listed, too, because somebody may have handed in nothing.
    """
    if not folder.is_dir():
        raise ValueError(f"There is no folder {folder}.")
    names = {path.name for path in LESSONS.glob("*.ipynb") if path.name.startswith(begin or "")}
    if not names:
        raise ValueError(f"No lesson begins with {' or '.join(begin)}.")
    found: dict[str, Files] = {}
    for path in sorted(folder.rglob("*.ipynb")):
        name = COPY.sub("", path.stem) + path.suffix
        if name in names and ".ipynb_checkpoints" not in path.parts:
            learner = path.parent.relative_to(folder).as_posix()
            found.setdefault(learner, {}).setdefault(name, []).append(path)
    if not found:
        raise ValueError(
            f"The folder {folder} has no lessons in it, such as {min(names, default='00_start_here.ipynb')}."
        )
    if "." not in found:
        empty = {path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")}
        empty -= {learner.partition("/")[0] for learner in found}
        found |= dict.fromkeys(sorted(empty), {})
    return found


def report(files: Files) -> str:
    """The state of each exercise of one learner, a line each."""
    lines, every = [], []
    for name, copies in files.items():
        found = best(name, copies)
        lines += [Path(name).stem, *(f"  {state:16}{title}" for title, state in found.items())]
        every += found.values()
    return "\n".join([*lines, f"{every.count('solved')} of {len(every)} exercises are solved."])


def table(everybody: dict[str, Files]) -> str:
    """How many exercises each learner has solved in each lesson, and what most learners tried and did not solve."""
    names = sorted({name for files in everybody.values() for name in files})
    totals = [len(exercises(read(LESSONS / name))) for name in names]
    rows = [["", *(_number(name) for name in names), "all"], ["exercises", *map(str, totals), str(sum(totals))]]
    stuck: dict[str, int] = {}
    for learner, files in everybody.items():
        solved = dict.fromkeys(names, "-")
        for name, copies in files.items():
            try:
                found = best(name, copies)
            except ValueError:
                solved[name] = "damaged"
                continue
            solved[name] = str(list(found.values()).count("solved"))
            for title in (title for title, state in found.items() if state == "not solved yet"):
                exercise = f"{_number(name)}, {title}"
                stuck[exercise] = stuck.get(exercise, 0) + 1
        rows.append([learner, *solved.values(), str(sum(int(count) for count in solved.values() if count.isdigit()))])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows]
    missing = [learner for learner, files in everybody.items() if not files]
    if missing:
        lines += ["", f"No lesson was found in: {', '.join(missing)}"]
    if stuck:
        most = sorted(stuck.items(), key=lambda item: -item[1])
        lines += ["", "Learners who began an exercise and have not solved it yet:"]
        lines += [f"{number:4}  {exercise}" for exercise, number in most]
    return "\n".join(lines)


def write_scores(everybody: dict[str, Files], path: Path) -> None:
    """A score sheet: a row for each exercise of each lesson that a learner has, in a file that spreadsheets open."""
    unfinished = path.with_name(path.name + ".tmp")
    with unfinished.open("w", newline="", encoding="utf-8") as file:
        sheet = csv.writer(file)
        sheet.writerow(["learner", "lesson", "exercise", "state", "points"])
        for learner, files in everybody.items():
            for name, copies in files.items():
                try:
                    found = best(name, copies)
                except ValueError:
                    found = dict.fromkeys(exercises(read(LESSONS / name)), "damaged")
                rows = [
                    [learner, Path(name).stem, title, state, int(state == "solved")] for title, state in found.items()
                ]
                sheet.writerows(rows)
            if not files:
                sheet.writerow([learner, "", "", "no lesson found", 0])
    os.replace(unfinished, path)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m notebooks.checks", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--report", metavar="FOLDER", nargs="?", const=LESSONS, type=Path, required=True)
    parser.add_argument("names", nargs="*", help="lessons, by the beginning of their names")
    parser.add_argument("--csv", metavar="FILE", type=Path, help="also write a score sheet")
    options = parser.parse_intermixed_args()
    try:
        everybody = learners(options.report, tuple(options.names))
        print(report(everybody["."]) if list(everybody) == ["."] else table(everybody))
        if options.csv:
            write_scores(everybody, options.csv)
    except (ValueError, OSError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
