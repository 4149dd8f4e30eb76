"""What the pages about the course say holds for the lessons: links, terms and minutes."""

import ast
import json
import re
import runpy
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import run_all
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
GLOSSARY = ROOT / "docs" / "glossary.md"

# Bold at the first use of a word in the course marks a term, except for these, which stress a point or write
# a term in another way.
NO_TERMS = """
shift+enter, in total, assign, for pytorch, 512 bytes, follow the data, 4.7 times, 6 gb more, within, tuple, dropout,
afterwards, per rank, never reaches 2, 24 times, 4 and 5, on its machine, one adapter per gpu, rank 0 of eight,
every forward pass gathers, to the byte, half file, pci express, autocast to bfloat16, sums over ranks,
gpu 0 works alone, as a weighted mean, two sums, test images, contrastive loss, never retry inside except,
wrap every block
"""


def number_of(path):
    """What a lesson's name begins with: "03", and "A" for the appendix."""
    return path.name.partition("_")[0]


@cache
def lesson(number):
    (path,) = run_all.lessons([number])
    return json.loads(path.read_text(encoding="utf-8"))


def markdown(notebook):
    return "\n\n".join("".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "markdown")


def sections(notebook):
    """The text of a lesson's sections and subsections by their titles. A section contains its subsections."""
    found = {}
    for level in (1, 2, 3):
        for part in re.split(rf"^{'#' * level} ", markdown(notebook), flags=re.MULTILINE)[1:]:
            title, _, body = re.split(rf"^#{{1,{level}}} ", part, flags=re.MULTILINE)[0].partition("\n")
            found[title] = body
    return found


def plain(words):
    """Words as they are compared: in lower case, without marks, each in the singular."""
    return " ".join(re.sub(r"[`*]|(?<=ch)es\b|(?<=[^\Ws])s\b", "", words.lower()).split())


# --- links -----------------------------------------------------------------------------------------------


def anchors(path):
    """The anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def test_links_lead_to_files_and_headings():
    links = [
        (page, *link)
        for page in PAGES
        for link in re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)", page.read_text(encoding="utf-8"))
    ]
    assert len(links) > 150
    for page, target, anchor in links:
        there = (page.parent / target).resolve() if target else page
        assert there.exists() and there.is_relative_to(ROOT), f"{page}: there is no {target}."
        assert not anchor or anchor in anchors(there), f"{page}: {target} has no heading {anchor}."


def test_the_site_s_start_page_lists_the_lessons_as_the_readme_does():
    pages = ROOT / "README.md", ROOT / "docs" / "index.md"
    rows = re.compile(r"^\| (?:\d\d|A) .*$", re.MULTILINE)
    first, second = (rows.findall(page.read_text(encoding="utf-8")) for page in pages)
    assert len(first) == len(run_all.lessons()) and first == [row.replace("](../", "](") for row in second]


def test_the_picture_of_the_readme_shows_the_lesson_as_it_is():
    """If this fails, take the picture again: `python -m tests.browser.readme_picture`."""
    with Image.open(ROOT / "notebooks" / "images" / "lesson_00.png") as picture:
        shown = json.loads(picture.text["Shows"])
    sources = ["".join(cell["source"]) for cell in lesson("00")["cells"]]
    assert shown["cells"] and [text for text in shown["cells"] if text not in sources] == []
    assert shown["files"] == [path.name for path in run_all.lessons()]


def test_badges_open_lessons_that_exist():
    repository = "OWNER/REPOSITORY"  # whoever publishes the course replaces it, on one page
    texts = {page: page.read_text(encoding="utf-8") for page in PAGES}
    (page,) = (page for page, text in texts.items() if "colab.research" in text or "mybinder.org" in text)
    colab, binder = re.findall(r"\]\((https://(?:colab\.\S+/github|mybinder\.org/v2/gh)/[^)]*)\)", texts[page])
    named = re.match(r"https://\S+?/github/([^/]+/[^/]+)$", colab)[1]
    assert f"/gh/{named}/HEAD?" in binder and f"github.com/{named} /content/course" in texts[page]
    assert named == repository or repository not in texts[page], f"{page} still says {repository}."
    assert (ROOT / binder.partition("lab/tree/")[2]).is_file()
    assert (ROOT / "notebooks" / "colab.py").is_file() and "course/notebooks/colab.py" in texts[page]


def test_commands_with_uv_install_into_the_environment():
    """`python3 -m uv pip install` without --python installs into the Python that runs uv."""
    commands = [
        line for page in PAGES for line in page.read_text(encoding="utf-8").splitlines() if "-m uv pip install" in line
    ]
    assert len(commands) > 2 and all("uv pip install --python .venv " in line for line in commands)


# --- the glossary ----------------------------------------------------------------------------------------


def entries():
    """The glossary's entries: term, explanation, and the lesson and section that explain it."""
    text = GLOSSARY.read_text(encoding="utf-8")
    place = r"\[(?:Lesson|Appendix) (\d\d|A)\]\(\S+\)(?:, section (\d+)|, \"([^\"]+)\")?\."
    return re.findall(rf"^## (.+)\n\n(.+) {place}$", text, re.MULTILINE), len(re.findall("^## ", text, re.MULTILINE))


