"""The site (group `docs`) builds without a warning, loads nothing from elsewhere, and its links lead somewhere."""

import re
import subprocess
import sys
from functools import cache
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote

import pytest
import run_all

ROOT = Path(__file__).resolve().parent.parent

pytestmark = pytest.mark.skipif(find_spec("sphinx") is None, reason="needs `uv run --group docs`")


class Page(HTMLParser):
    """A page's anchors, its links, and what a browser loads with it."""

    def __init__(self, path):
        super().__init__()
        self.anchors, self.links, self.loaded = set(), [], []
        self.text = path.read_text(encoding="utf-8")
        self.feed(self.text)

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.anchors |= {found[name] for name in ("id", "name") if found.get(name)}
        if tag == "a" and found.get("href"):
            self.links.append(found["href"])
        elif tag in ("img", "script", "iframe", "source") and found.get("src"):
            self.loaded.append(found["src"])
        elif tag == "link" and found.get("rel") in ("stylesheet", "preload", "icon", "shortcut icon"):
            self.loaded.append(found["href"])


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the built site."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "docs", str(folder)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert built.returncode == 0, built.stderr
    return folder


@cache
def page(path):
    return Page(path)


def is_elsewhere(address):
    return re.match(r"[a-z]+:|//", address) is not None


def test_every_lesson_and_page_is_on_the_site(site):
    lessons = [f"notebooks/{path.stem}.html" for path in run_all.lessons()]
    pages = [path.relative_to(ROOT).with_suffix(".html") for path in (ROOT / "docs").rglob("*.md")]
    assert len(lessons) > 11 and len(pages) > 8
    assert [name for name in [*lessons, *pages] if not (site / name).exists()] == []


def test_links_lead_to_pages_and_headings(site):
    checked = 0
    for path in site.rglob("*.html"):
        for link in page(path).links:
            if not is_elsewhere(link):
                target, _, anchor = unquote(link).partition("#")
                there = (path.parent / target).resolve() if target else path
                assert there.is_file(), f"{path.name}: there is no {link}"
                assert not anchor or anchor in page(there).anchors, f"{path.name}: there is no heading {link}"
                checked += 1
    assert checked > 2000


def test_nothing_is_loaded_from_elsewhere(site):
    for path in site.rglob("*.html"):
        loaded = [address for address in page(path).loaded if address[:5] != "data:"]
        assert [address for address in loaded if is_elsewhere(address)] == []
        assert [name for name in loaded if not (path.parent / name.partition("?")[0]).exists()] == []
    for path in [*site.rglob("*.css"), *(site / "_static").rglob("*.js")]:
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"@import|url\(['\"]?(https?:)?//|(fetch|import)\(['\"]https?:", text), path.name


def test_lessons_are_shown_as_they_are_stored(site):
    solutions = 0
    for path in run_all.lessons():
        notebook = run_all.nbformat.read(path, as_version=4)
        text = page(site / "notebooks" / f"{path.stem}.html").text
        outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
        assert text.count('class="output traceback') == sum(output.output_type == "error" for output in outputs)
        pictures = sum("image/png" in output.get("data", {}) for output in outputs)
        assert len(re.findall(r'<img[^>]* src="\.\./_images/[0-9a-f]{64}\.png"', text)) == pictures
        folded = text.count("Show the solution")
        assert folded == sum(map(run_all.is_solution, notebook.cells)), path.name
        solutions += folded
    assert solutions > 40


def test_each_term_of_the_glossary_is_linked_from_a_lesson(site):
    linked = set()
    for path in (site / "notebooks").glob("*.html"):
        linked |= {link.partition("#")[2] for link in page(path).links if "/glossary.html#" in link}
    assert len(linked) == page(site / "docs" / "glossary.html").text.count("<h2") > 100


def test_a_browser_asks_for_nothing_else_and_pages_fit_a_phone(site):
    from playwright.sync_api import sync_playwright

    from tests.browser.lab import _QUIET, chromium

    if chromium() is None:
        pytest.skip("Chromium is not installed")
    names = ["docs/index", "notebooks/04_distributed_data_parallel", "docs/cheat_sheet", "docs/reference/helpers"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=list(_QUIET))
        window = browser.new_page(viewport={"width": 390, "height": 844})
        requests, faults = [], []
        window.on("request", lambda request: requests.append(request.url))
        window.on("console", lambda message: faults.append(message.text) if message.type == "error" else None)
        for name in names:
            window.goto((site / f"{name}.html").as_uri())
            assert window.evaluate("document.documentElement.scrollWidth") == 390, name
        browser.close()
    assert len(requests) > 20 and faults == []
    assert [url for url in requests if not url.startswith(("file:", "data:"))] == []
