"""`notebooks/slides.py`: the pictures of the lessons with their headings and texts, on one page without network."""

import json
import re
import shutil
from functools import cache

import pytest
import run_all
import slides


@cache
def page():
    return slides.page()[0]


def found(pattern):
    return re.findall(pattern, page(), re.DOTALL)


def test_every_picture_is_shown_and_explained():
    lessons = [json.loads(path.read_text(encoding="utf-8")) for path in run_all.lessons() if path.stem[0].isdigit()]
    parts = [part for lesson in lessons for part in slides.parts(lesson)]
    pictures = [content for kind, content in parts if kind == "picture"]
    shown = found(r"<small>(.+?)</small><h2><p>(.+?)</p>\s*</h2>(<img [^>]+>)<p>(.+?)</p>\s*</section>")
    assert [image for _, _, image, _ in shown] == pictures and len(pictures) > 20
    texts = [json.dumps([cell for cell in lesson["cells"] if not slides.is_solution(cell)]) for lesson in lessons]
    drawn = sum(text.count('"image/png": "iVBOR') + text.count("data:image/svg+xml;base64") for text in texts)
    assert drawn + sum(len(re.findall(r"\]\(images/", text)) for text in texts) == len(pictures)
    assert all(text.endswith((".", ")")) and "$" not in text for _, _, _, text in shown)
    assert all("alt=" in image for image in pictures)


def test_each_lesson_has_goals_questions_and_take_aways():
    titles = [path.stem[:2] for path in run_all.lessons() if path.stem[0].isdigit()]
    assert [title[:2] for title in found("<h1>(.+?)</h1>")[1:]] == titles
    assert [title[:2] for title in found("<small>([^<]+)</small><h2><p>Take-aways")] == titles
    assert set(found('href="#(..)"')) == set(found('<section class="" id="(..)"')) == set(titles)
    questions = found('<section class="question">(.+?)</section>')
    assert len(questions) > 40 and all("<strong>Prediction" in question for question in questions)


def test_the_page_needs_no_network():
    assert page().count("<script") == 1 and not found(r"<link|@import|<script src|url\(")
    assert {source[:5] for source in found('src="([^"]+)"')} == {"data:"}


def test_questions_have_slides_and_pictures_a_text():
    code, picture = {"cell_type": "code", "source": "show()"}, {"data": {"image/png": "x"}, "metadata": {}}
    cells = {"PICTURE": code | {"outputs": [picture]}, "RUN": code | {"outputs": []}}

    def lesson(*texts):
        return {"cells": [cells.get(text, {"cell_type": "markdown", "source": text}) for text in texts]}

    ask, answer = "## 1. One\n\nAll. **Prediction.** Which?\n\n- a\n- b\n\nA note.", "It is a. The next cell draws it:"
    made = slides.slides(lesson("# 00 T", ask, "PICTURE", answer))
    assert ["question" in slide for slide in made] == [True, False]
    assert "All." not in made[0] and "<li>b</li>" in made[0] and "note" not in made[0] and "It is a." in made[1]
    assert "next cell" not in made[1] and r"1. One" in made[1]
    asked, shown = slides.slides(lesson("# 00 T", ask, "RUN", answer, "PICTURE", "## 2. Two"))
    assert "question" in asked and "It is a." in shown  # the text before, because none follows
    (only,) = slides.slides(lesson("# 00 T", "## 1. One\n\nThe picture shows b.", "PICTURE", "Now c."))
    assert "The picture shows b." in only and "Now c." not in only


@pytest.mark.outside  # needs Chromium
def test_the_slides_fit_and_the_keys_turn_them(tmp_path):
    from playwright.sync_api import sync_playwright

    (tmp_path / "slides.html").write_text(page(), encoding="utf-8")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        screen = browser.new_page()
        for width, height in ((1280, 720), (1024, 768), (1920, 1080)):
            screen.set_viewport_size({"width": width, "height": height})
            screen.goto(f"file://{tmp_path}/slides.html")
            cut = "s => s.scrollHeight > s.clientHeight || (s.querySelector('img') ?? {height: 200}).height < 150"
            all_cut = f"[...document.querySelectorAll('section')].filter({cut}).map(s => s.innerText)"
            assert screen.evaluate(all_cut) == []
        for key, number in {"ArrowRight": 1, " ": 2, "PageDown": 3, "ArrowUp": 2, "Home": 0, "ArrowLeft": 0}.items():
            screen.keyboard.press(key)
            assert screen.evaluate("scrollY / innerHeight") == number
        browser.close()
