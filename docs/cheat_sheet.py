"""Print the cheat sheet on one page of A4.

python docs/cheat_sheet.py cheat_sheet.pdf     # with Chromium or Chrome
python docs/cheat_sheet.py cheat_sheet.html    # to print from any other browser, without margins
"""

import argparse
import os
import shutil
import tempfile
from pathlib import Path
from string import Template

from nbconvert.filters.markdown import markdown2html
from playwright.sync_api import sync_playwright

SOURCE = Path(__file__).with_name("cheat_sheet.md")
PAGE = Template("""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>Multi-GPU PyTorch: cheat sheet</title>
<style>
@page { size: A4; margin: 0; }
body { box-sizing: border-box; width: 210mm; height: 297mm; margin: 0; padding: 8mm; overflow: hidden;
       columns: 2; column-gap: 6mm; column-fill: auto; font: 7pt/1.28 "DejaVu Sans", Verdana, sans-serif; }
h1 { font-size: 13pt; margin: 0 0 1mm; }
h2 { font-size: 9pt; margin: 2mm 0 0.8mm; padding-top: 0.8mm; border-top: 0.4mm solid #0072b2; break-after: avoid; }
p, ul { margin: 0.8mm 0; }
ul { padding-left: 3mm; }
blockquote { margin: 0; padding: 0.8mm 1.5mm; background: #f2f2f2; }
table { width: 100%; border-collapse: collapse; margin: 1mm 0; break-inside: avoid; }
td, th { padding: 0.25mm 1mm 0.25mm 0; border-bottom: 0.15mm solid #bbb; text-align: left; vertical-align: top; }
code, pre { font: 6.6pt/1.28 "DejaVu Sans Mono", Menlo, Consolas, monospace; }
pre { margin: 0.8mm 0; padding: 0.8mm 1.5mm; background: #f2f2f2; break-inside: avoid; }
.anchor-link { display: none; }
.k, .kn { color: #0b5394; } .c1 { color: #666; }
</style>
</head>
<body>
$content
</body>
</html>
""")


def page() -> str:
    """The sheet as a page of HTML that is printed on one sheet of A4."""
    return PAGE.substitute(content=markdown2html(SOURCE.read_text(encoding="utf-8")))


def write_pdf(file: Path) -> None:
    """Print the page into a PDF. Raises ValueError if the text is too long for a page.

    Without Chromium and Chrome, playwright raises its Error.
    """
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
    root = hasattr(os, "geteuid") and os.geteuid() == 0
    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as folder:
        browser = playwright.chromium.launch(
            executable_path=chromium, channel=None if chromium else "chrome", args=["--no-sandbox"] if root else []
        )
        html = Path(folder, "page.html")
        html.write_text(page(), encoding="utf-8")
        sheet = browser.new_page()
        sheet.goto(html.as_uri())
        if sheet.evaluate(
            "[document.body, ...document.querySelectorAll('pre')].some(e => e.scrollWidth > e.clientWidth)"
        ):
            raise ValueError(f"{SOURCE.name} has a line or more text than a page has room for. Shorten it.")
        sheet.pdf(path=file, prefer_css_page_size=True, print_background=True)
        browser.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, nargs="?", default=SOURCE.with_suffix(".pdf"), help="a .pdf or .html")
    file = parser.parse_args().file
    if file.suffix == ".html":
        file.write_text(page(), encoding="utf-8", newline="\n")
    else:
        write_pdf(file)
