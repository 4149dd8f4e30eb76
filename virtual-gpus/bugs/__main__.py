"""Runs all programs and writes docs/bugs.md."""

import inspect
import re
import sys
from pathlib import Path
from types import ModuleType

from bugs import programs, run

PAGE = Path(__file__).resolve().parents[1] / "docs" / "bugs.md"
BEGINNING = """# Public bugs that a free machine would have found

Each of these bugs stood in a public program for several GPUs, and was met on a machine that had them. Here is what
virtual GPUs say about it, in a test that needs two CPU cores and a few seconds. The programs are in the folder
[bugs](../bugs/__init__.py), as they were and as they were mended, written anew with only what the bug needs. `python -m
bugs`, run in the folder of the package, calls each of them and writes this page, and a test calls them too. Some of
them need no GPU to fail: a test with two ranks on CPUs (gloo) would have found these, too.
"""


def section(program: ModuleType) -> str:
    """What the page says of one program. Runs it both ways. Raises AssertionError if it does not fail as it should."""
    first, thread, *more = (inspect.getdoc(program) or "").split("\n\n")
    try:
        run(program, "before")
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    else:
        raise AssertionError(f"{program.__name__} raises no error.")
    assert program.ERROR in said, said
    run(program, "after")
    name = program.__name__.removeprefix("bugs.")
    address = thread.removeprefix("Thread: ")
    repository, kind, number = re.fullmatch(r"https://github.com/(.*)/(issues|pull)/(\d+)", address).groups()
    paragraphs = [
        f"## {name.replace('_', ' ').capitalize().replace('gpu', 'GPU').replace('cpu', 'CPU')}",
        f"{first} ([{repository} {number}]({address}), [the program](../bugs/{name}.py))",
        *more,
        f"On GPUs: {getattr(program, 'ON_GPUS', 'the same error')}. On virtual GPUs:",
        "```text\n" + "\n".join(important(said)) + "\n```",
    ]
    return "\n\n".join(paragraphs)


def important(said: str) -> list[str]:
    """The lines of an error that follow its last stack, or the stacks of this program if nothing follows."""
    lines = [line for line in said.splitlines() if line.strip()]
    last = max((number for number, line in enumerate(lines) if line.startswith("  File")), default=-1)
    text = [line for line in lines[last + 1 :] if not line.startswith("    ")]
    if not text:  # a time limit: the line of each rank
        text = [line for number, line in enumerate(lines) if 'File "torch/' not in line + lines[number - 1]]
    return [line if len(line) <= 150 else f"{line[:147]}..." for line in text]


if __name__ == "__main__":
    PAGE.write_text("\n\n".join([BEGINNING.rstrip(), *map(section, programs())]) + "\n", encoding="utf-8")
    sys.stdout.write(f"{PAGE}\n")
