"""The difference between two of the programs in `notebooks/scripts`, as coloured lines of a notebook."""

import difflib
from pathlib import Path

__all__ = ["Difference", "show_diff"]

SCRIPTS = Path(__file__).resolve().parents[2] / "notebooks" / "scripts"


class Difference:
    """Lines of a diff. JupyterLab draws them in colour; `print` gives them as plain text."""

    def __init__(self, lines: list[str]):
        self.lines = lines

    def __repr__(self) -> str:
        return "\n".join(self.lines)

    def _repr_markdown_(self) -> str:
        return f"```diff\n{self}\n```"


def show_diff(before: str, after: str) -> Difference:
    """What changes from one program to another: `show_diff("one_gpu", "ddp")`.

    Lines that begin with - are only in the first, lines with + only in the second. The docstrings at the top of the
    files, which explain the programs, are left out.
    """
    programs = [code(name) for name in (before, after)]
    lines = difflib.unified_diff(*programs, f"{before}.py", f"{after}.py", n=1, lineterm="")
    # The line numbers of a change mean nothing without the files: an empty line separates the places instead.
    return Difference(["" if line.startswith("@@") else line for line in lines])


def code(name: str) -> list[str]:
    """The lines of a program from its first import on."""
    lines = (SCRIPTS / f"{name}.py").read_text(encoding="utf-8").splitlines()
    return lines[lines.index("import argparse") :]
