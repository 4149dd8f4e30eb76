"""Lessons on the site: links to the glossary, folded solutions, and a sentence where a static page lacks the controls.

The files stay as they are. The changes are made to what Sphinx reads of them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

from sphinx.application import Sphinx
from sphinx.util import logging

logger = logging.getLogger(__name__)

DOCS = Path(__file__).parents[1]

STORED = """```{{note}}
This page shows the lesson with its stored outputs. To run it, [set up the course](../docs/setup.md) and open
`notebooks/{name}.ipynb`. Try each prediction before you read on.
```"""
CONTROLS = "*In the notebook, you can change the settings of this picture. This page shows those that were stored.*"
PRINTED = "{download}`The cheat sheet as a PDF of one page <cheat_sheet.pdf>`"
LIVE = "*In the notebook, this picture changes while the code runs. This page shows how it ends.*"

# Where no term is linked: in sections that name the terms before or after they are explained, in blocks of code, in
# headings, in quoted errors, in links and in formulas; and in inline code, unless the term is code.
BLOCKS = (
    r"^## (?:You will be able to|Take-aways|Where to read on).*?(?=^## |\Z)"
    r"|^(```|~~~).*?^\1|^(?: {4}|#|>).*?$|!?\[[^\]]*\]\([^)]*\)|\$[^$\n]+\$"
)
CODE = r"`[^`]+`"


def entries() -> Iterator[tuple[str, int]]:
    """The glossary's terms, and the number of the lesson that explains each."""
    text = (DOCS / "glossary.md").read_text(encoding="utf-8")
    for term, number in re.findall(r"^## (.+)\n\n.* \[(?:Lesson|Appendix) (\d\d|A)\]", text, re.MULTILINE):
        yield term, _place(number)


def _place(number: str) -> int:
    """The place of a lesson in the course, by what its name begins with. Letters come after numbers."""
    return int(number) if number.isdigit() else 100 + ord(number)


def pattern(term: str) -> re.Pattern:
    """A term as it stands in a sentence: also over the end of a line, as a plural, and with a capital letter."""
    words = r"\s+".join(re.escape(word) for word in term.split())
    if term.startswith("`"):
        return re.compile(words)
    first = f"(?i:{words[0]})" if term[0].islower() else words[0]
    return re.compile(rf"(?<![\w`.-]){first}{words[1:]}(?:s|es)?(?![\w-])")


def occurrences(term: str, text: str) -> Iterator[tuple[bool, re.Match]]:
    """Where a text uses a term, and whether it is bold there."""
    kept = BLOCKS if term.startswith("`") else f"{BLOCKS}|{CODE}"
    spans = [found.span() for found in re.finditer(kept, text, re.MULTILINE | re.DOTALL)]
    bold = [found.span() for found in re.finditer(r"\*\*.+?\*\*", text, re.DOTALL)]
    for match in pattern(term).finditer(text):
        if not any(start < match.end() and match.start() < end for start, end in spans):
            yield any(start < match.start() and match.end() < end for start, end in bold), match


def link_term(term: str, cells: list[dict], needed: bool) -> bool:
    """Link the first bold use of a term, or, if `needed`, its first use of any kind. Return whether there was one."""
    uses = [(bold, cell, match) for cell in cells for bold, match in occurrences(term, cell["source"])]
    chosen = next((use for use in uses if use[0]), uses[0] if uses and needed else None)
    if chosen:
        _, cell, match = chosen
        text = cell["source"]
        link = f"[{match[0]}](../docs/glossary.md#{anchor(term)})"
        cell["source"] = text[: match.start()] + link + text[match.end() :]
    return chosen is not None


def anchor(term: str) -> str:
    """The anchor of a heading, as code hosts and MyST make it."""
    return re.sub(r"[^\w\- ]", "", term.lower()).replace(" ", "-")


def link_terms(number: int, docname: str, cells: list[dict]) -> None:
    """Link each term from the lesson that explains it, and from earlier lessons that have it in bold."""
    prose = [cell for cell in cells if cell["cell_type"] == "markdown"]
    # Longer terms first, so that "gradient accumulation" is not taken for "gradient".
    for term, explained in sorted(entries(), key=lambda entry: -len(entry[0])):
        if number <= explained and not link_term(term, prose, number == explained) and number == explained:
            logger.warning("The glossary's term %s does not occur in this lesson.", term, location=docname)


def picture_notes(cell: dict) -> Iterator[str]:
    """What a reader of the static page must know of the cell's pictures, which have controls in JupyterLab."""
    for output in cell["outputs"]:
        shown = output.get("data", {})
        if "image/png" in shown and not "".join(shown.get("text/plain", "")).startswith("<Figure"):
            yield CONTROLS if output["output_type"] == "execute_result" else LIVE


def describe_pictures(cell: dict) -> None:
    """Hand the stored descriptions of pictures on to MyST-NB, which looks for them elsewhere."""
    for output in cell["outputs"]:
        if "image/png" in output.get("data", {}):
            description = output["metadata"].get("image/png", {}).get("alt") or "The picture that the code above draws"
            cell["metadata"]["mystnb"] = {"image": {"alt": description}}


def fold(cell: dict) -> None:
    """Fold on the page what is folded in JupyterLab: solutions, answers to predictions, the code of panels."""
    folded = cell["metadata"].get("jupyter", {})
    hidden = folded.get("source_hidden", False), folded.get("outputs_hidden", False)
    tag, what = {
        (True, True): ("hide-cell", "the solution"),
        (False, True): ("hide-output", "the output"),
        (True, False): ("hide-input", "the code"),
    }.get(hidden, (None, None))
    if tag:
        cell["metadata"].setdefault("tags", []).append(tag)
        prompts = {"code_prompt_show": f"Show {what}", "code_prompt_hide": f"Hide {what}"}
        cell["metadata"].setdefault("mystnb", {}).update(prompts)


def adapt(app: Sphinx, docname: str, source: list[str]) -> None:
    """Change what Sphinx reads of a lesson, and of the cheat sheet where it has been printed into a PDF."""
    folder, _, name = docname.partition("/")
    if docname == "docs/cheat_sheet" and (DOCS / "cheat_sheet.pdf").exists():
        source[0] = source[0].replace("\n", f"\n\n{PRINTED}\n", 1)
    if folder != "notebooks":
        return
    notebook = json.loads(source[0])
    cells = []
    for cell in notebook["cells"]:
        cell["source"] = "".join(cell["source"])
        cells.append(cell)
        if cell["cell_type"] == "code":
            describe_pictures(cell)
            fold(cell)
            cells += [markdown(f"{cell['id']}-note", note) for note in picture_notes(cell)]
    link_terms(_place(name.partition("_")[0]), docname, cells)
    app.env.note_dependency(DOCS / "glossary.md")
    title, _, text = cells[0]["source"].partition("\n")
    cells[0]["source"] = f"{title}\n\n{STORED.format(name=name)}\n{text}"
    notebook["cells"] = cells
    source[0] = json.dumps(notebook)


def markdown(identity: str, text: str) -> dict:
    return {"cell_type": "markdown", "id": identity[:64], "metadata": {}, "source": text}


def setup(app: Sphinx) -> dict:
    app.connect("source-read", adapt)
    return {"parallel_read_safe": True}