def test_the_glossary_names_the_section_that_explains_the_term():
    found, headings = entries()
    assert len(found) == headings > 100, "An entry has a heading and one paragraph, which ends with its lesson."
    assert [term for term, *_ in found] == sorted(
        (term for term, *_ in found), key=lambda term: term.strip("`").lower()
    )
    lessons = {number: sections(lesson(number)) for number in map(number_of, run_all.lessons())}
    for term, _, number, section, title in found:
        texts = lessons[number]
        place = next((name for name in texts if name == title or name.startswith(f"{section}. ")), None)
        text = texts[place] if section or title else markdown(lesson(number))
        assert plain(term) in plain(text), f"Lesson {number} does not explain {term} there."


def prose(notebook):
    """The sections of a lesson, without the goals before them, the take-aways and the reading list."""
    for part in re.split(r"^(?=#{2,3} )", markdown(notebook), flags=re.MULTILINE)[1:]:
        if not part.startswith(("## You will be able to", "## Take-aways", "## Where to read on")):
            yield re.sub("^>.*", "", part, flags=re.MULTILINE)  # a quoted error


def bold_at_first_use(notebook, before):
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


def test_every_term_of_the_lessons_is_in_the_glossary():
    """If this fails, write an entry for the new term, or add a word that is no term to NO_TERMS."""
    known = {plain(term) for term, *_ in entries()[0]} | {plain(word) for word in NO_TERMS.split(",")}
    before, missing, terms = " prediction work out by hand: ", {}, set()
    for path in run_all.lessons():
        notebook = lesson(number_of(path))
        found = set(bold_at_first_use(notebook, before))
        terms |= found & known
        missing |= {path.name: found - known} if found - known else {}
        before += " ".join(plain(part) for part in prose(notebook)) + " "
    assert missing == {} and len(terms) > 80


# --- the instructor's guide ------------------------------------------------------------------------------


def plans():
    """The rows of each plan by its title: what is done, its counted minutes and its planned minutes."""
    guide = (ROOT / "docs" / "teaching" / "README.md").read_text(encoding="utf-8")
    for title, table in re.findall(r"^### (.*\d+ minutes)\n\n((?:\|.*\n)+)", guide, re.MULTILINE):
        cells = [row.split("|")[1:4] for row in table.strip().splitlines()[2:]]
        yield title, [tuple(cell.strip(" *") for cell in row) for row in cells]


def test_the_minutes_of_each_plan_add_up():
    found = dict(plans())
    assert len(found) == 4
    for title, (*rows, (_, _, total)) in found.items():
        assert sum(int(planned) for _, _, planned in rows) == int(total) == int(re.search(r"(\d+) minutes", title)[1])


