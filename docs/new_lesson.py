"""Make the files of a new lesson, which run, and its rows in the tables: then replace the words.

    python docs/new_lesson.py 12 "Slow steps" "find out why a step is slow"

The number begins the names of the files: a notebook, the checks of its exercises and their test. What cannot be made is
printed at the end.
"""

import argparse
import json
import re
import sys
from pathlib import Path

import nbformat
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

sys.path.insert(0, str(Path(__file__).parents[1] / "notebooks"))

import run_all

ROOT = Path(__file__).resolve().parent.parent
CELLS = [
    (
        new_markdown_cell,
        """# {number} {title}

Two to four sentences: what goes wrong without this, and what the lesson does about it.

## You will be able to

- {goal}

**Time** {minutes} minutes, not counting exercises. **Before** lesson 00.""",
    ),
    (
        new_code_cell,
        """import torch

from helpers import use_gpus

gpus = use_gpus(4, memory="16 GiB")""",
    ),
    (
        new_markdown_cell,
        """## 1. The first idea

Why it matters, in two sentences. Then a question whose answer follows from the text above.

**Prediction.** How many GPUs does this machine have?""",
    ),
    (new_code_cell, 'print(torch.cuda.device_count(), "GPUs")'),
    (
        new_markdown_cell,
        """What the cell showed, and why. Compare it with the prediction in one sentence. Say what a learner should do
differently at work because of it, and when it does not matter. After about five lines of text there should be something
to do or to see again.

## Take-aways

- One line for each section.

## Exercises

### 1. Count the GPUs

Replace the dots. Then run the check.""",
    ),
    (
        new_code_cell,
        """from notebooks.checks import lesson{number} as check

count = ...""",
    ),
    (new_code_cell, "check.count(count)"),
    (
        new_code_cell,
        """# Solution
count_solution = torch.cuda.device_count()

check.count(count_solution)""",
    ),
    (
        new_markdown_cell,
        """## Where to read on

- What the next lesson does with this.""",
    ),
]
CHECKS = '''"""Checks of lesson {number}: the number of GPUs."""

import torch

from notebooks.checks import compare
from notebooks.checks.core import exercise


@exercise
def count(answer):
    """Exercise 1: the number of GPUs."""
    compare.number(answer, torch.cuda.device_count())
    return "PyTorch sees all of them."
'''
TESTS = '''"""The checks of lesson {number}: right and wrong answers of each exercise."""

import pytest
from virtual_gpus import virtual_gpus

from notebooks.checks import lesson{number} as check
from tests.check_answers import Answers, answers_test


@pytest.fixture(autouse=True)
def gpus():
    with virtual_gpus(4) as devices:
        yield devices


TABLE = {{
    "count": Answers(check.count, right=[4], wrong=[(3, "3")]),
}}
test_answers = answers_test(TABLE)
'''
LEFT = """Now write the lesson. CONTRIBUTING.md says how. These lists still lack it:
- the terms that it introduces: docs/glossary.md
- the plans of the guide for instructors: docs/teaching/README.md
- CHANGELOG.md
The tests also want three exercises, and a new picture for the README (python -m docs.tools.readme_picture).
After each change: python notebooks/run_all.py {number} && python notebooks/run_all.py --outline > tests/outline.md"""


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("number", help="two digits, or a letter for an appendix")
    parser.add_argument("title", help="without a number")
    parser.add_argument("goal", help='what stands in the tables under "you learn to"')
    options = parser.parse_args(arguments)
    number, title = options.number, options.title.strip()
    if not re.fullmatch(r"\d\d|[A-Z]", number):
        parser.error(f"{number!r} is not a number of a lesson. Write two digits, such as 12, or a letter.")
    if taken := next((ROOT / "notebooks").glob(f"{number}_*.ipynb"), None):
        parser.error(f"There is a lesson {number} already: {taken.name}.")
    name = f"{number}_{re.sub(r'[^a-z0-9]+', '_', title.lower()).strip('_')}.ipynb"
    words = {"number": number, "title": title, "goal": options.goal, "minutes": 3}
    cells = [make(text.format(**words)) for make, text in CELLS]
    create(ROOT / "notebooks" / name, nbformat.writes(new_notebook(cells=cells)))
    create(ROOT / "notebooks" / "checks" / f"lesson{number}.py", CHECKS.format(**words))
    create(ROOT / "tests" / f"test_check_lesson{number}.py", TESTS.format(**words))
    for page, folder in (("README.md", "notebooks"), ("docs/index.md", "../notebooks")):
        add_row(ROOT / page, f"| {number} | [{title}]({folder}/{name}) | 3 | {options.goal} |")
    if run_all.main([number]):
        raise SystemExit(f"{name} did not run.")
    outline = "".join(run_all.outline(json.loads(path.read_text(encoding="utf-8"))) for path in run_all.lessons())
    run_all.store(ROOT / "tests" / "outline.md", outline)
    print(LEFT.format(number=number))


def create(path, text):
    with path.open("x", encoding="utf-8", newline="\n") as file:
        file.write(text)
    print(path.relative_to(ROOT))


def add_row(path, row):
    """Put a row into a page's table of lessons, before the appendix if it is no appendix itself."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    rows = [i for i, line in enumerate(lines) if re.match(r"\| (\d\d|[A-Z]) \| \[", line)]
    after = [i for i in rows if lines[i] > row]  # digits come before letters
    lines.insert(after[0] if after else rows[-1] + 1, f"{row}\n")
    run_all.store(path, "".join(lines))
    print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
