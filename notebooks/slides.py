"""Make slides of the lessons' pictures, one HTML file that any browser shows without network.

    python notebooks/slides.py slides.html           # all lessons
    python notebooks/slides.py slides.html 02 03     # those whose names begin so
    python notebooks/slides.py slides.html --svg     # runs the lessons, for pictures that are sharp on a projector

A lesson begins with its title and its goals. Each prediction has a slide, and each picture follows under the heading of
its section, with the text that explains it. The take-aways come last. The arrow keys, the space bar and Page Up and
Page Down turn the slides. The browser's "Print" makes a PDF of them.
"""

import argparse
import base64
import html
import mimetypes
import re
from pathlib import Path
from string import Template

import nbformat
from nbconvert.filters.markdown import markdown2html
from run_all import FOLDER, is_solution, lessons, missing, run

IMAGE = re.compile(r"!\[([^\]]*)\]\(([^)]+)\)")
SHOWN = ("image/svg+xml", "image/png", "text/html")
WORDS = 60  # of explanation below a picture
# Sentences about what only the notebook shows.
LEFT_OUT = re.compile(r"next cell|notebook|printed line|table above|this section|builds the panel|^\||:$")
PAGE = Template("""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>Multi-GPU PyTorch: slides</title>
<style>
html { scroll-snap-type: y mandatory; font: 2.9vmin/1.4 system-ui, sans-serif; color: #1a1a1a; background: #fff; }
body { margin: 0; }
section { box-sizing: border-box; height: 100vh; padding: 4vmin 7vmin; overflow: hidden; scroll-snap-align: start;
          display: flex; flex-direction: column; justify-content: center; break-after: page; }
h1 { font-size: 6.5vmin; margin: 0 0 3vmin; }
h2 { font-size: 4vmin; margin: 0 0 2vmin; }
h2 p { margin: 0; font-size: inherit; }
small { color: #666; font-weight: normal; }
img { flex: 0 1 auto; min-height: 0; height: 66vh; max-width: 100%; object-fit: contain; }
p, ul, table { margin: 1.2vmin 0; max-width: 150vmin; }
.question { background: #eef4fb; }
.question > p, .question li { font-size: 3.6vmin; }
code { background: #f0f0f0; padding: 0 0.3em; border-radius: 0.2em; }
table { border-collapse: collapse; }
td, th { border-bottom: 1px solid #ccc; padding: 0.3em 1em; text-align: left; }
.anchor-link { display: none; }
@page { size: 320mm 180mm; margin: 0; }
</style>
</head>
<body>
$slides
<script>
const slides = [...document.querySelectorAll("section")];
const steps = {ArrowRight: 1, ArrowDown: 1, PageDown: 1, " ": 1, ArrowLeft: -1, ArrowUp: -1, PageUp: -1,
               Home: -slides.length, End: slides.length};
document.addEventListener("keydown", event => {
  if (!(event.key in steps)) return;
  event.preventDefault();
  const now = Math.round(scrollY / innerHeight);
  slides[Math.max(0, Math.min(slides.length - 1, now + steps[event.key]))].scrollIntoView();
});
</script>
</body>
</html>
""")


def slides(lesson):
    """The slides of a lesson as pieces of HTML, without their ends."""
    found, title, section, before = [], "", "", ""
    unexplained = False
    for kind, content in [*parts(lesson), ("heading", "## ")]:
        if kind == "text" and content.startswith("- ") and section in ("You will be able to", "Take-aways"):
            found.append(slide(title, section, markdown2html(content)))
        elif kind == "text" and unexplained and (explanation := shortened(content)):
            found[-1] += markdown2html(shortened(before) if "picture" in shortened(before) else explanation)
            unexplained = False
        elif kind == "text":
            before = content
        else:
            if unexplained:  # no text follows, so that before the picture has to do
                found[-1] += markdown2html(shortened(before))
            if unexplained := kind == "picture":
                found.append(slide(title, section, content))
            elif kind == "question":
                found.append(slide(title, section, markdown2html(content), "question"))
            else:
                section = content.lstrip("# ")
                title, before = title or section, ""
    return found


