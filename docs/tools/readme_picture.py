"""The picture of lesson 00 in the README: taken in JupyterLab, with what it shows written into the file.

    python -m docs.tools.readme_picture        # runs lesson 00 in Chromium and replaces the picture

The PNG has a text, "Shows", in JSON: the names in the file browser, and the sources of the cells that can be seen. A
test compares both with the lessons, so that a picture of yesterday fails.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from io import BytesIO
from pathlib import Path

from PIL import Image, PngImagePlugin

sys.path.insert(0, str(Path(__file__).parents[2] / "notebooks"))  # as pytest's setting `pythonpath` does

from tests.browser.lab import ROOT, jupyterlab

PICTURE = ROOT / "notebooks" / "images" / "lesson_00.png"
HEADING = "All four, in one line"
_SEEN = """
() => {
    const notebook = window.jupyterapp.shell.currentWidget.content;
    const frame = notebook.node.getBoundingClientRect();
    const seen = notebook.widgets.filter((cell) => {
        const box = cell.node.getBoundingClientRect();
        return box.bottom > frame.top + 40 && box.top < frame.bottom - 40;
    });
    return seen.map((cell) => cell.model.sharedModel.source);
}
"""


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, jupyterlab(Path(folder)) as lab:
        lab.page.set_viewport_size({"width": 1366, "height": 1230})
        lab.open("00_start_here")
        lab.run_all(timeout=600)
        heading = lab.page.locator(".jp-Notebook h2", has_text=HEADING).first
        heading.evaluate("(heading) => heading.scrollIntoView({block: 'start'})")
        lab.page.wait_for_timeout(1000)
        names = lab.page.locator(".jp-DirListing-itemText").all_inner_texts()
        text = PngImagePlugin.PngInfo()
        files = [name for name in names if name.endswith(".ipynb")]
        text.add_text("Shows", json.dumps({"files": files, "cells": lab.page.evaluate(_SEEN)}))
        with Image.open(BytesIO(lab.page.screenshot())) as image:
            unfinished = PICTURE.with_suffix(".tmp")
            image.quantize(256).save(unfinished, format="PNG", pnginfo=text, optimize=True)
    os.replace(unfinished, PICTURE)


if __name__ == "__main__":
    main()
