"""Find what breaks the rules for texts in the lessons and pages, and what the tests of stored lessons would not notice.

    python docs/lint.py          # all lessons and pages; exit code 1 if there are findings
    python docs/lint.py 03 07    # only the lessons whose names begin so

Each finding is a line: the file, the cell or section, and the reason. The rules are those of CONTRIBUTING.md. pytest
only tries whether this program works. Its own tests look at links, the outline, and stored outputs.
"""

import ast
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "notebooks"))

import run_all

from docs.tools.stored import problems, source

ROOT = Path(__file__).resolve().parents[1]
# Words in bold that mark no term: they stress a point, or write a term in another way.
NO_TERMS = """
shift+enter, in total, assign, for pytorch, 512 bytes, follow the data, 4.7 times, 6 gb more, within, tuple, dropout,
afterwards, per rank, never reaches 2, 24 times, 4 and 5, on its machine, one adapter per gpu, rank 0 of eight,
every forward pass gathers, to the byte, half file, pci express, autocast to bfloat16, sums over ranks,
gpu 0 works alone, as a weighted mean, two sums, test images, contrastive loss, never retry inside except,
wrap every block
"""
PHRASES = {
    r"\bcards?\b": "write GPU",
    r"\bwhole numbers?\b": "write integer",
    r"\bshall\b": "write must or should",
    r", say,? (\d|two|three|four)": "write: for example",
    r"\b(a couple of|in order to|utilize|leverage|obviously|trivially|simply)\b": "write plain, standard words",
    r"\b(hungry|happy|lazy|greedy|thirsty|angry|feels?|loves?|starves?|complains?)\b": "hardware is no person",
    r"\b(he|she|his|her|guys)\b": "a reader is 'you', and others are 'they'",
}
HEADINGS = ("You will be able to", "Take-aways", "Exercises", "Where to read on")
MOST_MINUTES, NEAR, MOST_WORDS = {"00": 30}, 0.10, 600  # others: 50; the last one is for "Going further"
MOST_LINES = {"03": 24, "06": 26, "07": 25, "08": 27}  # others: 22; without imports and lines of IPython


def read(path: Path) -> dict:
    """A stored lesson."""
    return json.loads(path.read_text(encoding="utf-8"))


def markdown(notebook: dict) -> str:
    return "\n\n".join(source(cell) for cell in notebook["cells"] if cell["cell_type"] == "markdown")


def plain(words: str) -> str:
    """Words as they are compared: in lower case, without marks, each in the singular."""
    return " ".join(re.sub(r"[`*]|(?<=ch)es\b|(?<=[^\Ws])s\b", "", words.lower()).split())


def minutes(path: Path, notebook: dict) -> Iterator[tuple]:
    """The stated minutes are those of a reader, without exercises, the reading list and what goes further."""
    counted = sum(run_all.minutes(notebook).values())
    stated = int(re.search(r"\*\*Time\*\*:? (?:about )?(\d+) minutes", source(notebook["cells"][0]))[1])
    most = MOST_MINUTES.get(run_all.number_of(path), 50)
    if abs(stated / counted - 1) > NEAR or max(stated, counted) > most:
        yield "Time", f"{stated} minutes are stated, {counted:.1f} are counted, {most} are allowed"
    row = re.search(rf"notebooks/{path.name}\) \| (\d+) \|", (ROOT / "README.md").read_text(encoding="utf-8"))
    if int(row[1]) != stated:
        yield "Time", f"README.md says {row[1]} minutes, the lesson {stated}"
    words = run_all.words(run_all.sections(notebook).get("Going further", []))
    if words > MOST_WORDS:
        yield "Going further", f"{words} words, at most {MOST_WORDS} are allowed"


def headings(_: Path, notebook: dict) -> Iterator[tuple]:
    """A lesson says what it teaches, what it taught, and where to read on."""
    found = [heading for cell in notebook["cells"] for heading in run_all.headings(cell)]
    yield from (("headings", f"there is no {heading!r}") for heading in HEADINGS if f"## {heading}" not in found)


def cells(path: Path, notebook: dict) -> Iterator[tuple]:
    """Code that a reader sees is short, and texts avoid some words."""
    most = MOST_LINES.get(run_all.number_of(path), 22)
    for place, cell in enumerate(notebook["cells"]):
        if cell["cell_type"] == "markdown":
            yield from ((f"cell {place}", reason) for reason in phrases(source(cell)))
        elif not cell["metadata"].get("jupyter", {}).get("source_hidden"):
            lines = [line for line in source(cell).splitlines() if re.match(r"\s*(?!import |from |%%)\S", line)]
            if len(lines) > most:
                yield f"cell {place}", f"{len(lines)} lines of code, at most {most} are allowed"