def test_the_counted_minutes_are_those_of_the_sections():
    """If this fails, print the minutes with `python notebooks/run_all.py --minutes` and correct the plan."""
    rows = [row for _, rows in plans() for row in rows if row[1].isdigit()]
    assert len(rows) > 20
    for what, counted, planned in rows:
        number, named = re.match(r"\[(\d\d)\]\([^)]*\), (.*)", what).groups()
        ranges = [
            range(int(first), int(last or first) + 1) for first, last in re.findall(r"(\d+)(?: to (\d+))?", named)
        ]
        minutes = run_all.minutes(lesson(number))
        chosen = [
            minutes[title]
            for title in minutes
            if not ranges or any(title.startswith(f"{section}. ") for span in ranges for section in span)
        ]
        assert len(chosen) == (sum(map(len, ranges)) or len(minutes))
        assert abs(sum(chosen) - int(counted)) <= 3 and int(planned) >= int(counted), (
            f"{what}: {sum(chosen):.0f} minutes"
        )


def test_the_quoted_sentences_are_those_of_the_checks():
    page = (ROOT / "docs" / "teaching" / "wrong_answers.md").read_text(encoding="utf-8")
    lessons = re.findall(r"^## (\d\d) .*?\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)
    assert len(lessons) > 8
    for number, tables in lessons:
        tree = ast.parse((ROOT / "notebooks" / "checks" / f"lesson{number}.py").read_text(encoding="utf-8"))
        constants = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
        sentences = " ".join(value for value in constants if isinstance(value, str))
        quoted = re.findall(r"(?<!\*)\*([^*|]+)\*(?!\*)", tables)
        assert quoted and [quote for quote in quoted if quote not in sentences] == []


# --- the cheat sheet -------------------------------------------------------------------------------------

GIVEN = """
def Net():
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3))
    model.blocks = [model[0]]
    return model

def initialize(module):
    for parameter in module.parameters(recurse=False):
        nn.init.constant_(parameter, 0.1)

model = Net()
dataset = [(torch.randn(4), number % 3) for number in range(8)]
images, labels = next(iter(DataLoader(dataset, 8)))
batch_size, epochs, path, folder = 2, 1, "model.pt", "checkpoint"
"""


def programs():
    """The programs that the blocks of the cheat sheet make, by their methods."""
    text = (ROOT / "docs" / "cheat_sheet.md").read_text(encoding="utf-8")
    placement, parallel, ddp, sharded, imports = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    wrap, save = sharded.split("...\n")
    setup, loop = re.split(r"^ddp_model = .*\noptimizer = .*\n", ddp, flags=re.MULTILINE)
    loop = re.sub(r"^if dist.*\n.*\n", save, loop.replace("ddp_model", "model"), flags=re.MULTILINE)
    found = {"placement": placement, "DataParallel": parallel, "DDP": ddp, "fully_shard": setup + wrap + loop}
    return {name: imports + GIVEN + code for name, code in found.items()}


@pytest.mark.outside  # starts nine processes
@pytest.mark.parametrize("method", ["placement", "DataParallel", "DDP", "fully_shard"])
def test_the_code_of_the_cheat_sheet_runs(method, tmp_path):
    (tmp_path / "train.py").write_text(programs()[method], encoding="utf-8")
    ranks = method in ("DDP", "fully_shard")
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"] if ranks else []
    command = [sys.executable, *torchrun, "-m", "virtual_gpus", "--gpus", "2", "train.py"]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=120)
    saved = {"placement": set(), "fully_shard": {"checkpoint"}}.get(method, {"model.pt"})
    assert {path.name for path in tmp_path.iterdir()} == {"train.py"} | saved


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs Chromium")
def test_the_cheat_sheet_fits_on_one_page(tmp_path, monkeypatch):
    sheet = runpy.run_path(str(ROOT / "docs" / "cheat_sheet.py"))
    sheet["write_pdf"](tmp_path / "sheet.pdf")
    pdf = (tmp_path / "sheet.pdf").read_bytes()
    assert len(re.findall(rb"/Type\s*/Page\b", pdf)) == 1 and re.search(rb"/MediaBox ?\[0 0 59[45][.\d]* 84[12]", pdf)
    longer = tmp_path / "cheat_sheet.md"
    longer.write_text(sheet["SOURCE"].read_text(encoding="utf-8") + "\n\n- one more line" * 30, encoding="utf-8")
    monkeypatch.setitem(sheet["write_pdf"].__globals__, "SOURCE", longer)
    with pytest.raises(ValueError, match="Shorten it"):
        sheet["write_pdf"](tmp_path / "sheet.pdf")