def slide(title, section, content, kind=""):
    """The beginning of a slide. The first slide of a lesson has its title in large letters."""
    heading = f"<h1>{title}</h1>" if section == "You will be able to" else f"<small>{title}</small>"
    name = markdown2html(re.sub(r"^(\w+)\.", r"\1\\.", section))  # "2. Text" would become a list
    return f'<section class="{kind}">{heading}<h2>{name}</h2>{content}'


def parts(lesson):
    """The parts of a lesson in order: pairs of "heading", "text", "question" or "picture" and its content."""
    for cell in lesson["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            yield from parts_of_text(source)
        elif not is_solution(cell):
            for output in cell["outputs"]:
                data = {kind: "".join(content) for kind, content in output.get("data", {}).items() if kind in SHOWN}
                alt = output.get("metadata", {}).get("image/png", {}).get("alt", "")
                if "image/svg+xml" in data:
                    content = base64.b64encode(data["image/svg+xml"].encode()).decode()
                    yield "picture", picture(alt, "image/svg+xml", content)
                elif "image/png" in data:
                    yield "picture", picture(alt, "image/png", data["image/png"])
                elif data.get("text/html", "").startswith("<img "):  # an animation
                    yield "picture", re.sub(' style="[^"]*"', "", data["text/html"])


def parts_of_text(source):
    blocks = re.split(r"\n\n+", re.sub(r"^(#+ .*)$", r"\n\1\n", source, flags=re.MULTILINE).strip())
    while blocks:
        block = blocks.pop(0)
        if re.match("#+ ", block):
            yield "heading", block
        elif image := IMAGE.match(block):
            file = FOLDER / image[2]
            yield (
                "picture",
                picture(image[1], mimetypes.guess_type(file)[0], base64.b64encode(file.read_bytes()).decode()),
            )
        elif "**Prediction" in block:
            text, _, question = block.partition("**Prediction")
            if text:
                yield "text", text
            while blocks and re.match(r"[-|]|\d\.", blocks[0]):  # a list or a table that belongs to the question
                question += "\n\n" + blocks.pop(0)
            yield "question", "**Prediction" + question
        else:
            yield "text", block


def picture(alt, kind, data):
    return f'<img alt="{html.escape(alt)}" src="data:{kind};base64,{"".join(data.split())}">'


def shortened(text):
    """The first sentences of a paragraph or list, without those about cells, panels and tables of the notebook."""
    plain = re.sub(r"^(- |\d\. )|\$", "", text, flags=re.MULTILINE)
    kept, words = [], 0
    for sentence in re.split(r"(?<=[.?!]) (?=[^a-z])", " ".join(plain.split())):
        words += len(sentence.split())
        if words <= WORDS and not LEFT_OUT.search(sentence):
            kept.append(sentence)
    return " ".join(kept)


def page(names=(), svg=False):
    """The whole page with the slides of these lessons, and their number. svg: run the lessons for vector graphics."""
    chosen = [path for path in lessons(names) if names or path.name[0].isdigit()]  # the appendix only when it is named
    notebooks = [nbformat.v4.reads(path.read_text(encoding="utf-8")) for path in chosen]
    if svg:
        for path, notebook in zip(chosen, notebooks, strict=True):
            if lacks := missing(path):
                print(f"{path.stem}: with the stored pictures. {lacks}")
            else:
                run(notebook, ["--InlineBackend.figure_formats={'svg'}"])
    made = [slide for notebook in notebooks for slide in slides(notebook)]
    titles = re.findall("<h1>(.+?)</h1>", "".join(made))
    links = "".join(f'<li><a href="#{title[:2]}">{title}</a></li>' for title in titles)
    made = [re.sub("(?=><h1>(..))", r' id="\1"', slide) for slide in made]  # what the links lead to
    made.insert(0, f"<section><h1>Multi-GPU PyTorch</h1><ul>{links}</ul>")
    return PAGE.substitute(slides="\n".join(f"{slide}</section>" for slide in made)), len(made)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="the HTML file to write")
    parser.add_argument("names", nargs="*", help="lessons, by the beginning of their names")
    parser.add_argument(
        "--svg", action="store_true", help="run the lessons, and draw their pictures as vector graphics"
    )
    options = parser.parse_intermixed_args()
    text, count = page(options.names, options.svg)
    options.file.write_text(text, encoding="utf-8", newline="\n")
    print(f"{count} slides in {options.file}")


if __name__ == "__main__":
    main()