def phrases(text: str) -> Iterator[str]:
    """Words that other words say better. Quotations and code may have them."""
    text = re.sub(r"```[\s\S]*?```|`[^`]*`|\"[^\"\n]*\"|^>.*", "", text, flags=re.MULTILINE)
    for pattern, advice in PHRASES.items():
        if match := re.search(pattern, text, re.IGNORECASE):
            yield f"{match[0]!r}: {advice}"


def entries() -> tuple[list[tuple], int]:
    """The glossary's entries (term, explanation, and the lesson and section that explain it), and its headings."""
    text = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    place = r"\[(?:Lesson|Appendix) (\d\d|A)\]\(\S+\)(?:, section (\d+)|, \"([^\"]+)\")?\."
    return re.findall(rf"^## (.+)\n\n(.+) {place}$", text, re.MULTILINE), len(re.findall("^## ", text, re.MULTILINE))


def glossary() -> Iterator[tuple]:
    """An entry has one paragraph, which ends with the lesson and the section that explain the term."""
    found, count = entries()
    if len(found) != count:
        yield "docs/glossary.md", "entries", f"{count - len(found)} do not end with their lesson"
    names = [term.strip("`").lower() for term, *_ in found]
    if names != sorted(names):
        yield "docs/glossary.md", "entries", "not in the order of the alphabet"
    lessons = {run_all.number_of(path): markdown(read(path)) for path in run_all.lessons()}
    for term, _, number, section, title in found:
        name = rf"{section}\. [^\n]*" if section else re.escape(title)
        deeper = rf"^(#+) {name}\n.*?(?=^(?!\1#)#+ |\Z)"  # with its subsections
        part = re.search(deeper, lessons[number], re.DOTALL | re.MULTILINE) if section or title else [lessons[number]]
        if not part or plain(term) not in plain(part[0]):
            yield "docs/glossary.md", term, f"lesson {number} does not explain it there"


def prose(notebook: dict) -> Iterator[str]:
    """The sections of a lesson, without the goals before them, the take-aways and the reading list."""
    for part in re.split(r"^(?=#{2,3} )", markdown(notebook), flags=re.MULTILINE)[1:]:
        if not part.startswith(("## You will be able to", "## Take-aways", "## Where to read on")):
            yield re.sub("^>.*", "", part, flags=re.MULTILINE)  # a quoted error


def bold_at_first_use(notebook: dict, before: str) -> Iterator[str]:
    """Words that are bold where the course uses them for the first time, `before` being all text before the lesson."""
    for part in prose(notebook):
        for match in re.finditer(r"\*\*(.+?)\*\*", part, re.DOTALL):
            word = plain(match[1])
            sentence = word.endswith((".", ":", "?")) or len(word.split()) > 4
            if sentence or match[1][0] == "`" or not re.search("[a-z]{2}|1f1b", word):
                continue
            used = before + plain(part[: match.start()])
            if word not in used or not re.search(rf"(?<![\w-]){re.escape(word)}(?![\w-])", used):
                yield word
        before += plain(part) + " "


def terms() -> Iterator[tuple]:
    """A word that is bold at its first use is in the glossary."""
    known = {plain(term) for term, *_ in entries()[0]} | {plain(word) for word in NO_TERMS.split(",")}
    before = " prediction work out by hand: "
    for path in run_all.lessons():
        for word in sorted(set(bold_at_first_use(read(path), before)) - known):
            yield path.name, word, "write an entry in docs/glossary.md, or add the word to NO_TERMS in docs/lint.py"
        before += " ".join(plain(part) for part in prose(read(path))) + " "


