"""Shows the difference between two Python programs, with tinted lines in a notebook."""

import ast
import difflib
import html
from itertools import dropwhile
from pathlib import Path

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


def show_diff(before: str | Path, after: str | Path) -> Difference:
    """Return the changes from one program to another: `show_diff("scripts/one_gpu.py", "scripts/ddp.py")`.

    Lines that begin with - are only in the first program, and lines that begin with + only in the second. The
    docstrings that explain the programs are left out. Raises FileNotFoundError for a missing file, and SyntaxError for
    one that is no Python program.
    """
    lines = difflib.unified_diff(_code(before), _code(after), str(before), str(after), n=1, lineterm="")
    # Without the files, the line numbers of a change are of no use. An empty line separates the changes instead.
    return Difference(["" if line.startswith("@@") else line for line in lines])


def _code(program: str | Path) -> list[str]:
    """Return the lines of a program below its docstring."""
    if not Path(program).is_file():
        raise FileNotFoundError(f"There is no program {str(program)!r} in the folder {Path.cwd()}. Pass its path.")
    text = Path(program).read_text(encoding="utf-8")
    tree = ast.parse(text, str(program))
    lines = text.split("\n")[tree.body[0].end_lineno if ast.get_docstring(tree) else 0 :]
    return list(dropwhile(lambda line: not line.strip(), lines))
