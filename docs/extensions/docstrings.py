"""Docstrings on the site. They are plain text that reads well in a terminal; autodoc wants reStructuredText.

Paragraphs stay paragraphs. Indented blocks become blocks of code. A paragraph that explains arguments line by line, as
`name: text` or in two columns, becomes a list. An underlined line becomes a heading without an entry in the contents.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

from sphinx.application import Sphinx

NAMES = r"\*{0,2}[\w.`]+(?:\(\))?(?:, \*{0,2}[\w.`]+)*"
COLUMNS = re.compile(rf"{NAMES} {{2,}}(?=\S)")  # name    text
COLON = re.compile(rf"({NAMES}): (\S.*)")  # name: text


def escape(text: str) -> str:
    """Inline code, also over the end of a line, and nothing else: a star or an underscore means itself."""
    parts = re.split(r"(`[^`]+`)", text)
    parts[::2] = [re.sub(r"([\\*|`]|_(?!\w))", r"\\\1", part) for part in parts[::2]]
    parts[1::2] = [f"`{part}`" for part in parts[1::2]]
    return "".join(parts)


def bold(names: str) -> str:
    return f"**{escape(names.replace('`', ''))}**"


def blocks(lines: list[str]) -> Iterator[list[str]]:
    """Lines between empty lines. Code with empty lines is one block."""
    block: list[str] = []
    for line, following in itertools.pairwise([*lines, ""]):
        code = block and all(text.startswith("    ") or not text for text in block)
        if line or (code and following.startswith("    ")):
            block.append(line)
        elif block:
            yield block
            block = []
    if block:
        yield block


def columns(block: list[str]) -> list[str]:
    """A list of names with their explanations, if the block has them in two columns."""
    found: list[str] = []
    width = first.end() if (first := COLUMNS.match(block[0])) else 0
    for line in block if width else []:
        name, text = line[:width].strip(), line[width:]
        if name and not re.fullmatch(NAMES, name):
            return []
        found.append(f"- {bold(name)}: {escape(text)}" if name else f"  {escape(text)}")
    return found


def colons(block: list[str]) -> list[str]:
    """A list of names with their explanations, if lines of the block begin with several of them."""
    matches = [COLON.match(line) for line in block]
    if not matches[0] or sum(map(bool, matches)) < 2:
        return []
    return [
        f"- {bold(match[1])}: {escape(match[2])}" if match else f"  {escape(line.strip())}"
        for match, line in zip(matches, block, strict=True)
    ]


def block_to_rst(block: list[str]) -> list[str]:
    """The lines of a block in reStructuredText."""
    if all(line.startswith("    ") or not line for line in block):
        return columns([line[4:] for line in block]) or ["::", "", *block]
    if len(block) == 2 and re.fullmatch(r"-{3,}", block[1]):
        return [f".. rubric:: {escape(block[0])}"]
    return columns(block) or colons(block) or escape("\n".join(block)).splitlines()


def to_rst(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Change the lines of a docstring in place."""
    text = "\n".join(lines)
    text = re.sub(r"(^(?!- |  ).+)\n(?=- )", r"\1\n\n", text, flags=re.MULTILINE)  # a list after a sentence
    text = re.sub(r"^(-{3,})\n(?!\n)", r"\1\n\n", text, flags=re.MULTILINE)  # text under a heading
    lines[:] = [line for block in blocks(text.splitlines()) for line in [*block_to_rst(block), ""]]


def setup(app: Sphinx) -> dict:
    app.connect("autodoc-process-docstring", to_rst)
    return {"parallel_read_safe": True}
