"""What the pages about the course say holds: links, tables, the picture, and the code of the cheat sheet."""

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


@cache
def text_of(path):
    """The text of a page, or of a lesson without its code."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".ipynb":
        return text
    cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "markdown"]
    return "\n\n".join("".join(cell["source"]) for cell in cells)


def anchors(path):
    """The anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", text_of(path), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def test_links_lead_to_files_and_headings():
    checked = 0
    for page in [*PAGES, *run_all.lessons()]:
        for target, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#([^)]*))?\)", text_of(page)):
            there = (page.parent / target).resolve() if target else page
            assert there.exists() and there.is_relative_to(ROOT), f"{page}: there is no {target}."
            assert not anchor or anchor in anchors(there), f"{page}: {target} has no heading {anchor}."
            checked += 1
    assert checked > 200


def test_the_site_s_start_page_lists_the_lessons_as_the_readme_does():
    pages = ROOT / "README.md", ROOT / "docs" / "index.md"
    rows = re.compile(r"^\| (?:\d\d|[A-Z]) .*$", re.MULTILINE)
    first, second = (rows.findall(page.read_text(encoding="utf-8")) for page in pages)
    assert len(first) == len(run_all.lessons()) and first == [row.replace("](../", "](") for row in second]


def test_the_picture_of_the_readme_shows_the_lesson_as_it_is():
    """If this fails, take the picture again: `python -m docs.tools.readme_picture`."""
    with Image.open(ROOT / "notebooks" / "images" / "lesson_00.png") as picture:
        shown = json.loads(picture.text["Shows"])
    cells = json.loads(run_all.lessons(["00"])[0].read_text(encoding="utf-8"))["cells"]
    sources = ["".join(cell["source"]) for cell in cells]
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
    longer.write_text(text_of(sheet["SOURCE"]) + "\n\n- one more line" * 30, encoding="utf-8")
    monkeypatch.setitem(sheet["write_pdf"].__globals__, "SOURCE", longer)
    with pytest.raises(ValueError, match="Shorten it"):
        sheet["write_pdf"](tmp_path / "sheet.pdf")
