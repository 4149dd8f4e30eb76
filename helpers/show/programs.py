"""Shows the difference between two programs of `notebooks/scripts`, with tinted lines in a notebook."""

import difflib
import html
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parents[2] / "notebooks" / "scripts"
# Green and red, transparent enough for light and dark themes. The signs + and - say the same without colour.
_TINTS = {"+": "rgba(46, 160, 67, 0.22)", "-": "rgba(248, 81, 73, 0.22)"}


class Difference:
    """The lines of a diff. Notebooks tint the changed lines, and `print` gives plain text."""

    def __init__(self, lines: list[str]):
        self.lines = lines

    def __repr__(self) -> str:
        return "\n".join(self.lines)

    def _repr_html_(self) -> str:
        # Styles are inline, and each line ends with a newline, because GitHub removes styles and keeps the rest.
        # The inner box is as wide as the longest line, so that the tint continues when a reader scrolls sideways.
        lines = "".join(_tinted(line) for line in self.lines)
        box = f'<span style="display: inline-block; min-width: 100%">{lines}</span>'
        return f'<pre style="overflow-x: auto; white-space: pre">{box}</pre>'


def _tinted(line: str) -> str:
    """Return a line of a diff as HTML."""
    text = html.escape(line, quote=False) + "\n"
    if line.startswith(("+++ ", "--- ")):  # the names of the files
        return f"<b>{text}</b>"
    if line[:1] in _TINTS:
        return f'<span style="display: block; background-color: {_TINTS[line[0]]}">{text}</span>'
    return text


def show_diff(before: str, after: str) -> Difference:
    """Return the changes from one program to another, for example `show_diff("one_gpu", "ddp")`.

    Lines that begin with - are only in the first program, and lines that begin with + only in the second. What
    stands above `import argparse`, the docstrings that explain the programs, is left out. Raises FileNotFoundError for
    a name that no program of notebooks/scripts has.
    """
    programs = [code(name) for name in (before, after)]
    lines = difflib.unified_diff(*programs, f"{before}.py", f"{after}.py", n=1, lineterm="")
    # Without the files, the line numbers of a change are of no use. An empty line separates the changes instead.
    return Difference(["" if line.startswith("@@") else line for line in lines])


def code(name: str) -> list[str]:
    """Return the lines of a program from the line `import argparse` on."""
    lines = (SCRIPTS / f"{name}.py").read_text(encoding="utf-8").splitlines()
    return lines[lines.index("import argparse") :]