def pages() -> Iterator[tuple]:
    """The words of the pages, and that uv installs into the environment, not into the Python that runs uv."""
    for page in sorted({*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")} - {ROOT / "CONTRIBUTING.md"}):
        name, text = page.relative_to(ROOT).as_posix(), page.read_text(encoding="utf-8")
        yield from ((name, "words", reason) for reason in phrases(text))
        for line in text.splitlines():
            if "-m uv pip install" in line and "uv pip install --python .venv " not in line:
                yield name, "commands", f"--python .venv is missing: {line}"


def plans() -> Iterator[tuple]:
    """The minutes of the instructor's plans add up, and are those of the sections."""
    name = "docs/teaching/README.md"
    guide = (ROOT / name).read_text(encoding="utf-8")
    for title, table in re.findall(r"^### (.*\d+ minutes)\n\n((?:\|.*\n)+)", guide, re.MULTILINE):
        *rows, last = [[cell.strip(" *") for cell in row.split("|")[1:4]] for row in table.strip().splitlines()[2:]]
        total = sum(int(planned) for _, _, planned in rows)
        if not total == int(last[2]) == int(re.search(r"(\d+) minutes", title)[1]):
            yield name, title, f"the rows have {total} minutes together"
        for what, counted, planned in (row for row in rows if row[1].isdigit()):
            number, named = re.match(r"\[(\d\d)\]\([^)]*\), (.*)", what).groups()
            chosen = {str(n) for n in run_all.numbers_of(named)}
            found = run_all.minutes(read(*run_all.lessons([number]))).items()
            needed = sum(time for title, time in found if not chosen or title.partition(". ")[0] in chosen)
            if abs(needed - int(counted)) > 3 or int(planned) < int(counted):
                yield name, what, f"{needed:.0f} minutes by `python notebooks/run_all.py --minutes`"


def quotations() -> Iterator[tuple]:
    """The sentences that the list of wrong answers quotes are those of the checks."""
    name = "docs/teaching/wrong_answers.md"
    page = (ROOT / name).read_text(encoding="utf-8")
    for number, tables in re.findall(r"^## (\d\d) .*?\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL):
        tree = ast.parse((ROOT / "notebooks" / "checks" / f"lesson{number}.py").read_text(encoding="utf-8"))
        constants = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
        sentences = " ".join(value for value in constants if isinstance(value, str))
        for quoted in re.findall(r"(?<!\*)\*([^*|]+)\*(?!\*)", tables):
            if quoted not in sentences:
                yield name, f"lesson {number}", f"no check says {quoted!r}"


# What is changed in a cell of code, and what `problems` has to say.
OUTPUT = {"output_type": "stream", "name": "stdout"}
FAULTS = [
    ({"execution_count": 77}, "execution count 77"),
    (
        {"outputs": [{"output_type": "error", "ename": "E", "evalue": "", "traceback": []}]},
        "the tag raises-exception is missing",
    ),
    ({"metadata": {"tags": ["raises-exception"]}, "outputs": []}, "no error is stored"),
    ({"metadata": {"jupyter": {"source_hidden": True}}}, "the code of a cell is folded"),
    ({"source": "# Solution"}, "the outputs of solutions"),
    ({"source": "# Solution\ncheck.count(1)"}, "its solution is not accepted"),
    ({"source": "use_gpus(64)"}, "asked for [64] GPUs"),
    ({"outputs": [OUTPUT | {"text": "3/3 [00:01<00:00, 2.93it/s]"}]}, "a duration"),
    ({"outputs": [OUTPUT | {"text": "Fri Nov 20 05:33:12"}]}, "a time of day"),
    ({"outputs": [OUTPUT | {"text": "saved to /home/me/x.pt"}]}, "a path of the machine"),
    ({"metadata": {"execution": "now"}}, "not stored as run_all.py stores it"),
]


def unnoticed() -> Iterator[tuple]:
    """Faults in a lesson that `problems` does not notice."""
    for changes, words in FAULTS:
        notebook = read(run_all.lessons()[0])
        next(cell for cell in notebook["cells"] if cell["cell_type"] == "code").update(changes)
        if not any(words in problem for problem in problems(notebook)):
            yield "docs/tools/stored.py", "problems", f"does not notice {words!r}"


OF_A_LESSON = (minutes, headings, cells)
OF_ALL = (terms, glossary, pages, plans, quotations, unnoticed)


def findings(names: list[str]) -> Iterator[tuple]:
    """What is wrong with these lessons, or with all lessons and pages if no name is given."""
    for path in run_all.lessons(names):
        notebook = read(path)
        yield from ((path.name, place, reason) for rule in OF_A_LESSON for place, reason in rule(path, notebook))
    if not names:
        yield from (finding for rule in OF_ALL for finding in rule())


if __name__ == "__main__":
    found = list(findings(sys.argv[1:]))
    print("\n".join(": ".join(finding) for finding in found) or "No findings.")
    sys.exit(bool(found))
